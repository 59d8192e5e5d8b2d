"""Writing keys and values through the native library: the same bits as torch and pagedkv.quantization."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedkv import native
from pagedkv.kv_write import write_kv
from pagedkv.quantization import quantize

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))

ISAS = native.available_isas() if native.reason() is None else ("none",)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SOURCES = [torch.float64, *FLOATS]


def pool(rows: int, heads: int, slots: int, dim: int, dtype: torch.dtype, order: str) -> Tensor:
    """Zeros of shape [rows, heads, slots, dim] in one of three orders of memory."""
    if order == "NHD":
        return torch.zeros(rows, slots, heads, dim, dtype=dtype).transpose(1, 2)
    if order == "token-minor":
        return torch.zeros(rows, heads, dim, slots, dtype=dtype).transpose(2, 3)
    return torch.zeros(rows, heads, slots, dim, dtype=dtype)


def scattered(values: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """What ``values`` holds after torch has written ``new``."""
    wanted, kept = values.clone(), slots >= 0
    size = values.shape[2]
    wanted[slots[kept] // size, :, slots[kept] % size] = new[kept]
    return wanted


def hard_numbers(n: int, heads: int, dim: int, seed: int) -> Tensor:
    """fp64 of many magnitudes, ties of the rounding, zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, heads, dim, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-9, 5, (n, heads, 1), generator=generator)
    ties = torch.randint(-254, 255, (n, heads, dim), generator=generator) / 2
    ties[..., 0] = 127
    pick = torch.randint(0, 4, (n, heads, 1), generator=generator)
    return torch.where(pick == 0, ties, torch.where(pick == 1, x * 0.0, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@given(
    source=st.sampled_from(SOURCES),
    order=st.sampled_from(["HND", "NHD", "token-minor"]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 8, 16, 31, 64, 130]),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_writes_the_bits_that_torch_writes(
    isa: str,
    dtype: torch.dtype,
    source: torch.dtype,
    order: str,
    heads: int,
    dim: int,
    strided: bool,
    seed: int,
) -> None:
    """Every pair of dtypes, every layout, padded rows that hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(0, 40, (), generator=generator))
    new = hard_numbers(n, heads, dim, seed).to(source)
    if source == torch.float16:
        new = new.nan_to_num(0.0, 60000.0, -60000.0)
    if strided:
        new = new.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    slots = torch.randperm(12 * 4, generator=generator)[:n]
    padded = torch.rand(n, generator=generator) < 0.2
    slots = torch.where(padded, -1 - slots, slots)
    new[padded] = torch.nan
    values, scale = pool(12, heads, 4, dim, dtype, order), None
    if dtype == torch.int8:
        scale = torch.zeros(12, heads, 4)
        q, s = quantize(new, check=False)
        wanted, wanted_scale = scattered(values, slots, q), scattered(scale, slots, s)
    else:
        wanted = scattered(values, slots, new.to(dtype))
    with native.force_isa(isa):
        assert native.write_kv(values, scale, new, slots) == 0
    assert torch.equal(values, wanted)
    assert scale is None or torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_half_and_every_boundary_of_rounding(dtype: torch.dtype) -> None:
    """All 65536 halves, both neighbours of every midpoint, infinities and overflow; NaN stays NaN."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float()])
    around = torch.cat(
        [
            halves,
            *(torch.nextafter(halves * f, halves * g) for f in (1, 1 + 2**-9, 1 + 2**-12) for g in (0, 2)),
        ]
    )
    new = around[: len(around) // 64 * 64].view(-1, 1, 64)
    for isa in ISAS:
        values = torch.zeros(len(new), 1, 1, 64, dtype=dtype)
        with native.force_isa(isa):
            native.write_kv(values, None, new, torch.arange(len(new)))
        wanted = new.to(dtype).view_as(values)
        assert torch.equal(values.isnan(), wanted.isnan())
        assert torch.equal(values.nan_to_num(1.0), wanted.nan_to_num(1.0)), isa


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_refuses_what_is_not_finite_before_anything_is_written(bad: float) -> None:
    """And says how much of it there is; in a padded row it does not matter."""
    new = torch.ones(1000, 2, 40)
    new[999, 1, 38:], new[3, 0, 0] = bad, bad
    values, scale = torch.zeros(1000, 2, 1, 40, dtype=torch.int8), torch.zeros(1000, 2, 1)
    slots = torch.arange(1000)
    assert native.write_kv(values, scale, new, slots) == 3
    assert not values.any() and not scale.any()
    slots[3] = slots[999] = -1
    assert native.write_kv(values, scale, new, slots) == 0
    assert values.ne(0).sum() == 998 * 80


def test_many_threads_write_what_one_writes() -> None:
    """A prompt long enough to be shared out."""
    new = torch.randn(3000, 4, 64)
    slots = torch.randperm(3000)
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        values, scale = torch.zeros(188, 4, 16, 64, dtype=torch.int8), torch.zeros(188, 4, 16)
        native.write_kv(values, scale, new, slots)
        results.append((values, scale))
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_what_it_cannot_write_is_named() -> None:
    """fp64 and fp8 storage is torch's business."""
    for dtype in (torch.float64, torch.float8_e4m3fn):
        assert f"does not write {dtype}" in str(
            native.unsupported_write(torch.zeros(1, dtype=dtype), torch.zeros(1))
        )
    assert native.unsupported_write(torch.zeros(1), torch.zeros(1)) is None


def test_tokens_may_move_within_the_cache() -> None:
    """The source is a view of the target: every token one slot further, on several threads and on one."""
    for n in (30, 3000):
        values = torch.randn(188, 16, 4, 64).transpose(1, 2)
        tokens = values.transpose(1, 2).flatten(0, 1)
        assert tokens.data_ptr() == values.data_ptr()
        before = tokens.clone()
        write_kv(values, None, tokens[:n], torch.arange(1, n + 1))
        assert torch.equal(tokens[1 : n + 1], before[:n])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
def test_a_negated_view_is_written_as_torch_shows_it(dtype: torch.dtype) -> None:
    """The imaginary part of a conjugate holds the negative of every entry in memory."""
    new = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    view = torch.complex(new, -new).conj().imag
    assert view.is_neg() and torch.equal(view, new)
    written = []
    for x in (view, new):
        values, scale = torch.zeros(2, 2, 4, 8, dtype=dtype), torch.zeros(2, 2, 4)
        write_kv(values, scale if dtype == torch.int8 else None, x, torch.tensor([5, 1, 6]))
        written.append(values)
    assert written[1].any()
    assert torch.equal(*written)
