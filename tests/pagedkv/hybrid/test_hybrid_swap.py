"""Hybrid sequences on the host and back: by hand, beside what every slot holds, and when memory runs out."""

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Media, Namespace, NeverFits, PagedKVError, SequenceError
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager, HybridSwapSpace
from pagedkv.swap import SwapIn, SwapOut, SwapSpace
from pagedkv.testing import snapshot

FULL, LOCAL = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=4)
SINKS = CacheGroup("sinks", (2,), window=3, sinks=3)
IGNORE = ("_seen", "_head", "_spare", "_next", "_last_batch", "num_evicted", "_stats")


def space_of(num_blocks: int, num_host: int, **options: Any) -> tuple[HybridKVCacheManager, HybridSwapSpace]:
    """A full group and a window of 4, in blocks of 2 tokens."""
    manager = HybridKVCacheManager([FULL, LOCAL], num_blocks, 2, **options)
    return manager, HybridSwapSpace(manager, num_host)


def opened(manager: HybridKVCacheManager, seq_id: str, tokens: list[int], **options: Any) -> None:
    assert manager.open(seq_id, tokens, **options)
    manager.commit(seq_id, tokens[manager.tables["full"].num_committed(seq_id) :])


def go_out(space: HybridSwapSpace, seq_id: str) -> SwapOut:
    out = space.swap_out(seq_id)
    assert out is not None
    space.done(out.transfer)
    return out


def come_back(space: HybridSwapSpace, seq_id: str) -> SwapIn:
    back = space.swap_in(seq_id)
    assert back is not None
    space.done(back.transfer)
    return back


def test_what_the_groups_hold_goes_out_and_only_what_is_gone_comes_back() -> None:
    """Ten tokens: five full blocks, and the local ones of the window."""
    manager, space = space_of(20, 20)
    opened(manager, "a", list(range(9)))
    tables = {name: table.block_ids("a").tolist() for name, table in manager.tables.items()}
    out = go_out(space, "a")
    assert out.copies.src.tolist() == [*tables["full"], *[b for b in tables["local"] if b]]
    assert len(out.copies.src) == 5 + 3 and "a" in space
    back = come_back(space, "a")
    assert back.num_cached_tokens == 8 and len(back.copies.src) == 2  # the partial tail of each group
    assert back.copies.src.tolist() == [out.copies.dst[4], out.copies.dst[7]]
    again = {name: table.block_ids("a").tolist() for name, table in manager.tables.items()}
    assert {name: b[:4] for name, b in again.items()} == {name: b[:4] for name, b in tables.items()}
    manager.check_invariants()
    space.check_invariants()
    assert space.stats().hit_blocks == 6 and space.counts.free == 20


def test_what_was_evicted_is_copied_group_by_group() -> None:
    """Some local blocks are gone and the full ones are not: a new sequence would have a shorter hit."""
    manager, space = space_of(14, 20)
    opened(manager, "a", list(range(9)))
    out = go_out(space, "a")
    assert manager.counts == (6, 8, 0)  # the full committed blocks, two local ones that fell out with them
    assert manager.open("filler", [50] * 8)  # 8 blocks: the six free ones, and the two that fell out
    assert manager.append("filler", 1)  # and the last local and full one
    manager.close("filler")
    assert manager.stats().groups == {"full": (0, 3), "local": (0, 1)}
    assert manager.lookup([*range(8), 99]).num_cached_tokens == 0
    back = come_back(space, "a")
    assert len(back.copies.src) == 8 - 4 and space.stats().hit_blocks == 4 and back.num_cached_tokens == 6
    where = dict(zip(out.copies.dst.tolist(), out.copies.src.tolist(), strict=True))
    assert len(where) == 8 and set(back.copies.src.tolist()) <= set(where)
    assert manager.tables["local"].block_ids("a")[:2].tolist() == [0, 0]
    manager.check_invariants()


def test_lengths_commits_namespace_media_and_windows_come_back() -> None:
    """As it was, the uncommitted slots too."""
    manager, space = space_of(30, 30)
    namespace, media = Namespace(salt="s"), [Media(3, "cat")]
    opened(manager, "a", list(range(11)), namespace=namespace, media=media)
    assert manager.append("a", 4)
    held = {name: (table.block_ids("a") != NULL_BLOCK).tolist() for name, table in manager.tables.items()}
    go_out(space, "a")
    come_back(space, "a")
    table = manager.tables["local"]
    assert (table.num_tokens("a"), table.num_committed("a")) == (15, 11)
    assert held == {name: (t.block_ids("a") != NULL_BLOCK).tolist() for name, t in manager.tables.items()}
    manager.commit("a", [11, 12, 13, 14])
    manager.close("a")
    prompt = [*range(15), 99]
    assert manager.lookup(prompt, namespace=namespace, media=media).num_cached_tokens == 14
    assert manager.lookup(prompt, namespace=namespace).num_cached_tokens == 2
    manager.check_invariants()


