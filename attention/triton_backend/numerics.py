"""What every kernel computes with: casts, products and the online softmax, also right in the interpreter.

The interpreter keeps bf16 as raw 16-bit integers, so that a product, a sum or a cast of them is silently
wrong. Hence kernels never do arithmetic on bf16: operands go through ``operand`` and ``rounded`` into
``dot``, which the interpreter sees as fp32 with the values that the device would see. Everything else is
fp32.
"""

import os

import triton
import triton.language as tl

# Triton decides by this variable, once, when a kernel is decorated; so do the helpers below.
INTERPRETED: bool = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def operand(x, DTYPE: tl.constexpr):
    """Loaded values as an operand of ``dot``: in ``DTYPE``, exact if DTYPE is no narrower."""
    if _INTERPRETED:
        return x.to(tl.float32)
    else:
        return x.to(DTYPE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Computed fp32 values as an operand of ``dot``: rounded to the nearest ``DTYPE``, ties to even."""
    if _INTERPRETED:
        return _round(x, DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def stored(x, DTYPE: tl.constexpr):
    """Computed fp32 values in ``DTYPE``, for a store: rounded to nearest, ties to even."""
    if _INTERPRETED:
        return _round(x, DTYPE).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        # the interpreter's own cast truncates
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32; fp32 operands as three TF32 products, which lose about one bit of fp32."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def soft_cap(s, cap):
    """``cap * tanh(s / cap)`` in a form that saturates: exp2 may overflow to infinity, and 2 / inf is 0.

    Off by some 1e-7 of the cap, as 1 - 2 / (1 + 1) cancels for small logits.
    """
    return cap * (1 - 2 / (tl.exp2(s * (2 * LOG2_E / cap)) + 1))


@triton.jit
def softmax_step(s, peak):
    """Raise the running maximum ``peak`` [M] to logits ``s`` [M, N] (base 2, -inf for unseen).

    Returns the weights [M, N] = exp2(s - base), the factor [M] of what was summed before, the new peak, and
    base [M]: the new peak, or 0 where nothing was seen yet, since -inf - -inf would be NaN.
    """
    new_peak = tl.maximum(peak, tl.max(s, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return tl.exp2(s - base[:, None]), tl.exp2(peak - base), new_peak, base


@triton.jit
def sink_weight(sink, peak):
    """What sinks [M] (natural logits, -inf for none) add to sums of weights relative to ``peak`` [M]."""
    return tl.exp2(sink.to(tl.float32) * LOG2_E - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def log_sum(base, total):
    """``base + log2(total)``, and -inf for a total of 0 (nothing was seen), of any shape."""
    some = total != 0  # a NaN is some, and shows
    return tl.where(some, base + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
