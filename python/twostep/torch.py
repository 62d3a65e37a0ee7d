"""Routes the BF16 linears of a PyTorch module tree, and a drafter's logits, to twostep (spec: draft-gemm 9, 10).

    report = twostep.torch.install(model, rows=(8, 16))   # every unquantised BF16 linear without bias
    print(report)
    ...                                                   # eager, torch.compile, CUDA graphs: as before
    twostep.torch.uninstall(model)                        # the very objects that were there

A layer is a torch.nn.Linear, or a layer of vLLM whose quant_method is the unquantised one. An eager call goes straight to
the kernel, on torch's current stream. A traced one is the operator twostep::linear.
"""

import os
import secrets
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from twostep import _twostep
from twostep.error import Error, refuse
from twostep.kda import PreparedKda

__all__ = ["DraftLinear", "GroupBootstrap", "InstallReport", "LayerReport", "LogitsGather", "PreparedKda",
           "UninstallReport", "draft_logits", "install", "prepare_draft_logits", "uninstall"]

_BF16 = torch.bfloat16
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAX_ROWS = 64  # above, a layer stays on its own method: prefill is as it was

# An active dispatch mode means that something traces: fake tensors, make_fx, export.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad
_functorch_level = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled


def _is_transformed(x):
    """Under forward-mode AD, a transform of torch.func, or an autocast to another dtype: what the original knows of."""
    return (
        _forward_ad._current_level >= 0
        or _functorch_level() is not None
        or (_any_autocast() and torch.is_autocast_enabled(x.device.type)
            and torch.get_autocast_dtype(x.device.type) is not _BF16)
    )


# ---- The operator of traced calls

# It names its method by the weight alone: a number or a name in the graph would be compiled anew for every layer.

_library = torch.library.Library("twostep", "DEF")
_library.define("linear(Tensor x, Tensor weight) -> Tensor")
_library.define("linear_out(Tensor x, Tensor weight, *, Tensor(a!) out) -> ()")

_by_weight = weakref.WeakValueDictionary()  # place of a weight: its method
_adopted = {}  # the same, of weights that no installed layer has: of a graph that was loaded from a file
_MOST_ADOPTED = 4096


def _method_of(weight):
    place = (weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.device)
    method = _by_weight.get(place)
    if method is None:
        for layer, candidate in list(_installed.items()):
            now = getattr(layer, "weight", None)
            if now is not None and (now.data_ptr(), tuple(now.shape), now.stride(), now.device) == place:
                method = candidate
                break
        else:
            if len(_adopted) >= _MOST_ADOPTED:
                del _adopted[next(iter(_adopted))]
            method = _adopted[place] = DraftLinear(_PlainLinear())
        _by_weight[place] = method
    return method


def _linear(x, weight):
    return _method_of(weight)._product(x, weight)


def _linear_out(x, weight, *, out):
    out.copy_(_linear(x, weight))


for _backend in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _backend)
    _library.impl("linear_out", _linear_out, _backend)


@torch.library.register_fake("twostep::linear", lib=_library)
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("twostep::linear_out", lib=_library)
def _(x, weight, *, out):
    return None


# ---- DraftLinear


