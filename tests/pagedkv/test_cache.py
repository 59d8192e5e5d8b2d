"""PagedKVCache: the manager and the storage stay in step, also when a call is refused."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pagedkv
from pagedkv import (
    KVCacheManager,
    KVCacheSpec,
    Media,
    Namespace,
    NeverFits,
    PagedKVCache,
    PagedKVError,
    SequenceError,
)
from pagedkv.attention import paged_attention
from pagedkv.block_tables import NULL_BLOCK, SeqId
from pagedkv.page_table import PAD_SLOT
from pagedkv.quantization import dequantize, quantize
from pagedkv.spec import LayerSpec
from pagedkv.storage import STORAGE_DTYPES, KVPair, Layout

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, V_DIM = 8, 4, 4, 6
# two groups of layers, so that a copy has to touch several allocations
LAYERS = (LayerSpec(2, 8, V_DIM), LayerSpec(1, 16), LayerSpec(2, 8, V_DIM))

DTYPES = list(STORAGE_DTYPES)
LAYOUTS: list[Layout] = ["HND", "NHD"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Grow = Callable[[PagedKVCache, SeqId], bool]
GROW: dict[str, Grow] = {
    "step": lambda cache, seq_id: cache.step([seq_id]),
    "append": lambda cache, seq_id: cache.step([seq_id]),
    "append 3": lambda cache, seq_id: cache.step([seq_id], 3),
}
every_growth = pytest.mark.parametrize("grow", GROW.values(), ids=GROW)


def make(dtype: str = "fp32", layout: Layout = "HND", *, prefix_caching: bool = True) -> PagedKVCache:
    policy = "lru" if prefix_caching else None
    manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, max_seqs=MAX_SEQS, policy=policy)
    return PagedKVCache(KVCacheSpec(LAYERS, dtype, BLOCK_SIZE), NUM_BLOCKS, layout=layout, manager=manager)


def vectors(layer: int, n: int, seed: int) -> KVPair:
    shape, generator = LAYERS[layer], torch.Generator().manual_seed(100 * seed + layer)
    return KVPair(
        torch.randn(n, shape.num_kv_heads, shape.head_dim, generator=generator),
        torch.randn(n, shape.num_kv_heads, shape.value_dim, generator=generator),
    )


def write(cache: PagedKVCache, slots: Tensor, seed: int) -> None:
    for layer in range(len(LAYERS)):
        cache.write(layer, *vectors(layer, len(slots), seed), slots)


def fill(cache: PagedKVCache, seq_id: SeqId, tokens: Sequence[int], seed: int = 0) -> None:
    """Open a sequence, write all of its prompt that is not cached, and commit it."""
    opened = cache.open(seq_id, tokens)
    assert opened is not None
    write(cache, cache.slots(seq_id, opened.num_cached_tokens), seed)
    cache.commit(seq_id, tokens[opened.num_cached_tokens :])


def gather(cache: PagedKVCache, seq_id: SeqId, layer: int, stop: int | None = None) -> KVPair:
    """The first tokens of a sequence, by default all of them."""
    tables = cache.manager.tables
    stop = tables.num_tokens(seq_id) if stop is None else stop
    return cache.storage.gather(layer, tables.block_ids(seq_id), stop)


def contents(cache: PagedKVCache, seq_id: SeqId, num_tokens: int) -> list[Tensor]:
    """The first tokens of a sequence, keys and values of every layer."""
    return [x for layer in range(len(LAYERS)) for x in gather(cache, seq_id, layer, num_tokens)]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class State(NamedTuple):
    """Everything that a refused call must leave as it was."""

    stats: object
    tables: tuple[object, ...]
    committed: dict[SeqId, int]
    buffers: list[bytes]


def state(cache: PagedKVCache) -> State:
    cache.manager.check_invariants()
    tables = cache.manager._tables
    return State(
        cache.manager.stats(),
        (tables.blocks.tolist(), tables.seq_len.tolist(), tables.seq_ids, tables.num_free_rows),
        {seq_id: cache.manager.tables.num_committed(seq_id) for seq_id in tables.seq_ids},
        [buffer.contiguous().view(torch.uint8).numpy().tobytes() for buffer in cache.storage.buffers],
    )


# -- copy-on-write


@every_dtype
@every_layout
@every_growth
def test_growing_a_fork_copies_the_whole_tail(dtype: str, layout: Layout, grow: Grow) -> None:
    """The new tail equals the shared one in every layer, scales included, before anything is written."""
    cache = make(dtype, layout)
    fill(cache, "parent", range(6))
    assert cache.fork("parent", "child")
    before = contents(cache, "parent", 6)
    assert grow(cache, "child")

    parent, child = (cache.manager.tables.block_ids(i).tolist() for i in ("parent", "child"))
    assert parent[0] == child[0] and parent[1] != child[1]
    assert len(cache.storage.buffers) == (8 if dtype == "int8" else 4)
    for buffer in cache.storage.buffers:
        raw = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
        assert torch.equal(raw[:, child[1]], raw[:, parent[1]])
        assert bool(raw[:, child[1]].any())
    assert same(contents(cache, "child", 6), before)


@every_dtype
@every_growth
def test_writing_to_a_fork_leaves_the_other_unchanged(dtype: str, grow: Grow) -> None:
    """Parent and child each read their own tokens after both have written beyond the shared tail."""
    cache = make(dtype)
    fill(cache, "parent", range(6))
    assert cache.fork("parent", "child")
    shared = contents(cache, "parent", 6)
    for seed, seq_id in enumerate(("child", "parent"), 1):
        assert grow(cache, seq_id)
        write(cache, cache.slots(seq_id, 6), seed)
    for seed, seq_id in enumerate(("child", "parent"), 1):
        length = cache.manager.tables.num_tokens(seq_id)
        assert same(contents(cache, seq_id, 6), shared)
        for layer in range(len(LAYERS)):
            for got, new in zip(gather(cache, seq_id, layer), vectors(layer, length - 6, seed), strict=True):
                stored = dequantize(*quantize(new)) if dtype == "int8" else new.to(STORAGE_DTYPES[dtype])
                assert torch.equal(got[6:], stored)


def test_forks_that_grow_in_one_step_each_get_the_tail() -> None:
    """Three holders of one tail step together: the copies are made from it before anybody writes."""
    cache = make("int8")
    fill(cache, "a", range(6))
    assert cache.fork("a", "b") and cache.fork("b", "c")
    before = contents(cache, "a", 6)
    assert cache.step(["a", "b", "c"])
    tails = {int(cache.manager.tables.block_ids(i)[1]) for i in "abc"}
    assert len(tails) == 3
    assert cache.manager.stats().copied_blocks == 2
    write(cache, cache.batch(["a", "b", "c"]).slot_mapping, seed=1)
    for seq_id in "abc":
        assert same(contents(cache, seq_id, 6), before)


def test_a_holder_that_does_not_grow_keeps_its_tail_to_itself() -> None:
    """While one holder stands still, nobody may write into the shared tail, not even beyond its tokens."""
    cache = make("int8")
    fill(cache, "still", range(6))
    for child in "abc":
        assert cache.fork("still", child)
    tail = int(cache.manager.tables.block_ids("still")[1])
    before = [buffer[:, tail].clone() for buffer in cache.storage.buffers]
    assert cache.step(["a", "b", "c"])
    assert cache.manager.stats().copied_blocks == 3
    write(cache, cache.batch(["a", "b", "c"]).slot_mapping, seed=1)
    assert same([buffer[:, tail] for buffer in cache.storage.buffers], before)


@pytest.mark.parametrize("shared", ["by a sequence", "by a cached child", "by nobody"])
def test_growth_after_a_cut_into_a_cached_block_changes_nothing_that_is_hit(shared: str) -> None:
    """What others can see is copied; what nobody else can see leaves the cache and is written in place."""
    cache = make("int8")
    fill(cache, "a", range(12 if shared == "by a cached child" else 8))
    before = contents(cache, "a", 8)
    if shared == "by a sequence":
        assert cache.open("other", [*range(8), 98]) == (9, 8)
    cache.truncate("a", 6)
    assert cache.step(["a"], 2)
    write(cache, cache.slots("a", 6), seed=1)
    assert same(contents(cache, "a", 6), [x[:6] for x in before])
    assert not same(contents(cache, "a", 8), before)
    assert cache.manager.stats().copied_blocks == (0 if shared == "by nobody" else 1)

    hit = 4 if shared == "by nobody" else 8
    assert cache.open("b", [*range(8), 99]) == (9, hit)
    assert same(contents(cache, "b", hit), [x[:hit] for x in before])
    cache.commit("a", [60, 61])
    assert cache.open("c", [*range(6), 60, 61, 99]) == (9, 8)
    assert same(contents(cache, "c", 8), contents(cache, "a", 8))


# -- copies that wait, and copies that fail


def test_no_copy_is_left_pending() -> None:
    """What grows through the cache needs no ``take_copies`` from the caller."""
    cache = make()
    fill(cache, "a", range(6))
    assert cache.fork("a", "b")
    assert cache.step(["b"])
    assert len(cache.manager.copies.take().src) == 0


def test_a_write_runs_the_copies_that_growth_through_the_manager_left() -> None:
    """Whoever grows ``cache.manager`` itself loses no write to a copy that comes later."""
    cache = make("int8")
    fill(cache, "a", range(6))
    assert cache.fork("a", "b")
    before = contents(cache, "a", 6)
    assert cache.manager.append("b")
    assert len(cache.manager.copies.pending.src) == 1
    write(cache, cache.slots("b", 6), seed=1)
    assert len(cache.manager.copies.pending.src) == 0
    assert same(contents(cache, "b", 6), before)
    assert cache.step(["a"])
    write(cache, cache.slots("a", 6), seed=2)
    alone = make("int8")
    fill(alone, "b", range(6))
    assert alone.step(["b"])
    write(alone, alone.slots("b", 6), seed=1)
    assert same(contents(cache, "b", 7), contents(alone, "b", 7))


@every_growth
def test_a_copy_that_fails_stays_pending_and_the_data_is_right_afterwards(
    grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the copy: no commit passes it, and the next write, growth or commit finds it done."""
    cache = make("int8")
    fill(cache, "a", range(6))
    assert cache.fork("a", "b")
    before = contents(cache, "a", 6)

    def fail(*args: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(cache.storage, "copy_blocks", fail)
        with pytest.raises(MemoryError, match="injected"):
            grow(cache, "b")
        assert len(cache.manager.copies.pending.src) == 1
        failed = state(cache)
        with pytest.raises(MemoryError, match="injected"):
            write(cache, cache.slots("b", 6), seed=1)
        with pytest.raises(MemoryError, match="injected"):
            cache.step(["a"])
        cache.truncate("a", 6)
        with pytest.raises(SequenceError, match="awaits its copy"):
            cache.commit("b", [60])
        with pytest.raises(SequenceError, match="awaits its copy"):
            cache.commit_step(["b"], [60])
        assert state(cache).buffers == failed.buffers
    write(cache, cache.slots("b", 6), seed=1)
    cache.commit("b", range(60, 60 + cache.manager.tables.num_tokens("b") - 6))
    assert len(cache.manager.copies.pending.src) == 0
    assert same(contents(cache, "a", 6), before) and same(contents(cache, "b", 6), before)
    assert cache.step(["a"])
    write(cache, cache.slots("a", 6), seed=2)
    n = cache.manager.tables.num_tokens("b")
    for layer in range(len(LAYERS)):
        for got, new in zip(gather(cache, "b", layer), vectors(layer, n - 6, seed=1), strict=True):
            assert torch.equal(got[6:], dequantize(*quantize(new)))


# -- batches


def test_batch_has_the_documented_shapes_and_dtypes() -> None:
    """Tables as wide as the longest sequence needs, int32 but for the slots, on the storage's device."""
    cache = make()
    fill(cache, "short", range(2))
    fill(cache, "long", range(10, 19))
    assert cache.step(["short", "long"])
    batch = cache.batch(["long", "short"])
    assert (batch.block_tables.shape, batch.block_tables.dtype) == ((2, 3), torch.int32)
    assert (batch.seq_lens.tolist(), batch.seq_lens.dtype) == ([10, 3], torch.int32)
    assert (batch.slot_mapping.shape, batch.slot_mapping.dtype) == ((2,), torch.int64)
    assert {x.device for x in batch} == {cache.storage.device}
    assert (batch.positions.tolist(), batch.positions.dtype) == ([9, 2], torch.int64)
    assert batch.positions.device == cache.storage.device


def test_batch_pads_short_and_empty_sequences() -> None:
    """Columns beyond a sequence's blocks hold NULL_BLOCK, and an empty sequence has no slot to write."""
    cache = make()
    fill(cache, "long", range(9))
    fill(cache, "short", [50, 51, 52])
    fill(cache, "empty", [])
    batch = cache.batch(["short", "empty", "long"])
    tables = cache.manager.tables
    assert batch.block_tables.tolist() == [
        [*tables.block_ids("short").tolist(), NULL_BLOCK, NULL_BLOCK],
        [NULL_BLOCK] * 3,
        tables.block_ids("long").tolist(),
    ]
    assert batch.seq_lens.tolist() == [3, 0, 9]
    newest = [int(cache.slots("short", 2)[0]), PAD_SLOT, int(cache.slots("long", 8)[0])]
    assert batch.slot_mapping.tolist() == newest


@pytest.mark.parametrize("seq_ids", [[], ["empty"]], ids=["no sequence", "an empty sequence"])
def test_batch_without_any_token_can_be_written_and_attended(seq_ids: list[str]) -> None:
    """The edge cases are valid arguments of everything that takes a batch, and write nothing."""
    cache = make()
    fill(cache, "empty", [])
    before = state(cache)
    batch = cache.batch(seq_ids)
    n = len(seq_ids)
    assert batch.block_tables.shape == (n, 1)
    write(cache, batch.slot_mapping, seed=1)
    kv = cache.storage.layer(0)
    out = paged_attention(torch.ones(n, 2, 8), kv.k, kv.v, batch.block_tables, batch.seq_lens)
    assert torch.equal(out, torch.zeros(n, 2, V_DIM))
    assert state(cache) == before


def test_batch_is_a_snapshot() -> None:
    """A batch belongs to the caller: later calls do not change it, and changing it changes no table."""
    cache = make()
    fill(cache, "a", range(5))
    batch = cache.batch(["a"])
    old = [x.clone() for x in batch]
    assert cache.step(["a"], 8)
    assert same(batch, old)
    before = state(cache)
    for x in batch:
        x.fill_(3)
    assert state(cache) == before


def test_batch_attends_to_what_was_written() -> None:
    """Attention over a batch equals plain attention over each gathered sequence."""
    cache = make()
    fill(cache, "a", range(7), seed=1)
    fill(cache, "b", range(20, 23), seed=2)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    kv, batch = cache.storage.layer(2), cache.batch(["a", "b"])
    out = paged_attention(q, kv.k, kv.v, batch.block_tables, batch.seq_lens)
    for row, seq_id in enumerate("ab"):
        k, v = (x.repeat_interleave(2, dim=1) for x in gather(cache, seq_id, 2))
        weights = torch.einsum("hd,nhd->hn", q[row], k).div(8**0.5).softmax(dim=1)
        torch.testing.assert_close(out[row], torch.einsum("hn,nhd->hd", weights, v))


# -- slots and gather


def test_slots_name_the_positions_in_order() -> None:
    """Slots are int64 and walk through the block table; a range gives its part of the whole."""
    cache = make()
    fill(cache, "other", range(3))
    fill(cache, "a", range(10, 20))
    slots, blocks = cache.slots("a", 0), cache.manager.tables.block_ids("a").tolist()
    assert slots.dtype == torch.int64
    assert slots.tolist() == [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(10)]
    assert torch.equal(cache.slots("a", 3, 9), slots[3:9])
    assert torch.equal(cache.slots("a", 10), slots[10:])


def test_slots_are_by_default_those_not_committed_yet() -> None:
    """A prefix hit and what was committed may be shared: the default never names their slots."""
    cache = make()
    fill(cache, "a", range(2 * BLOCK_SIZE + 1))
    opened = cache.open("b", [*range(2 * BLOCK_SIZE), 77, 78])
    assert opened is not None
    assert opened.num_cached_tokens == 2 * BLOCK_SIZE
    assert torch.equal(cache.slots("b"), cache.slots("b", 2 * BLOCK_SIZE))
    assert len(cache.slots("b")) == 2
    assert len(cache.slots("a")) == 0


@every_dtype
@every_layout
def test_gather_returns_what_was_written(dtype: str, layout: Layout) -> None:
    """Keys and values of every layer come back contiguous, in order, in the storage dtype (int8: fp32)."""
    cache = make(dtype, layout)
    fill(cache, "a", range(9), seed=1)
    for layer in range(len(LAYERS)):
        for got, new in zip(gather(cache, "a", layer), vectors(layer, 9, seed=1), strict=True):
            stored = dequantize(*quantize(new)) if dtype == "int8" else new.to(STORAGE_DTYPES[dtype])
            assert got.dtype == stored.dtype and got.is_contiguous()
            assert torch.equal(got.float(), stored.float())


def test_gather_reads_a_shared_prefix() -> None:
    """A second sequence reads the cached part as the first wrote it, and the rest as its own."""
    cache = make()
    fill(cache, "a", range(9), seed=1)
    fill(cache, "b", [*range(8), 30, 31], seed=2)
    assert same(contents(cache, "b", 8), contents(cache, "a", 8))
    assert torch.equal(gather(cache, "b", 1).k[8:], vectors(1, 2, seed=2).k)


@every_dtype
def test_gather_stops_where_it_is_told(dtype: str) -> None:
    """The first ``stop`` tokens, anywhere in a block, are the first of the whole."""
    cache = make(dtype)
    fill(cache, "a", range(9))
    for layer in range(len(LAYERS)):
        whole = gather(cache, "a", layer)
        assert same(gather(cache, "a", layer, 9), whole)
        for stop in (0, 1, 4, 5, 8):
            part = gather(cache, "a", layer, stop)
            assert same(part, [x[:stop] for x in whole])
            assert part.k.is_contiguous() and part.v.is_contiguous()


def test_gather_of_an_empty_sequence_is_empty() -> None:
    """No tokens give tensors of zero tokens, with the shapes of the layer."""
    cache = make()
    fill(cache, "a", [])
    k, v = gather(cache, "a", 0)
    assert (k.shape, v.shape) == ((0, 2, 8), (0, 2, V_DIM))


# -- refusals


def _write_layer_1(cache: PagedKVCache, slots: Sequence[int], n: int | None = None) -> None:
    cache.write(1, *vectors(1, len(slots) if n is None else n, seed=9), torch.tensor(slots))


Misuse = tuple[type[Exception], Callable[[PagedKVCache], Any]]
# "a" holds 6 committed tokens, "b" the same 6 as a fork, "draft" has a token that is not committed
MISUSE: dict[str, Misuse] = {
    "open an open sequence": (SequenceError, lambda c: c.open("a", [1, 2])),
    "open more than the pool": (NeverFits, lambda c: c.open("new", range(NUM_BLOCKS * BLOCK_SIZE + 1))),
    "open with tokens that are no integers": (PagedKVError, lambda c: c.open("new", [1.5])),
    "append to a sequence that is not open": (SequenceError, lambda c: c.step(["nobody"])),
    "append a negative count": (PagedKVError, lambda c: c.step(["a"], -1)),
    "append more than the pool": (NeverFits, lambda c: c.step(["a"], NUM_BLOCKS * BLOCK_SIZE)),
    "step a sequence that is not open": (SequenceError, lambda c: c.step(["a", "nobody"])),
    "step a sequence twice": (SequenceError, lambda c: c.step(["a", "b", "a"])),
    "commit beyond the end": (SequenceError, lambda c: c.commit("draft", [1, 2])),
    "commit to a sequence that is not open": (SequenceError, lambda c: c.commit("nobody", [1])),
    "fork a sequence that is not open": (SequenceError, lambda c: c.fork("nobody", "new")),
    "fork onto an open sequence": (SequenceError, lambda c: c.fork("a", "b")),
    "fork before the commit": (SequenceError, lambda c: c.fork("draft", "new")),
    "truncate below zero": (SequenceError, lambda c: c.truncate("a", -1)),
    "truncate beyond the end": (SequenceError, lambda c: c.truncate("a", 7)),
    "close a sequence that is not open": (SequenceError, lambda c: c.close("nobody")),
    "slots beyond the end": (SequenceError, lambda c: c.slots("a", 0, 7)),
    "slots of a sequence that is not open": (SequenceError, lambda c: c.slots("nobody")),
    "batch of a sequence twice": (SequenceError, lambda c: c.batch(["a", "a"])),
    "batch of a sequence that is not open": (SequenceError, lambda c: c.batch(["nobody"])),
    "step a negative count": (PagedKVError, lambda c: c.step(["a"], -1)),
    "open with a bad limit": (PagedKVError, lambda c: c.open("new", [1], max_cached_tokens=-1)),
    "open with a bad namespace": (
        PagedKVError,
        lambda c: c.open("new", [1], namespace="tenant"),  # type: ignore[arg-type]
    ),
    "commit media behind the tokens": (
        PagedKVError,
        lambda c: c.commit("draft", [43], media=[Media(4, "cat")]),
    ),
    "commit_step beyond the end": (SequenceError, lambda c: c.commit_step(["draft", "a"], [43, 1])),
    "commit_step of another number of tokens": (SequenceError, lambda c: c.commit_step(["draft"], [])),
    "commit_step of a sequence twice": (
        SequenceError,
        lambda c: c.commit_step(["draft", "draft"], [43, 44]),
    ),
    "layer that is not there": (PagedKVError, lambda c: c.storage.layer(-1)),
    "write to the null block": (PagedKVError, lambda c: _write_layer_1(c, [8, 0])),
    "write beyond the last block": (PagedKVError, lambda c: _write_layer_1(c, [8, 36])),
    "write a slot twice": (PagedKVError, lambda c: _write_layer_1(c, [8, 9, 8])),
    "write another number of tokens": (PagedKVError, lambda c: _write_layer_1(c, [8, 9], n=3)),
    "write the vectors of another layer": (
        PagedKVError,
        lambda c: c.write(1, *vectors(0, 2, seed=9), torch.tensor([8, 9])),
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize(("error", "call"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_refused_and_changes_nothing(
    dtype: str, error: type[Exception], call: Callable[[PagedKVCache], Any]
) -> None:
    """A mistake raises a ValueError; manager, storage and the copies that are due stay as they were."""
    cache = make(dtype)
    fill(cache, "a", range(6))
    assert cache.fork("a", "b")
    fill(cache, "draft", range(40, 43))
    assert cache.step(["draft"])
    before = state(cache)
    with pytest.raises(error) as caught:
        call(cache)
    assert isinstance(caught.value, ValueError) and str(caught.value)
    assert state(cache) == before
    assert len(cache.manager.copies.take().src) == 0


def test_closing_twice_is_refused() -> None:
    """The second close of a sequence raises and leaves what is cached alone."""
    cache = make()
    fill(cache, "a", range(6))
    cache.close("a")
    before = state(cache)
    with pytest.raises(SequenceError, match="'a' is not open"):
        cache.close("a")
    assert state(cache) == before


def almost_full() -> PagedKVCache:
    """Six of eight blocks active, one cached, one free; "a" and "b" share a partial tail."""
    cache = make("int8")
    fill(cache, "gone", range(60, 64))
    cache.close("gone")
    fill(cache, "a", range(6))
    assert cache.fork("a", "b")
    fill(cache, "full", range(20, 36))
    counts = cache.manager.counts
    assert (counts.free, counts.cached, counts.active) == (1, 1, 6)
    return cache


NOT_NOW: dict[str, Callable[[PagedKVCache], Any]] = {
    "open": lambda c: c.open("new", range(80, 89)),
    "append": lambda c: c.step(["full"], 9),
    "append to a shared tail": lambda c: c.step(["a"], 7),
    "step": lambda c: c.step(["a", "b", "full", "last"]),
    "step of several tokens": lambda c: c.step(["full", "last"], 5),
}


@pytest.mark.parametrize("call", NOT_NOW.values(), ids=NOT_NOW)
def test_not_now_is_a_value_and_changes_nothing(call: Callable[[PagedKVCache], Any]) -> None:
    """What does not fit now gives None or False, and evicts and copies nothing."""
    cache = almost_full()
    fill(cache, "last", [])
    assert cache.step(["last"], 4)
    cache.commit("last", range(90, 94))
    before = state(cache)
    assert call(cache) in (None, False)
    assert state(cache) == before


def test_step_of_a_batch_grows_all_or_none() -> None:
    """One row that does not fit stops the others too; after a close the same call succeeds."""
    cache = almost_full()
    fill(cache, "last", range(70, 78))
    before = state(cache)
    assert not cache.step(["b", "full"])
    assert state(cache) == before
    cache.close("last")
    assert cache.step(["b", "full"])
    assert cache.batch(["b", "full"]).seq_lens.tolist() == [7, 17]


def test_fork_and_open_give_way_when_all_rows_are_taken() -> None:
    """At ``max_seqs`` open sequences fork is False and open is None, however many blocks are free."""
    cache = make()
    for number in range(MAX_SEQS):
        fill(cache, number, [number])
    before = state(cache)
    assert not cache.fork(0, "new")
    assert cache.open("new", [1]) is None
    assert state(cache) == before
    cache.close(3)
    assert cache.fork(0, "new")


# -- the object


def test_manager_and_storage_agree_about_the_blocks() -> None:
    """Both have the blocks, block size and bytes that the spec and the arguments say."""
    cache = make("int8", "NHD")
    assert cache.manager.num_blocks == cache.storage.num_blocks == NUM_BLOCKS
    assert cache.manager.block_size == cache.storage.block_size == BLOCK_SIZE
    assert cache.storage.layout == "NHD"
    fill(cache, "a", range(6))
    spec = cache.storage.spec
    size = cache.manager.stats().bytes(spec)
    assert size.reserved == NUM_BLOCKS * spec.bytes_per_block == cache.storage.nbytes - spec.bytes_per_block
    assert (size.active, size.used) == (2 * spec.bytes_per_block, 6 * spec.bytes_per_token)


def test_prefix_caching_can_be_switched_off() -> None:
    """Without it an equal prompt shares nothing, and forks still copy their tails."""
    cache = make(prefix_caching=False)
    fill(cache, "a", range(8))
    assert cache.open("b", range(8)) == (8, 0)
    fill(cache, "c", range(6), seed=1)
    before = contents(cache, "c", 6)
    assert cache.fork("c", "d") and cache.step(["d"])
    write(cache, cache.batch(["d"]).slot_mapping, seed=2)
    assert same(contents(cache, "c", 6), before) and same(contents(cache, "d", 6), before)


def test_everything_of_open_and_commit_reaches_the_manager() -> None:
    """Namespace, media and the limit of cached tokens keep apart and share as they do without tensors."""
    cache = make()
    tenant, cat = Namespace("tenant"), Media(5, "cat")
    assert cache.open("a", range(8), namespace=tenant) == (8, 0)
    cache.commit("a", range(8), media=[cat])
    cache.truncate("a", 8)
    opens: list[tuple[dict[str, Any], int]] = [
        ({"namespace": tenant, "media": [cat], "max_cached_tokens": 8}, 8),
        ({"namespace": tenant, "media": [cat]}, 4),
        ({"namespace": tenant, "max_cached_tokens": 8}, 4),
        ({"media": [cat], "max_cached_tokens": 8}, 0),
        ({"namespace": tenant, "media": [cat], "max_cached_tokens": 0}, 0),
    ]
    for options, hit in opens:
        assert cache.open("b", range(8), **options) == (8, hit)
        assert cache.manager.tables.num_tokens("b") == 8
        cache.close("b")


def test_commit_step_equals_commit_one_by_one() -> None:
    """A batch of single tokens, some of which fill a block."""
    caches = make(), make()
    for cache in caches:
        fill(cache, "a", range(7))
        fill(cache, "b", range(20, 25))
        assert cache.step(["a", "b"])
        write(cache, cache.batch(["a", "b"]).slot_mapping, seed=1)
    caches[0].commit_step(["a", "b"], torch.tensor([7, 25]))
    caches[1].commit("a", [7])
    caches[1].commit("b", [25])
    assert state(caches[0]) == state(caches[1])
    assert [cache.open("c", range(9)) for cache in caches] == [(9, 8)] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": 4, "manager": KVCacheManager(5, 16)},
        {"num_blocks": 4, "manager": KVCacheManager(4, 8)},
        {"num_blocks": 4, "layout": "X"},
    ],
    ids=["no block", "negative", "more blocks", "smaller blocks", "layout"],
)
def test_impossible_sizes_are_refused(arguments: dict[str, Any]) -> None:
    """A cache without blocks, of an unknown layout, or with a manager of other blocks raises PagedKVError."""
    with pytest.raises(PagedKVError):
        PagedKVCache(KVCacheSpec(LAYERS), **arguments)


# -- the package


LAZY_IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import pagedkv
assert "torch" not in sys.modules, "import pagedkv imported torch"
assert pagedkv.KVCacheManager(num_blocks=4).open("a", [1, 2]) == (2, 0)
assert not hasattr(pagedkv, "no_such_name")
assert {"PagedKVCache", "DecodeBatch", "KVStorage"} <= set(dir(pagedkv))
assert "torch" not in sys.modules, "a manager imported torch"
assert pagedkv.PagedKVCache.__name__ == "PagedKVCache"
assert "torch" in sys.modules
from pagedkv import DecodeBatch, KVStorage
"""


def test_torch_is_imported_with_the_cache_and_not_before() -> None:
    """``import pagedkv`` and its manager run without torch; asking for ``PagedKVCache`` imports it."""
    root = Path(pagedkv.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", LAZY_IMPORT, str(root)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_every_public_name_exists() -> None:
    """All of ``__all__`` can be had, and the lazy names are the classes of their modules."""
    for name in pagedkv.__all__:
        assert getattr(pagedkv, name) is not None
    assert pagedkv.PagedKVCache is sys.modules["pagedkv.cache"].PagedKVCache
    assert pagedkv.KVStorage is sys.modules["pagedkv.storage"].KVStorage


def test_dir_lists_the_names_that_are_imported_late() -> None:
    """Completion shows everything public, before torch is imported as well."""
    assert set(pagedkv.__all__) <= set(dir(pagedkv))
    assert {"__version__", "__name__"} <= set(dir(pagedkv))


def test_unknown_attribute_raises_attribute_error() -> None:
    """A name that does not exist is an AttributeError that says so, also for ``from pagedkv import``."""
    name = "no_such_name"
    with pytest.raises(AttributeError, match="'pagedkv' has no attribute 'no_such_name'"):
        getattr(pagedkv, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from pagedkv import {name}")


def test_a_wholly_cached_partial_hit_is_read_without_a_write() -> None:
    """The copy that a partial hit asks for is run by ``open``: nothing else has to be written first."""
    cache = make()
    prompt = list(range(BLOCK_SIZE + 3))
    fill(cache, "a", [*prompt, 99])
    half = prompt[: BLOCK_SIZE + 2]
    opened = cache.open("b", half, partial_hits=True, max_cached_tokens=len(half))
    assert opened is not None and opened.num_cached_tokens == len(half)
    assert contents(cache, "b", len(half))[0].abs().sum() > 0
    for mine, theirs in zip(contents(cache, "b", len(half)), contents(cache, "a", len(half)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("num_blocks", [3, 40])
def test_a_resized_cache_holds_what_it_held(dtype: str, num_blocks: int) -> None:
    """Grown or shrunk: open sequences read back the same values and scales, under whatever ids."""
    cache = make(dtype)
    length = BLOCK_SIZE + 2
    fill(cache, "old", [1] * length, seed=1)
    fill(cache, "a", [2] * length, seed=2)
    cache.close("old")
    before = contents(cache, "a", length)
    fence = cache.manager.fences.open()
    assert cache.resize(num_blocks) is False
    cache.manager.fences.signal(fence)
    assert cache.resize(num_blocks) is True
    assert cache.storage.num_blocks == cache.manager.num_blocks == num_blocks
    for now, then in zip(contents(cache, "a", length), before, strict=True):
        assert torch.equal(now, then)
    cache.manager.check_invariants()
    assert cache.resize(1) is False
