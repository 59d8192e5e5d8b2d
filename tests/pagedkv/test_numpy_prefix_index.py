"""The prefix index in numpy: its work grows with branches only."""

from typing import Any, cast

import numpy as np
import pytest

from pagedkv.block_tables import Int32Array
from pagedkv.numpy_prefix_index import NumpyPrefixIndex
from pagedkv.prefix_index import ROOT

SIZE = 2


Content = tuple[int, tuple[int, ...]]  # extra key and tokens of one block
Path = tuple[Content, ...]


def arrays(contents: list[Content]) -> tuple[Int32Array, Int32Array]:
    tokens = np.array([c[1] for c in contents], np.int32).reshape(len(contents), SIZE)
    return tokens, np.array([c[0] for c in contents], np.int32)


def match(index: NumpyPrefixIndex, contents: list[Content], parent: int = ROOT) -> list[int]:
    found: list[int] = index.match(*arrays(contents), parent).tolist()
    return found


def insert(index: NumpyPrefixIndex, blocks: list[int], contents: list[Content], parent: int = ROOT) -> None:
    tokens, extra = arrays(contents)
    ids = np.array(blocks, np.int32)
    index.tokens[ids] = tokens
    index.insert(ids, extra, parent)


def chain(*firsts: int) -> list[Content]:
    """Blocks (first, first + 1, ...) without an extra key."""
    return [(0, tuple(range(first, first + SIZE))) for first in firsts]


class CountingDict(dict[Any, Any]):
    """Counts lookups."""

    lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(key, default)


class CountingArray(np.ndarray[Any, Any]):
    """Counts how many blocks' contents are picked as an array, and how often."""

    picks = 0
    rows = 0

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            CountingArray.picks += 1
            CountingArray.rows += len(key)
        return np.asarray(super().__getitem__(key))


@pytest.mark.parametrize("num_branches", [0, 1, 5, 20])
@pytest.mark.parametrize("length", [100, 1_000, 10_000])
def test_a_hit_costs_one_lookup_and_one_comparison_per_branch(length: int, num_branches: int) -> None:
    """However long the prompt: lookups and array comparisons count the branches on its way."""
    index = NumpyPrefixIndex(length + num_branches, SIZE)
    contents = chain(*range(length))
    insert(index, list(range(1, length + 1)), contents)
    for i in range(num_branches):  # a branch leaves the chain at evenly spaced places
        insert(index, [length + 1 + i], chain(-9), parent=(i + 1) * length // (num_branches + 1))
    counted = CountingDict(index._children)
    index._children = counted
    index.tokens = cast("Int32Array", index.tokens.view(CountingArray))
    CountingArray.picks = CountingArray.rows = 0
    assert len(match(index, contents)) == length
    assert counted.lookups == CountingArray.picks == num_branches + 1
    assert CountingArray.rows == length


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_long_suffix_is_one_entry_of_the_hash_table(length: int) -> None:
    """Inserting any number of blocks adds one key per run."""
    index = NumpyPrefixIndex(2 * length, SIZE)
    insert(index, list(range(1, length + 1)), chain(*range(length)))
    assert len(index._children) == 1
    insert(index, list(range(length + 1, 2 * length + 1)), chain(*range(5, length + 5)), parent=length // 2)
    assert len(index._children) == 3