class DraftLinear:
    """The method of one layer, routed to its DraftGemm: apply(layer, x, bias=None) -> x @ layer.weight.T.

    Every other attribute is that of the original method. x [.., K] BF16 on the weight's device, up to 64 rows, without bias
    and gradient goes to the kernel, on torch's current stream; all else to the original. The weight is taken from the layer
    on every call: a re-pointed one is followed, another shape gets a new plan (under capture: the original method, with one
    warning). Result: fresh and packed, [.., N]. May be captured after a prepare, or a run, of the row count.
    """

    _left_to_the_original = frozenset(
        ("invalid_argument", "unsupported", "bad_layout", "wrong_device", "weight_changed", "capturing")
    )
    _own = frozenset(("original", "options", "plan", "_n", "reason", "capture_misses"))

    def __init__(self, original, options=None):
        self.__dict__.update(original=original, options=options, plan=None, _n=0, reason="", capture_misses=0)

    def __getattr__(self, name):  # of what is not found here
        if name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name, value):
        if name in self._own:
            self.__dict__[name] = value
        else:
            setattr(self.original, name, value)

    def __reduce__(self):  # copies and pickles make their own plan
        return _of_original, (self.original, self.options)

    def apply(self, layer, x, bias=None):
        weight = layer.weight
        traced = _is_compiling() or type(x) not in _PLAIN_TENSORS or _dispatch_modes() or _jit_trace() is not None
        if not traced and _is_transformed(x):
            return self.original.apply(layer, x, bias)
        if not traced and bias is None and not (weight.requires_grad and _is_grad_enabled()):
            shape = x.shape
            if len(shape) == 2 and shape[0] <= _MAX_ROWS and self.plan is not None:
                try:
                    out = x.new_empty((shape[0], self._n))
                    self.plan.run(x, out, weight=weight)
                    return out
                except Error:  # not these operands, or not this plan: what follows tells
                    pass
        if (
            bias is not None
            or x.dtype is not _BF16
            or weight.dtype is not _BF16
            or ((weight.requires_grad or x.requires_grad) and _is_grad_enabled())
        ):
            return self.original.apply(layer, x, bias)
        if traced:
            if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
                return self.original.apply(layer, x, bias)
            return torch.ops.twostep.linear(x, weight)
        out = self._served(x, weight)
        return self.original.apply(layer, x, bias) if out is None else out

    def prepare(self, weight, rows):
        """Builds the plan of `weight` and prepares it for `rows`. Raises Error."""
        self._plan_of(weight)
        for m in rows:
            self.plan.prepare(m)

    def _plan_of(self, weight):
        """The plan for this weight. Raises Error; under capture a plan that must be built is capturing."""
        plan = self.plan
        if plan is None or (plan.n, plan.k) != tuple(weight.shape) or plan.weight.device != weight.device:
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                refuse("capturing", "DraftLinear", "weight", list(weight.shape), "the weight that was prepared",
                       "run once, or prepare, before the capture")
            self._n = weight.shape[0]
            self.plan = plan = _twostep.DraftGemm(weight, self.options)
        return plan

    def _served(self, x, weight):
        """The product of any operands that the plan can serve, else None."""
        if x.dim() < 2 or x.shape[-1] != weight.shape[-1] or x.device != weight.device or weight.dim() != 2:
            return None
        rows = x.numel() // max(x.shape[-1], 1)
        if rows > _MAX_ROWS or x.shape[-1] == 0:
            return None
        try:
            plan = self._plan_of(weight)
            flat = x.detach().reshape(-1, x.shape[-1])
            if (flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]) or (flat.shape[1] > 1 and flat.stride(1) != 1):
                flat = flat.contiguous()
            out = x.new_empty((flat.shape[0], plan.n))
            plan.run(flat, out, weight=weight)
        except Error as error:
            self._refused(error)
            return None
        return out.view(*x.shape[:-1], plan.n)

    def _refused(self, error):
        strict = self.options is not None and self.options.strict
        if strict or error.code not in self._left_to_the_original:
            raise error
        self.capture_misses += error.code == "capturing"
        if self.reason != str(error):
            self.reason = str(error)
            warnings.warn(f"twostep: a layer runs on its own method: {error}", RuntimeWarning, stacklevel=4)

    def _product(self, x, weight):
        """For the operator, which has no layer: as the unquantised method does what the plan does not."""
        out = self._served(x, weight)
        return torch.nn.functional.linear(x, weight) if out is None else out


class _PlainLinear:
    """What torch.nn.Linear does, as a method."""

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class RoutedLinear(torch.nn.Linear):
    """A torch.nn.Linear while install is in force: the same object, with this class."""

    def forward(self, x):
        method = self.__dict__.get("_twostep")  # who holds this bound method may call it after uninstall
        if method is None:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return method.apply(self, x, self.bias)


_classes = {}  # DraftLinear as a subclass of an unquantised method, by that class


def _of_original(original, options):
    """A DraftLinear that passes for its original, whose own members it forwards."""
    base = type(original)
    if base is _PlainLinear:
        return DraftLinear(original, options)
    if base not in _classes:
        members = {
            name: property(lambda self, name=name: getattr(self.original, name))
            for name in dir(base)
            if not name.startswith("__") and name not in dir(DraftLinear)
        }
        _classes[base] = type("DraftLinear", (DraftLinear, base), {**members, "prepare": DraftLinear.prepare})
    return _classes[base](original, options)


