"""The four kinds of fragmentation, counted by hand."""

import random

from pagedkv import KVCacheManager, Namespace
from pagedkv.fragmentation import Fragmentation, fragmentation


def opened(manager: KVCacheManager, name: str, tokens: list[int], **options: object) -> None:
    found = manager.open(name, tokens, **options)  # type: ignore[arg-type]
    assert found is not None
    manager.commit(name, tokens[found.num_cached_tokens :])


def test_an_idle_pool_is_not_fragmented() -> None:
    assert fragmentation(KVCacheManager(4, 4)) == (0, 0, 0, 0)
    assert fragmentation(KVCacheManager(4, 4, policy=None)) == (0, 0, 0, 0)


def test_each_kind_is_counted() -> None:
    """a: 8 tokens. b: shares 4, its tail holds 5 6 and one more. c: another tenant's 1 2 3, no duplicate."""
    manager = KVCacheManager(16, 4)
    opened(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened(manager, "b", [1, 2, 3, 4, 5, 6, 9])
    opened(manager, "c", [1, 2, 3], namespace=Namespace(salt="tenant"))
    assert fragmentation(manager) == Fragmentation(2, 2, 0, 0)
    twice = [manager.retention.pin("a"), manager.retention.pin("a", 4)]
    assert fragmentation(manager).pinned_blocks == 0  # "a" holds them too
    manager.close("a")
    assert fragmentation(manager).pinned_blocks == 1  # "b" still holds the first
    manager.close("b")
    assert fragmentation(manager) == Fragmentation(1, 0, 0, 2)
    for pin in twice:
        manager.retention.unpin(pin)
    assert fragmentation(manager) == Fragmentation(1, 0, 0, 0)


def test_a_stranded_block_would_be_seen() -> None:
    """The count is a real one: a cached block torn out of the tree is found."""
    manager = KVCacheManager(16, 4)
    opened(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    leaf = manager.tables.block_ids("a")[1:]
    manager.close("a")
    manager._cache.index.remove(leaf)
    assert fragmentation(manager).unreachable_blocks == 1


def test_nothing_is_unreachable_however_much_is_evicted() -> None:
    rng = random.Random(1)
    manager = KVCacheManager(12, 2, max_seqs=3)
    for number in range(400):
        opened(manager, str(number), [rng.randrange(2) for _ in range(rng.randint(1, 12))])
        if number % 3:
            manager.close(rng.choice(manager.tables.seq_ids))
        while len(manager.tables) > 1:
            manager.close(manager.tables.seq_ids[0])
        assert fragmentation(manager).unreachable_blocks == 0
    assert manager.stats().evicted_blocks > 100
