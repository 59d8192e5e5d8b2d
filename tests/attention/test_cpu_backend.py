"""The native CPU backend, on every instruction set that this machine has, against the fp64 reference."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedkv import native
from pagedkv.attention import paged_attention
from pagedkv.attention.testing import Batch, make_batch
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.storage import Layout

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))

ISAS = native.available_isas() if native.reason() is None else ("none",)
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS: list[Layout] = ["HND", "NHD"]
NAN = float("nan")

# Rounding of the output to the dtype of the query, relative to its largest entry.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

every_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """So that the pool takes part where there is enough to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def with_cache(batch: Batch, dtype: str, q_dtype: torch.dtype) -> Batch:
    """The batch with its cache in a storage dtype and its query in another."""
    if dtype == "int8":
        return replace(batch.quantized(), q=batch.q.to(q_dtype))
    kv = torch.float8_e4m3fn if dtype == "fp8" else FLOATS[dtype]
    # torch casts NaN to fp8 as NaN, so that poison stays poison
    return replace(batch, q=batch.q.to(q_dtype), k=batch.k.to(kv), v=batch.v.to(kv))


def exact(batch: Batch) -> Batch:
    """The same numbers in fp64."""
    if batch.scales:
        return batch.dequantized()
    return replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())


def outputs(batch: Batch, backend: str, **options: Any) -> dict[str, Tensor]:
    """Output, LSE and block masses, from buffers that were NaN."""
    rows = batch.q.shape[:-1]
    lse, mass = torch.full(rows, NAN), torch.full((*rows, batch.tables.shape[1]), NAN)
    out = torch.full((*rows, batch.v.shape[3]), NAN, dtype=batch.q.dtype)
    batch.attend(backend, out=out, lse=lse, block_mass=mass, **options)
    return {"out": out, "lse": lse, "mass": mass}


def assert_like_reference(batch: Batch, isa: str, **options: Any) -> None:
    got, truth = outputs(batch, "native", **options), exact(batch)
    wanted = outputs(truth, "reference", **options)
    largest = max(1.0, float(truth.v.nan_to_num(0.0).abs().max()))
    logit_error = 5e-6 + (integer_logit_error(truth, options) if is_integer(batch, isa) else 0.0)
    weight_error = math.expm1(2 * logit_error) + (64 / 65534 if is_integer(batch, isa) else 0.0)
    close = torch.testing.assert_close
    close(got["lse"], wanted["lse"], rtol=5e-6, atol=logit_error)
    close(got["mass"], wanted["mass"], rtol=0, atol=weight_error)
    out_error = (weight_error + ROUNDING[batch.q.dtype]) * largest
    close(got["out"].double(), wanted["out"], rtol=0, atol=out_error)


def is_integer(batch: Batch, isa: str) -> bool:
    """The kernels that carry query and weights as integers serve the call."""
    return batch.k.dtype == torch.int8 and isa == "avx512-dot"