# ---- Layers


def _framework(name):
    """A class of vLLM, if vLLM is in use."""
    for module in ("vllm.model_executor.layers.linear", "vllm.model_executor.layers.vocab_parallel_embedding",
                   "vllm.models.kimi_k3.nvidia.low_latency_gemm"):
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            return found
    return None


def _is_linear(layer):
    """Does the report speak of this layer? Anything that has a method with apply, or is a torch.nn.Linear."""
    return isinstance(layer, torch.nn.Linear) or hasattr(getattr(layer, "quant_method", None), "apply")


def _routed(layer):
    """Our method of this layer, or None."""
    method = layer.__dict__.get("_twostep") if type(layer) is RoutedLinear else getattr(layer, "quant_method", None)
    return method if isinstance(method, DraftLinear) else None


def _refusal(name, layer):
    """Why a layer is not routed; empty: it can be."""
    if name.rpartition(".")[2].endswith("kv_b_proj"):
        return "kv_b_proj: the decode runs its absorbed halves instead"
    method = getattr(layer, "quant_method", None)
    if method is not None:
        unquantised = _framework("UnquantizedLinearMethod")
        if unquantised is None or type(method) is not unquantised:
            return f"its method is {type(method).__name__}; routed is exactly UnquantizedLinearMethod"
    elif type(layer) is not torch.nn.Linear:
        return f"its class is {type(layer).__name__}; routed is exactly torch.nn.Linear"
    elif "forward" in layer.__dict__:
        return "its forward was replaced by another"
    elif layer.bias is not None:
        return "it has a bias"
    weight = getattr(layer, "weight", None)
    if weight is None or weight.dtype is not _BF16:
        return f"its weight is {'absent' if weight is None else weight.dtype}; routed is bfloat16"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions; routed are 2"
    return ""


@dataclass
class LayerReport:
    """One linear of the tree."""

    name: str
    n: int = 0
    k: int = 0
    bytes: int = 0  # of its weight
    kinds: dict = field(default_factory=dict)  # {m: "warp" | "cublas" | "cpu" | "original"}
    why: dict = field(default_factory=dict)  # {m: one sentence, empty for "warp"}
    installed: bool = False
    reason: str = ""  # why it was skipped


@dataclass
class InstallReport:
    """What install did. print() gives a table."""

    count: int = 0  # routed layers, those of an earlier install included
    new: int = 0
    bytes: int = 0  # of the routed weights; a weight that layers share counts once
    layers: list = field(default_factory=list)

    def __str__(self):
        lines = [f"twostep: {self.count} linears routed, {self.new} of them now, {self.bytes / 1e6:.1f} MB"]
        for layer in self.layers:
            kinds = ", ".join(f"M = {m}: {kind}" for m, kind in layer.kinds.items())
            lines.append(f"  {layer.name or '(root)'} [{layer.n}, {layer.k}]  {kinds if layer.installed else 'skipped: ' + layer.reason}")
        return "\n".join(lines)


@dataclass
class UninstallReport:
    count: int = 0  # layers that have their own method again
    left: list = field(default_factory=list)  # names of layers whose method someone replaced since


_installed = weakref.WeakKeyDictionary()  # layer: our method