def test_without_prefix_caching_and_without_tokens_all_goes_and_comes() -> None:
    """Nothing to hit; and nothing to copy."""
    manager, space = space_of(20, 20, policy=None)
    opened(manager, "a", list(range(9)))
    assert manager.open("empty", [])
    go_out(space, "a")
    assert len(go_out(space, "empty").copies.src) == 0
    assert len(come_back(space, "a").copies.src) == 8
    back = come_back(space, "empty")
    assert len(back.copies.dst) == 0 and back.num_cached_tokens == 0
    manager.check_invariants()


def test_it_comes_back_when_its_way_out_is_done_and_there_is_room() -> None:
    """Not now is None, and changes nothing."""
    manager, space = space_of(12, 20)
    opened(manager, "a", list(range(9)))
    out = space.swap_out("a")
    assert out is not None and manager.counts.active >= 8
    assert manager.open("early", [9] * 6) is None  # the fence keeps the blocks
    assert space.swap_in("a") is None
    space.done(out.transfer)
    assert manager.open("b", [9] * 10)
    before = snapshot(space, IGNORE)  # type: ignore[arg-type]
    assert space.swap_in("a") is None
    assert snapshot(space, IGNORE) == before  # type: ignore[arg-type]
    manager.close("b")
    back = space.swap_in("a")
    assert back is not None and len(back.copies.src) == 6 and back.num_cached_tokens == 4
    assert space.swap_out("a") is None  # its blocks are being filled
    space.done(back.transfer)
    assert space.swap_out("a") is not None
    manager.check_invariants()


def test_misuse_is_refused_with_the_numbers_and_changes_nothing() -> None:
    """Wrong ids, wrong managers, copies that wait, a host that is too small."""
    manager, space = space_of(30, 9)
    opened(manager, "a", list(range(9)))
    opened(manager, "big", list(range(50, 66)))
    acts: list[tuple[Callable[[], object], type[PagedKVError], str]] = [
        (lambda: space.swap_out("x"), SequenceError, "'x' is not open"),
        (lambda: space.swap_in("a"), SequenceError, "'a' is not swapped out"),
        (lambda: space.swap_out("big"), NeverFits, "it has 10 blocks, the host 9"),
        (lambda: space.drop("a"), SequenceError, "'a' is not swapped out"),
        (lambda: space.done(0), PagedKVError, "is not under way"),
        (lambda: HybridSwapSpace(KVCacheManager(4, 2), 4), PagedKVError, "needs a HybridKVCacheManager"),  # type: ignore[arg-type]
        (lambda: SwapSpace(manager, 4), PagedKVError, "needs a KVCacheManager"),  # type: ignore[arg-type]
        (lambda: HybridSwapSpace(manager, 0), PagedKVError, "num_host_blocks"),
    ]
    for act, error, words in acts:
        before = snapshot(space, IGNORE)  # type: ignore[arg-type]
        with pytest.raises(error, match=words):
            act()
        assert snapshot(space, IGNORE) == before  # type: ignore[arg-type]
    go_out(space, "a")
    opened(manager, "a", [1, 2, 3])
    with pytest.raises(SequenceError, match="another sequence 'a' is open"):
        space.swap_in("a")
    with pytest.raises(SequenceError, match="another sequence 'a' is swapped out"):
        space.swap_out("a")
    assert manager.fork("a", "b") and manager.append("b")
    with pytest.raises(SequenceError, match="awaits its copy"):
        space.swap_out("b")
    space.drop("a")
    assert space.counts.free == 9
    manager.check_invariants()
    space.check_invariants()


# -- beside what every slot holds


