"""Gumbel noise that is a pure function of (seed, position, token id).

There is no generator state, so a token's noise does not depend on the batch, on speculation, on which other tokens are
asked about, or on the device. Hash: splitmix64. Its integers wrap around, which torch's int64 does everywhere.
"""

import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_SQRT_HALF = math.sqrt(0.5)
_LN2 = math.log(2)
#: Of 2 * atanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...), enough for float64 where |s| < 0.172.
_ATANH_TERMS = [1 / (2 * n + 1) for n in range(11)]


def uniform(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64: the odd multiples of 2^-53, so that neither border can occur."""
    key = _mix_int(_mix_int(seed + _GAMMA) + position * _GAMMA)
    bits = _mix((token_ids + 1) * _signed(_GAMMA) + _signed(key))
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel_of(u: Tensor) -> Tensor:
    """-log(-log(u)) in operations that IEEE 754 rounds correctly, so that every device and vector width agrees."""
    return -_log(-_log(u))


def child_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of several answers to one request; answer 0 keeps the request's own."""
    return seed if index == 0 else _mix_int(_mix_int(seed) ^ (index * _GAMMA & _MASK)) >> 1


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64, within a few units in the last place."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa * 2, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(x, _ATANH_TERMS[-1])
    for coefficient in reversed(_ATANH_TERMS[:-1]):
        series.mul_(square).add_(coefficient)
    return (exponent - low.int()).double().mul_(_LN2).add_(series.mul_(s).mul_(2))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer on int64."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = (x ^ _shift_right(x, shift)).mul_(_signed(multiplier))
    return x ^ _shift_right(x, _SHIFTS[-1])


def _mix_int(x: int) -> int:
    """splitmix64's finalizer on a Python integer."""
    x &= _MASK
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = (x ^ (x >> shift)) * multiplier & _MASK
    return x ^ (x >> _SHIFTS[-1])


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return x - (1 << 64) if x >> 63 else x