def install(module, rows=(), options=None, group=None):
    """Routes every unquantised BF16 linear under `module` to twostep, but those named *kv_b_proj.

    rows: the row counts to prepare at once; others are prepared by their first eager call. options: twostep.Options;
    with strict, a layer that the kernel cannot serve is skipped. group: a torch.distributed group whose ranks agree on
    kinds: a (layer, m) that is "cublas" on one is on all. A layer that occurs twice is routed once; a second call wraps
    nothing twice. Returns an InstallReport. Raises Error for faults of the machine alone: device_error, out_of_memory.
    """
    rows = sorted(set(rows))
    report = InstallReport()
    found = []
    weights = {}
    for name, layer in module.named_modules():
        if not _is_linear(layer):
            continue
        line = LayerReport(name)
        report.layers.append(line)
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.dim() == 2:
            line.n, line.k = weight.shape
            line.bytes = weight.numel() * weight.element_size()
        method = _routed(layer)
        line.reason = "" if method else _refusal(name, layer)
        if not line.reason:
            original = getattr(layer, "quant_method", None) or _PlainLinear()
            if method is not None and options is not None and method.options != options:
                method.options, method.plan = options, None  # the plan follows what is asked for now
            found.append((line, layer, method or _of_original(original, options)))

    def make_ready(item):
        line, layer, method = item
        try:
            method.prepare(layer.weight, [m for m in rows if m <= _MAX_ROWS])
            if options is not None and options.strict and method.plan.why_code(1) not in ("", "not_prepared"):
                line.reason = method.plan.why(1)
        except Error as error:
            if error.code in ("device_error", "out_of_memory"):
                raise
            line.reason = str(error)

    streams = {layer.weight.device: torch.cuda.current_stream(layer.weight.device)
               for _, layer, _ in found if layer.weight.is_cuda}

    def on_the_callers_streams(item):
        device = item[1].weight.device
        if device not in streams:
            return make_ready(item)
        with torch.cuda.stream(streams[device]):
            return make_ready(item)

    with ThreadPoolExecutor() as pool:
        list(pool.map(on_the_callers_streams, found))

    for line, layer, method in found:
        if line.reason and _routed(layer) is None:
            continue
        line.reason = ""  # of a layer that is routed already: its calls tell, and take its own method
        for m in rows if method.plan is not None else ():
            kind = method.plan.kind(m) if m <= _MAX_ROWS else "original"
            line.kinds[m] = kind
            line.why[m] = method.plan.why(m) if m <= _MAX_ROWS else f"M = {m} is above {_MAX_ROWS}: the layer's own method"
        line.installed = True
        report.count += 1
        weights[layer.weight.data_ptr()] = line.bytes
        if _routed(layer) is None:
            report.new += 1
            if isinstance(method.original, _PlainLinear):
                layer._twostep = method
                layer.__class__ = RoutedLinear
            else:
                layer.quant_method = method
        _installed[layer] = method
    report.bytes = sum(weights.values())
    if group is not None:
        _agree(report, {line.name: method for line, _, method in found if line.installed}, group)
    return report


def _agree(report, methods, group):
    """Pins to cuBLAS, on every rank, each (layer, m) that is "cublas" on any (5.5)."""
    mine = {line.name: line.kinds for line in report.layers if line.installed}
    everyone = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, mine, group=group)
    for line in report.layers:
        for m, kind in line.kinds.items():
            # A layer that another rank skipped runs on its own method there, which is cuBLAS.
            if kind == "warp" and any(other.get(line.name, {}).get(m, "cublas") == "cublas" for other in everyone):
                plan = methods[line.name].plan
                plan.pin(m, "cublas")
                line.kinds[m], line.why[m] = plan.kind(m), plan.why(m)


def uninstall(module):
    """Puts back the very method, or class, of each routed layer under `module`. Returns an UninstallReport.

    A layer whose method someone replaced since is left as it is, and named. Afterwards no attribute of ours remains.
    """
    report = UninstallReport()
    for name, layer in module.named_modules():
        plain = type(layer) is RoutedLinear
        if plain and "forward" in layer.__dict__:
            report.left.append(name)  # someone wrapped ours
            continue
        method = _routed(layer)
        if _installed.pop(layer, None) is not None and method is None:
            report.left.append(name)
        if method is None:
            continue
        if plain:
            layer.__class__ = torch.nn.Linear
            del layer._twostep
        else:
            layer.quant_method = method.original
        report.count += 1
    return report


# ---- draft_logits

_heads = weakref.WeakKeyDictionary()  # head: {(what, ...): DraftLogits or LogitsStage}