class SwapWalk:
    """Random sequences that write, swap and read in every group, on a device and a host of numbers."""

    def __init__(self, seed: int, groups: list[CacheGroup], policy: str | None) -> None:
        self.random = random.Random(seed)
        self.manager = HybridKVCacheManager(groups, 24, 2, max_seqs=5, max_seq_len=40, policy=policy)
        self.space = HybridSwapSpace(self.manager, 24)
        self.device, self.host = np.full((25, 2), -1), np.full((25, 2), -1)
        self.tokens: dict[Hashable, list[int]] = {}  # committed ones, wherever the sequence is
        self.transfers: list[int] = []
        self.next_id = self.num_back = 0
        self.known: list[list[int]] = [[]]

    def run(self, num_ops: int) -> None:
        for _ in range(num_ops):
            getattr(
                self, self.random.choice(["open", "grow", "grow", "out", "back", "done", "close", "cut"])
            )()
            self.manager.check_invariants()
            self.space.check_invariants()
            self.check()

    def check(self) -> None:
        for seq_id in self.manager.tables[self.manager.groups[0].name].seq_ids:
            tokens = self.tokens[seq_id]
            for g, (group, table) in enumerate(
                zip(self.manager.groups, self.manager.tables.values(), strict=True)
            ):
                slots = table.slots(seq_id, 0, len(tokens))
                for p, token in enumerate(tokens):
                    seen = group.window is None or p > len(tokens) - group.window or p < group.sinks
                    if slots[p] >= 2:
                        assert self.device.reshape(-1)[slots[p]] == 100 * g + token, (group.name, seq_id, p)
                    assert slots[p] >= 2 or not seen

    def write(self, seq_id: Hashable, tokens: list[int]) -> None:
        copies = self.manager.copies.take()
        self.device[copies.dst] = self.device[copies.src]
        start = len(self.tokens[seq_id])
        for g, table in enumerate(self.manager.tables.values()):
            slots = table.slots(seq_id, start, start + len(tokens))
            self.device.reshape(-1)[slots] = 100 * g + np.array(tokens, np.int64)
        self.manager.commit(seq_id, tokens)
        self.tokens[seq_id] += tokens
        self.known.append(list(self.tokens[seq_id]))

    def any(self) -> Hashable | None:
        ids = self.manager.tables[self.manager.groups[0].name].seq_ids
        return self.random.choice(ids) if ids else None

    def open(self) -> None:
        prompt = [*self.random.choice(self.known[-30:]), *self.random.choices(range(3), k=3)][:30]
        opened = self.manager.open(self.next_id, prompt, max_fresh_tokens=4)
        if opened is not None:
            self.tokens[self.next_id] = prompt[: opened.num_cached_tokens]
            self.write(self.next_id, prompt[opened.num_cached_tokens : opened.num_tokens])
        self.next_id += 1

    def grow(self) -> None:
        seq_id = self.any()
        if seq_id is not None and len(self.tokens[seq_id]) < 35:
            table = self.manager.tables[self.manager.groups[0].name]
            if self.manager.append(seq_id, 3):
                left = table.num_tokens(seq_id) - len(self.tokens[seq_id])
                self.write(seq_id, self.random.choices(range(3), k=self.random.randint(0, left)))

    def cut(self) -> None:
        seq_id = self.any()
        if seq_id is not None:
            length = max(0, len(self.tokens[seq_id]) - self.random.randrange(2))
            try:
                self.manager.truncate(seq_id, length)
                del self.tokens[seq_id][length:]
            except SequenceError:
                pass

    def out(self) -> None:
        seq_id = self.any()
        copies = self.manager.copies.take()
        self.device[copies.dst] = self.device[copies.src]
        out = self.space.swap_out(seq_id) if seq_id is not None else None
        if out is not None:
            self.host[out.copies.dst] = self.device[out.copies.src]
            self.transfers.append(out.transfer)

    def back(self) -> None:
        if self.space.seq_ids:
            seq_id = self.random.choice(self.space.seq_ids)
            back = self.space.swap_in(seq_id)
            if back is not None:
                self.device[back.copies.dst] = self.host[back.copies.src]
                self.transfers.append(back.transfer)
                self.num_back += 1

    def done(self) -> None:
        if self.transfers:
            self.space.done(self.transfers.pop(self.random.randrange(len(self.transfers))))

    def close(self) -> None:
        seq_id = self.any()
        if seq_id is not None and self.random.random() < 0.4:
            self.manager.close(seq_id)


@pytest.mark.parametrize("policy", ["lru", "lfu", None])
@pytest.mark.parametrize("groups", [[FULL, LOCAL], [LOCAL, SINKS], [SINKS, FULL, LOCAL]])
def test_every_group_reads_its_tokens_wherever_the_sequence_has_been(
    groups: list[CacheGroup], policy: str | None
) -> None:
    """Slots are compared after every operation, and nothing is lost at the end."""
    walk = SwapWalk(1, groups, policy)
    walk.run(700)
    assert walk.num_back > 20 and walk.space.stats().copied_in_blocks > 30
    assert policy is None or walk.space.stats().hit_blocks > 30
    while walk.transfers:
        walk.done()
    for seq_id in walk.space.seq_ids:
        walk.space.drop(seq_id)
    for seq_id in list(walk.manager.tables[groups[0].name].seq_ids):
        walk.manager.close(seq_id)
    assert walk.manager.counts.active == 0 and walk.space.counts.free == 24
    walk.manager.check_invariants()


@pytest.mark.parametrize("point", ["pool", "nodes", "grow", "adopt", "open", "_begin"])
def test_running_out_of_memory_on_the_way_back_leaves_both_pools_as_they_were(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens; and then it comes back after all."""
    manager, space = space_of(14, 20)
    opened(manager, "a", list(range(9)))
    opened(manager, "b", [0, 1, 70])
    go_out(space, "a")
    manager.close("b")
    assert manager.open("filler", [50] * 14)  # all is evicted
    manager.close("filler")
    counts, nodes = (manager.counts, space.counts), manager.stats().num_nodes
    tree = manager._tree
    owner: dict[str, tuple[Any, str]] = {
        "pool": (tree.pool, "acquire"),
        "nodes": (tree.nodes, "acquire"),
        "grow": (tree, "grow"),
        "adopt": (tree, "adopt"),
        "open": (manager.fences, "open"),
        "_begin": (space, "_begin"),
    }

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(*owner[point], fail)
        with pytest.raises(MemoryError):
            space.swap_in("a")
    evicted = counts[0].cached - manager.counts.cached
    assert (manager.counts.active, space.counts) == (counts[0].active, counts[1]) and evicted >= 0
    assert manager.stats().num_nodes <= nodes and "a" in space
    manager.check_invariants()
    space.check_invariants()
    assert len(come_back(space, "a").copies.src) == 8
    manager.check_invariants()
