"""PreparedKda, and how it is made of the KDA layer of a model."""

from twostep import _twostep
from twostep.error import refuse


def _refuse_variants(layer):
    """Layers that the kernel does not compute, each by the name of what is different."""

    def unsupported(argument, value, accepted):
        refuse("unsupported", "kda.from_module", argument, value, accepted, "keep this layer on its own method")

    if getattr(layer, "allow_neg_eigval", False):
        unsupported("allow_neg_eigval", True, "False")
    heads = getattr(layer, "num_heads", getattr(layer, "num_k_heads", None))
    value_heads = getattr(layer, "num_v_heads", heads)
    if heads is not None and value_heads != heads:
        unsupported("num_v_heads", value_heads, f"num_heads, {heads}")
    expand = getattr(layer, "expand_v", 1)
    if expand != 1:
        unsupported("expand_v", expand, "1")
    for name in ("head_dim", "head_k_dim", "head_v_dim"):
        size = getattr(layer, name, _twostep.KDA_HEAD_DIM)
        if size != _twostep.KDA_HEAD_DIM:
            unsupported(name, size, str(_twostep.KDA_HEAD_DIM))
    for name in ("g_a_proj", "g_b_proj"):
        if getattr(layer, name, None) is not None:
            unsupported("output gate", f"low-rank, {name}", "full rank, in the packed projection")
    if isinstance(getattr(layer, "g_proj", None), (list, tuple)) or hasattr(getattr(layer, "g_proj", None), "__len__"):
        unsupported("output gate", "low-rank, g_proj", "full rank, in the packed projection")
    activation = getattr(getattr(layer, "o_norm", None), "activation", "sigmoid")
    if activation != "sigmoid":
        unsupported("o_norm.activation", activation, "sigmoid")
    if getattr(layer, "use_full_rank_gate", True) is False:
        unsupported("use_full_rank_gate", False, "True")


def _part(layer, path):
    part = layer
    for name in path.split("."):
        part = getattr(part, name, None)
        if part is None:
            refuse("unsupported", "kda.from_module", path, "absent", "the Kimi K3 form of a KDA layer: conv1d over packed "
                   "Q, K, V; f_b_proj; A_log; dt_bias; o_norm; gate_lower_bound", "pass the weights to PreparedKda")
    return part


class PreparedKda(_twostep.PreparedKda):
    __doc__ = _twostep.PreparedKda.__doc__

    @classmethod
    def from_module(cls, layer, policies, **options):
        """The core of a KDA layer in the Kimi K3 form.

        Reads conv1d.weight and .bias, f_b_proj.weight, A_log, dt_bias, o_norm.weight and .eps, gate_lower_bound; the
        number of heads is that of dt_bias, which is the device's shard. policies and options as of the constructor.
        The layer's f_b_proj, A_log and dt_bias are borrowed: do not re-point them. Raises Error: unsupported, naming
        allow_neg_eigval, num_v_heads, expand_v, the head size, a low-rank output gate or the missing part.
        """
        _refuse_variants(layer)
        if getattr(_part(layer, "f_b_proj"), "bias", None) is not None:
            refuse("unsupported", "kda.from_module", "f_b_proj.bias", "present", "absent")
        dt_bias = _part(layer, "dt_bias")
        norm = _part(layer, "o_norm")
        if "norm_eps" not in options:
            eps = getattr(norm, "eps", None)
            options["norm_eps"] = _part(norm, "variance_epsilon") if eps is None else eps
        options.setdefault("conv_bias", getattr(layer.conv1d, "bias", None) if hasattr(layer, "conv1d") else None)
        if "gate_lower_bound" not in options:
            if not hasattr(layer, "gate_lower_bound"):
                _part(layer, "gate_lower_bound")
            options["gate_lower_bound"] = layer.gate_lower_bound  # None: the softplus form
        return cls(
            _part(layer, "conv1d.weight"),
            _part(layer, "f_b_proj.weight"),
            _part(layer, "A_log"),
            dt_bias.reshape(-1),
            _part(norm, "weight"),
            heads=dt_bias.shape[0] // _twostep.KDA_HEAD_DIM if len(dt_bias.shape) == 1 else dt_bias.shape[0],
            policies=policies,
            **options,
        )
