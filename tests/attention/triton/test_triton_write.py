"""The KV append kernel, interpreted, against torch's casts and ``quantize``: bit for bit."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.quantization import quantize

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/attention/test_triton_interpreter.py runs it", allow_module_level=True)

from pagedkv.triton_write import write_kv

# numpy says what the hardware does silently: fp16 that overflows, quotients of numbers that are not finite
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
LAYOUTS = ["HND", "NHD", "token-minor"]


def pool(
    rows: int, heads: int, slots: int, dim: int, dtype: torch.dtype, layout: str = "HND"
) -> torch.Tensor:
    """[rows, heads, slots, dim] of zeros, in one of the orders that a storage may have."""
    if layout == "NHD":
        return torch.zeros(rows, slots, heads, dim).to(dtype).transpose(1, 2)
    if layout == "token-minor":
        return torch.zeros(rows, heads, dim, slots).to(dtype).transpose(2, 3)
    return torch.zeros(rows, heads, slots, dim).to(dtype)


def write_by_hand(
    values: torch.Tensor, scale: torch.Tensor | None, new: torch.Tensor, slots: torch.Tensor
) -> None:
    for vector, slot in zip(new, slots.tolist(), strict=True):
        if slot < 0:
            continue
        row, offset = divmod(slot, values.shape[2])
        if scale is None:
            values[row, :, offset] = vector.to(values.dtype)
        else:
            values[row, :, offset], scale[row, :, offset] = quantize(vector)


def check(values: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Every bit of the pool, what was not written included."""
    scale = torch.zeros(values.shape[:3]) if values.dtype == torch.int8 else None
    wanted, wanted_scale = values.clone(), None if scale is None else scale.clone()
    write_by_hand(wanted, wanted_scale, new, slots)
    write_kv(values, scale, new, slots)
    bits = BITS[values.dtype.itemsize]
    assert torch.equal(values.view(bits), wanted.view(bits))
    if scale is not None and wanted_scale is not None:
        assert torch.equal(scale, wanted_scale)


def vectors(n: int, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Random, their magnitudes spread over orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(n, heads, 1, generator=generator))
    return size * torch.randn(n, heads, dim, generator=generator)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("dim", [1, 20, 64, 96])
def test_every_dtype_layout_and_width(dtype: torch.dtype, layout: str, dim: int) -> None:
    """Scattered over blocks, some rows padded."""
    slots = torch.tensor([9, -1, 4, 23, 0, 17, -7])
    check(pool(6, 3, 4, dim, dtype, layout), vectors(7, 3, dim), slots)