def draft_logits(model, hidden, gather=None):
    """Logits [M, V] of hidden [M, K]: model.compute_logits(hidden), with a BF16 head on twostep.

    V is the vocabulary without padding. Read are model.lm_head, and of model.logits_processor, if there is one:
    org_vocab_size, soft_cap, scale, logits_as_input, head_dtype. A plain BF16 head runs on DraftLogits; any other that
    gives BF16 logits runs its own method, then cap and scale; whatever else goes to model.compute_logits, with its
    result type: hidden not [M, K] BF16, logits as input, another head dtype, an FP32 head, a gradient, a trace, a head of
    several ranks without gather. The current head is used on every call. The result is the caller's.

    gather: for a head of several ranks (head.tp_size), whose shards are equally wide. gather(shard [M, N]) -> [M, tp_size N],
    fresh, in the order of the ranks. It is called on every rank or on none, whatever fails on one of them. Raises Error:
    invalid_argument where the shards are together narrower than V.
    """
    processor = getattr(model, "logits_processor", None)
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    ranks = getattr(head, "tp_size", 1)
    if (
        hidden.dim() != 2
        or hidden.dtype is not _BF16
        or weight is None
        or getattr(processor, "logits_as_input", False)
        or getattr(processor, "head_dtype", None) not in (None, _BF16)
        or weight.dtype is torch.float32
        or (ranks != 1 and (gather is None or getattr(head, "num_added_embeddings", 0)))  # added ones: padding in each shard
        or ((hidden.requires_grad or weight.requires_grad) and _is_grad_enabled())
        or _is_compiling()
        or type(hidden) not in _PLAIN_TENSORS
        or _dispatch_modes()
    ):
        return _compute_logits(model, hidden)
    cap, scale = getattr(processor, "soft_cap", None), getattr(processor, "scale", 1.0)
    vocab = getattr(processor, "org_vocab_size", None)
    if ranks != 1 and ranks * weight.shape[0] < (vocab or 0):
        refuse("invalid_argument", "draft_logits", "lm_head.weight", f"{ranks} shards of {weight.shape[0]} rows",
               f"at least the {vocab} of the vocabulary", "pad the head, or keep the model's compute_logits")
    logits = None
    if _is_plain_head(head, weight):
        try:
            logits = _plain_logits(head, weight, hidden, *_shard_of(ranks, weight, vocab, cap, scale))
            if ranks == 1:
                return logits
        except Error as error:
            if error.code not in DraftLinear._left_to_the_original:
                raise
            if ranks == 1:
                if getattr(model, "compute_logits", None) is None:
                    raise
                return _compute_logits(model, hidden)
    if logits is None:  # with several ranks also after a failure of this one: the others gather
        method = getattr(head, "quant_method", None)
        logits = head(hidden) if method is None else method.apply(head, hidden, bias=getattr(head, "bias", None))
    if not isinstance(logits, torch.Tensor) or logits.dtype is not _BF16:
        return _compute_logits(model, hidden)
    if ranks != 1:
        logits = gather(logits)
        if cap is None and scale == 1.0:
            return logits[:, :vocab]
    out = hidden.new_empty((hidden.shape[0], vocab or logits.shape[1]))
    stage = _of_head(head, ("stage", cap, scale, str(logits.device)),
                     lambda: _twostep.LogitsStage(str(logits.device), soft_cap=cap, scale=scale))
    return stage.run(_rows_apart(logits), out)


def prepare_draft_logits(model, rows):
    """Prepares what draft_logits(model, hidden) runs for these row counts of hidden; gathers nothing.

    Returns {m: kind}; "original" where the head runs on its own method. Raises Error.
    """
    processor, head = getattr(model, "logits_processor", None), model.lm_head
    cap, scale = getattr(processor, "soft_cap", None), getattr(processor, "scale", 1.0)
    weight, vocab, ranks = head.weight, getattr(processor, "org_vocab_size", None), getattr(head, "tp_size", 1)
    if not _is_plain_head(head, weight):
        return dict.fromkeys(rows, "original")
    plan = _logits_plan(head, weight, *_shard_of(ranks, weight, vocab, cap, scale))
    if ranks != 1 and (cap is not None or scale != 1.0):
        _of_head(head, ("stage", cap, scale, str(weight.device)),
                 lambda: _twostep.LogitsStage(str(weight.device), soft_cap=cap, scale=scale))
    for m in rows:
        plan.prepare(m)
    return {m: plan.kind(m) for m in rows}


def _shard_of(ranks, weight, vocab, cap, scale):
    """Columns, cap and scale of this rank's product: with several ranks all columns, to be cut and capped when gathered."""
    return (vocab or weight.shape[0], cap, scale) if ranks == 1 else (weight.shape[0], None, 1.0)


def _logits_plan(head, weight, vocab, cap, scale):
    return _of_head(head, ("logits", vocab, cap, scale),
                    lambda: _twostep.DraftLogits(weight, vocab, soft_cap=cap, scale=scale))


