"""A hybrid manager of one group without a window beside the plain manager."""

import random
from typing import Any

import pytest

from pagedkv import KVCacheManager
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager

FULL = CacheGroup("full", (0,))


@pytest.mark.parametrize("seed", range(4))
def test_one_group_without_a_window_does_what_the_plain_manager_does(seed: int) -> None:
    """The same calls give the same results, hits, counts, evictions and copies."""
    rng, size = random.Random(seed), 3
    options: dict[str, Any] = {"max_seqs": 5, "max_seq_len": 42, "watermark": 0.1}
    plain = KVCacheManager(14, size, **options)
    hybrid = HybridKVCacheManager([FULL], 14, size, **options)
    table, prompts, next_id = (
        hybrid.tables["full"],
        [[rng.randrange(2) for _ in range(30)] for _ in range(3)],
        0,
    )
    for _ in range(3000):
        ids = plain.tables.seq_ids
        seq_id = rng.choice(ids) if ids else None
        operation = rng.choice(["open", "step", "step", "commit", "commit", "commit", "fork", "cut", "close"])
        if rng.random() < 0.1:
            operation = rng.choice(["accept", "accept", "resize", "defragment", "reset"])
        managers: list[Any] = [plain, hybrid]
        if operation == "open":
            prompt = [*rng.choice(prompts)[: rng.randrange(24)], *(rng.randrange(2) for _ in range(3))]
            results = [m.open(next_id, prompt) for m in managers]
            next_id += 1
        elif operation == "step":
            batch = rng.sample(ids, rng.randint(0, len(ids)))
            batch = [i for i in batch if plain.tables.num_tokens(i) < 40]
            results = [m.step(batch) for m in managers]
        elif operation in ("resize", "defragment", "reset"):
            sizes = [rng.randint(12, 16)] if operation == "resize" else []
            results = [getattr(m.maintenance, operation)(*sizes) for m in managers]
            results = [result is None or result is False for result in results]
        elif seq_id is None:
            continue
        elif operation == "accept":
            for m in managers:
                m.copies.take()
            left = plain.tables.num_tokens(seq_id) - plain.tables.num_committed(seq_id)
            drafts, count = [rng.randrange(2) for _ in range(left)], rng.randint(0, left)
            results = [m.commit_step([seq_id], [drafts], [count]) for m in managers]
        elif operation == "commit":
            left = plain.tables.num_tokens(seq_id) - plain.tables.num_committed(seq_id)
            tokens = [rng.randrange(2) for _ in range(rng.choice([left, rng.randint(0, left)]))]
            for m in managers:
                m.copies.take()
            results = [m.commit(seq_id, tokens) for m in managers]
        elif operation == "fork":
            if plain.tables.num_tokens(seq_id) > plain.tables.num_committed(seq_id):
                continue
            results = [m.fork(seq_id, next_id) for m in managers]
            next_id += 1
        elif operation == "cut":
            length = rng.randint(0, plain.tables.num_tokens(seq_id))
            results = [m.truncate(seq_id, length) for m in managers]
        else:
            results = [m.close(seq_id) for m in managers]
        assert results[0] == results[1], operation
        assert plain.counts == hybrid.counts, operation
        assert table.seq_ids == plain.tables.seq_ids
        assert [table.num_committed(i) for i in ids if i in table] == [
            plain.tables.num_committed(i) for i in ids if i in table
        ]
        one, other = plain.stats(), hybrid.stats()
        for name in ("evicted_blocks", "copied_blocks", "hit_tokens", "queried_tokens", "num_opened"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.indexed_blocks == other.num_nodes
    assert one.evicted_blocks > 100 and one.copied_blocks > 20 and one.hit_tokens > 100
