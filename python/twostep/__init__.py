"""twostep: prepared decode kernels for the Kimi K3 family.

Everything slow is done once per weight (prepare), and each step only launches (run). The same classes serve GPUs and the
CPU. PyTorch is not needed; twostep.torch routes the linears of a module tree here.
"""

from twostep._twostep import (
    DeviceFacts,
    DraftBatch,
    DraftGemm,
    DrafterWeights,
    DraftLogits,
    DsparkDrafter,
    LogitsStage,
    Mailbox,
    Options,
    PackedWeight,
    PreparedWarpSplitK,
    SocketBootstrap,
    Tactic,
    TensorView,
    compile,
    decode_conv_weight,
    info,
    kda_record_bytes,
    kda_row_stride,
    known_gpu,
    pack_weight,
    view,
    warp_eligible,
    warp_tactic,
)
from twostep.error import Error
from twostep.kda import PreparedKda

__version__ = info()["version"]
__all__ = [
    "DeviceFacts",
    "DraftBatch",
    "DraftGemm",
    "DraftLogits",
    "DrafterWeights",
    "DsparkDrafter",
    "Error",
    "LogitsStage",
    "Mailbox",
    "Options",
    "PackedWeight",
    "PreparedKda",
    "PreparedWarpSplitK",
    "SocketBootstrap",
    "Tactic",
    "TensorView",
    "compile",
    "decode_conv_weight",
    "info",
    "kda_record_bytes",
    "kda_row_stride",
    "known_gpu",
    "pack_weight",
    "view",
    "warp_eligible",
    "warp_tactic",
]
