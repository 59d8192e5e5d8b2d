"""The Triton attention kernels, interpreted, against the fp64 reference over every feature."""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.attention import paged_attention, paged_mla_attention
from pagedkv.attention.testing import Batch, make_batch
from pagedkv.errors import PagedKVError

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/attention/test_triton_interpreter.py runs it", allow_module_level=True)

from pagedkv.attention.triton_backend import plan_splits

# numpy says what the hardware does silently: a saturating exp2
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}
LENS = [0, 300, 1, 17, 150]

ALL: dict[str, Any] = {"window": 40, "softcap": 3.0, "sinks": True, "scale": 0.4}
FEATURES: list[dict[str, Any]] = [
    {}, {"window": 1}, {"window": 100}, {"softcap": 3.0}, {"sinks": True}, {"scale": -0.3}, ALL
]  # fmt: skip


def batch_of(lens: Sequence[int] = LENS, dims: tuple[int, int] = (32, 32), **options: Any) -> Batch:
    """fp32, with NaN in every slot and block that no sequence owns."""
    options = {"block_size": 16, **options}
    return make_batch(lens, dims=dims, unused=NAN, **options).to(torch.float32)


def outputs(batch: Batch, backend: str, **options: Any) -> dict[str, torch.Tensor]:
    """Output, LSE and block mass, from buffers that were NaN."""
    rows = batch.q.shape[:-1]
    out = torch.full((*rows, batch.v.shape[3]), NAN, dtype=batch.q.dtype)
    lse, mass = torch.full(rows, NAN), torch.full((*rows, batch.tables.shape[1]), NAN)
    batch.attend(backend, out=out, lse=lse, block_mass=mass, **options)
    return {"out": out, "lse": lse, "block_mass": mass}


