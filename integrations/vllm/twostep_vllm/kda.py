"""The KDA layers of the target: decode and verify on PreparedKda, over vLLM's own caches; all else as it was."""

import inspect
import logging
from collections import Counter

import torch

import twostep
from twostep_vllm.framework import Missing, Unserved, captures, need

log = logging.getLogger("vllm.twostep")

MOST_REQUESTS = 128  # what was measured
MOST_TOKENS = 8


def keys_of(sizes, requests, draft_tokens):
    """The prepared keys: decode and verify steps of the captured token counts, or of 1 to `requests` where none is.

    A graph of a verify step holds whole requests: its token count is a captured one, rounded up.
    """
    most, verified = min(requests, MOST_REQUESTS), 1 + draft_tokens
    decode = {size for size in sizes if size <= most} or set(range(1, most + 1))
    keys = sorted(decode)
    if draft_tokens and verified <= MOST_TOKENS:
        rounded = {-(-size // verified) for size in sizes}
        keys += [(r, verified) for r in sorted({r for r in rounded if r <= most} or decode)]
    return keys


def product(linear, x):
    """Of a layer of vLLM, which may give its bias as well."""
    out = linear(x)
    return out[0] if isinstance(out, tuple) else out


class Layer:
    """One KimiK3DeltaAttention, whose forward and bind_kv_cache are ours while this is in force."""

    def __init__(self, layer, keys, forward_context, is_uniform, tell):
        need(layer, "prefix", "in_proj_qkvgfab", "o_proj", "bind_kv_cache")
        if list(inspect.signature(need(layer, "forward")).parameters) != ["hidden_states", "positions"]:
            raise Missing(f"{type(layer).__name__}.forward(hidden_states, positions)")
        if getattr(layer, "use_recoverssm", False):
            raise Unserved("--use-replayssm keeps records of vLLM's own form; served is a state for each drafted token")
        if getattr(layer, "gemm_rs_ar", None) is not None:
            raise Unserved("its output projection is fused with a reduction; served is one by itself")
        heads, width, padding = need(layer, "local_num_heads", "local_projection_size", "in_proj_padding")
        conv, state = need(layer, "get_state_shape")()[:2]
        dtypes = tuple(need(layer, "get_state_dtype")()[:2])
        if dtypes != (torch.bfloat16, torch.float32):
            raise Unserved(f"its caches are {dtypes[0]} and {dtypes[1]}; served are bfloat16 (conv) and float32 (state)")
        self.layer, self.width, self._tell = layer, width, tell
        self._context, self._is_uniform = forward_context, is_uniform
        columns = 4 * width + width // heads + heads + padding
        self.core = twostep.PreparedKda.from_module(layer, dict.fromkeys(keys, columns), conv_dim_first=conv[0] == 3 * width)
        self._keys, self._caches = frozenset(keys), None  # the caches that the core is prepared for
        self.steps = Counter()
        self._forward, self._bind = layer.forward, layer.bind_kv_cache
        self._ours = (self.forward, self.bind_kv_cache)
        layer.forward, layer.bind_kv_cache = self._ours
        if isinstance(getattr(layer, "kv_cache", None), tuple):
            self._prepare()

    def bind_kv_cache(self, *args, **options):
        self._bind(*args, **options)
        self._prepare()

    def _prepare(self):
        """For the caches that are bound now."""
        self._caches = None
        try:
            self.core.prepare(tuple(self.layer.kv_cache[:2]))
            self._caches = self.layer.kv_cache
        except (twostep.Error, AttributeError, TypeError) as error:
            self._leave(error)

    def _leave(self, error):
        """To vLLM, until other caches are bound."""
        self._caches = None
        self._tell(f"{self.layer.prefix} and all like it run on vLLM's kernels", error)

    def forward(self, hidden_states, positions):
        heads = self._heads(hidden_states)
        self.steps["vllm" if heads is None else "twostep"] += 1
        if heads is None:
            return self._forward(hidden_states=hidden_states, positions=positions)
        return product(self.layer.o_proj, heads)

    def _heads(self, hidden_states):
        """The rows for the output projection, or None: the step is vLLM's, and nothing was launched but the projection."""
        try:
            step = self._step(hidden_states)
        except AttributeError as error:  # of the metadata
            self._leave(error)
            return None
        if step is None:
            return None
        rows, call = step
        projected = product(self.layer.in_proj_qkvgfab, hidden_states)
        heads = projected.new_empty((projected.shape[0], self.width))
        try:
            self.core.run(projected[:rows], heads[:rows], caches=self._caches[:2], **call)
        except twostep.Error as error:
            if error.code == "device_error":
                raise
            self._leave(error)
            return None
        return heads

    def _step(self, hidden_states):
        """(rows, the call's slots, accepted and tokens) of a step that the core serves: all decode, or all verify with one
        number of tokens. Else None. What is decided here under capture holds for each replay."""
        if torch.compiler.is_compiling() or self._caches is None or self.layer.kv_cache is not self._caches:
            return None
        context = self._context()
        metadata = context.attn_metadata
        m = metadata.get(self.layer.prefix) if isinstance(metadata, dict) else None
        if m is None or m.num_prefills:
            return None
        captured = captures(hidden_states)
        if captured and getattr(context.cudagraph_runtime_mode, "name", "") != "FULL":
            return None  # pieces: vLLM leaves the core out of the graph, and runs it with each step's own metadata
        rows = m.num_actual_tokens
        if m.num_spec_decodes:
            slots, accepted = m.spec_state_indices_tensor, m.num_accepted_tokens
            tokens, rest = divmod(m.num_spec_decode_tokens, m.num_spec_decodes)
            # Each request has from one token to as many as slots: where the mean is either, all have that.
            if m.num_decodes or rest or tokens not in (1, slots.shape[1]) or (captured and tokens == 1):
                return None
            if not self._is_uniform(captured):
                return None
            call = {"accepted": accepted, "tokens": tokens}
        else:
            slots, tokens, call = m.non_spec_state_indices_tensor, 1, {"tokens": 1}
            if not m.num_decodes:
                return None
        requests, rest = divmod(rows, tokens)
        if rest or not requests or requests > slots.shape[0]:
            return None
        if (requests if tokens == 1 else (requests, tokens)) not in self._keys:
            return None
        return rows, {"slots": slots, **call}

    def reload(self):
        """After the layer's weights were written: the copies of conv and norm follow, at their addresses."""
        part = self.layer
        try:
            self.core.reload(part.conv1d.weight, part.f_b_proj.weight, part.A_log, part.dt_bias.reshape(-1), part.o_norm.weight,
                             conv_bias=getattr(part.conv1d, "bias", None))
        except twostep.Error as error:
            self._leave(error)

    def remove(self):
        for name, ours in zip(("forward", "bind_kv_cache"), self._ours):
            if self.layer.__dict__.get(name) is ours:
                delattr(self.layer, name)


class KdaLayers:
    """All KDA layers of a model that can be served."""

    def __init__(self, layers, runner, keys, forward_context, is_uniform):
        """is_uniform(captured): do the host's counts of a verify step tell that all its requests have as many tokens, and,
        of a captured one, those of each replay?"""
        self._runner, self._follow, self.keys = runner, need(runner, "reset_lora_state"), keys
        self.layers, self._skipped, self._told = {}, {}, set()
        kind = Unserved
        for path, layer in layers.items():
            try:
                self.layers[path] = Layer(layer, keys, forward_context, is_uniform, self._tell)
            except (Unserved, twostep.Error, AttributeError, TypeError, ValueError) as error:  # the last three: it has moved
                self._skipped[path] = str(error)
                kind = Unserved if isinstance(error, twostep.Error) or type(error) is Unserved else Missing
        if not self.layers:
            raise kind("; ".join(self.skipped()))
        runner.reset_lora_state = self._weights_replaced

    def _tell(self, what, error):
        """Each reason once, not once for each layer."""
        if str(error) not in self._told:
            self._told.add(str(error))
            log.warning("twostep: %s: %s", what, error)

    def _weights_replaced(self, *args, **options):
        """vLLM calls this whenever the target's weights were replaced."""
        result = self._follow(*args, **options)
        for layer in self.layers.values():
            layer.reload()
        return result

    def __str__(self):
        verify = [key for key in self.keys if isinstance(key, tuple)]
        return (f"{len(self.layers)} KDA layers, decode of {len(self.keys) - len(verify)} batch sizes and verify of "
                f"{len(verify)}, prepared when the caches are bound")

    def skipped(self):
        return [f"KDA ({count}): {reason}" for reason, count in Counter(self._skipped.values()).items()]

    def remove(self):
        for layer in self.layers.values():
            layer.remove()
        if self._runner.__dict__.get("reset_lora_state") == self._weights_replaced:
            del self._runner.reset_lora_state