def integer_logit_error(batch: Batch, options: dict[str, Any]) -> float:
    """The bound of cpu_backend.py, for the largest query and the largest key of the batch."""
    if not batch.q.numel():
        return 0.0
    scale = options.get("scale", batch.q.shape[-1] ** -0.5)
    sums = batch.k.nan_to_num(0.0).abs().sum(-1).max()
    return float(abs(scale) * batch.q.abs().max() / 32512 * sums)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Batch, dict[str, Any]]:
    """Any shape and any mix of features, over a pool whose unused slots hold NaN."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8]))
    block_size = draw(st.sampled_from([1, 3, 8, 16, 16, 24, 32, 64, 100]))
    head_dim = draw(st.sampled_from([1, 8, 20, 32, 64, 64, 72, 96, 128, 130, 192]))
    batch = make_batch(
        draw(st.lists(st.one_of(st.integers(0, 70), st.integers(200, 700)), min_size=0, max_size=4)),
        heads=(kv_heads * group, kv_heads),
        dims=(head_dim, draw(st.sampled_from([head_dim, 5, 16, 40, 128]))),
        block_size=block_size,
        layout=draw(st.sampled_from(LAYOUTS)),
        q_len=draw(st.sampled_from([None, None, 1, 2, 5, 8])),
        seed=draw(st.integers(0, 2**16)),
        unused=NAN,
    )
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 3, 16, 100, 5000]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-3.0, 4.0, kv_heads * group)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.3, 0.7]))
    return batch, options


@every_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
@given(case=cases(), q_dtype=st.sampled_from(list(FLOATS.values())))
@settings(max_examples=25, deadline=None)
def test_equals_the_reference(
    isa: str, dtype: str, case: tuple[Batch, dict[str, Any]], q_dtype: torch.dtype
) -> None:
    """Every feature, alone and together, in every dtype."""
    batch, options = case
    with native.force_isa(isa):
        assert_like_reference(with_cache(batch, dtype, q_dtype), isa, **options)


@every_isa
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_whole_tiles_equal_the_reference(isa: str, layout: Layout, dtype: str, block_size: int) -> None:
    """Llama's heads, contexts of many tiles and chunks: the paths that are built for speed."""
    batch = make_batch(
        [1300, 64, 129, 1024],
        heads=(32, 8),
        dims=(128, 128),
        block_size=block_size,
        layout=layout,
        unused=NAN,
    )
    q_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    with native.force_isa(isa):
        assert_like_reference(with_cache(batch, dtype, q_dtype), isa)


@every_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_latent_attention_equals_the_reference(isa: str, dtype: str, q_len: int) -> None:
    """MLA: one KV head of 576, whose values are a view of the keys."""
    batch = make_batch([300, 0, 17], heads=(16, 1), dims=(576, 512), block_size=16, q_len=q_len, unused=NAN)
    batch = with_cache(batch, dtype, torch.float32)
    scales = {**batch.scales, "v_scale": batch.scales["k_scale"]} if batch.scales else {}
    batch = replace(batch, v=batch.k[..., :512], scales=scales)
    with native.force_isa(isa):
        assert_like_reference(batch, isa)


@every_isa
@pytest.mark.parametrize("seed", range(4))
def test_int8_stays_within_its_bound(isa: str, seed: int) -> None:
    """The bound of cpu_backend.py holds for the numbers at hand, and 1e-4 of the largest output does too."""
    batch = make_batch([700], heads=(8, 2), dims=(128, 128), block_size=16, seed=seed, unused=NAN)
    batch = with_cache(batch, "int8", torch.float32)
    with native.force_isa(isa):
        got = outputs(batch, "native")
    wanted = outputs(exact(batch), "reference")
    keys, values = (
        x.repeat_interleave(4, dim=1) for x in (dequantized_rows(batch, "k"), dequantized_rows(batch, "v"))
    )
    step = batch.q[0].double().abs().amax(-1) / 32512
    logit_error = 128**-0.5 * step * keys.abs().sum(-1).amax(0)
    assert bool(((got["lse"] - wanted["lse"]).abs()[0] <= logit_error + 1e-5).all())
    # a change of every logit by e changes weights by a factor within exp(+-2e)
    weight_error = torch.expm1(2 * logit_error) + 64 / 65534 + 1e-6
    spread = values.abs().amax((0, 2))
    assert bool(((got["out"] - wanted["out"]).abs()[0].amax(-1) <= weight_error * spread).all())
    assert float((got["out"] - wanted["out"]).abs().max()) <= 1e-4 * float(wanted["out"].abs().max())


def dequantized_rows(batch: Batch, name: str) -> Tensor:
    """[seq_len, num_kv_heads, dim] of the only sequence."""
    n = int(batch.lens[0])
    values = getattr(exact(batch), name)[batch.tables[0].long()]
    rows: Tensor = values.transpose(1, 2).flatten(0, 1)[:n]
    return rows


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


INVARIANT = ["fp32", "bf16", "int8"]


@pytest.mark.parametrize("dtype", INVARIANT)
def test_results_do_not_depend_on_the_number_of_threads(dtype: str) -> None:
    """Bit for bit, with one long sequence and with many short ones."""
    for lens in ([3000], [5, 900, 40, 0, 1500, 77]):
        batch = make_batch(lens, heads=(16, 4), dims=(64, 64), block_size=16, unused=NAN)
        batch = with_cache(batch, dtype, torch.bfloat16)
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(outputs(batch, "native"))
        assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", INVARIANT)
