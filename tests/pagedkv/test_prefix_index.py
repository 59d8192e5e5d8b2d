"""The prefix index: exact hits against a dict of whole prefixes, and work that grows with branches only."""

import copy
import importlib
import random
from typing import Any

import numpy as np
import pytest

from pagedkv import core
from pagedkv.block_tables import Int32Array
from pagedkv.errors import BlockError
from pagedkv.prefix_index import ROOT, PrefixIndex

SIZE = 2


@pytest.fixture(
    params=[
        "numpy",
        pytest.param(
            "native", marks=pytest.mark.skipif(core.missing() is not None, reason="no compiled core")
        ),
    ],
    autouse=True,
)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every test of this file run with both engines."""
    name: str = request.param
    module = importlib.import_module(f"pagedkv.{name}_prefix_index")
    monkeypatch.setitem(globals(), "PrefixIndex", getattr(module, f"{name.title()}PrefixIndex"))
    return name


Content = tuple[int, tuple[int, ...]]  # extra key and tokens of one block
Path = tuple[Content, ...]


def arrays(contents: list[Content]) -> tuple[Int32Array, Int32Array]:
    tokens = np.array([c[1] for c in contents], np.int32).reshape(len(contents), SIZE)
    return tokens, np.array([c[0] for c in contents], np.int32)


def match(index: PrefixIndex, contents: list[Content], parent: int = ROOT) -> list[int]:
    found: list[int] = index.match(*arrays(contents), parent).tolist()
    return found


def insert(index: PrefixIndex, blocks: list[int], contents: list[Content], parent: int = ROOT) -> None:
    tokens, extra = arrays(contents)
    ids = np.array(blocks, np.int32)
    index.tokens[ids] = tokens
    index.insert(ids, extra, parent)


def remove(index: PrefixIndex, *blocks: int) -> None:
    index.remove(np.array(blocks, np.int32))


def chain(*firsts: int) -> list[Content]:
    """Blocks (first, first + 1, ...) without an extra key."""
    return [(0, tuple(range(first, first + SIZE))) for first in firsts]


def tree(index: PrefixIndex) -> set[tuple[int, tuple[int, ...]]]:
    return {(before, tuple(ids.tolist())) for before, ids in index.chains()}


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("what", ["token 0", "token 1", "extra key"])
def test_changing_anything_stops_the_hit_right_there(at: int, what: str) -> None:
    """One other token or extra key in block ``at``: the blocks before it hit, it and all after it do not."""
    index = PrefixIndex(8, SIZE)
    contents = chain(10, 20, 30, 40, 50)
    insert(index, [3, 1, 4, 2, 5], contents)
    assert match(index, contents) == [3, 1, 4, 2, 5]
    extra, tokens = contents[at]
    if what == "extra key":
        contents[at] = (7, tokens)
    else:
        position = int(what[-1])
        contents[at] = (extra, (*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]))
    assert match(index, contents) == [3, 1, 4, 2, 5][:at]


def test_equal_content_under_another_parent_is_no_hit() -> None:
    """A block counts only behind the block it was computed after."""
    index = PrefixIndex(8, SIZE)
    insert(index, [1, 2], chain(10, 20))
    insert(index, [3, 4], chain(30, 40))
    assert match(index, chain(20)) == []
    assert match(index, chain(30, 20)) == [3]
    assert match(index, chain(20), parent=3) == []
    assert match(index, chain(20), parent=1) == [2]
    assert match(index, chain(40), parent=3) == [4]


def test_an_extra_key_that_nobody_uses_hits_nothing() -> None:
    """Id -1, which stands for an unknown key, never equals an indexed one."""
    index = PrefixIndex(4, SIZE)
    insert(index, [1, 2], chain(10, 20))
    assert match(index, [(-1, (10, 11))]) == []
    assert match(index, [(0, (10, 11)), (-1, (20, 21))]) == [1]


def test_an_empty_prompt_and_an_empty_index_hit_nothing() -> None:
    """No blocks to look up, or none to find: an empty int32 array."""
    index = PrefixIndex(4, SIZE)
    assert match(index, chain(1)) == match(index, []) == []
    found = index.match(*arrays([]))
    assert found.dtype == np.int32 and found.shape == (0,)


def test_a_run_parts_where_a_branch_leaves_it_and_grows_at_its_end() -> None:
    """A suffix extends the run; a branch in the middle splits it; both branches keep hitting."""
    index = PrefixIndex(9, SIZE)
    insert(index, [1, 2], chain(10, 20))
    insert(index, [3], chain(30), parent=2)
    assert tree(index) == {(ROOT, (1, 2, 3))}
    insert(index, [4, 5], chain(25, 35), parent=1)
    assert tree(index) == {(ROOT, (1,)), (1, (2, 3)), (1, (4, 5))}
    insert(index, [6], chain(45), parent=5)
    assert match(index, chain(10, 25, 35, 45)) == [1, 4, 5, 6]
    assert match(index, chain(10, 20, 30, 45)) == [1, 2, 3]
    assert len(index) == 6


def test_a_branch_before_the_first_block_of_a_run_is_a_new_run() -> None:
    """Two prompts that differ at once share nothing."""
    index = PrefixIndex(4, SIZE)
    insert(index, [1], chain(10))
    insert(index, [2], chain(20))
    assert tree(index) == {(ROOT, (1,)), (ROOT, (2,))}


def test_parting_a_run_keeps_its_children() -> None:
    """The tail of a split run still leads to what hung under it."""
    index = PrefixIndex(9, SIZE)
    insert(index, [1, 2, 3], chain(10, 20, 30))
    insert(index, [4], chain(40), parent=3)
    insert(index, [5], chain(50), parent=2)  # parts before 3
    insert(index, [6], chain(60), parent=1)  # parts before 2
    insert(index, [7], chain(70), parent=3)  # 3 and 4 part
    assert match(index, chain(10, 20, 30, 40)) == [1, 2, 3, 4]
    assert match(index, chain(10, 20, 50)) == [1, 2, 5]
    assert match(index, chain(10, 60)) == [1, 6]
    assert match(index, chain(10, 20, 30, 70)) == [1, 2, 3, 7]


def test_eviction_from_the_tail_shortens_the_hit_block_by_block() -> None:
    """Removed blocks no longer hit, their parents still do, and their ids can be indexed again."""
    index = PrefixIndex(4, SIZE)
    contents = chain(10, 20, 30, 40)
    insert(index, [1, 2, 3, 4], contents)
    for left in (3, 2, 1, 0):
        remove(index, left + 1)
        assert match(index, contents) == [1, 2, 3, 4][:left]
        assert len(index) == left
    insert(index, [4, 2], chain(30, 10))
    assert match(index, chain(30, 10)) == [4, 2]
    assert match(index, contents) == []


def test_an_evicted_tail_can_grow_again_with_other_content() -> None:
    """A run cut in its middle goes on with new blocks, and forgets the old ones."""
    index = PrefixIndex(5, SIZE)
    insert(index, [1, 2, 3], chain(10, 20, 30))
    remove(index, 3, 2)
    insert(index, [2, 5, 3], chain(21, 31, 41), parent=1)
    assert match(index, chain(10, 21, 31, 41)) == [1, 2, 5, 3]
    assert match(index, chain(10, 20)) == [1]


def test_one_call_evicts_from_several_branches() -> None:
    """Children go with their parents in one call, and an emptied index has no run left."""
    index = PrefixIndex(7, SIZE)
    insert(index, [1, 2, 3], chain(10, 20, 30))
    insert(index, [4, 5], chain(40, 50), parent=1)
    insert(index, [6], chain(60))
    remove(index, 5, 3, 2, 4, 6, 1)
    assert (len(index), tree(index)) == (0, set())
    assert not index.indexed.any()


def test_a_leaf_is_a_block_that_no_indexed_block_continues() -> None:
    """Not within a run, not before a branch; and again once everything behind it is removed."""
    index = PrefixIndex(7, SIZE)
    insert(index, [1, 2, 3], chain(10, 20, 30))
    insert(index, [4, 5], chain(40, 50), parent=2)
    insert(index, [6], chain(60))

    def leaves() -> list[int]:
        return [b for b in np.flatnonzero(index.indexed).tolist() if index.is_leaf(b)]

    assert leaves() == [3, 5, 6]
    remove(index, 5, 6)
    assert leaves() == [3, 4]
    remove(index, 3, 4)
    assert leaves() == [2]


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 3_000])
def test_a_deep_chain_inserted_block_by_block_hits_whole(depth: int) -> None:
    """Growing one block at a time, as decoding does, gives the same hit as one insertion."""
    index = PrefixIndex(depth, SIZE)
    contents = chain(*range(depth))
    for i in range(depth):
        insert(index, [i + 1], contents[i : i + 1], parent=i)
    assert match(index, contents) == list(range(1, depth + 1))
    assert len(tree(index)) == 1


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_agree_with_a_dict_of_whole_prefixes(seed: int) -> None:
    """Insertions, hits behind any parent and evictions of any leaves follow a plain model."""
    rng = random.Random(seed)
    num_blocks, vocabulary = rng.choice([(3, 2), (12, 2), (40, 2), (40, 3)])
    index = PrefixIndex(num_blocks, SIZE)
    model: dict[Path, int] = {}
    free = list(range(1, num_blocks + 1))

    def random_contents() -> list[Content]:
        return [
            (rng.choice([0, 0, 0, 5]), tuple(rng.randrange(vocabulary) for _ in range(SIZE)))
            for _ in range(rng.randint(0, 8))
        ]

    def expected(start: Path, contents: list[Content]) -> list[int]:
        hit: list[int] = []
        while len(hit) < len(contents) and (*start, *contents[: len(hit) + 1]) in model:
            hit.append(model[(*start, *contents[: len(hit) + 1])])
        return hit

    for _ in range(300):
        start = rng.choice([(), *model])
        parent = model.get(start, ROOT)
        contents = random_contents()
        hit = match(index, contents, parent)
        assert hit == expected(start, contents)
        if rng.random() < 0.6:
            new = contents[len(hit) : len(hit) + len(free)]
            blocks = [free.pop(rng.randrange(len(free))) for _ in new]
            if blocks:
                insert(index, blocks, new, hit[-1] if hit else parent)
            for i, block in enumerate(blocks):
                model[(*start, *contents[: len(hit) + i + 1])] = block
        else:
            gone: list[int] = []
            for _ in range(rng.randint(0, len(model))):
                parents = {path[:-1] for path in model}
                leaf = rng.choice([path for path in model if path not in parents])
                gone.append(model.pop(leaf))
            if gone:
                remove(index, *gone)
            free += gone
        assert len(index) == len(model)
        assert np.flatnonzero(index.indexed).tolist() == sorted(model.values())
        inner = {path[:-1] for path in model}
        assert all(index.is_leaf(block) == (path not in inner) for path, block in model.items())
        if rng.random() < 0.2:
            for path, block in model.items():
                assert match(index, list(path))[-1] == block


# -- moving, and the best child


def nested(contents: list[int], parent: int, index: PrefixIndex, first_id: int) -> None:
    insert(index, [first_id + i for i in range(len(contents))], chain(*contents), parent)


def forest() -> PrefixIndex:
    """1-2-3 with 4-5 and 6 behind 1 too, 7 alone; ids up to 12."""
    index = PrefixIndex(12, SIZE)
    nested([10, 20, 30], ROOT, index, 1)
    nested([40, 50], 1, index, 4)
    nested([60], 1, index, 6)
    nested([70], ROOT, index, 7)
    return index


def best(index: PrefixIndex, row: list[int], parent: int = ROOT, **options: int) -> tuple[int, int]:
    return index.best_child(np.array(row, np.int32), options.pop("extra", 0), parent, **options)


def test_the_best_child_shares_the_longest_start_of_a_row() -> None:
    """Whatever the row goes on with, and under the given parent and extra key only."""
    index = forest()
    assert best(index, [40, 99], parent=1) == (4, 1)
    assert best(index, [40, 41], parent=1) == (4, 2)
    assert best(index, [40], parent=1) == (4, 1)
    assert best(index, [30, 0], parent=2) == (3, 1)
    assert best(index, [40, 41]) == best(index, [0, 41], parent=1) == best(index, [], parent=1) == (0, 0)
    assert best(index, [30, 31], parent=2, extra=5) == best(index, [1, 1], parent=7) == (0, 0)


def test_fewer_tokens_than_asked_for_are_no_best_child() -> None:
    """``at_least`` is a bound, and one token the least of all."""
    index = forest()
    assert best(index, [70, 0], at_least=2) == (0, 0)
    assert best(index, [70, 71], at_least=2) == (7, 2)
    assert best(index, [0, 0], at_least=0) == best(index, [0, 0], at_least=-3) == (0, 0)
    assert best(index, [70, 0], at_least=0) == (7, 1)


def test_of_equally_good_children_the_newest_is_best() -> None:
    """Also when the older one was put back in another place by a removal or a split."""
    index = PrefixIndex(9, SIZE)
    for block, second in ((1, 5), (2, 6), (3, 7)):
        insert(index, [block], [(0, (10, second))])
    assert best(index, [10, 0]) == (3, 1)
    assert best(index, [10, 6]) == (2, 2)
    remove(index, 3)
    assert best(index, [10, 0]) == (2, 1)
    insert(index, [4, 5], [(0, (10, 8)), (0, (1, 1))])
    insert(index, [6], [(0, (10, 9))])
    insert(index, [7], [(0, (2, 2))], parent=4)  # a run parts, and is as old as before
    assert best(index, [10, 0]) == (6, 1)
    remove(index, 6)
    assert best(index, [10, 0]) == (4, 1)
    assert best(index, [1, 0], parent=4) == (5, 1)


@pytest.mark.parametrize("newer", [63, 64])
def test_only_the_newest_64_children_are_looked_at(newer: int) -> None:
    """Those with another extra key count as looked at."""
    index = PrefixIndex(100, SIZE)
    insert(index, [1], chain(-5))
    for i in range(newer):
        insert(index, [2 + i], [(i % 2, (i, i))])
    assert best(index, [-5, 0]) == ((1, 1) if newer < 64 else (0, 0))


def test_renamed_blocks_hit_under_their_new_names() -> None:
    """A parent, a child and a leaf at once; the tree, leaves, parents and the newest children stay."""
    index = forest()
    index.rename(np.array([1, 4, 7], np.int32), np.array([10, 12, 11], np.int32))
    assert match(index, chain(10, 20, 30)) == [10, 2, 3]
    assert match(index, chain(10, 40, 50)) == [10, 12, 5]
    assert match(index, chain(10, 60)) == [10, 6]
    assert match(index, chain(70)) == [11]
    assert tree(index) == {(ROOT, (10,)), (10, (2, 3)), (10, (12, 5)), (10, (6,)), (ROOT, (11,))}
    assert np.flatnonzero(index.indexed).tolist() == [2, 3, 5, 6, 10, 11, 12]
    assert [index.parent(b) for b in (2, 12, 5, 10)] == [10, 10, 12, ROOT]
    assert index.path(5).tolist() == [10, 12, 5]
    assert best(index, [40, 0], parent=10) == (12, 1)
    insert(index, [1, 4], chain(80, 90), parent=12)
    assert match(index, chain(10, 40, 80, 90)) == [10, 12, 1, 4]
    remove(index, 4, 1, 5, 12)
    assert match(index, chain(10, 40)) == [10]


def test_tokens_of_a_block_that_is_not_indexed_move_when_it_is_renamed() -> None:
    """A tail that is still being filled is no hit, before or after."""
    index = forest()
    index.tokens[9] = [8, 9]
    index.rename(np.array([9], np.int32), np.array([8], np.int32))
    assert index.tokens[8].tolist() == [8, 9]
    assert len(index) == 7 and not index.indexed[8:].any()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ([1, 2], [8], "rename 2 blocks to 1"),
        ([1], [13], r"rename block 13: ids are 1\.\.12"),
        ([0], [8], r"rename block 0: ids are 1\.\.12"),
        ([1, 1], [8, 9], "rename block 1 twice"),
        ([1, 2], [8, 8], "rename block 8 twice"),
        ([1, 8], [8, 9], "rename block 8 twice"),
        ([1, 2], [8, 3], "rename a block to 3, which is indexed"),
        ([1.5], [8], "must be integers"),
    ],
)
def test_a_wrong_renaming_is_refused_and_changes_nothing(old: Any, new: Any, message: str) -> None:
    """Foreign, repeated and indexed names raise ``BlockError`` with the numbers."""
    index = forest()
    before = (tree(index), index.tokens.tolist(), index.extra.tolist(), index.indexed.tolist())
    with pytest.raises(BlockError, match=message):
        index.rename(np.array(old), np.array(new))
    assert (tree(index), index.tokens.tolist(), index.extra.tolist(), index.indexed.tolist()) == before


def test_an_index_grows_and_shrinks_around_what_is_in_it() -> None:
    """Every hit stays; new ids can be indexed, and an indexed one cannot be cut off."""
    index = forest()
    before = tree(index)
    for num_blocks in (1_000, 40, 7):
        index.resize(num_blocks)
        assert tree(index) == before
        assert (len(index.tokens), len(index.extra), len(index.indexed)) == (num_blocks + 1,) * 3
        assert match(index, chain(10, 40, 50)) == [1, 4, 5]
        assert best(index, [60, 0], parent=1) == (6, 1)
        if num_blocks > 7:
            insert(index, [num_blocks], chain(75), parent=1)
            assert match(index, chain(10, 75)) == [1, num_blocks]
            with pytest.raises(BlockError, match=f"block {num_blocks} is indexed"):
                index.resize(7)
            remove(index, num_blocks)
    with pytest.raises(BlockError, match="cannot shrink to 6 blocks: block 7 is indexed"):
        index.resize(6)
    with pytest.raises(BlockError, match="at least 1 block, got 0"):
        index.resize(0)
    assert tree(index) == before


def test_what_is_behind_blocks_comes_children_first_and_once() -> None:
    """All that builds on any of them, also where one builds on another."""
    index = forest()
    assert index.behind(np.array([1], np.int32)).tolist() == [3, 2, 5, 4, 6]
    assert index.behind(np.array([4, 1, 2, 4], np.int32)).tolist() == [5, 3, 2, 4, 6]
    assert index.behind(np.array([3, 7], np.int32)).tolist() == []
    assert index.behind(np.zeros(0, np.int32)).tolist() == []


def test_a_copy_of_an_index_is_independent() -> None:
    """A deep copy has arrays of its own."""
    index = forest()
    twin = copy.deepcopy(index)
    remove(twin, 5)
    insert(twin, [9], chain(90), parent=1)
    assert match(index, chain(10, 40, 50)) == [1, 4, 5] and match(index, chain(10, 90)) == [1]
    assert match(twin, chain(10, 40, 50)) == [1, 4] and match(twin, chain(10, 90)) == [1, 9]
    assert (len(index), len(twin)) == (7, 7)
