"""One contract for every backend, against formulas in numpy, torch's attention, and the fp64 reference."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from pagedkv.arithmetic import div_ceil
from pagedkv.attention import backends, paged_attention
from pagedkv.attention.testing import Batch, make_batch
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.quantization import quantize
from pagedkv.spec import KVCacheSpec, LayerSpec
from pagedkv.storage import STORAGE_DTYPES, KVStorage, Layout

LAYOUTS: list[Layout] = ["HND", "NHD"]
Array = NDArray[np.float64]

AVAILABLE = [info.name for info in backends() if info.available]
every_backend = pytest.mark.parametrize("backend", ["auto", *AVAILABLE])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# Beyond what the stored integers and scales say: a backend that computes on integers rounds q and p to them.
INT8_ARITHMETIC = {"native": 1e-4, "auto": 1e-4}

FP64_BACKENDS = ("auto", "reference", "torch")


def served(batch: Batch, backend: str) -> Batch:
    """In fp64 where the backend has it."""
    if batch.q.dtype == torch.float64 and backend not in FP64_BACKENDS:
        return batch.to(torch.float32)
    return batch


def attend(batch: Batch, backend: str, **options: Any) -> torch.Tensor:
    return served(batch, backend).attend(backend, **options)


def attend_with_lse(batch: Batch, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return served(batch, backend).attend_with_lse(backend, **options)


def attend_with_mass(batch: Batch, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return served(batch, backend).attend_with_mass(backend, **options)


def logits_by_hand(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> Array:
    """[num_q_heads, n] for one sequence: plain loops over heads and tokens."""
    group = q.shape[0] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    q64, k64 = q.double().numpy(), k.double().numpy()
    return np.array(
        [[scale * (q64[h] @ k64[j, h // group]) for j in range(len(k64))] for h in range(len(q64))]
    )


def mix_by_hand(weights: Array, v: torch.Tensor) -> Array:
    group = weights.shape[0] // v.shape[1]
    v64 = v.double().numpy()
    return np.array([weights[h] @ v64[:, h // group] for h in range(len(weights))])


def assert_near(got: torch.Tensor, wanted: Array | torch.Tensor, tolerance: float = 1e-6) -> None:
    """To the tolerance, or to what fp32 can hold where the result is fp32."""
    expected = wanted.double().numpy() if isinstance(wanted, torch.Tensor) else wanted
    tolerance = max(tolerance, 5e-6) if got.dtype == torch.float32 else tolerance
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=tolerance, atol=tolerance)


# --- the exercise that can be checked on paper --------------------------------------------------------------

HAND_KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
HAND_VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
HAND_WEIGHTS = np.array([0.16358, 0.16358, 0.67284])
HAND_OUTPUT = np.array([1.50926, 1.50926])


def hand_exercise(
    dtype: str, block_size: int, values: torch.Tensor, q_dtype: torch.dtype, backend: str
) -> Any:
    """Attention with q = [2, 2] over a storage that holds the three tokens, blocks in falling order."""
    spec = KVCacheSpec((LayerSpec(1, 2, values.shape[1]),), dtype, block_size)
    storage = KVStorage(spec, num_blocks=3)
    table = torch.tensor([[3, 2, 1]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, j // block_size]) * block_size + j % block_size for j in range(3)])
    storage.write(0, HAND_KEYS.unsqueeze(1), values.unsqueeze(1), slots)
    kv = storage.layer(0)
    q, lens = torch.full((1, 1, 2), 2.0, dtype=q_dtype), torch.tensor([3], dtype=torch.int32)
    return paged_attention(
        q, kv.k, kv.v, table, lens, k_scale=kv.k_scale, v_scale=kv.v_scale, backend=backend
    )[0, 0]


@every_backend
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_hand_exercise_for_every_block_size_and_storage_dtype(
    backend: str, block_size: int, dtype: str
) -> None:
    """0, 1 and 2 are exact in every dtype, int8 with its scales included: the five digits must come out."""
    output = hand_exercise(dtype, block_size, HAND_VALUES, torch.float32, backend)
    weights = hand_exercise(dtype, block_size, torch.eye(3), torch.float32, backend)
    assert_near(output, HAND_OUTPUT, 5e-6)
    assert_near(weights, HAND_WEIGHTS, 8e-6)


@every_backend
@pytest.mark.parametrize(
    ("q_dtype", "digits"), [(torch.float64, 53), (torch.bfloat16, 8), (torch.float16, 11)]
)
def test_hand_exercise_for_every_query_dtype(backend: str, q_dtype: torch.dtype, digits: int) -> None:
    """The output has the dtype of the query, and is off by no more than its rounding."""
    if q_dtype == torch.float64 and backend not in FP64_BACKENDS:
        pytest.skip(f"{backend} has no fp64")
    output = hand_exercise("bf16", 2, HAND_VALUES, q_dtype, backend)
    assert output.dtype == q_dtype
    assert_near(output, HAND_OUTPUT, 5e-6 + 2.0**-digits)


@every_backend
def test_decode_is_the_last_row_of_causal_attention(backend: str) -> None:
    """So that it needs no causal mask: the mask row of the last query is all ones."""
    batch = make_batch([37], heads=(2, 2))
    square_q = torch.randn(2, 37, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    square_q[:, -1] = batch.q[0]
    causal = F.scaled_dot_product_attention(
        square_q, batch.ks[0].transpose(0, 1), batch.vs[0].transpose(0, 1), is_causal=True
    )
    assert bool(torch.ones(37, 37).tril()[-1].all())
    assert_near(attend(batch, backend)[0], causal[:, -1], 1e-12)


# --- against torch's attention on contiguous keys and values ------------------------------------------------


def sdpa(batch: Batch) -> torch.Tensor:
    rows = []
    for q, k, v in zip(batch.q, batch.ks, batch.vs, strict=True):
        group = q.shape[0] // k.shape[1]
        k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
        empty = torch.zeros(q.shape[0], 1, v.shape[2], dtype=q.dtype)
        rows.append(F.scaled_dot_product_attention(q.unsqueeze(1), k, v) if len(k[0]) else empty)
    return torch.cat(rows, dim=1).transpose(0, 1)


@every_backend
@every_layout
@pytest.mark.parametrize("seed", range(12))
def test_equals_scaled_dot_product_attention(backend: str, layout: Layout, seed: int) -> None:
    """Random shapes: MHA, GQA and MQA, lengths with 0 and 1 among them, value dims unlike key dims."""
    generator = np.random.default_rng(seed)
    kv_heads = int(generator.integers(1, 4))
    batch = make_batch(
        [0, 1, *generator.integers(0, 60, generator.integers(1, 5)).tolist()],
        heads=(kv_heads * int(generator.choice([1, 1, 2, 3, 8])), kv_heads),
        dims=(int(generator.integers(1, 33)), int(generator.integers(1, 33))),
        block_size=int(generator.choice([1, 2, 3, 8, 16])),
        layout=layout,
        seed=seed,
    )
    assert_near(attend(batch, backend), sdpa(batch), 1e-12)
    assert_near(attend(batch.to(torch.float32), backend), sdpa(batch), 2e-5)


@every_backend
@pytest.mark.parametrize("block_size", [16, 100, 700])
def test_long_contexts_equal_scaled_dot_product_attention(backend: str, block_size: int) -> None:
    """Several chunks, lengths on both sides of their boundaries, blocks that do not divide a chunk."""
    lens = [1500, 3, 512, 0, 513, 511, 1024, 1400]
    batch = make_batch(lens, heads=(4, 1), dims=(16, 4), block_size=block_size)
    assert_near(attend(batch, backend), sdpa(batch), 1e-12)


# --- each feature against a formula -------------------------------------------------------------------------

LENS = [0, 1, 5, 16, 33, 700]


@every_backend
@pytest.mark.parametrize("scale", [None, 0.07, -1.0, 0.0])
def test_lse_is_the_natural_logarithm_of_the_sum(backend: str, scale: float | None) -> None:
    """``log(sum(exp(scale * q . k)))``, -inf for an empty sequence, whose output is 0."""
    batch = make_batch(LENS)
    out, lse = attend_with_lse(batch, backend, scale=scale)
    assert bool((lse[0] == -torch.inf).all()) and bool((out[0] == 0).all())
    for row in range(1, len(LENS)):
        s = logits_by_hand(batch.q[row], batch.ks[row], scale)
        assert_near(lse[row], np.log(np.exp(s).sum(1)))
        assert_near(out[row], mix_by_hand(np.exp(s) / np.exp(s).sum(1, keepdims=True), batch.vs[row]), 1e-12)


@every_backend
@pytest.mark.parametrize("window", [1, 2, 4, 15, 600, 100_000])
def test_window_keeps_the_last_positions(backend: str, window: int) -> None:
    """The token of this step counts: a window of 1 sees only itself."""
    batch = make_batch(LENS)
    out, lse = attend_with_lse(batch, backend, window=window)
    for row in range(1, len(LENS)):
        k, v = batch.ks[row][-window:], batch.vs[row][-window:]
        s = np.exp(logits_by_hand(batch.q[row], k))
        assert_near(out[row], mix_by_hand(s / s.sum(1, keepdims=True), v), 1e-12)
        assert_near(lse[row], np.log(s.sum(1)))
    assert bool((out[0] == 0).all()) and bool((lse[0] == -torch.inf).all())


@every_backend
def test_a_window_may_be_a_numpy_integer(backend: str) -> None:
    """As it comes out of an array of windows per layer."""
    batch = make_batch([5, 9])
    assert torch.equal(attend(batch, backend, window=np.int64(3)), attend(batch, backend, window=3))


@every_backend
def test_the_window_of_a_layer_comes_with_its_views(backend: str) -> None:
    """A layer of window 4 and one of all, holding the same five tokens: only the first forgets one."""
    spec = KVCacheSpec((LayerSpec(1, 4, window=4), LayerSpec(1, 4)), "fp32", 8)
    storage = KVStorage(spec, num_blocks=1)
    k, v = torch.randn(5, 1, 4), torch.eye(5, 4).unsqueeze(1)
    q, table, lens = torch.ones(1, 1, 4), torch.ones(1, 1, dtype=torch.int32), torch.tensor([5]).int()
    for layer in (0, 1):
        storage.write(layer, k, v, torch.arange(8, 13))
    sliding, full = (
        paged_attention(q, kv.k, kv.v, table, lens, window=kv.window, backend=backend)[0, 0]
        for kv in map(storage.layer, (0, 1))
    )
    assert sliding[0] == 0 and full[0] > 0


@every_backend
def test_sinks_add_to_the_denominator_only(backend: str) -> None:
    """One more logit per query head, without a value; an empty sequence has LSE = sink and output 0."""
    batch = make_batch(LENS)
    sinks = torch.tensor([-1.0, 0.0, 3.0, -torch.inf])
    out, lse = attend_with_lse(batch, backend, sinks=sinks, scale=0.5)
    for row in range(len(LENS)):
        s = np.exp(logits_by_hand(batch.q[row], batch.ks[row], 0.5)).reshape(4, -1)
        total = s.sum(1) + np.exp(sinks.double().numpy())
        if row == 0:
            assert torch.equal(lse[0], sinks) and bool((out[0] == 0).all())
        else:
            assert_near(lse[row], np.log(total))
            assert_near(out[row], mix_by_hand(s / total[:, None], batch.vs[row]), 1e-12)


@every_backend
@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_softcap_bounds_the_scaled_logits(backend: str, softcap: float) -> None:
    """The scale first, then ``cap * tanh(s / cap)``."""
    batch = make_batch(LENS)
    out, lse = attend_with_lse(batch, backend, softcap=softcap, scale=2.0)
    for row in range(1, len(LENS)):
        s = np.exp(softcap * np.tanh(logits_by_hand(batch.q[row], batch.ks[row], 2.0) / softcap))
        assert_near(out[row], mix_by_hand(s / s.sum(1, keepdims=True), batch.vs[row]), 1e-12)
        assert_near(lse[row], np.log(s.sum(1)))


@every_backend
def test_all_features_together(backend: str) -> None:
    """The mask comes after the softcap, and the sink is neither scaled nor capped nor masked."""
    batch = make_batch(LENS)
    sinks = torch.tensor([4.0, -2.0, 0.5, 9.0])
    out, lse = attend_with_lse(batch, backend, softcap=1.5, scale=0.9, window=7, sinks=sinks)
    for row in range(1, len(LENS)):
        s = logits_by_hand(batch.q[row], batch.ks[row][-7:], 0.9)
        s = np.exp(1.5 * np.tanh(s / 1.5))
        total = s.sum(1) + np.exp(sinks.double().numpy())
        assert_near(out[row], mix_by_hand(s / total[:, None], batch.vs[row][-7:]), 1e-12)
        assert_near(lse[row], np.log(total))


@every_backend
def test_large_logits_do_not_overflow(backend: str) -> None:
    """Logits of +-1e4 and more: the largest takes everything, the LSE is that logit."""
    batch = make_batch([1200]).to(torch.float32)
    out, lse = attend_with_lse(batch, backend, scale=1e5)
    s = logits_by_hand(batch.q[0], batch.ks[0], 1e5)
    winner = np.zeros_like(s)
    winner[np.arange(4), s.argmax(1)] = 1
    assert_near(out[0], mix_by_hand(winner, batch.vs[0]), 1e-5)
    assert_near(lse[0], s.max(1), 1e-5)


# --- dtypes against the fp64 reference ----------------------------------------------------------------------


@every_backend
@every_layout
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)]
)
def test_every_float_dtype_is_near_the_reference(
    backend: str, layout: Layout, window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    """On the same (rounded) inputs: what is left is fp32 arithmetic and one rounding of the output."""
    batch = make_batch(LENS, heads=(6, 2), dims=(64, 32), block_size=16, layout=layout).to(dtype)
    out, lse = attend_with_lse(batch, backend, window=window, softcap=20.0)
    wanted, wanted_lse = batch.to(torch.float64).attend_with_lse("reference", window=window, softcap=20.0)
    assert out.dtype == dtype
    assert_near(out, wanted, tolerance)
    assert_near(lse[1:], wanted_lse[1:], 5e-6)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_cache_may_be_narrower_than_the_query(backend: str, dtype: torch.dtype) -> None:
    """An fp32 query over a bf16 or fp8 cache loses nothing beyond the rounding of the cache."""
    batch = make_batch(LENS)
    narrow = replace(batch.to(torch.float32), k=batch.k.to(dtype), v=batch.v.to(dtype))
    exact = replace(batch, q=narrow.q.double(), k=narrow.k.double(), v=narrow.v.double())
    assert_near(attend(narrow, backend), exact.attend("reference"), 5e-6)


@every_backend
@every_layout
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": torch.ones(4)}])
def test_int8_is_near_the_reference_on_dequantized_values(
    backend: str, layout: Layout, options: dict[str, Any]
) -> None:
    """The scales are applied exactly where they belong, with every feature."""
    batch = make_batch(LENS, dims=(16, 8), layout=layout).quantized()
    wanted = batch.dequantized().attend("reference", **options)
    assert_near(batch.attend(backend, **options), wanted, INT8_ARITHMETIC.get(backend, 5e-6))


@every_backend
@pytest.mark.parametrize("seed", range(3))
def test_int8_error_is_within_its_bound(backend: str, seed: int) -> None:
    """Derived from half a scale per stored entry; for random vectors below 1 % of the output (RMS).

    A key entry is off by at most s_k/2, so a logit by at most E = scale * |q|_1 * max(s_k) / 2, a weight by a
    factor within exp(+-2E), all weights together by at most exp(2E) - 1, and a value entry by s_v/2:
    ``|error| <= max(s_v) / 2 + (exp(2E) - 1) * max|v|``. A hair more for the rounding in fp32.
    """
    lens = [40, 300, 900]
    batch = make_batch(lens, heads=(8, 2), dims=(64, 64), block_size=16, seed=seed)
    int8 = batch.quantized()
    exact = batch.attend("reference")
    error = (int8.attend(backend).double() - exact).abs()
    half_k, half_v = (int8.scales[name].max().item() / 2 for name in ("k_scale", "v_scale"))
    logit_error = batch.q.abs().sum(dim=-1, keepdim=True) / 8 * half_k
    bound = half_v + torch.expm1(2 * logit_error) * batch.v.abs().max()
    assert bool((error <= bound * 1.001).all())
    relative_rms = (error.square().mean() / exact.square().mean()).sqrt().item()
    assert relative_rms < 0.01


def int8_noise_variance(batch: Batch, row: int) -> Array:
    """[num_q_heads, v_head_dim]: first-order error variance if every entry is rounded independently.

    Rounding to a step of s has variance s**2 / 12. A logit inherits ``(scale * |q|)**2 * s_k**2 / 12``, and
    moves the output along ``w * (v - out)``; a value entry moves it along ``w``.
    """
    q, k, v = batch.q[row], batch.ks[row], batch.vs[row]
    k_step, v_step = (quantize(x).scale.double().numpy() for x in (k, v))
    s = np.exp(logits_by_hand(q, k))
    weights = s / s.sum(1, keepdims=True)
    out, rows = mix_by_hand(weights, v), []
    for h, w in enumerate(weights):
        kv_head = h * v.shape[1] // len(weights)
        logit_variance = (q[h].square().sum().item() / q.shape[1]) * k_step[:, kv_head] ** 2 / 12
        reach = (v[:, kv_head].numpy() - out[h]) ** 2
        rows.append(w**2 @ (v_step[:, kv_head, None] ** 2 / 12 + logit_variance[:, None] * reach))
    return np.array(rows)


@every_backend
@pytest.mark.parametrize("seed", range(3))
def test_int8_error_is_what_independent_rounding_predicts(backend: str, seed: int) -> None:
    """The bound above is the worst case; this is the size: 6 sigma for each entry, 10 % for the RMS."""
    batch = make_batch([40, 300, 900], heads=(8, 2), dims=(64, 64), block_size=16, seed=seed)
    error = (batch.quantized().attend(backend).double() - batch.attend("reference")).numpy()
    variance = np.stack([int8_noise_variance(batch, row) for row in range(3)])
    assert bool((np.abs(error) < 6 * np.sqrt(variance)).all())
    assert np.sqrt((error**2 / variance).mean()) == pytest.approx(1, abs=0.1)


# --- what must not matter -----------------------------------------------------------------------------------

FEATURES: list[dict[str, Any]] = [{}, {"window": 6}, {"sinks": torch.ones(4), "softcap": 3.0}]


@every_backend
@every_layout
@pytest.mark.parametrize("options", FEATURES)
def test_unused_slots_are_never_read_into_the_result(
    backend: str, layout: Layout, options: dict[str, Any]
) -> None:
    """NaN in every unused slot and block, tables that end in poisoned blocks: the same bit for bit."""
    lens = [0, 1, 3, 4, 5, 30, 515, 1030]
    clean = make_batch(lens, layout=layout)
    poisoned = make_batch(lens, layout=layout, unused=torch.nan)
    assert bool(poisoned.k[0].isnan().all()) and bool(poisoned.k[poisoned.tables[0, 0]].isnan().all())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got = attend_with_lse(poisoned.to(dtype), backend, **options)
        wanted = attend_with_lse(clean.to(dtype), backend, **options)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@every_backend
@pytest.mark.parametrize("options", FEATURES)
def test_unused_int8_scales_are_never_read_into_the_result(backend: str, options: dict[str, Any]) -> None:
    """A NaN in a scale is the only NaN that int8 can hold."""
    lens = [0, 1, 5, 30, 515]
    got = make_batch(lens, unused=torch.nan).quantized().attend_with_lse(backend, **options)
    wanted = make_batch(lens).quantized().attend_with_lse(backend, **options)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@every_backend
def test_tokens_before_the_window_are_never_read_into_the_result(backend: str) -> None:
    """Their blocks may have been freed: poisoned content, table entries that name no block at all."""
    lens, window = [30, 2, 1200, 7, 0], 6
    batch = make_batch(lens)
    wanted = attend(batch, backend, window=window)
    for row, n in enumerate(lens):
        for position in range(max(0, n - window)):
            batch.k[batch.tables[row, position // 4], :, position % 4] = torch.nan
            batch.v[batch.tables[row, position // 4], :, position % 4] = torch.nan
        batch.tables[row, : max(0, n - window) // 4] = 2**30
        batch.tables[row, div_ceil(n, 4) :] = -5
    assert torch.equal(attend(batch, backend, window=window), wanted)


@every_backend
def test_block_ids_do_not_matter(backend: str) -> None:
    """The same content under other ids gives the same result."""
    batch = make_batch(LENS).to(torch.float32)
    order = torch.randperm(len(batch.k), generator=torch.Generator().manual_seed(3))
    moved = replace(
        batch, k=batch.k[order], v=batch.v[order], tables=order.argsort()[batch.tables.long()].int()
    )
    assert_near(attend(moved, backend), attend(batch, backend), 1e-6)


@every_backend
@pytest.mark.parametrize("options", FEATURES)
def test_other_sequences_of_the_batch_do_not_matter(backend: str, options: dict[str, Any]) -> None:
    """Alone, in another order, or twice: each sequence keeps its result."""
    batch = make_batch(LENS).to(torch.float32)
    together = attend(batch, backend, **options)
    for rows in (*([row] for row in range(len(LENS))), [5, 0, 2], [3, 3]):
        part = replace(batch, q=batch.q[rows], tables=batch.tables[rows], lens=batch.lens[rows])
        assert_near(attend(part, backend, **options), together[rows], 1e-6)


@every_backend
def test_sequences_may_share_blocks(backend: str) -> None:
    """Two sequences with one prefix give what two copies of it would give."""
    batch = make_batch([8, 8])
    batch.tables[1, 0] = batch.tables[0, 0]
    batch.ks[1][:4], batch.vs[1][:4] = batch.ks[0][:4], batch.vs[0][:4]
    assert_near(attend(batch, backend), sdpa(batch), 1e-12)


@every_backend
def test_mla_values_may_be_a_view_of_the_keys(backend: str) -> None:
    """``v = k[..., :rank]`` gives what a copy of it gives."""
    batch = make_batch(LENS, heads=(8, 1), dims=(24, 16))
    view = replace(batch, v=batch.k[..., :16])
    copy = replace(batch, v=batch.k[..., :16].clone())
    assert torch.equal(attend(view, backend, scale=0.2), attend(copy, backend, scale=0.2))
    assert_near(attend(view, backend), sdpa(replace(batch, vs=[k[..., :16] for k in batch.ks])), 1e-12)


@every_backend
def test_inputs_are_left_alone_and_outputs_are_filled_in_place(backend: str) -> None:
    """``out`` is what is returned; it, ``lse`` and the query may be strided."""
    batch = make_batch(LENS).to(torch.float32)
    batch = replace(batch, q=batch.q.repeat_interleave(2, dim=2)[..., ::2])
    inputs = [batch.q, batch.k, batch.v, batch.tables, batch.lens]
    before = [x.clone() for x in inputs]
    out = torch.full((len(LENS), 4, 16), torch.nan)[..., ::2]
    lse = torch.full((4, len(LENS)), torch.nan).T
    returned = attend(batch, backend, out=out, lse=lse)
    assert returned is out and torch.equal(out, attend(batch, backend))
    assert torch.equal(lse, attend_with_lse(batch, backend)[1])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@every_backend
@pytest.mark.parametrize("lens", [[], [0], [0, 0, 0]])
def test_batches_without_tokens_are_no_error(backend: str, lens: list[int]) -> None:
    """No sequences, or empty ones, with a table of no columns as well."""
    batch = make_batch(lens)
    assert torch.equal(attend(batch, backend), torch.zeros(len(lens), 4, 8, dtype=torch.float64))
    narrow = replace(batch, tables=batch.tables[:, :0])
    assert torch.equal(attend(narrow, backend, window=3), torch.zeros(len(lens), 4, 8, dtype=torch.float64))


@every_backend
def test_a_query_that_wants_gradients_gets_none(backend: str) -> None:
    """Decode is inference: the result is detached."""
    batch = make_batch([3])
    batch.q.requires_grad_()
    assert not attend(batch, backend).requires_grad


@every_backend
@pytest.mark.parametrize("window", [2**31 - 1, 2**40, 2**63 - 1, 2**70])
def test_a_window_beyond_every_length_is_none(backend: str, window: int) -> None:
    """Also for query tokens that stand before their sequence: no position less a window may wrap around."""
    batch = make_batch([0, 2, 9, 40], q_len=8)
    assert torch.equal(attend(batch, backend, window=window), attend(batch, backend))


# --- misuse -------------------------------------------------------------------------------------------------

GOOD = make_batch([5, 9])
SCALE = torch.ones(GOOD.k.shape[:3])
INT8 = GOOD.k.to(torch.int8)
WIDE = torch.zeros(len(GOOD.k), 3, 4, 8, dtype=torch.float64)

BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no q": ({"q": None}, "q must be a tensor, got NoneType"),
    "numpy k": ({"k": GOOD.k.numpy()}, "k must be a tensor, got ndarray"),
    "listed lengths": ({"seq_lens": [5, 9]}, "seq_lens must be a tensor, got list"),
    "q of 2 dims": ({"q": GOOD.q[0]}, r"q must be \[num_seqs, num_q_heads, head_dim\] or .*, got \(4, 8\)"),
    "q of 0 dims": ({"q": GOOD.q[0, 0, 0]}, r"q must be .* got \(\)"),
    "q without entries": ({"q": GOOD.q[..., :0], "k": GOOD.k[..., :0]}, "empty dimension"),
    "k of 3 dims": ({"k": GOOD.k[0]}, r"k must be \[num_blocks, .*, got \(2, 4, 8\)"),
    "v of 3 dims": ({"v": GOOD.v[0]}, r"v must be \[num_blocks, .*, got \(2, 4, 8\)"),
    "another head_dim": ({"k": GOOD.k[..., :7]}, r"q \(2, 4, 8\), k \(\d+, 2, 4, 7\) .* do not agree"),
    "v of other blocks": ({"v": GOOD.v[1:]}, "do not agree"),
    "heads in no groups": ({"k": WIDE, "v": WIDE}, "4 query heads are no multiple of 3 KV heads"),
    "integer q": ({"q": GOOD.q.int()}, "q must be fp64, fp32, bf16 or fp16, got torch.int32"),
    "integer k": ({"k": GOOD.k.int(), "v": GOOD.v.int()}, "got torch.int32 and torch.int32"),
    "k unlike v": ({"k": GOOD.k.float()}, "got torch.float32 and torch.float64"),
    "int8 without scales": ({"k": INT8, "v": INT8, "k_scale": SCALE}, "v_scale is missing"),
    "scales without int8": ({"k_scale": SCALE}, "k_scale is given, but k and v are torch.float64"),
    "scales of another shape": (
        {"k": INT8, "v": INT8, "k_scale": SCALE[1:], "v_scale": SCALE},
        "k_scale must be",
    ),
    "fp64 scales": ({"k": INT8, "v": INT8, "k_scale": SCALE.double(), "v_scale": SCALE}, "got torch.float64"),
    "int64 tables": ({"block_tables": GOOD.tables.long()}, "block_tables must be torch.int32"),
    "tables of one row": (
        {"block_tables": GOOD.tables[:1]},
        r"block_tables must be .*\(2, 5\), got .*\(1, 5\)",
    ),
    "tables of 1 dim": ({"block_tables": GOOD.tables[0]}, "block_tables must be"),
    "int64 lengths": ({"seq_lens": GOOD.lens.long()}, "seq_lens must be torch.int32"),
    "too few lengths": ({"seq_lens": GOOD.lens[:1]}, r"seq_lens must be .*\(2,\), got .*\(1,\)"),
    "length beyond the table": (
        {"seq_lens": GOOD.lens + 12},
        r"seq_lens\[1\] is 21, outside 0\.\.20 \(5 blocks",
    ),
    "negative length": ({"seq_lens": GOOD.lens - 6}, r"seq_lens\[0\] is -1"),
    "window of 0": ({"window": 0}, "window must be an integer of at least 1 .* got 0"),
    "window of 2.5": ({"window": 2.5}, "window must be an integer of at least 1 .* got 2.5"),
    "window True": ({"window": True}, "window must be an integer of at least 1 .* got True"),
    "window of text": ({"window": "4"}, "window must be an integer of at least 1 .* got '4'"),
    "softcap of 0": ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
    "softcap NaN": ({"softcap": math.nan}, "softcap must be positive and finite, got nan"),
    "scale inf": ({"scale": math.inf}, "scale must be finite, got inf"),
    "sinks per KV head": ({"sinks": torch.ones(2)}, r"sinks must be floats \(4,\), got .*\(2,\)"),
    "integer sinks": ({"sinks": torch.ones(4).int()}, "sinks must be floats"),
    "out of another shape": ({"out": GOOD.q[:1]}, r"out must be .*\(2, 4, 8\), got .*\(1, 4, 8\)"),
    "out of another dtype": ({"out": GOOD.q.float()}, "out must be torch.float64 .* got torch.float32"),
    "lse of another shape": ({"lse": torch.ones(2, 2)}, r"lse must be torch.float32 \(2, 4\)"),
    "fp64 lse": ({"lse": torch.ones(2, 4).double()}, "lse must be torch.float32"),
    "expanded out": (
        {"out": torch.empty(1, 4, 8).double().expand(2, 4, 8)},
        r"out \(2, 4, 8\) is expanded \(strides \(0, 8, 1\)\)",
    ),
    "expanded lse": ({"lse": torch.empty(2, 1).expand(2, 4)}, r"lse \(2, 4\) is expanded"),
    "expanded mass": ({"block_mass": torch.empty(1).expand(2, 4, 5)}, "block_mass .* is expanded"),
    "another device": ({"v": GOOD.v.to("meta")}, "v is on meta, q on cpu"),
    "q_len of 9": ({"q": torch.zeros(2, 9, 4, 8)}, r"q_len must be 1\.\.8, got q \(2, 9, 4, 8\)"),
    "q_len of 0": ({"q": torch.zeros(2, 0, 4, 8)}, r"q_len must be 1\.\.8, got q \(2, 0, 4, 8\)"),
    "lse without q_len": (
        {"q": torch.zeros(2, 3, 4, 8).double(), "lse": torch.ones(2, 4)},
        r"lse must be torch.float32 \(2, 3, 4\), got .*\(2, 4\)",
    ),
    "mass of other blocks": (
        {"block_mass": torch.ones(2, 4, 9)},
        r"block_mass must be torch.float32 \(2, 4, 5\), got .*\(2, 4, 9\)",
    ),
    "a strided plan": (
        {"plan": torch.zeros(20).int()[::2]},
        "plan must come from plan_splits for 2 sequences",
    ),
    "a short plan": ({"plan": torch.zeros(6).int()}, "at least 7 entries, got torch.int32 .6,."),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_misuse_is_refused_with_the_numbers(case: str) -> None:
    """At the door, the same for every backend."""
    change, message = BAD_CALLS[case]
    arguments = {"q": GOOD.q, "k": GOOD.k, "v": GOOD.v, "block_tables": GOOD.tables, "seq_lens": GOOD.lens}
    with pytest.raises(PagedKVError, match=message):
        paged_attention(**{**arguments, **change})


@pytest.mark.parametrize("block_id", [-1, len(GOOD.k), 2**31 - 1])
def test_a_used_table_entry_that_names_no_block_is_refused(block_id: int) -> None:
    """With its row, its column and the range."""
    tables = GOOD.tables.clone()
    tables[1, 2] = block_id
    with pytest.raises(
        BlockError, match=rf"block_tables\[1, 2\] is {block_id}, outside 0\.\.{len(GOOD.k) - 1}"
    ):
        replace(GOOD, tables=tables).attend("auto")


def test_a_block_that_is_partly_in_the_window_is_checked_and_one_before_it_is_not() -> None:
    """Tokens 3..8 are seen, of the blocks 0..3, 4..7 and 8."""
    tables = GOOD.tables.clone()
    tables[1, 0] = 999
    with pytest.raises(BlockError, match=r"block_tables\[1, 0\] is 999"):
        replace(GOOD, tables=tables).attend("auto", window=6)
    assert torch.equal(replace(GOOD, tables=tables).attend("auto", window=5), GOOD.attend("auto", window=5))
