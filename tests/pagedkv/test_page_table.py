"""The page table: both batch dialects against one loop per sequence, and buffers refused before any write."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pagedkv import NULL_BLOCK, PAD_SLOT, KVCacheManager
from pagedkv.block_tables import BlockTables, SeqId
from pagedkv.errors import PagedKVError, SequenceError
from pagedkv.page_table import PageTable

GARBAGE = 777_777


def make_table(lengths: Sequence[int], block_size: int, seed: int = 0) -> PageTable:
    """One sequence ``i`` per length, with random distinct block ids."""
    rng = random.Random(seed)
    counts = [-(-n // block_size) for n in lengths]
    table = PageTable(BlockTables(len(lengths) + 1, max([*counts, 1]), block_size))
    blocks = rng.sample(range(1, sum(counts) + 50), sum(counts))
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        add(table, i, [blocks.pop() for _ in range(count)], length)
    return table


def add(table: PageTable, seq_id: SeqId, blocks: Sequence[int], num_tokens: int) -> int:
    row = table._tables.add(seq_id)
    table._tables.fill(row, np.array(blocks, np.int32), num_tokens, 0)
    return row


def snapshot(table: PageTable) -> tuple[object, ...]:
    return (
        table._tables.blocks.tolist(),
        table._tables.seq_len.tolist(),
        dict(table._tables._rows),
        list(table._tables._free_rows),
    )


def slots_by_loop(table: PageTable, seq_id: SeqId, start: int, stop: int) -> list[int]:
    """One position at a time, in Python integers."""
    blocks = [int(b) for b in table.block_ids(seq_id)]
    size = table.block_size
    return [blocks[p // size] * size + p % size for p in range(start, stop)]


def garbage(*shape: int, dtype: Any = np.int32) -> Any:
    return np.full(shape, GARBAGE, dtype)


RANDOM_BATCHES = [
    pytest.param(seed, block_size, id=f"seed{seed}-block{block_size}")
    for block_size in (1, 3, 16)
    for seed in range(8)
]


def random_batch(seed: int, block_size: int) -> tuple[PageTable, list[int], random.Random]:
    """A table of up to ten sequences, some of them empty, and a random batch of them in random order."""
    rng = random.Random(seed)
    edges = [0, 1, block_size, block_size + 1, 2 * block_size]
    lengths = [rng.choice([*edges, rng.randint(0, 5 * block_size)]) for _ in range(rng.randint(0, 10))]
    table = make_table(lengths, block_size, seed)
    return table, rng.sample(range(len(lengths)), rng.randint(0, len(lengths))), rng


@pytest.mark.parametrize(("seed", "block_size"), RANDOM_BATCHES)
def test_block_tables_equal_a_loop_and_overwrite_every_stale_entry(seed: int, block_size: int) -> None:
    """Tables, lengths and newest slots match a per-sequence loop; padding writes nothing."""
    table, batch, rng = random_batch(seed, block_size)
    rows, extra_columns = len(batch) + rng.randint(0, 3), rng.randint(0, 3)
    width = max([len(table.block_ids(i)) for i in batch], default=0)
    tables, lens = garbage(rows, width + extra_columns), garbage(rows)
    slots = garbage(rows, dtype=np.int64)
    before = snapshot(table)
    assert table.write_block_tables(batch, tables, lens, slots) == width
    assert snapshot(table) == before
    for row in range(rows):
        seq_id = batch[row] if row < len(batch) else None
        blocks = [] if seq_id is None else table.block_ids(seq_id).tolist()
        length = 0 if seq_id is None else table.num_tokens(seq_id)
        assert tables[row].tolist() == blocks + [NULL_BLOCK] * (tables.shape[1] - len(blocks))
        assert lens[row] == length
        assert slots[row] == (slots_by_loop(table, seq_id, length - 1, length)[0] if length else PAD_SLOT)


@pytest.mark.parametrize(("seed", "block_size"), RANDOM_BATCHES)
def test_csr_equals_a_loop_and_overwrites_every_stale_entry(seed: int, block_size: int) -> None:
    """Row pointers, indices and last page lengths match a per-sequence loop; padding owns no page."""
    table, batch, rng = random_batch(seed, block_size)
    rows = len(batch) + rng.randint(0, 3)
    pages = [table.block_ids(i).tolist() for i in batch]
    total = sum(map(len, pages))
    indptr, indices, last = garbage(rows + 1), garbage(total + rng.randint(0, 4)), garbage(rows)
    assert table.write_csr(batch, indptr, indices, last) == total
    assert indptr[0] == 0
    assert indices[total:].tolist() == [NULL_BLOCK] * (len(indices) - total)
    for row in range(rows):
        expected = pages[row] if row < len(batch) else []
        length = table.num_tokens(batch[row]) if row < len(batch) else 0
        assert indices[indptr[row] : indptr[row + 1]].tolist() == expected
        assert last[row] == (length - (len(expected) - 1) * block_size if length else 0)


@pytest.mark.parametrize(("seed", "block_size"), RANDOM_BATCHES)
def test_slots_of_any_chunk_equal_a_loop(seed: int, block_size: int) -> None:
    """The slots of a prefill chunk match a per-position loop for every start and stop."""
    table, batch, rng = random_batch(seed, block_size)
    for seq_id in batch:
        length = table.num_tokens(seq_id)
        start = rng.randint(0, length)
        stop = rng.randint(start, length)
        slots = table.slots(seq_id, start, stop)
        assert slots.dtype == np.int64
        assert slots.tolist() == slots_by_loop(table, seq_id, start, stop)
        assert table.slots(seq_id).tolist() == slots_by_loop(table, seq_id, 0, length)


def test_slots_without_a_mapping_are_not_needed() -> None:
    """``slot_mapping`` may be left out, as for a prefill."""
    tables, lens = garbage(1, 1), garbage(1)
    assert make_table([3], 4).write_block_tables([0], tables, lens) == 1
    assert lens.tolist() == [3]


def test_an_empty_batch_pads_every_row_of_both_dialects() -> None:
    """No sequences: every row is null, every slot is PAD_SLOT, every row pointer is 0."""
    table = make_table([5], 4)
    tables, lens, slots = garbage(2, 3), garbage(2), garbage(2, dtype=np.int64)
    assert table.write_block_tables([], tables, lens, slots) == 0
    assert (tables.any(), lens.tolist(), slots.tolist()) == (False, [0, 0], [PAD_SLOT] * 2)
    indptr, indices, last = garbage(3), garbage(2), garbage(2)
    assert table.write_csr([], indptr, indices, last) == 0
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 0, 0], [0, 0], [0, 0])


def test_an_empty_sequence_writes_nothing_in_both_dialects() -> None:
    """A sequence of no tokens between two others has no page, no length and no slot."""
    table = make_table([4, 0, 1], 4)
    tables, lens, slots = garbage(3, 1), garbage(3), garbage(3, dtype=np.int64)
    table.write_block_tables([0, 1, 2], tables, lens, slots)
    assert (tables[1].tolist(), lens.tolist(), slots[1]) == ([NULL_BLOCK], [4, 0, 1], PAD_SLOT)
    indptr, indices, last = garbage(4), garbage(2), garbage(3)
    table.write_csr([0, 1, 2], indptr, indices, last)
    assert (indptr.tolist(), last.tolist()) == ([0, 1, 1, 2], [4, 0, 1])


def block_tables_buffers() -> dict[str, Any]:
    return {
        "block_tables": garbage(3, 2),
        "seq_lens": garbage(3),
        "slot_mapping": garbage(3, dtype=np.int64),
    }


def csr_buffers() -> dict[str, Any]:
    return {"kv_indptr": garbage(4), "kv_indices": garbage(4), "kv_last_page_len": garbage(3)}


def read_only(buffer: Any) -> Any:
    buffer.flags.writeable = False
    return buffer


BAD_BLOCK_TABLES: dict[str, dict[str, Any]] = {
    "tables_int64": {"block_tables": garbage(3, 2, dtype=np.int64)},
    "tables_uint32": {"block_tables": garbage(3, 2, dtype=np.uint32)},
    "tables_narrow": {"block_tables": garbage(3, 1)},
    "tables_one_dimension": {"block_tables": garbage(6)},
    "tables_of_another_batch": {"block_tables": garbage(4, 2)},
    "lens_int64": {"seq_lens": garbage(3, dtype=np.int64)},
    "lens_float": {"seq_lens": garbage(3, dtype=np.float32)},
    "lens_two_dimensions": {"seq_lens": garbage(3, 1)},
    "slots_int32": {"slot_mapping": garbage(3)},
    "slots_of_another_batch": {"slot_mapping": garbage(2, dtype=np.int64)},
    "slots_two_dimensions": {"slot_mapping": garbage(3, 1, dtype=np.int64)},
    "tables_read_only": {"block_tables": read_only(garbage(3, 2))},
    "lens_read_only": {"seq_lens": read_only(garbage(3))},
    "slots_read_only": {"slot_mapping": read_only(garbage(3, dtype=np.int64))},
    "tables_a_list": {"block_tables": [[GARBAGE] * 2] * 3},
    "lens_a_list": {"seq_lens": [GARBAGE] * 3},
    "lens_a_number": {"seq_lens": np.int32(GARBAGE)},
    "batch_too_small": {
        "block_tables": garbage(1, 2),
        "seq_lens": garbage(1),
        "slot_mapping": garbage(1, dtype=np.int64),
    },
}

BAD_CSR: dict[str, dict[str, Any]] = {
    "indptr_int64": {"kv_indptr": garbage(4, dtype=np.int64)},
    "indptr_one_short": {"kv_indptr": garbage(3)},
    "indptr_one_long": {"kv_indptr": garbage(5)},
    "indices_int64": {"kv_indices": garbage(4, dtype=np.int64)},
    "indices_too_few": {"kv_indices": garbage(2)},
    "indices_two_dimensions": {"kv_indices": garbage(2, 2)},
    "last_int64": {"kv_last_page_len": garbage(3, dtype=np.int64)},
    "last_two_dimensions": {"kv_last_page_len": garbage(3, 1)},
    "indptr_read_only": {"kv_indptr": read_only(garbage(4))},
    "indices_read_only": {"kv_indices": read_only(garbage(4))},
    "last_read_only": {"kv_last_page_len": read_only(garbage(3))},
    "last_a_list": {"kv_last_page_len": [GARBAGE] * 3},
    "batch_too_small": {"kv_indptr": garbage(2), "kv_last_page_len": garbage(1)},
}


@pytest.mark.parametrize("case", BAD_BLOCK_TABLES)
def test_a_wrong_block_table_buffer_is_refused_before_any_write(case: str) -> None:
    """Wrong type, dtype, shape or size, or read-only: ``PagedKVError``; every buffer keeps its garbage."""
    buffers = {**block_tables_buffers(), **BAD_BLOCK_TABLES[case]}
    with pytest.raises(PagedKVError, match=r"must be|must have shape|too small"):
        make_table([5, 3], 4).write_block_tables([0, 1], **buffers)
    assert all((np.asarray(buffer) == GARBAGE).all() for buffer in buffers.values())


@pytest.mark.parametrize("case", BAD_CSR)
def test_a_wrong_csr_buffer_is_refused_before_any_write(case: str) -> None:
    """Wrong type, dtype, shape or size, or read-only: ``PagedKVError``; every buffer keeps its garbage."""
    buffers = {**csr_buffers(), **BAD_CSR[case]}
    with pytest.raises(PagedKVError, match=r"must be|must have shape|too small"):
        make_table([5, 3], 4).write_csr([0, 1], **buffers)
    assert all((np.asarray(buffer) == GARBAGE).all() for buffer in buffers.values())


@pytest.mark.parametrize(
    ("batch", "message"),
    [([0, 0], "batch of 2 names only 1"), ([0, 9], r"sequence 9 is not open \(2 are\)"), (["0"], "'0'")],
)
def test_a_repeated_or_unknown_sequence_is_refused_before_any_write(batch: list[SeqId], message: str) -> None:
    """Both dialects and ``seq_lens`` name the sequence or the counts."""
    table = make_table([5, 3], 4)
    first, second = block_tables_buffers(), csr_buffers()
    with pytest.raises(SequenceError, match=message):
        table.write_block_tables(batch, **first)
    with pytest.raises(SequenceError, match=message):
        table.write_csr(batch, **second)
    with pytest.raises(SequenceError, match=message):
        table.seq_lens(batch)
    assert all((buffer == GARBAGE).all() for buffer in [*first.values(), *second.values()])


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, 6), (0.5, 2.0), (0, 1.5), (0, np.uint8(6))]
)
def test_positions_outside_the_sequence_are_refused(start: Any, stop: Any) -> None:
    """A chunk must lie inside the sequence, between whole positions; the message has the numbers."""
    with pytest.raises(SequenceError, match=rf"{start}\.\.{stop} are outside sequence 0 of 5 tokens"):
        make_table([5], 4).slots(0, start, stop)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.uint64])
def test_positions_may_be_numpy_integers(kind: Any) -> None:
    """Small or unsigned kinds neither wrap nor become floats."""
    table = make_table([200], 3)
    for start, stop in ((0, 120), (100, 127), (7, 7)):
        slots = table.slots(0, kind(start), kind(stop))
        assert slots.dtype == np.int64
        assert slots.tolist() == slots_by_loop(table, 0, start, stop)


@pytest.mark.parametrize("block", [2**27, 2**27 + 1, 2**31 - 1])
def test_slots_do_not_overflow_32_bits(block: int) -> None:
    """Slots of a very large block id are exact beyond 2^31, in chunks and in the slot mapping."""
    table = PageTable(BlockTables(2, 2, 16))
    add(table, "far", [block], 16)
    assert table.slots("far").tolist() == [block * 16 + i for i in range(16)]
    assert table.slots("far", 15, 16)[0] > 2**31 - 1
    tables, lens, slots = garbage(1, 1), garbage(1), garbage(1, dtype=np.int64)
    table.write_block_tables(["far"], tables, lens, slots)
    assert slots.tolist() == [block * 16 + 15]


@pytest.mark.parametrize("sizes", [(2**63 - 1, 4, 4), (4, 2**70, 4), (4, 4, 2**70)])
def test_sizes_that_no_array_can_have_are_refused(sizes: tuple[int, int, int]) -> None:
    """With the numbers, and not by numpy."""
    with pytest.raises(PagedKVError, match=str(max(sizes))):
        BlockTables(*sizes)


def test_a_row_is_cleared_and_reused_last_in_first_out() -> None:
    """Cutting a sequence to nothing zeroes its row, and the next sequence gets that row."""
    table = PageTable(BlockTables(3, 2, 4))
    tables = table._tables
    first = add(table, "a", [7, 8], 5)
    add(table, "b", [9], 2)
    assert tables.beyond(first, 4).tolist() == [8]
    tables.cut(first, 0)
    tables.remove("a")
    assert (tables.blocks[first].tolist(), tables.seq_len[first]) == ([0, 0], 0)
    assert (len(table), "a" in table, table.seq_ids, tables.num_free_rows) == (1, False, ["b"], 2)
    assert add(table, "c", [1], 1) == first


def test_a_row_is_filled_with_the_hit_and_then_the_new_blocks() -> None:
    """Positions run through the hit first; a row is empty until it is filled."""
    tables = BlockTables(2, 4, 4)
    table, row = PageTable(tables), tables.add("a")
    assert (table.num_tokens("a"), table.block_ids("a").tolist()) == (0, [])
    tables.fill(row, np.array([7, 5], np.int32), 10, 0)[:] = 9
    assert (table.num_tokens("a"), table.block_ids("a").tolist()) == (10, [7, 5, 9])
    assert table.slots("a", 7).tolist() == [5 * 4 + 3, 9 * 4, 9 * 4 + 1]


def test_block_ids_is_a_copy() -> None:
    """Writing into what ``block_ids`` returned does not reach the table."""
    table = make_table([5], 4)
    copy = table.block_ids(0)
    copy[:] = GARBAGE
    assert GARBAGE not in table.block_ids(0)


def test_a_shorter_batch_after_a_longer_one_leaves_no_stale_column() -> None:
    """The same buffers reused for every step never show a block of the step before."""
    manager = KVCacheManager(num_blocks=12, block_size=2, policy=None)
    for seq_id, length in (("long", 9), ("short", 1)):
        manager.open(seq_id, list(range(length)))
    tables, lens, slots = garbage(2, 5), garbage(2), garbage(2, dtype=np.int64)
    assert manager.tables.write_block_tables(["long", "short"], tables, lens, slots) == 5
    manager.close("long")
    assert manager.tables.write_block_tables(["short"], tables, lens, slots) == 1
    held = manager.tables.block_ids("short").tolist()
    assert tables.tolist() == [held + [0] * 4, [0] * 5]
    assert (lens.tolist(), slots[1]) == ([1, 0], PAD_SLOT)
