"""What must hold between the parts of a hybrid manager after every call."""

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import CACHED, FREE
from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.errors import check
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.rows import Rows
from pagedkv.prefix_index import ROOT


def check_invariants(tree: ContentTree, rows: Rows, pinned: list[Int32Array]) -> None:
    """Raise ``AssertionError`` naming the first broken invariant; ``pinned`` are the ids that each pin holds.

    Cost: O(groups x (blocks + page table) + nodes + the paths of all leaves).
    """
    tree.pool.check_invariants()
    tree.nodes.check_invariants()
    _check_blocks(tree)
    _check_tree(tree)
    _check_order(tree)
    _check_references(tree, rows, np.concatenate([*pinned, *tree.fences.held(), tree.copies.pending.src]))
    for seq_id in rows.tables[0].seq_ids:
        _check_row(tree, rows, rows.tables[0].row(seq_id))


def _check_blocks(tree: ContentTree) -> None:
    """Which group has which block for which content."""
    groups, nodes = np.nonzero(tree.block_of)
    blocks = tree.block_of[groups, nodes]
    check(np.array_equal(tree.node_of[blocks], nodes), "a block does not know its content")
    check(np.array_equal(tree.group_of[blocks], groups), "a block does not know its group")
    check(np.count_nonzero(tree.node_of) == len(blocks), "a block has a content that does not know it")
    check(bool((tree.pool.state[blocks] != FREE).all()), "a free block has content")
    check(bool(tree.node_of[tree.pool.state == CACHED].all()), "a cached block has no content")
    check(bool(tree.index.indexed[nodes].all()), "a block has content that nobody can find")


def _check_tree(tree: ContentTree) -> None:
    """Every node is where it is found, and needed."""
    known = np.flatnonzero(tree.index.indexed)
    check(np.array_equal(known, np.flatnonzero(tree.nodes.state[1:] != FREE) + 1), "tree and node ids differ")
    check(len(known) == len(tree.index), "the index miscounts its nodes")
    parent: Int32Array = np.full(len(tree.children), -1, np.int32)
    for leaf in known[tree.children[known] == 0].tolist():
        path = tree.index.path(leaf)
        parent[path] = np.concatenate([[ROOT], path[:-1]])
        held = tree.nodes.ref_count[path] > 0
        check(bool((held[1:] <= held[:-1]).all()), "a node is held, but not its parent")
        found = tree.index.match(tree.index.tokens[path], tree.index.extra[path])
        check(np.array_equal(found, path), "a content cannot be found by its tokens")
    check(bool((parent[known] >= 0).all()), "a node has children that nobody can find")
    children = np.bincount(parent[known], minlength=len(tree.children))
    check(np.array_equal(children, tree.children), "the children of a node are miscounted")
    idle = known[tree.nodes.state[known] == CACHED]
    needed = tree.block_of[:, idle].any(axis=0) | (children[idle] > 0)
    check(bool(needed.all()), "a content is kept for nothing")
    ids = set(tree.index.extra[known].tolist()) - {0}
    check(ids <= tree.extra_keys.ids(), "a content has a dropped extra key")
    check(bool(tree.fences) or not tree.fences.held(), "ids wait for a fence that is not open")


def _check_order(tree: ContentTree) -> None:
    """The policy orders the cached blocks, and no block goes before one that needs it."""
    ids = tree.policy.ids()
    check(
        np.array_equal(np.sort(ids), np.flatnonzero(tree.pool.state == CACHED)),
        "the order does not have the cached blocks",
    )
    place = {block: i for i, block in enumerate(ids.tolist())}
    full = [g for g in tree.let_go_order if tree.groups[g].window is None]
    for block, i in place.items():
        parent = tree.view.parent(block)
        is_first = tree.group_of[block] in full[-1:] and tree.index.parent(int(tree.node_of[block])) == ROOT
        check(parent != NULL_BLOCK or is_first or not full, "a cached block lost its prefix")
        check(place.get(parent, i) >= i, "a block would be evicted before one that needs it")


def _check_references(tree: ContentTree, rows: Rows, others: Int32Array) -> None:
    first = rows.tables[0]
    for table in rows.tables:
        check(table.seq_ids == first.seq_ids, "groups have different sequences")
        check(np.array_equal(table.all_rows(), first.all_rows()), "groups have different rows")
        check(np.array_equal(table.seq_len, first.seq_len), "groups have different lengths")
        check(np.array_equal(table.committed, first.committed), "groups have committed different tokens")
    held = np.concatenate([table.blocks.reshape(-1) for table in rows.tables])
    held, nodes = np.concatenate([held, others]), np.concatenate([rows.nodes.reshape(-1), -others])
    for entries, pool in ((held, tree.pool), (nodes, tree.nodes)):
        references = np.bincount(entries[entries > 0], minlength=pool.num_blocks + 1)
        check(np.array_equal(references, pool.ref_count), "ref_counts are not the number of holders")


def _check_row(tree: ContentTree, rows: Rows, row: int) -> None:
    first, size = rows.tables[0], rows.block_size
    done, length = int(first.committed[row]), int(first.seq_len[row])
    check(0 <= done <= length, "more tokens are committed than the sequence has")
    total, full = div_ceil(length, size), done // size
    nodes = rows.nodes[row]
    check(not nodes[total:].any(), "a row has a content beyond its blocks")
    chain = nodes[: full if rows.keeps_content else 0]
    check(bool((chain != ROOT).all()), "a full committed block has no content")
    tail = nodes[len(chain) : total]
    cut = tail[-1:] if length % size else tail[:0]
    check(np.count_nonzero(tail) == np.count_nonzero(cut), "an uncommitted block has content")
    path = np.concatenate([chain, tail[tail != ROOT]])
    if len(path):
        check(np.array_equal(tree.index.path(int(path[-1])), path), "a sequence's prefix is not a path")
    index = np.arange(first.blocks.shape[1])
    for g, (group, table) in enumerate(zip(rows.groups, rows.tables, strict=True)):
        start, sinks = int(rows.start[g, row]), rows.sink_blocks[g]
        held = ((index >= start) | (index < sinks)) & (index < total)
        check(np.array_equal(table.blocks[row] != NULL_BLOCK, held), "a group holds too much or too little")
        seen = group.first_block(done, size)
        check(start <= max(seen, sinks) or start <= total, "a block that the next token sees is gone")
        at = np.flatnonzero(held & (nodes != ROOT))
        check(
            np.array_equal(tree.block_of[g, nodes[at]], table.blocks[row, at]), "a held block is not shared"
        )
