"""int8 with a scale per token and head."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.quantization import MIN_SCALE, NonFiniteError, dequantize, quantize

BOUND = 0.5 + 2.0**-16


def random_vectors(seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp(spread * torch.randn(50, 4, 1, generator=generator))
    return magnitude * torch.randn(50, 4, 64, generator=generator)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_error_is_at_most_half_a_scale(values: list[float]) -> None:
    """The bound of the docstring, in exact (fp64) arithmetic, from denormals to 2**100."""
    x = torch.tensor([values], dtype=torch.float32)
    q, scale = quantize(x)
    error = (x.double() - dequantize(q, scale).double()).abs().max().item()
    assert error <= scale.item() * BOUND


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_error_bound_holds_and_is_nearly_reached_for_random_vectors(spread: float) -> None:
    """Normal vectors whose magnitudes range over ``exp(+-3 * spread)``."""
    x = random_vectors(0, spread)
    q, scale = quantize(x)
    relative = (
        ((x.double() - dequantize(q, scale).double()).abs() / scale.double().unsqueeze(-1)).max().item()
    )
    assert 0.49 < relative <= BOUND


def test_scale_is_the_largest_magnitude_over_127() -> None:
    """Per token and per head, in fp32, against numpy."""
    x = random_vectors(1)
    scale = quantize(x).scale
    assert scale.dtype == torch.float32 and scale.shape == (50, 4)
    np.testing.assert_array_equal(scale.numpy(), np.abs(x.numpy()).max(-1) / np.float32(127))


def test_the_largest_entry_becomes_127_and_never_minus_128() -> None:
    """The whole range is used and it is symmetric."""
    q = quantize(random_vectors(2, spread=2.0)).values
    assert q.dtype == torch.int8
    assert bool((q.abs().amax(dim=-1) == 127).all())
    assert int(q.min()) == -127


def test_halves_round_away_from_zero() -> None:
    """127 fixes the scale at 1, so that the halves are exact; the last entry is the float just below 0.5."""
    below_half = 0.5 - 2.0**-25
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.4, -2.6, below_half]])
    assert quantize(x).values.tolist() == [[127, 1, 2, 3, -1, -2, -3, 2, -3, 0]]


def test_negation_commutes() -> None:
    """``quantize(-x)`` is ``-quantize(x)``, with the same scale."""
    x = random_vectors(3)
    positive, negative = quantize(x), quantize(-x)
    assert torch.equal(positive.values, -negative.values) and torch.equal(positive.scale, negative.scale)


def test_zero_vectors_stay_zero_with_the_smallest_scale() -> None:
    """And magnitudes below the floor of the scale do not blow up."""
    q, scale = quantize(torch.tensor([[0.0, 0.0], [1e-9, -1e-9]]))
    assert q.tolist() == [[0, 0], [0, 0]]
    assert scale.tolist() == pytest.approx([MIN_SCALE, MIN_SCALE])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_float_dtype_quantizes_like_its_fp32_value(dtype: torch.dtype) -> None:
    """The cast to fp32 comes first."""
    x = random_vectors(4).to(dtype)
    got, wanted = quantize(x), quantize(x.to(torch.float32))
    assert torch.equal(got.values, wanted.values) and torch.equal(got.scale, wanted.scale)


def test_strided_input_quantizes_like_contiguous_input() -> None:
    """A permuted view gives the same numbers."""
    x = random_vectors(5)
    view = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(quantize(view).values, quantize(x).values)


def test_input_is_left_alone() -> None:
    """No in-place work on the caller's tensor."""
    x = random_vectors(6)
    before = x.clone()
    quantize(x)
    assert torch.equal(x, before)


def test_no_vectors_give_no_scales() -> None:
    """n = 0 is not an error."""
    q, scale = quantize(torch.zeros(0, 4, 64))
    assert q.shape == (0, 4, 64) and scale.shape == (0, 4)


def test_non_finite_values_are_refused_with_their_count() -> None:
    """NaN and both infinities count, and so does what overflows fp32."""
    x = torch.zeros(2, 4, dtype=torch.float64)
    x[0, 0], x[0, 1], x[1, 2], x[1, 3] = math.nan, math.inf, -math.inf, 1e300
    with pytest.raises(NonFiniteError, match="4 of 8 values"):
        quantize(x)


def test_unchecked_non_finite_values_stay_visible_in_the_scale() -> None:
    """They are not turned into plausible numbers."""
    _, scale = quantize(torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [2.0, 1.0]]), check=False)
    assert torch.isfinite(scale).tolist() == [False, False, True]


@pytest.mark.parametrize("x", [torch.zeros(2, 3, dtype=torch.int32), torch.tensor(1.0), torch.zeros(2, 0)])
def test_what_is_no_vector_of_floats_is_refused(x: torch.Tensor) -> None:
    """Integers, scalars, and vectors without entries."""
    with pytest.raises(PagedKVError, match="quantize needs floats"):
        quantize(x)


def test_dequantize_refuses_a_scale_of_another_shape() -> None:
    """A scale that would broadcast wrongly is caught, with both shapes."""
    with pytest.raises(PagedKVError, match=r"\(3, 4\) and \(4,\)"):
        dequantize(torch.zeros(3, 4, dtype=torch.int8), torch.ones(4))
