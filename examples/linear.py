"""A linear for few rows, prepared once and run each step, on NumPy arrays. Torch tensors are passed as they are."""

import numpy as np

import twostep

m, n, k = 8, 7168, 1536
ones = lambda *shape: twostep.view(np.full(shape, 0x3F80, np.uint16), "bf16")  # NumPy has no BF16: uint16 with a tag
out = np.zeros((m, n), np.uint16)

gemm = twostep.DraftGemm(ones(n, k))
gemm.prepare(m)  # all that can fail or be slow happens here
gemm.run(ones(m, k), twostep.view(out, "bf16"))

print(f"kind {gemm.kind(m)}, out[0] = {out[0, 0]:#06x}")
assert (out == 0x44C0).all()  # 1536 = 1.5 * 2^10
