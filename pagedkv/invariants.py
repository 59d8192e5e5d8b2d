"""What must hold between the parts of a manager after every call."""

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import ACTIVE, CACHED, FREE, BlockPool
from pagedkv.block_tables import BlockTables, Int32Array
from pagedkv.errors import check
from pagedkv.namespace import ExtraKeys
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.prefix_index import ROOT, PrefixIndex


def check_invariants(
    cache: BlockCache, tables: BlockTables, pinned: list[Int32Array], prefix_caching: bool
) -> None:
    """Raise ``AssertionError`` naming the first broken invariant.

    Cost: O(blocks + max_seqs x blocks of the longest sequence), vectorised, and O(1) per branch.
    """
    pool, index = cache.pool, cache.index
    pool.check_invariants()
    unlisted = [state.held for state in tables.dropped.values()]
    _check_tables(pool, tables, [*cache.fences.held(), cache.copies.pending.src, *pinned, *unlisted])
    parent = _check_index(pool, index, cache.extra_keys)
    _check_policy(pool, cache.policy, parent)
    for seq_id in tables.seq_ids:
        row = tables.row(seq_id)
        done = int(tables.committed[row])
        check(0 <= done <= int(tables.seq_len[row]), "more tokens are committed than the sequence has")
        chain = tables.blocks[row, : done // tables.block_size if prefix_caching else 0]
        if row in tables.dropped:
            chain = _checked_chain(index, tables, row)
        check(bool(index.indexed[chain].all()), "a full committed block is not indexed")
        check(np.array_equal(parent[chain[1:]], chain[:-1]), "a sequence's prefix is not a chain")


def _checked_chain(index: PrefixIndex, tables: BlockTables, row: int) -> Int32Array:
    """What of a row with gaps others can find: the blocks of its chain, those outside the row included."""
    state = tables.dropped[row]
    num_chained, num_blocks = state.num_chained, tables.num_blocks(row)
    blocks = tables.blocks[row, :num_blocks]
    check(state.num_blocks > 0, "a row without a gap is said to have one")
    check(num_chained <= state.least_columns <= int(tables.committed[row]) // tables.block_size, "a lost gap")
    check(np.array_equal(state.chain[state.in_row], blocks[:num_chained]), "a row does not begin its chain")
    check(not index.indexed[blocks[num_chained:]].any(), "a block behind a gap can be found")
    check(not len(state.chain) or bool(state.in_row[-1]), "a block is held for no child")
    return state.chain


def _check_tables(pool: BlockPool, tables: BlockTables, others: list[Int32Array]) -> None:
    rows = tables.all_rows()
    counts = div_ceil(tables.seq_len[rows], tables.block_size)
    width = int(counts.max(initial=0))
    held = tables.blocks[rows, :width][np.arange(width) < counts[:, None]]
    check(bool((held > 0).all()), "a sequence holds the null block")
    references = np.bincount(np.concatenate([held, *others]), minlength=pool.num_blocks + 1)
    check(np.array_equal(references, pool.ref_count), "ref_counts are not the number of holders")
    stale = np.count_nonzero(tables.blocks[:, : width + 1]) - len(held)
    check(stale == 0, "the page table has an entry beyond a sequence")


def _check_index(pool: BlockPool, index: PrefixIndex, extra_keys: ExtraKeys) -> Int32Array:
    """Check the tree; returns the parent of every indexed block."""
    parent: Int32Array = np.zeros(pool.num_blocks + 1, np.int32)
    seen: list[Int32Array] = []
    for before, ids in index.chains():
        check(len(ids) > 0, "the tree has an empty run")
        parent[ids[0]], parent[ids[1:]] = before, ids[:-1]
        found = index.match(index.tokens[ids], index.extra[ids], before)
        check(np.array_equal(found, ids), "a cached block cannot be found by its content")
        seen.append(ids)
    ids = np.sort(np.concatenate(seen)) if seen else np.zeros(0, np.int32)
    check(np.array_equal(ids, np.flatnonzero(index.indexed)), "the tree and the indexed flags differ")
    check(len(ids) == len(index), "the index miscounts its blocks")
    check(bool((pool.state[ids] != FREE).all()), "a free block is indexed")
    check(bool(index.indexed[pool.state == CACHED].all()), "a cached block is not indexed")
    parents = parent[ids]
    check(
        bool(((parents == ROOT) | index.indexed[parents]).all()), "a block is indexed but its parent is not"
    )
    active = pool.state[ids] == ACTIVE
    check(
        bool(((parents == ROOT) | ~active | (pool.state[parents] == ACTIVE)).all()),
        "a block is active but its parent is not",
    )
    check(
        set(index.extra[ids].tolist()) - {0} <= extra_keys.ids(), "an indexed block has a dropped extra key"
    )
    return parent


def _check_policy(pool: BlockPool, policy: EvictionPolicy, parent: Int32Array) -> None:
    ids = policy.ids()
    check(
        np.array_equal(np.sort(ids), np.flatnonzero(pool.state == CACHED)),
        "the policy does not order the cached blocks",
    )
    place = np.full(pool.num_blocks + 1, np.iinfo(np.int64).max)
    place[ids] = np.arange(len(ids))
    check(bool((place[parent[ids]] > place[ids]).all()), "a parent would be evicted before its child")
