"""The vLLM plug-in of twostep: drafter linears, draft logits and KDA decode of the Kimi K3 family.

`register` is the entry point of vllm.general_plugins. It hooks the load of models, and nothing else; what is then served,
and why not, is logged once. Without the wheel, vLLM is exactly as before.
"""

import logging
import time
from importlib.metadata import PackageNotFoundError, version

from twostep_vllm.framework import Missing, Unserved, find, layers_of, need, release
from twostep_vllm.switches import Switches

__all__ = ["Served", "Switches", "register", "serve", "unregister"]

log = logging.getLogger("vllm.twostep")  # below vLLM's own logger, whose handlers show it
try:
    __version__ = version("twostep-vllm")
except PackageNotFoundError:
    __version__ = "of no wheel"

_hooked = None  # (class, its own load_model or None)


def register():
    """Hooks WorkerWrapperBase.load_model: the model that a worker has loaded is served. A second call changes nothing."""
    global _hooked
    switches = Switches.of_environment()
    if not switches.all or _hooked is not None:
        if not switches.all:
            log.info("twostep-vllm: off (TWOSTEP_VLLM=0)")
        return
    try:
        wrapper = find("vllm.v1.worker.worker_base", "WorkerWrapperBase")
    except Missing as missing:
        log.warning("twostep: nothing is served: %s is missing in %s", missing, release())
        return
    own = wrapper.__dict__.get("load_model")  # absent in the tested releases: the wrapper passes the call on

    def load_model(self, *args, **options):
        result = own(self, *args, **options) if own else self.worker.load_model(*args, **options)
        serve(getattr(getattr(self, "worker", None), "model_runner", None), switches)
        return result

    wrapper.load_model = load_model
    _hooked = wrapper, own


def unregister():
    """Takes the hook back. What was served stays: Served.remove."""
    global _hooked
    if _hooked is not None:
        wrapper, own = _hooked
        if own is None:
            del wrapper.load_model
        else:
            wrapper.load_model = own
    _hooked = None


class Served:
    """What serve did for one model runner, which keeps it. `parts` by name; remove() gives vLLM its own back."""

    def __init__(self, runner):
        self.parts, self.unserved, self.missing = {}, {}, {}
        before = getattr(runner, "_twostep", None)
        if before is not None:  # the runner has loaded another model since
            before.remove()
        self._runner = runner
        if runner is not None:
            runner._twostep = self

    def remove(self):
        for part in self.parts.values():
            part.remove()
        self.parts = {}
        if getattr(self._runner, "_twostep", None) is self:
            del self._runner._twostep


def serve(runner, switches=Switches()):
    """Routes what a model runner of vLLM has loaded, and logs what it did. Never raises. Returns a Served."""
    served, begin = Served(runner), time.perf_counter()
    for name, route in (("linears", _linears), ("logits", _logits), ("kda", _kda)):
        if not (switches.all and getattr(switches, name)):
            continue
        try:
            part = route(runner, switches)
            if part is not None:
                served.parts[name] = part
        except Missing as missing:
            served.missing[name] = str(missing)
        except Exception as error:  # one part must stop neither the others nor the server
            served.unserved[name] = str(error) if isinstance(error, Unserved) else f"{type(error).__name__}: {error}"
    _tell(served, switches, time.perf_counter() - begin)
    return served


def _tell(served, switches, seconds):
    if served.missing:
        log.warning("twostep: missing in %s, so vLLM's own code runs: %s", release(), _by_reason(served.missing))
    if served.unserved:
        log.warning("twostep: vLLM's own code runs: %s", _by_reason(served.unserved))
    for part in served.parts.values():
        for sentence in part.skipped():
            log.info("twostep: on vLLM's own code: %s", sentence)
    off = f"; off: {', '.join(switches.off())}" if switches.off() else ""
    if served.parts:
        log.info("twostep on %s serves %s; in %.1f s%s", release(), "; ".join(map(str, served.parts.values())), seconds, off)
    else:
        log.info("twostep serves nothing of this model%s", off)