@pytest.mark.parametrize("source", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_every_source_dtype(source: torch.dtype, dtype: torch.dtype) -> None:
    """What is new need not have the dtype of the cache."""
    check(pool(2, 2, 8, 16, dtype), vectors(5, 2, 16).to(source), torch.tensor([3, 1, 15, 8, 0]))


@pytest.mark.parametrize("heads", [1, 5, 70])
def test_any_number_of_heads(heads: int) -> None:
    """More than one program takes, and not a multiple of what it takes."""
    check(pool(2, heads, 4, 128, torch.int8), vectors(3, heads, 128), torch.tensor([5, 2, -1]))
    check(pool(2, heads, 4, 128, torch.bfloat16), vectors(3, heads, 128), torch.tensor([5, 2, -1]))


def test_any_strides() -> None:
    """A slice of a fused projection, transposed, and scales and slots that are no plain arrays."""
    fused = vectors(6, 4, 96).transpose(0, 1).contiguous().transpose(0, 1)[:, :, 16:48]
    slots = torch.tensor([[7, 0], [1, 0], [30, 0], [9, 0], [12, 0], [-1, 0]])[:, 0]
    values, scale = pool(4, 4, 8, 32, torch.int8, "NHD"), torch.zeros(4, 8, 4).transpose(1, 2)
    wanted, wanted_scale = values.clone(), scale.clone()
    write_by_hand(wanted, wanted_scale, fused, slots)
    write_kv(values, scale, fused, slots)
    assert torch.equal(values, wanted) and torch.equal(scale, wanted_scale)


def test_padded_rows_may_hold_anything() -> None:
    """NaN in them reaches nothing."""
    new = vectors(3, 2, 16)
    new[1] = torch.nan
    for dtype in (*DTYPES, torch.int8):
        check(pool(2, 2, 4, 16, dtype), new, torch.tensor([6, -1, 1]))


def test_slots_beyond_the_pool_write_nothing() -> None:
    """The host cannot look at them on a device, but memory that is not the pool's stays as it was."""
    whole = pool(4, 2, 4, 16, torch.float32)
    write_kv(whole[:2], None, vectors(3, 2, 16), torch.tensor([8, 2**40, 15]))
    assert not bool(whole.any())


def test_nothing_is_written_for_no_tokens() -> None:
    """n = 0 is no launch."""
    values = pool(2, 2, 4, 16, torch.float32)
    write_kv(values, None, torch.zeros(0, 2, 16), torch.zeros(0, dtype=torch.int64))
    assert not bool(values.any())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_any_vector_is_quantized_as_in_torch(numbers: list[float]) -> None:
    """Values and scale, from denormals to 2**100."""
    check(pool(1, 1, 1, len(numbers), torch.int8), torch.tensor([[numbers]]), torch.tensor([0]))


def test_halves_and_zeros_are_quantized_as_in_torch() -> None:
    """Halves away from zero, the float below one half to zero, and zeros with the smallest scale."""
    below_half = 0.5 - 2.0**-25
    new = torch.tensor(
        [[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, below_half]], [[0.0] * 8], [[1e-9, -1e-9] + [0.0] * 6]]
    )
    check(pool(1, 1, 3, 8, torch.int8), new, torch.arange(3))


def test_numbers_that_are_not_finite_show_in_the_scale() -> None:
    """They are not turned into plausible numbers."""
    values, scale = pool(1, 1, 3, 2, torch.int8), torch.zeros(1, 1, 3)
    write_kv(
        values, scale, torch.tensor([[[torch.nan, 1.0]], [[-torch.inf, 1.0]], [[2.0, 1.0]]]), torch.arange(3)
    )
    assert scale.isfinite().tolist() == [[[False, False, True]]]
    assert int(values.min()) >= -127


def neighbourhood(grid: torch.Tensor) -> torch.Tensor:
    """Numbers of a coarse grid, the middles between them, and the floats on both sides of each middle."""
    middles = (grid[1:] + grid[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(way)) for way in (-torch.inf, torch.inf)]
    return torch.cat([grid, middles, *around])


def all_numbers(dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    numbers = bits.view(dtype).float()
    return numbers[numbers.isfinite()].sort().values


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float8_e4m3fn, torch.arange(256, dtype=torch.uint8)),
        (torch.bfloat16, torch.arange(-(2**15), 2**15, 7, dtype=torch.int16)),
        (torch.float16, torch.arange(-(2**15), 2**15, 7, dtype=torch.int16)),
    ],
)
def test_rounding_is_to_the_nearest_with_ties_to_even(dtype: torch.dtype, bits: torch.Tensor) -> None:
    """At every number of fp8, every middle between two and on both sides of it; samples of the others."""
    new = neighbourhood(all_numbers(dtype, bits))
    new = torch.nn.functional.pad(new, (0, -len(new) % 64)).view(-1, 1, 64)
    check(pool(len(new), 1, 1, 64, dtype), new, torch.arange(len(new)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_that_do_not_fit_become_what_torch_makes_of_them(dtype: torch.dtype) -> None:
    """Too large, infinite and NaN; of NaN any NaN will do."""
    numbers: list[Any] = [1e30, -1e30, 460.0, -500.0, 65519.0, 65520.0, torch.inf, -torch.inf, torch.nan, 0.0]
    new = torch.tensor(numbers).view(1, 1, -1)
    values = pool(1, 1, 1, len(numbers), dtype)
    write_kv(values, None, new, torch.tensor([0]))
    torch.testing.assert_close(
        values.float().flatten(), new.to(dtype).float().flatten(), rtol=0, atol=0, equal_nan=True
    )
