"""int8 for keys and values: symmetric, with one fp32 scale per token and per head."""

from typing import NamedTuple

import torch
from torch import Tensor

from pagedkv.errors import PagedKVError

# -128 stays unused: with a symmetric range -q exists for every q, so that quantize(-x) is -quantize(x)
# and a kernel may negate or take |q| without overflow.
Q_MAX = 127

# The floor of a scale: an all-zero vector divides by it instead of by zero.
MIN_SCALE = 1e-6


class NonFiniteError(PagedKVError):
    """Values to quantize hold NaN or infinity, which int8 cannot express."""


class Quantized(NamedTuple):
    """int8 values [..., head_dim] and their fp32 scales [...]; ``values * scale`` restores the vector."""

    values: Tensor
    scale: Tensor


def quantize(x: Tensor, *, check: bool = True) -> Quantized:
    """Quantize every vector along the last dimension: ``scale = max(absmax / 127, 1e-6)``, ``q = x / scale``.

    ``q`` is rounded half away from zero and clamped to -127..127. Everything is computed in fp32.

    Error bound: rounding moves ``x / scale`` by at most 1/2, so ``|x - q * scale| <= scale / 2`` in exact
    arithmetic. In fp32 the division and the product back are each off by at most ``2**-24`` of a magnitude of
    at most ``127 * scale``, together less than ``2**-16 * scale``:
    ``|x - dequantize(quantize(x))| <= scale * (1/2 + 2**-16)``. The bound is reached: at most 1/254 (0.4 %)
    of the largest entry of the vector.

    Args:
        x: [..., head_dim], any float dtype, any layout.
        check: refuse NaN and infinity. That reads one number back, for which the host waits for the device;
            unchecked, such a vector gets a scale that is not finite and so stays visible.

    Raises:
        NonFiniteError: with the count of values that are NaN or infinite (after the cast to fp32).

    Cost: O(x.numel()), a few passes. Source: the per-token, per-head scheme of vLLM and of lmdeploy,
    symmetric form.

    >>> q, scale = quantize(torch.tensor([[254.0, -1.0, 0.9]]))
    >>> q.tolist(), scale.tolist()
    ([[127, -1, 0]], [2.0])
    """
    x = _as_float32(x)
    absmax = x.abs().amax(dim=-1)
    # amax passes NaN and infinity on, so that one look at the maxima covers every value
    if check and not bool(torch.isfinite(absmax).all()):
        count = x.numel() - int(torch.isfinite(x).sum())
        raise NonFiniteError(f"{count} of {x.numel()} values to quantize are NaN or infinite in fp32")
    scale = (absmax / Q_MAX).clamp_min(MIN_SCALE)
    # a finite vector never exceeds 127; the cast of one that is not is undefined and could give -128
    values = _round_half_away(x / scale.unsqueeze(-1)).clamp_(-Q_MAX, Q_MAX)
    return Quantized(values, scale)


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Restore fp32 vectors: ``values [..., head_dim]`` int8 times ``scale [...]`` fp32. Cost: one pass.

    >>> dequantize(torch.tensor([[127, -1]], dtype=torch.int8), torch.tensor([2.0])).tolist()
    [[254.0, -2.0]]
    """
    if values.dtype != torch.int8 or values.shape[:-1] != scale.shape:
        raise PagedKVError(
            f"dequantize needs int8 values [..., head_dim] and a scale [...], "
            f"got {values.dtype} {tuple(values.shape)} and {tuple(scale.shape)}"
        )
    return values.to(torch.float32) * scale.unsqueeze(-1)


def _as_float32(x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0:
        raise PagedKVError(f"quantize needs floats [..., head_dim], got {x.dtype} {tuple(x.shape)}")
    return x.to(torch.float32)


def _round_half_away(x: Tensor) -> Tensor:
    # torch.round rounds half to even, and adding 0.5 before truncating rounds 0.49999997 up;
    # the cast truncates like trunc() and is 10x faster on the CPU
    whole = x.to(torch.int8)
    return whole.add_((x - whole).mul_(2).to(torch.int8))