def _by_reason(reasons):
    """{part: reason} in words, each reason once."""
    parts = {}
    for part, why in reasons.items():
        parts.setdefault(why, []).append(part)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in parts.items())


def _model(runner):
    """The target, and its VllmConfig."""
    if runner is None:
        raise Missing("WorkerWrapperBase.worker.model_runner")
    return need(runner, "get_model")(), need(runner, "vllm_config")


def _refuse_exact_batches():
    if find("vllm.envs", "VLLM_BATCH_INVARIANT"):
        raise Unserved("VLLM_BATCH_INVARIANT asks for results that do not depend on the batch")


def _drafter(runner):
    """(K3DSparkForCausalLM, tokens, requests) or None: there is no drafter of this kind."""
    _, config = _model(runner)
    speculation = need(config, "speculative_config")
    if speculation is None or need(speculation, "method") != "dspark":
        return None
    drafter = need(need(runner, "speculator"), "model")
    if "" not in layers_of(drafter, "K3DSparkForCausalLM"):
        raise Unserved(f"the drafter is a {type(drafter).__name__}; served is K3DSparkForCausalLM")
    _refuse_exact_batches()
    return drafter, need(speculation, "num_speculative_tokens"), need(config, "scheduler_config.max_num_seqs")


def _linears(runner, switches):
    found = _drafter(runner)
    if found is None:
        return None
    from twostep_vllm.drafter import Linears, rows_of

    drafter, tokens, requests = found
    group = find("vllm.distributed", "get_tp_group")()
    # A step has the drafted block's rows, with or without its anchor, and those of the verified tokens.
    rows = rows_of((tokens, tokens + 1), requests)
    return Linears(drafter, rows, group=need(group, "cpu_group") if need(group, "world_size") > 1 else None)


def _logits(runner, switches):
    found = _drafter(runner)
    if found is None:
        return None
    from twostep_vllm.drafter import Gather, Logits, mailbox_of, on_all_ranks, rows_of

    drafter, tokens, requests = found
    head, gather, how = need(drafter, "lm_head"), None, ""
    ranks, group = getattr(head, "tp_size", 1), find("vllm.distributed", "get_tp_group")()
    if ranks > 1:
        all_gather = find("vllm.distributed", "tensor_model_parallel_all_gather")
        mailbox, why = None, "TWOSTEP_VLLM_MAILBOX=0"
        if switches.mailbox:
            mailbox, why = mailbox_of(group, head, runner.speculator)
        gather = Gather(ranks, all_gather, mailbox)
        how = f" on each of {ranks} ranks, gathered by " + ("the Mailbox" if mailbox else f"vLLM's all-gather ({why})")
    return on_all_ranks(group, lambda: Logits(drafter, rows_of((tokens,), requests), gather, how, runner.speculator))


def _kda(runner, switches):
    model, config = _model(runner)
    layers = layers_of(model, "KimiK3DeltaAttention")
    if not layers:
        names = getattr(getattr(config, "model_config", None), "architectures", None) or ()
        if any(name.startswith(("KimiK3", "KimiLinear")) for name in names):
            raise Missing(f"a KimiK3DeltaAttention in {type(model).__name__}")
        return None
    from twostep_vllm.kda import KdaLayers, keys_of

    _refuse_exact_batches()
    if getattr(config, "lora_config", None) is not None:
        raise Unserved("adapters (LoRA) may change the projections that the core takes in")
    speculation, compilation = need(config, "speculative_config", "compilation_config")
    adaptive = getattr(speculation, "enable_adaptive_verification", False)
    tokens = 0 if speculation is None or adaptive else need(speculation, "num_speculative_tokens")
    keys = keys_of(compilation.cudagraph_capture_sizes or (), need(config, "scheduler_config.max_num_seqs"), tokens)

    def is_uniform(captured):  # with adaptive verification the host's counts are not those of the device
        return not adaptive and (not captured or compilation.cudagraph_mode.separate_routine())

    return KdaLayers(layers, runner, keys, find("vllm.forward_context", "get_forward_context"), is_uniform)
