"""Measuring: what a cell reads, that every peer computes the same, and what the figures are made of."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv.attention import backends, paged_attention
from pagedkv.attention.bench import flex_peer, gpu_peers, measure, vllm_peer
from pagedkv.attention.bench.cell import Cell, ColdSets, even_cell
from pagedkv.attention.bench.conditions import available_bytes, conditions, last_level_cache_bytes
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.measure import CellResult, Plan, Row, measure_cell
from pagedkv.attention.bench.peers import PEERS, Peer
from pagedkv.attention.bench.read_ceiling import NAME
from pagedkv.attention.bench.rounds import call_seconds
from pagedkv.errors import PagedKVError
from pagedkv.storage import STORAGE_DTYPES, Layout

HEADS = (4, 2, 16)
LAYOUTS: list[Layout] = ["HND", "NHD"]
EVERYWHERE = ["sdpa", "sdpa-rows", "gather", "cat"]
QUICK = Plan(backends=("torch",), peers=("sdpa",), seconds=0.0, cold_bytes=1)


def small(dtype: str = "bf16", batch: int = 2, context: int = 37, block_size: int = 8) -> Cell:
    return even_cell(batch, context, dtype, block_size, HEADS)


def expected(sets: ColdSets, index: int) -> Tensor:
    """What a set gives in the reference, in fp64."""
    kv = sets.kv
    return paged_attention(
        sets.q.double(), kv.k, kv.v, sets.tables[index], sets.lens, k_scale=kv.k_scale, v_scale=kv.v_scale,
        backend="reference",
    )  # fmt: skip


def assert_right(sets: ColdSets, made: Contender | str) -> None:
    """The contender computes every set, in the precision of the dtype."""
    assert not isinstance(made, str), made
    for index in range(len(sets)):
        out, wanted = made.call(index), expected(sets, index)
        assert out.shape == wanted.shape
        tolerance = measure.TOLERANCES[sets.cell.compute_dtype]
        assert (out.double() - wanted).abs().max() <= tolerance * wanted.abs().max(), index


def row(result: CellResult, name: str) -> Row:
    (found,) = (r for r in result.rows if r.name == name)
    return found


@pytest.mark.parametrize(
    ("dtype", "per_token"), [("bf16", 4096), ("fp32", 8192), ("int8", 2112), ("fp8-e4m3", 2048)]
)
def test_bytes_of_a_llama_layer(dtype: str, per_token: int) -> None:
    """K, V and scales of 8 heads of 128."""
    cell = even_cell(3, 1000, dtype, 16, (32, 8, 128))
    assert cell.kv_bytes == 3000 * per_token
    assert cell.float_bytes == 3000 * (8192 if dtype == "fp32" else 4096)
    assert cell.num_blocks == 3 * 63


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_the_pool_is_as_large_as_announced(dtype: str, layout: Layout) -> None:
    """What a memory limit is compared with is what is allocated, and it is cold enough."""
    sets = ColdSets(small(dtype), 100_000, layout=layout)
    assert sets.storage.nbytes == sets.cell.pool_bytes(100_000) >= 100_000
    assert len(sets) == sets.cell.num_sets(100_000)


def test_sets_share_no_block_and_leave_none_out() -> None:
    """No call finds in cache what another one read."""
    sets = ColdSets(small(), 100_000)
    ids = torch.cat([table.flatten() for table in sets.tables])
    assert len(sets) > 2
    assert sorted(ids.tolist()) == list(range(1, sets.storage.num_blocks + 1))


def test_blocks_differ() -> None:
    """A backend that reads a wrong block is found out."""
    sets = ColdSets(small(block_size=4), 3 * 2**24)
    blocks = sets.kv.k[1:].flatten(1)
    assert len(torch.unique(blocks[:, :8].float(), dim=0)) == len(blocks)


def test_one_set_if_a_call_reads_more_than_a_cache_holds() -> None:
    """It evicts itself."""
    assert small().num_sets(1) == 1


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_peers_compute_the_same(dtype: str, name: str) -> None:
    """Nobody is faster by doing something else."""
    sets = ColdSets(small(dtype), 20_000)
    assert_right(sets, PEERS[name].make(sets))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_knows_sequences_of_different_lengths(layout: Layout) -> None:
    """It masks what a shorter sequence does not have."""
    sets = ColdSets(Cell((5, 40, 1), "fp32", 8, *HEADS), 1, layout=layout)
    assert_right(sets, PEERS["gather"].make(sets))


@pytest.mark.parametrize("name", ["sdpa", "sdpa-rows", "cat"])
def test_contiguous_peers_need_one_length(name: str) -> None:
    """They say so."""
    sets = ColdSets(Cell((5, 40), "bf16", 8, *HEADS), 1)
    assert PEERS[name].make(sets) == "sequences of different lengths"


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_flex_reads_the_same_blocks(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Its masks and tables are right; without the compilation, which takes half a minute."""

    def eagerly(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
        return function

    monkeypatch.setattr(torch, "compile", eagerly)
    # one set, because without the compilation torch looks at the mask alone and not at the tables
    sets = ColdSets(small(dtype), 1)
    assert_right(sets, flex_peer.make(sets))


def test_flex_says_why_it_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler gets a reason, not a traceback."""

    def missing(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
        def call(*args: object, **options: object) -> Tensor:
            raise RuntimeError("no C++ compiler\nand a long story")

        return call

    monkeypatch.setattr(torch, "compile", missing)
    assert flex_peer.make(ColdSets(small(), 1)) == "not compiled: RuntimeError: no C++ compiler"


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_vllm_computes_the_same_where_it_is_installed(dtype: str, block_size: int) -> None:
    """Its cache is written by its own kernel."""
    sets = ColdSets(even_cell(2, 70, dtype, block_size, (8, 2, 64)), 200_000)
    made = vllm_peer.make(sets)
    if isinstance(made, str):
        assert made.startswith("not importable here: ")
        pytest.skip(made)
    assert_right(sets, made)


@pytest.mark.parametrize("make", [gpu_peers.flashinfer, gpu_peers.vllm_triton])
def test_gpu_peers_say_why_they_are_not_there(make: Callable[[ColdSets], Contender | str]) -> None:
    """An import that fails is a reason."""
    made = make(ColdSets(small(), 1))
    if not isinstance(made, str):
        pytest.skip("it is there")
    assert made.startswith("not importable here: ")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_figures_of_a_cell(dtype: str) -> None:
    """GB/s are bytes over seconds; the read-only pass comes first and is its own ceiling."""
    result = measure_cell(small(dtype), QUICK)
    assert [r.name for r in result.rows[:3]] == [NAME, "torch", "sdpa"]
    assert result.rows[0].of_ceiling == 1.0
    assert result.baseline == "sdpa"
    assert result.num_sets == 1
    torch_row = row(result, "torch")
    assert torch_row.seconds is not None and torch_row.gb_per_s is not None
    assert torch_row.gb_per_s == pytest.approx(result.cell.kv_bytes / torch_row.seconds / 1e9)
    assert torch_row.error == 0.0 and not torch_row.is_wrong
    assert row(result, "sdpa").speedup == 1.0
    assert {r.rounds for r in result.rows} == {QUICK.least_rounds}


def test_every_backend_takes_part_or_says_why_not() -> None:
    """Nobody is missing silently, and the reference is no contender."""
    result = measure_cell(small(), Plan(peers=(), seconds=0.0, cold_bytes=1))
    names = {r.name for r in result.rows}
    assert names == {NAME} | {info.name for info in backends()} - {"reference"}
    for info in backends():
        if not info.available:
            assert row(result, info.name).note == info.reason


def recording(calls: list[tuple[str, int]], name: str, factor: float = 1.0) -> Peer:
    """A peer that says what was called, and is right up to a factor."""

    def make(sets: ColdSets) -> Contender:
        def call(index: int) -> Tensor:
            calls.append((name, index))
            return expected(sets, index).to(sets.q.dtype) * factor

        return Contender(name, call, sets.cell.kv_bytes)

    return Peer(make)


def test_rounds_are_interleaved_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per round each, in changing order, and never the set of the call before."""
    calls: list[tuple[str, int]] = []
    for name in "abc":
        monkeypatch.setitem(PEERS, name, recording(calls, name))
    plan = Plan(backends=(), peers=("a", "b", "c"), seconds=0.0, cold_bytes=50_000, least_rounds=8)
    result = measure_cell(small(), plan)
    rounds = [calls[3 + 3 * i : 6 + 3 * i] for i in range(8)]  # the first three are the comparison
    assert all(sorted(name for name, _ in one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(name for name, _ in one) for one in rounds}) >= 3
    assert result.num_sets > 2
    indices = [index for one in rounds for _, index in one]
    assert all(a != b for a, b in itertools.pairwise(indices))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fast for nothing."""
    monkeypatch.setitem(PEERS, "liar", recording([], "liar", factor=1.5))
    result = measure_cell(small(), Plan(backends=(), peers=("liar",), seconds=0.0, cold_bytes=1))
    liar = row(result, "liar")
    assert liar.is_wrong and liar.seconds is None
    assert "wrong result: off by 0.5" in liar.note


def test_not_a_number_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN compares with nothing."""
    monkeypatch.setitem(PEERS, "liar", recording([], "liar", factor=torch.nan))
    result = measure_cell(small(), Plan(backends=(), peers=("liar",), seconds=0.0, cold_bytes=1))
    assert row(result, "liar").is_wrong


def test_who_raises_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured all the same."""

    def make(sets: ColdSets) -> Contender:
        def call(index: int) -> Tensor:
            raise RuntimeError("no such kernel\nstack")

        return Contender("broken", call, 1)

    monkeypatch.setitem(PEERS, "broken", Peer(make))
    result = measure_cell(small(), Plan(backends=("torch",), peers=("broken",), seconds=0.0, cold_bytes=1))
    assert row(result, "broken").note == "no such kernel"
    assert row(result, "torch").seconds is not None


def test_a_pool_that_is_too_large_is_left_out() -> None:
    """Before anything is allocated."""
    cell = even_cell(32, 131072, "bf16", 16, (32, 8, 128))
    result = measure_cell(cell, Plan(max_bytes=2**30))
    assert result.rows == ()
    assert result.note == "the pool needs 16.0 GiB, allowed are 1.0 GiB"


def test_a_peer_whose_copy_is_too_large_is_left_out() -> None:
    """The others are measured all the same; the copy that several share counts once."""
    cell = small("bf16", context=512)
    plan = Plan(backends=("torch",), peers=("sdpa", "sdpa-rows"), seconds=0.0, cold_bytes=1)
    pool = cell.pool_bytes(1)
    refused = measure_cell(cell, Plan(**{**vars(plan), "max_bytes": pool + cell.float_bytes - 1}))
    assert row(refused, "torch").seconds is not None
    assert row(refused, "sdpa").note == "needs 0.0 GiB more, 0.0 GiB are left"
    taken = measure_cell(cell, Plan(**{**vars(plan), "max_bytes": pool + cell.float_bytes}))
    assert row(taken, "sdpa").seconds is not None and row(taken, "sdpa-rows").seconds is not None


@pytest.mark.parametrize("names", [{"backends": ("fast",)}, {"peers": ("fast",)}])
def test_unknown_names_are_refused(names: dict[str, Any]) -> None:
    """With the names there are."""
    with pytest.raises(PagedKVError, match=r"no (attention backend|peer) 'fast', there are: \w+, "):
        Plan(**names)


@pytest.mark.parametrize(("lens", "heads"), [((), HEADS), ((4, 0), HEADS), ((4,), (3, 2, 16))])
def test_impossible_cells_are_refused(lens: tuple[int, ...], heads: tuple[int, int, int]) -> None:
    """An empty sequence has nothing to read."""
    with pytest.raises(PagedKVError):
        Cell(lens, "bf16", 16, *heads)


def test_conditions_say_what_the_machine_is() -> None:
    """Enough to judge a table by."""
    found = conditions()
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert {"pagedkv", "python", "torch", "numpy"} <= set(found["versions"])
    assert 2**18 <= last_level_cache_bytes() <= 2**40
    assert available_bytes() > 0


def test_the_slow_take_part_in_the_first_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would use up the time of the others; ratios are taken where both took part."""
    now = itertools.count(step=1e-3)  # a clock that only the slow one moves on by more than a tick
    monkeypatch.setattr("pagedkv.attention.bench.rounds.time.perf_counter", lambda: next(now))
    monkeypatch.setitem(PEERS, "quick", recording([], "quick"))

    def make(sets: ColdSets) -> Contender:
        def call(index: int) -> Tensor:
            for _ in range(20):
                next(now)
            return expected(sets, index).to(sets.q.dtype)

        return Contender("slow", call, sets.cell.kv_bytes)

    monkeypatch.setitem(PEERS, "slow", Peer(make))
    result = measure_cell(small(), Plan(backends=(), peers=("quick", "slow"), seconds=0.3, cold_bytes=1))
    assert row(result, "slow").rounds == Plan().least_rounds < row(result, "quick").rounds
    assert row(result, "slow").of_ceiling is not None


def test_cpu_time_does_not_count_waiting() -> None:
    """What another program does in between is not the contender's."""

    def call(index: int) -> Tensor:
        time.sleep(0.05)
        return torch.empty(0)

    asleep = Contender("asleep", call, 1)
    assert call_seconds(asleep, 0, "cpu", "cpu") < 0.04 < call_seconds(asleep, 0, "cpu", "wall")


def test_cpu_time_needs_one_thread() -> None:
    """The clock of the calling thread does not see the others."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(PagedKVError, match="needs one thread on a CPU, got 2 threads"):
            Plan(clock="cpu")
        torch.set_num_threads(1)
        assert Plan(clock="cpu").clock == "cpu"
    finally:
        torch.set_num_threads(before)