def _plain_logits(head, weight, hidden, *what):
    out = hidden.new_empty((hidden.shape[0], what[0]))
    hidden = _rows_apart(hidden)
    try:
        return _logits_plan(head, weight, *what).run(hidden, out, head=weight)
    except Error as error:
        if error.code != "weight_changed":
            raise
    del _heads[head]
    return _logits_plan(head, weight, *what).run(hidden, out, head=weight)


def _rows_apart(matrix):
    """The matrix itself, or a packed copy where its columns are not adjacent or its rows overlap."""
    rows, columns = matrix.shape
    if (columns > 1 and matrix.stride(1) != 1) or (rows > 1 and matrix.stride(0) < columns):
        return matrix.contiguous()
    return matrix


def _of_head(head, key, make):
    kept = _heads.setdefault(head, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _plain_methods():
    """Of a head. The last is vLLM's choice of another kernel for the same product."""
    return tuple(map(_framework, ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "KimiK3LowLatencyEmbeddingMethod")))


def _is_plain_head(head, weight):
    if weight.dtype is not _BF16 or weight.dim() != 2 or getattr(head, "bias", None) is not None:
        return False
    method = getattr(head, "quant_method", None)
    if method is not None:
        return type(method) in _plain_methods() or isinstance(method, DraftLinear)
    return type(head) in (torch.nn.Linear, torch.nn.Embedding, RoutedLinear) and "forward" not in head.__dict__


def _compute_logits(model, hidden):
    original = getattr(model, "compute_logits", None)
    if original is None:
        refuse("unsupported", "draft_logits", "hidden, or the head", f"{hidden.dtype} {list(hidden.shape)}",
               "hidden [M, K] bfloat16 and a bfloat16 lm_head, or a model with compute_logits")
    return original(hidden)


# ---- Several ranks

class GroupBootstrap:
    """A torch.distributed group of CPU tensors (gloo) as the exchange that a Mailbox is made with."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        name = f"twostep-{os.getpid()}-{secrets.token_hex(4)}".encode()
        name = self.all_gather_bytes(name.ljust(64), 60)[0].decode().strip()  # that of rank 0
        self.socket_path = os.path.join("/tmp", name)  # the sockets there are removed after use

    def all_gather_bytes(self, data, limit_s):
        """`data`, of the same length on every rank, by rank. Raises Error peer_lost after limit_s seconds."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = torch.distributed.all_gather(everyone, mine, group=self.group, async_op=True)
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            refuse("peer_lost", "mailbox.bootstrap", "the group", str(error).splitlines()[0], f"all ranks within {limit_s} s",
                   "look at the other ranks, then start the group again")
        return [part.numpy().tobytes() for part in everyone]


class LogitsGather:
    """The all-gather of logits over the ranks of a tensor-parallel group: what vLLM's model._drafter_comm may hold.

    Made by all ranks together, with a group of CPU tensors. width: columns of a rank's shard. rows: the most that a call
    has, up to 256. Raises Error on all ranks, where one cannot.
    """

    def __init__(self, group, width, rows=64, device=None, **limits):
        bootstrap = GroupBootstrap(group)
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        self.mailbox = _twostep.Mailbox(bootstrap, bootstrap.rank, bootstrap.size, device=str(device), max_cols=width,
                                        max_rows=rows, **limits)

    def gather_logits(self, logits):
        """[M, P * C] of logits [M, C] BF16 of every rank, in fresh memory; None for what the mailbox does not serve.

        None says the same on all ranks, before anything is launched: the framework's own all-gather then runs. Columns
        of padding are the caller's to cut. An M that differs between ranks shows in mailbox.status().
        """
        mailbox = self.mailbox
        if logits.dim() != 2 or logits.dtype is not _BF16 or mailbox.accepts("all_gather", *logits.shape) is not None:
            return None
        if logits.stride(1) != 1 or logits.stride(0) % 8 or logits.stride(0) < logits.shape[1] or logits.data_ptr() % 16:
            logits = logits.contiguous()
        out = logits.new_empty((logits.shape[0], mailbox.size * logits.shape[1]))
        return mailbox.all_gather(logits, out)

    def close(self):
        """By all ranks together."""
        self.mailbox.close()