def test_results_do_not_depend_on_the_batch(dtype: str) -> None:
    """A sequence alone, in any company and in any row gets the same bits."""
    batch = make_batch([700, 3, 0, 1500, 64], heads=(8, 2), dims=(64, 64), block_size=16, unused=NAN)
    batch = with_cache(batch, dtype, torch.bfloat16)
    together = outputs(batch, "native")
    for rows in ([3], [4, 0], [4, 3, 2, 1, 0]):
        index = torch.tensor(rows)
        part = replace(batch, q=batch.q[index], tables=batch.tables[index], lens=batch.lens[index])
        assert equal(outputs(part, "native"), {name: x[index] for name, x in together.items()})


@pytest.mark.parametrize("dtype", INVARIANT)
def test_results_do_not_depend_on_where_blocks_lie(dtype: str) -> None:
    """A permutation of the pool, and of the ids with it, changes nothing; both ends of the pool are used."""
    batch = make_batch([700, 90], heads=(8, 2), dims=(64, 64), block_size=16, unused=NAN)
    batch = with_cache(batch, dtype, torch.bfloat16)
    order = torch.randperm(len(batch.k), generator=torch.Generator().manual_seed(1))
    # the first blocks of the table go to both ends
    for place, block in ((0, int(batch.tables[0, 0])), (len(order) - 1, int(batch.tables[0, 1]))):
        other = int((order == block).nonzero())
        order[place], order[other] = order[other].clone(), order[place].clone()
    scales = {name: x[order] for name, x in batch.scales.items()}
    tables = torch.argsort(order)[batch.tables.long()].int()
    moved = replace(batch, k=batch.k[order], v=batch.v[order], tables=tables, scales=scales)
    assert {0, len(order) - 1} <= set(tables[0].tolist())
    assert equal(outputs(moved, "native"), outputs(batch, "native"))


def test_python_threads_do_not_disturb_each_other() -> None:
    """Eight threads at once, of different shapes, get what each gets alone."""
    batches = [
        with_cache(
            make_batch([800 + 100 * i, 5], heads=(8, 4), dims=(32 + 8 * i, 64), seed=i), "fp32", torch.float32
        )
        for i in range(8)
    ]
    alone = [outputs(batch, "native") for batch in batches]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        # exceptions of a thread would pass unseen
        wrong.extend(i for _ in range(10) if not equal(outputs(batches[i], "native"), alone[i]))

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_blocks_beyond_two_to_the_31_elements_are_found() -> None:
    """Addresses are computed in 64 bits. The pool is virtual: only its ends are ever touched."""
    blocks = 2**31 // (16 * 64) + 8
    k = torch.empty(blocks, 1, 16, 64, dtype=torch.bfloat16)
    k[0], k[-1] = torch.randn(2, 1, 16, 64).to(torch.bfloat16)
    ends, small = (
        torch.tensor([[0, blocks - 1]], dtype=torch.int32),
        torch.tensor([[0, 1]], dtype=torch.int32),
    )
    q, lens = torch.randn(1, 4, 64), torch.tensor([30], dtype=torch.int32)
    far = paged_attention(q, k, k, ends, lens, backend="native")
    copy = torch.stack([k[0], k[-1]])
    assert torch.equal(far, paged_attention(q, copy, copy, small, lens, backend="native"))


