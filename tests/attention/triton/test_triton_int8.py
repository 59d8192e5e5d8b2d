"""int8 attention with integer products, interpreted: its error bound, and what integers could hide."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.attention.testing import Batch, make_batch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/attention/test_triton_interpreter.py runs it", allow_module_level=True)

from pagedkv.attention.triton_backend import plan_splits

# numpy says what the hardware does silently
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)

NAN = float("nan")
TOLERANCE = 2e-4

# Tokens per step at most; the bound of smaller tiles is no larger.
TILE = 128
LENS = [0, 300, 1, 17, 150]


def int8_batch(lens: Sequence[int] = LENS, dims: tuple[int, int] = (32, 32), **options: Any) -> Batch:
    """Values token-minor; scales of unused slots NaN."""
    options = {"block_size": 16, **options}
    return token_minor(make_batch(lens, dims=dims, unused=NAN, **options).quantized())


def token_minor(batch: Batch) -> Batch:
    """The same values, the tokens of a block side by side in memory."""
    return replace(batch, v=batch.v.transpose(2, 3).contiguous().transpose(2, 3))


def outputs(batch: Batch, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and block mass."""
    rows = batch.q.shape[:-1]
    lse, mass = torch.full(rows, NAN), torch.full((*rows, batch.tables.shape[1]), NAN)
    return batch.attend(backend, lse=lse, block_mass=mass, **options), lse, mass


def split(batch: Batch, **options: Any) -> dict[str, Any]:
    """Options with a plan that cuts whatever is longer than a tile."""
    q_len = batch.q.shape[1] if batch.q.dim() == 4 else 1
    plan = plan_splits(batch.lens, target=6, q_len=q_len, window=options.get("window"), min_chunk=1)
    return {"plan": plan, **options}


