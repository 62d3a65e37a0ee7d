"""The DSpark drafter: its linears, and its draft logits with their gather."""

from collections import Counter

import torch

import twostep
import twostep.torch
from twostep_vllm.framework import Unserved, captures, need

MOST_ROWS = 64  # above, every layer runs its own method


def rows_of(tokens, requests):
    """Every row count up to 64 that a step of 1 to `requests` requests has, at these numbers of rows per request."""
    return sorted({r * t for r in range(1, requests + 1) for t in tokens if 0 < r * t <= MOST_ROWS})


class Linears:
    """Every unquantised BF16 linear of the drafter but kv_b_proj. The target's head and embedding stay as they are."""

    def __init__(self, drafter, rows, group=None):
        self._tree = need(drafter, "model")
        self.report = twostep.torch.install(self._tree, rows=rows, group=group)
        if not self.report.count:
            raise Unserved("; ".join(self.skipped()) or f"{type(drafter).__name__}.model has no linear")

    def __str__(self):
        kinds = Counter(kind for layer in self.report.layers for kind in layer.kinds.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return f"{self.report.count} drafter linears, {self.report.bytes / 1e6:.0f} MB ({counts} of (linear, rows))"

    def skipped(self):
        """[sentence]: which linears stay on their own method, and why, one for each name and reason."""
        names = Counter((layer.name.rpartition(".")[2], layer.reason) for layer in self.report.layers if not layer.installed)
        return [f"{name} ({count}): {reason}" for (name, reason), count in names.items()]

    def remove(self):
        twostep.torch.uninstall(self._tree)


class Gather:
    """Logits [M, N] of each rank to [M, ranks N] on all: by the Mailbox in a captured step that it takes, else by vLLM's
    all-gather. Eager steps, the same on all ranks, are on several streams of vLLM, and a mailbox is bound to one."""

    def __init__(self, ranks, all_gather, mailbox=None):
        self.ranks, self.all_gather, self.mailbox = ranks, all_gather, mailbox

    def __call__(self, shard):
        if self.mailbox is not None and captures(shard):
            whole = self.mailbox.gather_logits(shard)  # None: it does not take them, on any rank
            if whole is not None:
                return whole
        if shard.shape[0] == 0:
            return shard.new_empty((0, self.ranks * shard.shape[1]))
        return self.all_gather(shard)


def mailbox_of(group, head, speculator):
    """(LogitsGather over the ranks of a tensor-parallel group of vLLM, "") or (None, why not). Collective."""
    kind = getattr(twostep.torch, "LogitsGather", None)
    if kind is None:
        return None, "this twostep has no Mailbox"
    if not head.weight.is_cuda:
        return None, "the head is not on a GPU"
    if not hasattr(speculator, "propose"):
        return None, f"{type(speculator).__name__}.propose is missing, where each step asks whether a peer was lost"
    try:
        return kind(need(group, "cpu_group"), head.weight.shape[0], rows=MOST_ROWS), ""
    except twostep.Error as error:  # the same on all ranks: creating one is a vote
        return None, str(error)


def on_all_ranks(group, make):
    """make() on every rank of a tensor-parallel group, or on none: ranks that gather in two ways wait for each other."""
    if need(group, "world_size") == 1:
        return make()
    made, why, reasons = None, None, [None] * group.world_size
    try:
        made = make()
    except Exception as error:
        why = str(error) or type(error).__name__
    torch.distributed.all_gather_object(reasons, why, group=need(group, "cpu_group"))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            if made is not None:
                made.remove()
            raise Unserved(f"rank {rank}: {reason}")
    return made


class Logits:
    """drafter.compute_draft_logits on twostep.torch.draft_logits. With a mailbox, each speculator.propose checks it first."""

    def __init__(self, drafter, rows, gather=None, how="", speculator=None):
        head, _, _ = need(drafter, "lm_head", "logits_processor", "compute_draft_logits")
        if head is None:
            raise Unserved("the drafter has no head on this rank")
        self._shape, self._how = list(need(head, "weight").shape), how
        self.kinds = twostep.torch.prepare_draft_logits(drafter, rows)
        self._drafter, self._method = drafter, lambda hidden: twostep.torch.draft_logits(drafter, hidden, gather)
        drafter.compute_draft_logits = self._method
        self._speculator, self._propose = speculator, None
        if gather is not None and gather.mailbox is not None:
            propose, check = speculator.propose, gather.mailbox.mailbox.check

            def checked(*args, **options):
                check()  # raises for a peer that was lost in a replay; waits for nothing
                return propose(*args, **options)

            self._propose = speculator.propose = checked

    def __str__(self):
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds.values()).most_common())
        return f"draft logits {self._shape}{self._how} ({counts} of rows)"

    def skipped(self):
        return []

    def remove(self):
        if self._drafter.__dict__.get("compute_draft_logits") is self._method:
            del self._drafter.compute_draft_logits
        if self._propose is not None and self._speculator.__dict__.get("propose") is self._propose:
            del self._speculator.propose