def test_views_of_query_and_output_are_served() -> None:
    """Strides of q, out and lse are honoured, that of the last dimension too."""
    batch = make_batch([40, 7], heads=(4, 2), dims=(16, 12)).to(torch.float32)
    wanted = batch.attend_with_lse("native")
    out, lse = torch.zeros(12, 4, 5).permute(2, 1, 0)[::3], torch.zeros(4, 2).t()
    q = batch.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    tables = torch.cat([batch.tables, batch.tables], dim=1)[:, : batch.tables.shape[1]]
    paged_attention(q, batch.k, batch.v, tables, batch.lens, out=out, lse=lse, backend="native")
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@every_isa
def test_scales_are_found_wherever_they_lie(isa: str) -> None:
    """Scales with NaN between them, to be copied together, give what those read in place give."""
    batch = make_batch([200, 77], heads=(8, 2), dims=(64, 72), block_size=16).quantized()
    apart = {
        name: torch.stack([scale, torch.full_like(scale, NAN)], dim=-1)[..., 0]
        for name, scale in batch.scales.items()
    }
    with native.force_isa(isa):
        wanted = batch.attend_with_lse("native")
        got = replace(batch, scales=apart).attend_with_lse("native")
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("block_id", [-1, 10**6, -(2**31)])
def test_a_foreign_block_is_refused_before_anything_is_written(block_id: int) -> None:
    """With row and column in the message, and the output as it was."""
    batch = make_batch([40, 7]).to(torch.float32)
    batch.tables[1, 1] = block_id
    out = torch.full((2, 4, 8), 7.0)
    with pytest.raises(BlockError, match=rf"block_tables\[1, 1\] is {block_id}"):
        batch.attend("native", out=out)
    assert bool((out == 7).all())
    # 7 tokens are 2 blocks of 4: the third entry is nobody's business
    batch.tables[1, 1] = batch.tables[1, 0]
    batch.tables[1, 2] = block_id
    batch.attend("native", out=out)


@pytest.mark.parametrize("length", [-1, 49])
def test_a_length_beyond_its_table_is_refused(length: int) -> None:
    """With the numbers."""
    batch = make_batch([40, 7]).to(torch.float32)
    batch.lens[1] = length
    with pytest.raises(PagedKVError, match=rf"seq_lens\[1\] is {length}, outside 0..48"):
        batch.attend("native")


def test_nan_in_what_is_read_reaches_the_result() -> None:
    """A sequence whose cache is broken says so, in every dtype, and its neighbours do not."""
    for dtype in ("fp32", "bf16", "fp16", "int8"):
        for isa in ISAS:
            batch = with_cache(make_batch([40, 40], dims=(64, 64)), dtype, torch.bfloat16)
            for name in ("k", "v"):
                target = batch.scales[f"{name}_scale"] if dtype == "int8" else getattr(batch, name)
                kept = target.clone()
                target[int(batch.tables[0, 3])] = NAN
                with native.force_isa(isa):
                    out = batch.attend("native")
                assert bool(out[0].isnan().all()) and not bool(out[1].isnan().any()), (dtype, isa, name)
                target.copy_(kept)


def test_huge_logits_do_not_overflow() -> None:
    """The maximum is subtracted first; tokens far below it weigh nothing."""
    batch = make_batch([100], dims=(64, 64)).to(torch.float32)
    wanted = exact(batch).attend("reference", scale=1000.0)
    for isa in ISAS:
        with native.force_isa(isa):
            torch.testing.assert_close(
                batch.attend("native", scale=1000.0).double(), wanted, rtol=0, atol=0.01
            )


def test_what_it_cannot_do_is_named() -> None:
    """fp64, and values that lie token-minor."""
    batch = make_batch([5])
    with pytest.raises(PagedKVError, match=r"no torch\.float64 query on torch\.float64 keys"):
        batch.attend("native")
    batch = batch.to(torch.float32)
    minor = batch.v.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(PagedKVError, match="last dimension of v contiguous, its strides are"):
        replace(batch, v=minor).attend("native")


def test_an_unknown_instruction_set_is_refused() -> None:
    """In the environment, with the names that there are."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.environ['PAGEDKV_CPU_ISA'] = 'mmx'; import pagedkv.native"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PAGEDKV_CPU_ISA is 'mmx', must be one of auto, portable, avx2" in done.stderr


def test_an_instruction_set_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for in the environment it is the reason why there is no native backend; never a crash."""
    with pytest.raises(PagedKVError, match="no instruction set 'avx1024' here, there are: auto, portable"):
        native.force_isa("avx1024").__enter__()
    monkeypatch.setattr(native, "ISAS", (*native.ISAS, "avx1024"))
    monkeypatch.setattr(native, "_isa", len(native.ISAS) - 1)
    reason = native._load.__wrapped__()
    assert reason == f"PAGEDKV_CPU_ISA asks for avx1024, the best of this CPU is {ISAS[-1]}"