def check(batch: Batch, tolerance: float = TOLERANCE, **options: Any) -> None:
    got = outputs(batch, "triton", **split(batch, **options))
    for x, wanted in zip(got, outputs(batch.dequantized(), "reference", **options), strict=True):
        torch.testing.assert_close(x.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def dequantized_sequence(
    batch: Batch, row: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [n, head_dim], values [n, v_head_dim] and the scales of the values [n], fp64."""
    exact, positions = batch.dequantized(), torch.arange(int(batch.lens[row]))
    blocks, slots = batch.tables[row].long()[positions // 16], positions % 16
    scales = batch.scales["v_scale"][blocks, head, slots].double()
    return exact.k[blocks, head, slots], exact.v[blocks, head, slots], scales


def bounds(batch: Batch, row: int, q_head: int) -> tuple[torch.Tensor, float]:
    """What the kernel promises of one query head: the error of each output [v_head_dim], and of the LSE."""
    group = batch.q.shape[1] // batch.k.shape[1]
    q = batch.q[row, q_head].double()
    k, v, v_scale = dequantized_sequence(batch, row, q_head // group)
    scale = len(q) ** -0.5
    logits = scale * k @ q
    eps = float(scale * k.abs().sum(1).max() * q.abs().max() / 65000)
    # fp32: a few roundings of a logit
    eps += 2.0**-21 * (1 + float(logits.abs().max()))
    p = torch.softmax(logits, 0)
    shares = p * 127 * v_scale
    tiles = sum(float(shares[start : start + TILE].max()) for start in range(0, len(shares), TILE))
    return math.expm1(2 * eps) * (p @ v.abs()) + TILE / 61000 * tiles, eps


@pytest.mark.parametrize("seed", range(4))
def test_error_stays_within_its_bound(seed: int) -> None:
    """Entry by entry, for keys, values and queries whose magnitudes differ by orders of magnitude."""
    batch = make_batch([300, 140, 129], dims=(64, 64), block_size=16, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for x in (batch.q, batch.k, batch.v):
        x *= torch.exp(seed / 2 * torch.randn(*x.shape[:-1], 1, generator=generator))
    batch = token_minor(batch.quantized())
    got, lse, _ = outputs(batch, "triton", **split(batch))
    wanted, wanted_lse, _ = outputs(batch.dequantized(), "reference")
    used = 0.0
    for row in range(3):
        for head in range(4):
            out_bound, lse_bound = bounds(batch, row, head)
            error = (got[row, head].double() - wanted[row, head]).abs()
            assert bool((error <= out_bound + 1e-12).all())
            assert abs(float(lse[row, head]) - float(wanted_lse[row, head])) <= lse_bound
            used = max(used, float((error / out_bound).max()))
    # a bound that is never approached would not be checked by this
    assert used > 0.02


def test_relative_error_is_some_parts_in_a_hundred_thousand() -> None:
    """Root mean square, for normal keys, values and queries."""
    batch = int8_batch([512, 300, 200], (128, 128), heads=(8, 2))
    got, _, _ = outputs(batch, "triton", **split(batch))
    wanted, _, _ = outputs(batch.dequantized(), "reference")
    error = (got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert float(error) < 6e-5


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    """Shorter and longer than the tile, with a window that begins within a block."""
    batch = int8_batch([300, 70, 1, 257], block_size=block_size, q_len=2, heads=(2, 1))
    check(batch)
    check(batch, window=90)


@pytest.mark.parametrize("dims", [(32, 32), (40, 64), (80, 80), (128, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_every_head_dim_and_layout(dims: tuple[int, int], layout: Any) -> None:
    """Widths that are no power of two are padded, whatever lies beside them in memory."""
    check(int8_batch([150, 33], dims, layout=layout))


@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (8, 1), (9, 1), (16, 1), (40, 2)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_every_group_size(heads: tuple[int, int], q_len: int) -> None:
    """One tile of 16 byte rows, two, and more rows than one program takes."""
    check(int8_batch([150, 5, 0], heads=heads, q_len=q_len))


@pytest.mark.parametrize("q_len", range(1, 9))
def test_every_feature_at_once(q_len: int) -> None:
    """Window, soft cap, sinks and a causal tail, some query tokens of which see nothing."""
    batch = int8_batch([300, 3, 0, 129], q_len=q_len)
    check(batch, window=40, softcap=3.0, sinks=torch.linspace(-2, 2, 4), scale=0.4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_query_dtype(dtype: torch.dtype) -> None:
    """The query is exact in the integers; the output is rounded to its dtype."""
    batch = int8_batch()
    check(replace(batch, q=batch.q.to(dtype)), tolerance=8e-3 if dtype == torch.bfloat16 else 6e-4)


def test_values_may_lie_row_by_row() -> None:
    """Slower on a device, but the same numbers."""
    batch = int8_batch()
    rows = replace(batch, v=batch.v.contiguous())
    assert torch.equal(outputs(batch, "triton")[0], outputs(rows, "triton")[0])


def scaled(batch: Batch, name: str, position: int, factor: float) -> Batch:
    """The first sequence with the scale of one of its tokens multiplied, in every head."""
    scale = batch.scales[name].clone()
    scale[int(batch.tables[0, position // 16]), :, position % 16] *= factor
    return replace(batch, scales={**batch.scales, name: scale})


@pytest.mark.parametrize("factor", [0.0, 1e-6, 1e4])
@pytest.mark.parametrize("position", [0, 200])
def test_one_value_may_be_far_from_the_others(factor: float, position: int) -> None:
    """A first token with much weight and almost no value must not cost the others their resolution."""
    batch = scaled(int8_batch([300]), "k_scale", position, 8.0)
    batch = scaled(batch, "v_scale", position, factor)
    got, wanted = outputs(batch, "triton"), outputs(batch.dequantized(), "reference")
    size = float(wanted[0].abs().max())
    torch.testing.assert_close(got[0].double() / size, wanted[0] / size, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(got[1].double(), wanted[1].double(), rtol=TOLERANCE, atol=TOLERANCE)


def test_all_values_may_be_zero() -> None:
    """Also with scales of 0, of which there is no logarithm."""
    batch = int8_batch([300, 20])
    zeros = torch.where(batch.scales["v_scale"].isnan(), NAN, 0.0)
    batch = replace(batch, scales={**batch.scales, "v_scale": zeros})
    got, wanted = outputs(batch, "triton"), outputs(batch.dequantized(), "reference")
    torch.testing.assert_close(got[0], torch.zeros_like(got[0]), rtol=0, atol=1e-20)
    for x, exact in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(x.double(), exact.double(), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_tile_that_a_query_token_does_not_see_leaves_it_alone() -> None:
    """However small the logits are that it did see: nothing is 0 times infinity. No part begins there."""
    batch = int8_batch([TILE + 1], q_len=2)
    batch.q.fill_(40.0)
    batch.k.copy_(-batch.k.abs())
    got, wanted = outputs(batch, "triton")[:2], outputs(batch.dequantized(), "reference")[:2]
    assert float(wanted[1].max()) < -100
    for x, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), exact.double(), rtol=TOLERANCE, atol=TOLERANCE)


def test_long_flat_tails_are_not_lost_beside_a_peak() -> None:
    """Thousands of weights, each less than half a step of the largest one, are half of the output."""
    batch = int8_batch([8000], heads=(1, 1), block_size=256)
    first = int(batch.tables[0, 0])
    batch.q.zero_()
    batch.q[..., 0] = 1.0
    batch.k.zero_()
    # one logit of log(8000), all others 0; its values are theirs negated
    batch.k[first, :, 0, 0] = 127
    batch.scales["k_scale"][first, :, 0] = math.log(8000) / 127 * 32**0.5
    batch.v.fill_(100)
    batch.v[first, :, 0, :16] = -100
    batch.scales["v_scale"].mul_(0).add_(0.01).masked_fill_(batch.scales["k_scale"].isnan(), NAN)
    _, wanted, _ = outputs(batch.dequantized(), "reference")
    assert float(wanted) == pytest.approx(math.log(15999))
    check(batch)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_scale_that_is_no_number_shows(name: str, bad: float) -> None:
    """In the sequences that read it, and nowhere else: an integer made of NaN would look plausible."""
    batch = scaled(int8_batch([300, 40]), name, 150, bad)
    out, _, _ = outputs(batch, "triton", **split(batch))
    assert not bool(out[0].isfinite().any())
    assert bool(out[1].isfinite().all())
    out, _, _ = outputs(batch, "triton", window=100)
    assert bool(out.isfinite().all())


def test_a_query_that_is_no_number_shows() -> None:
    """In its own head only."""
    batch = int8_batch([300, 40])
    batch.q[0, 1, 3] = NAN
    out, _, _ = outputs(batch, "triton")
    assert bool(out[0, 1].isnan().all())
    assert bool(out[0, [0, 2, 3]].isfinite().all()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize("size", [1e-20, 1e3, 1e6])
def test_extreme_queries_neither_overflow_nor_vanish(size: float) -> None:
    """No logits at all, and logits so large that the softmax is a choice."""
    batch = int8_batch([300, 40])
    batch.q.mul_(size)
    got, wanted = outputs(batch, "triton")[0], outputs(batch.dequantized(), "reference")[0]
    largest = float(batch.dequantized().v.nan_to_num(0).abs().max())
    assert bool(got.isfinite().all()) and float(got.abs().max()) <= 1.01 * largest
    if size < 1:
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE, atol=TOLERANCE)
