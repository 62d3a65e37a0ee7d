"""BF16 for NumPy, which has none: values in arrays of uint16, seen through twostep.view."""

import numpy as np

import twostep


def to_bf16(values):
    """Nearest BF16, ties to even, of finite FP32 values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16(array):
    return twostep.view(array, "bf16")


def integers(random, *shape):
    """Small integers as BF16: any order of summation is exact."""
    return to_bf16(random.integers(-4, 5, shape))


def normals(random, *shape, spread=1.0):
    return to_bf16(random.standard_normal(shape) * spread)


def nans(*shape):
    return np.full(shape, 0x7FC1, np.uint16)


def product(x, weight):
    """bf16(x @ weight.T) of exact sums."""
    return to_bf16(from_bf16(x).astype(np.float64) @ from_bf16(weight).astype(np.float64).T)
