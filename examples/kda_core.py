"""The KDA core of one layer: a decode step of two requests, on NumPy arrays. Torch tensors are passed as they are."""

import numpy as np

import twostep

heads, d, columns, slots = 2, 256, twostep.kda_row_stride(2), 3  # slot 0 is padding
f32 = np.float32
bf16 = lambda *shape: twostep.view(np.full(shape, 0x3F80, np.uint16), "bf16")  # ones; NumPy has no BF16

conv, state = twostep.view(np.zeros((slots, 3, 3 * d), np.uint16), "bf16"), np.zeros((slots, heads, 128, 128), f32)
kda = twostep.PreparedKda(
    np.full((3 * d, 1, 4), 0.5, f32), bf16(d, 128), np.zeros(heads, f32), np.zeros(d, f32), np.ones(128, f32),
    heads=heads, gate_lower_bound=-5.0, policies={2: columns})  # of a model's layer: PreparedKda.from_module(layer, ..)
kda.prepare((conv, state))  # compiles; needs no data
result = np.zeros((2, d), np.uint16)
kda.run(bf16(2, columns), twostep.view(result, "bf16"), caches=(conv, state), slots=np.array([1, 2], np.int32))

print(f"{kda.kernel(2)}: out[0] = {result[0, 0]:#06x}")
assert result.any() and (result[0] == result[1]).all()