def exact(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """What the reference says of exactly these numbers, unrounded where a dtype allows."""
    doubled = batch.dequantized() if batch.scales else batch.to(torch.float64)
    return outputs(doubled, "reference", **options)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, x in got.items():
        limit = tolerance if name == "out" else max(tolerance / 4, 2e-6)
        expected = wanted[name].double()
        error = (x.double() - expected).abs() - limit * expected.abs()
        same = (error <= limit) | (x.double() == expected)
        assert same.all(), f"{name}: {(~same).sum()} of {same.numel()} differ, by up to {error.max()}"


def check(batch: Batch, *, target: int = 6, tolerance: float | None = None, **options: Any) -> None:
    """With the default plan, and with one that splits whatever is longer than 128 tokens."""
    if options.get("sinks") is True:
        options["sinks"] = torch.linspace(-2, 2, batch.q.shape[-2])
    q_len = batch.q.shape[1] if batch.q.dim() == 4 else 1
    plan = plan_splits(batch.lens, target=target, q_len=q_len, window=options.get("window"), min_chunk=1)
    tolerance = TOLERANCE[batch.q.dtype] if tolerance is None else tolerance
    assert_same(outputs(batch, "triton", plan=plan, **options), exact(batch, **options), tolerance)


@pytest.mark.parametrize("options", FEATURES, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("q_len", [None, 3])
def test_every_feature(options: dict[str, Any], q_len: int | None) -> None:
    """One by one and all together, for one and for several query tokens; output, LSE and mass."""
    check(batch_of(q_len=q_len), **options)


def test_int8_with_every_feature() -> None:
    """The integer kernel has tests of its own; here it is reached, with what surrounds it."""
    check(batch_of(q_len=3).quantized(), tolerance=2e-4, **ALL)


@pytest.mark.parametrize(
    ("block_size", "layout"),
    [(1, "HND"), (8, "NHD"), (24, "HND"), (32, "HND"), (64, "NHD"), (80, "HND"), (128, "HND"), (256, "NHD")],
)
def test_every_block_size(block_size: int, layout: Any) -> None:
    """Blocks shorter and longer than the tile, also of sizes that are no power of two."""
    batch = batch_of([300, 70, 1, 257], block_size=block_size, layout=layout, q_len=2, heads=(2, 1))
    check(batch)
    check(batch, window=90)


@pytest.mark.parametrize("dims", [(32, 48), (40, 40), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256)])
def test_every_head_dim(dims: tuple[int, int]) -> None:
    """Widths that are no power of two, and values of another width than the keys."""
    check(batch_of([150, 33], dims=dims, heads=(4, 2)))


@pytest.mark.parametrize(
    ("heads", "q_len"), [((1, 1), 1), ((2, 2), 1), ((7, 1), 2), ((6, 2), 4), ((8, 1), 8), ((40, 1), None)]
)
def test_every_group_size(heads: tuple[int, int], q_len: int | None) -> None:
    """MHA, GQA with odd groups, MQA, and more rows than one program takes."""
    check(batch_of([150, 5, 0], heads=heads, q_len=q_len))


@pytest.mark.parametrize("q_len", range(1, 9))
def test_every_query_length(q_len: int) -> None:
    """Also where some query tokens stand before the first token and see nothing."""
    check(batch_of([3, 8, 140], q_len=q_len), window=5)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
        (torch.float16, FP8),
        (torch.float32, FP8),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_every_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Query and cache may differ; the products lose nothing that one of them holds."""
    batch = batch_of(heads=(4, 1))
    check(replace(batch, q=batch.q.to(q_dtype), k=batch.k.to(kv_dtype), v=batch.v.to(kv_dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_output_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    """One token has all the weight: its value comes out, rounded as torch rounds it."""
    batch = batch_of([1, 1, 1])
    got = replace(batch, q=batch.q.to(dtype)).attend("triton")
    wanted = torch.stack([v[0] for v in batch.vs]).to(dtype).repeat_interleave(2, dim=1)
    assert torch.equal(got, wanted)


def mla_batch(
    lens: Sequence[int], latent: int, rope: int, num_heads: int, q_len: int, block_size: int
) -> Batch:
    batch = batch_of(lens, dims=(latent + rope, 1), heads=(num_heads, 1), q_len=q_len, block_size=block_size)
    return replace(batch, v=batch.k[..., :latent])


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("latent", "rope", "num_heads", "q_len", "block_size"),
    [(512, 64, 3, 1, 64), (32, 16, 5, 4, 16), (48, 8, 40, 1, 24), (64, 32, 2, 2, 128)],
)
def test_latent_caches(
    latent: int, rope: int, num_heads: int, q_len: int, block_size: int, options: dict[str, Any]
) -> None:
    """The values are the first part of the keys; one kernel reads them once."""
    check(mla_batch([140, 0, 30], latent, rope, num_heads, q_len, block_size), **options)


def test_latent_cache_in_bf16_through_its_own_entry() -> None:
    """``paged_mla_attention`` reaches the kernel."""
    batch = mla_batch([40], 64, 16, 4, 1, 16).to(torch.bfloat16)
    got, wanted = (
        paged_mla_attention(b.q, b.k, b.tables, b.lens, latent_rank=64, scale=0.1, backend=name).double()
        for b, name in ((batch, "triton"), (batch.to(torch.float64), "reference"))
    )
    torch.testing.assert_close(got, wanted, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("options", [{}, {**ALL, "window": 300}], ids=["plain", "all"])
def test_the_number_of_splits_does_not_matter(options: dict[str, Any]) -> None:
    """Every target gives the same result, whether a sequence is whole or in many parts."""
    batch = batch_of([700, 30], heads=(2, 1), q_len=2)
    for target in (1, 2, 3, 5, 9):
        check(batch, target=target, **options)


def test_a_plan_for_other_lengths_costs_balance_only() -> None:
    """Captured in a graph, a plan may be older than the lengths."""
    batch = batch_of([300, 0, 150, 20], heads=(2, 1))
    wanted = exact(batch)
    for lens in ([0, 0, 0, 0], [20, 1000, 0, 5], [9000, 1, 1, 1], [300, 1, 700, 9000]):
        plan = plan_splits(torch.tensor(lens, dtype=torch.int32), target=12)
        assert_same(outputs(batch, "triton", plan=plan), wanted, 2e-6)


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_plan_for_another_batch_size_is_refused(num_seqs: int) -> None:
    """Its length may fit all the same. On a device only the debug mode sees it."""
    batch = batch_of([300, 20], heads=(2, 1))
    plan = plan_splits(torch.full((num_seqs,), 400, dtype=torch.int32), target=12)
    with pytest.raises(PagedKVError, match="plan must come from plan_splits for 2 sequences: its indptr"):
        batch.attend("triton", plan=plan)


def test_growing_lengths_in_the_same_buffers() -> None:
    """What a captured graph replays: the plan is made again in place, the launches stay what they were."""
    batch = batch_of([600, 400], heads=(2, 1))
    lens = torch.zeros_like(batch.lens)
    plan = torch.empty(2 * 2 + 4 + 2, dtype=torch.int32)
    for fraction in (0.0, 0.01, 0.5, 1.0):
        lens.copy_((batch.lens * fraction).int())
        plan_splits(lens, target=4, min_chunk=128, out=plan)
        now = replace(batch, lens=lens)
        assert_same(outputs(now, "triton", plan=plan), exact(now), 2e-6)


def test_the_default_plan_serves_a_call_without_one() -> None:
    """Long enough to be split by it."""
    batch = batch_of([900, 100], heads=(2, 1))
    assert_same(outputs(batch, "triton"), exact(batch), 2e-6)


def test_the_rest_of_the_batch_does_not_matter() -> None:
    """A sequence that is not split gets the same bits alone and in company."""
    batch = batch_of([100, 3, 0, 120])
    together = outputs(batch, "triton")
    for row in range(4):
        alone = replace(
            batch,
            q=batch.q[row : row + 1],
            tables=batch.tables[row : row + 1],
            lens=batch.lens[row : row + 1],
        )
        for name, x in outputs(alone, "triton").items():
            assert torch.equal(x[0], together[name][row]), name


def test_a_permutation_of_the_blocks_does_not_matter() -> None:
    """Ids are names: the same bits come out wherever a block lies, at both ends of the pool too."""
    batch = batch_of([300, 41])
    wanted = outputs(batch, "triton")
    num_blocks = len(batch.k)
    for seed in range(3):
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        first, last = int(batch.tables[0, 0]), int(batch.tables[1, 2])
        # the first and the last block in use move to the ends of the pool
        for end, used in ((0, first), (num_blocks - 1, last)):
            at = int((order == used).nonzero())
            order[[end, at]] = order[[at, end]]
        tables = torch.argsort(order)[batch.tables.long()].int()
        moved = replace(batch, k=batch.k[order], v=batch.v[order], tables=tables)
        for name, x in outputs(moved, "triton").items():
            assert torch.equal(x, wanted[name]), name


def test_table_entries_that_are_not_read_may_be_anything() -> None:
    """Beyond the sequence and before its window, also ids that would leave the pool."""
    batch = batch_of([100, 0, 37], q_len=2)
    tables = batch.tables.clone()
    for row, n in enumerate(batch.lens.tolist()):
        used = torch.zeros(tables.shape[1], dtype=torch.bool)
        used[max(0, n - 2 - 30 + 1) // 16 : -(-n // 16)] = True
        tables[row, ~used] = 2**31 - 1
    check(replace(batch, tables=tables), window=30)


@pytest.mark.parametrize(("latent", "block_size"), [(None, 16), (None, 128), (32, 16)])
def test_slots_before_the_window_may_be_anything(latent: int | None, block_size: int) -> None:
    """A block may lie across the start of a window; what it holds before that may be stale, NaN included."""
    lens, window = [100, 37, 200], 21
    if latent is not None:
        batch = mla_batch(lens, latent, 16, 4, 1, block_size)
    else:
        batch = batch_of(lens, block_size=block_size)
    for table, n in zip(batch.tables, lens, strict=True):
        for position in range(max(0, n - window)):
            block, slot = table[position // block_size], position % block_size
            batch.k[block, :, slot] = NAN
            batch.v[block, :, slot] = NAN
    check(batch, window=window)


def test_strides_of_every_tensor() -> None:
    """Views with gaps in every dimension, as an engine slices them from larger buffers."""
    batch = batch_of([150, 40], heads=(4, 2), q_len=2)

    def spread(x: torch.Tensor) -> torch.Tensor:
        larger = torch.full([2 * n + 1 for n in x.shape], NAN if x.is_floating_point() else -1, dtype=x.dtype)
        view = larger[tuple(slice(1, None, 2) for _ in x.shape)]
        return view.copy_(x)

    got = {name: spread(x.fill_(NAN)) for name, x in outputs(batch, "torch").items()}
    names = ("q", "k", "v", "tables", "lens")
    views: dict[str, Any] = {name: spread(getattr(batch, name)) for name in names}
    apart = replace(batch, **views)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    apart.attend("triton", sinks=spread(sinks), **got)
    assert_same(got, exact(batch, sinks=sinks), 2e-6)


def test_offsets_beyond_32_bits() -> None:
    """Neither an id nor a stride passes 2**31, their product does. Two blocks of the 2 GiB are touched."""
    stride = 2**30
    pool = torch.empty(2 * stride + 512, dtype=torch.float8_e4m3fn)
    k = pool.as_strided((3, 1, 16, 32), (stride, 512, 32, 1))
    v = pool.as_strided((3, 1, 16, 32), (stride, 512, 1, 16))
    generator = torch.Generator().manual_seed(0)
    for block in (0, 2):
        k[block].copy_(torch.randn(1, 16, 32, generator=generator))
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    batch = replace(batch_of([32], heads=(2, 1)), k=k, v=v, tables=table)
    near = replace(batch, k=k[[0, 2]].float(), v=v[[0, 2]].float(), tables=table // 2)
    assert_same(outputs(batch, "triton"), outputs(near, "reference"), 2e-6)


def test_huge_logits_stay_finite() -> None:
    """The exponent is relative to the maximum, and the soft cap saturates."""
    batch = batch_of([70])
    loud = replace(batch, q=batch.q * 1e4)
    check(loud, tolerance=1e-3)
    check(loud, tolerance=1e-3, softcap=20.0)


def test_empty_sequences_need_no_table() -> None:
    """Zero columns, zero lengths: zeros come out, and minus infinity."""
    batch = batch_of([0, 0])
    batch = replace(batch, tables=batch.tables[:, :0])
    check(batch, sinks=True)
    assert_same(outputs(batch, "triton"), exact(batch), 0.0)


def test_no_sequences() -> None:
    """An empty batch launches nothing."""
    batch = batch_of([5])
    empty = replace(batch, q=batch.q[:0], tables=batch.tables[:0], lens=batch.lens[:0])
    assert empty.attend("triton").shape == (0, 4, 32)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    """Shapes, lengths, tables and options at random."""
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 2, 3, 5])
    width = rng.choice([16, 24, 32, 72])
    batch = batch_of(
        [rng.choice([0, rng.randint(1, 20), rng.randint(1, 400)]) for _ in range(rng.randint(1, 4))],
        dims=(width, rng.choice([width, 32])),
        heads=(kv_heads * group, kv_heads),
        block_size=rng.choice([4, 8, 16, 48, 128]),
        layout=rng.choice(["HND", "NHD"]),
        q_len=rng.choice([None, 1, 2, 5]),
        seed=seed,
    )
    options: dict[str, Any] = {
        "window": rng.choice([None, rng.randint(1, 200)]),
        "softcap": rng.choice([None, 5.0]),
        "sinks": rng.choice([None, True]),
    }
    if rng.random() < 0.3:
        check(batch.quantized(), target=rng.randint(1, 5), tolerance=2e-4, **options)
    else:
        check(batch, target=rng.randint(1, 5), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "a query in fp64"),
        ({"dims": (320, 32)}, "head_dim 320 with v_head_dim 32, at most 256"),
        ({"latent": 600}, r"a latent of 600 \+ 8, at most 512 \+ 64"),
        ({"kv_dtype": torch.float8_e5m2}, "a cache in torch.float8_e5m2"),
    ],
)
def test_what_it_cannot_serve_is_named(change: dict[str, Any], message: str) -> None:
    """Asked for by name, the backend says which feature is missing, with its numbers."""
    if "latent" in change:
        batch = mla_batch([5], change["latent"], 8, 1, 1, 16)
    else:
        batch = batch_of([5], dims=change.get("dims", (32, 32))).to(change.get("dtype", torch.float32))
    if "kv_dtype" in change:
        batch = replace(batch, k=batch.k.to(change["kv_dtype"]), v=batch.v.to(change["kv_dtype"]))
    with pytest.raises(PagedKVError, match=message):
        batch.attend("triton")


def test_contents_are_checked_on_the_cpu() -> None:
    """A stray id would end the process."""
    batch = batch_of([5])
    batch.tables[0, 0] = 99
    with pytest.raises(PagedKVError, match="block_tables"):
        paged_attention(batch.q, batch.k, batch.v, batch.tables, batch.lens, backend="triton")
