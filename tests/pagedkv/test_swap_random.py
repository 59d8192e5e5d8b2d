"""Swapping under random operations, with bugs that must show, and with failures injected."""

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from pagedkv import BlockPool, KVCacheManager, Namespace, SequenceError
from pagedkv.block_cache import BlockCache
from pagedkv.block_tables import BlockTables
from pagedkv.fences import Fences
from pagedkv.page_table import PageTable
from pagedkv.policies.lru import LRU
from pagedkv.prefix_index import PrefixIndex
from pagedkv.sequences import Sequences
from pagedkv.swap import SwapIn, SwapOut, SwapSpace
from pagedkv.testing import ShadowStorage, snapshot

TENANT = Namespace(salt="tenant")


UNSEEN = ("_seen", "_head", "_spare", "_next", "index", "_index", "_stats", "_counters")
"""Scratch space, the next numbers, what the tree looks like inside, and counters of what was tried."""


def state(space: SwapSpace) -> object:
    """Everything that a later call to the space or its manager can depend on."""
    index = space._manager._cache.index
    tree = {}
    for parent, ids in index.chains():
        for block, before in zip(ids.tolist(), [parent, *ids.tolist()], strict=False):
            tree[block] = before, index.tokens[block].tolist(), int(index.extra[block])
    seen: Any = space
    return snapshot(seen, UNSEEN), tree


class SwapWalk:
    """A manager and a swap space with arrays for both sides, driven as an engine would that copies late.

    Every slot holds its token from the moment it is assigned (drafts are tokens too), so that whatever a
    sequence reads while it is on the device must be ``tokens``. Copies of either way are run at the last
    moment, just before ``done``, and until then nothing but a close touches the blocks that are filled.
    """

    space_type = SwapSpace

    def __init__(
        self, seed: int, policy: str | None = "lru", num_blocks: int = 10, num_host: int = 8
    ) -> None:
        self.random = random.Random(seed)
        self.manager = KVCacheManager(num_blocks, 3, max_seqs=4, policy=policy)
        self.space = self.space_type(self.manager, num_host)
        self.device = ShadowStorage(num_blocks, 3)
        self.host = ShadowStorage(num_host, 3)
        self.tokens: dict[Hashable, list[int]] = {}
        self.committed: dict[Hashable, int] = {}
        self.namespace: dict[Hashable, Namespace | None] = {}
        self.late: dict[int, tuple[str, SwapOut | SwapIn]] = {}
        self.next_id = 0
        self.seen: dict[str, int] = {}

    # engine

    def write(self, seq_id: Hashable, start: int) -> None:
        self.device.copy(self.manager)
        stop = len(self.tokens[seq_id])
        self.device.write(self.manager.tables.slots(seq_id, start, stop), self.tokens[seq_id][start:stop])

    def filling(self) -> set[int]:
        return {b for side, t in self.late.values() if side == "in" for b in t.copies.dst.tolist()}

    def idle(self) -> list[Hashable]:
        """Sequences on the device that hold no block which is still being filled."""
        filling = self.filling()
        ids = self.manager.tables.seq_ids
        return [i for i in ids if not filling & set(self.manager.tables.block_ids(i).tolist())]

    def run_copies(self, side: str, result: SwapOut | SwapIn) -> None:
        source, target = (self.device, self.host) if side == "out" else (self.host, self.device)
        target.slots[result.copies.dst] = source.slots[result.copies.src]

    def is_committed(self, seq_id: Hashable) -> bool:
        return self.committed[seq_id] == len(self.tokens[seq_id])

    # operations

    def open(self, _: Hashable) -> bool:
        rng = self.random
        seq_id, self.next_id = self.next_id, self.next_id + 1
        tokens = [rng.randrange(2) for _ in range(rng.randrange(14))]
        namespace = rng.choice([None, None, TENANT])
        if self.tokens and rng.random() < 0.6:
            other = rng.choice(list(self.tokens))
            namespace = self.namespace[other]
            tokens = [*self.tokens[other][: rng.randint(0, 14)], *tokens[:3]]
        opened = self.manager.open(seq_id, tokens, namespace=namespace)
        if opened is None:
            return False
        self.tokens[seq_id], self.namespace[seq_id] = tokens, namespace
        self.committed[seq_id] = opened.num_cached_tokens
        self.write(seq_id, opened.num_cached_tokens)
        return True

    def step(self, seq_id: Hashable) -> bool:
        count = self.random.randint(1, 4)
        if len(self.tokens[seq_id]) + count > 20 or not self.manager.append(seq_id, count):
            return False
        start = len(self.tokens[seq_id])
        self.tokens[seq_id] = self.tokens[seq_id] + [self.random.randrange(2) for _ in range(count)]
        self.write(seq_id, start)
        return True

    def commit(self, seq_id: Hashable) -> bool:
        self.device.copy(self.manager)
        start = self.committed[seq_id]
        stop = self.random.randint(start, len(self.tokens[seq_id]))
        self.manager.commit(seq_id, self.tokens[seq_id][start:stop])
        self.committed[seq_id] = stop
        return stop > start

    def fork(self, seq_id: Hashable) -> bool:
        child, self.next_id = self.next_id, self.next_id + 1
        if not self.is_committed(seq_id) or not self.manager.fork(seq_id, child):
            return False
        self.tokens[child], self.committed[child] = self.tokens[seq_id], self.committed[seq_id]
        self.namespace[child] = self.namespace[seq_id]
        return True

    def truncate(self, seq_id: Hashable) -> bool:
        length = self.random.randint(0, len(self.tokens[seq_id]))
        self.manager.truncate(seq_id, length)
        self.tokens[seq_id] = self.tokens[seq_id][:length]
        self.committed[seq_id] = min(length, self.committed[seq_id])
        return True

    def close(self, _: Hashable) -> bool:
        """Also what is still being filled."""
        seq_id = self.random.choice(self.manager.tables.seq_ids)
        self.manager.close(seq_id)
        self.forget(seq_id)
        return True

    def swap_out(self, seq_id: Hashable) -> bool:
        if self.random.random() < 0.5:
            self.device.copy(self.manager)
        before = self.manager.tables.block_ids(seq_id).tolist()
        pending = set(self.manager.copies.pending.dst.tolist())
        if pending & set(before):
            with pytest.raises(SequenceError, match="awaits its copy"):
                self.space.swap_out(seq_id)
            return False
        out = self.space.swap_out(seq_id)
        if out is None:
            assert len(before) > self.space.counts.free, "what would fit did not go"
            return False
        assert out.copies.src.tolist() == before
        self.late[out.transfer] = "out", out
        return True

    def swap_in(self, _: Hashable) -> bool:
        self.device.copy(self.manager)
        seq_id = self.random.choice(self.space.seq_ids)
        back = self.space.swap_in(seq_id)
        if back is None:
            return False
        self.late[back.transfer] = "in", back
        self.seen["hit"] = self.seen.get("hit", 0) + (back.num_cached_tokens > 0)
        self.seen["copied"] = self.seen.get("copied", 0) + (len(back.copies.src) > 0)
        return True

    def drop(self, _: Hashable) -> bool:
        seq_id = self.random.choice(self.space.seq_ids)
        self.space.drop(seq_id)
        self.forget(seq_id)
        return True

    def done(self, _: Hashable) -> bool:
        transfer = self.random.choice(list(self.late))
        self.run_copies(*self.late.pop(transfer))
        self.space.done(transfer)
        return True

    def forget(self, seq_id: Hashable) -> None:
        del self.tokens[seq_id], self.committed[seq_id], self.namespace[seq_id]

    # checks

    def check(self) -> None:
        self.manager.check_invariants()
        self.space.check_invariants()
        assert {*self.manager.tables.seq_ids, *self.space.seq_ids} == set(self.tokens)
        for seq_id in self.manager.tables.seq_ids:
            lengths = self.manager.tables.num_tokens(seq_id), self.manager.tables.num_committed(seq_id)
            assert lengths == (len(self.tokens[seq_id]), self.committed[seq_id])
        if len(self.manager.copies):
            return
        for seq_id in self.idle():
            read = self.device.slots.reshape(-1)[self.manager.tables.slots(seq_id)].tolist()
            assert read == self.tokens[seq_id], f"{seq_id} reads {read}, not {self.tokens[seq_id]}"

    def run(self, num_ops: int) -> None:
        weights = {"open": 6, "step": 8, "commit": 8, "fork": 2, "truncate": 2, "close": 2}
        weights |= {"swap_out": 5, "swap_in": 6, "drop": 1, "done": 5}
        for _ in range(num_ops):
            name = self.random.choices(list(weights), list(weights.values()))[0]
            idle = self.idle()
            if name in ("step", "commit", "fork", "truncate", "swap_out") and not idle:
                continue
            if name == "close" and not len(self.manager.tables):
                continue
            if (name in ("swap_in", "drop") and not self.space.seq_ids) or (name == "done" and not self.late):
                continue
            granted = getattr(self, name)(self.random.choice(idle) if idle else None)
            self.seen[name] = self.seen.get(name, 0) + granted
            self.check()

    def finish(self) -> None:
        """Close, drop and finish everything, in any order."""
        while self.tokens or self.late:
            name = self.random.choice(["close", "drop", "done"])
            there = {
                "close": len(self.manager.tables),
                "drop": len(self.space.seq_ids),
                "done": len(self.late),
            }
            if there[name]:
                getattr(self, name)(None)
                self.check()
        assert self.manager.counts.active == 0 and self.manager.stats().used_slots == 0
        assert self.space.counts == (self.space.stats().num_blocks, 0, 0)


POLICIES = ["lru", "fifo", "s3fifo", None]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_reads_its_tokens_wherever_it_has_been(seed: int, policy: str | None) -> None:
    """Fifteen hundred operations with copies as late as they may be; both pools end as they began."""
    walk = SwapWalk(seed, policy)
    walk.run(1_500)
    assert min(walk.seen[name] for name in ("swap_out", "swap_in", "drop", "done", "copied")) > 10, walk.seen
    assert policy is None or walk.seen["hit"] > 10
    walk.finish()


def test_the_same_walk_gives_the_same_ids() -> None:
    """Device and host ids depend on the calls alone."""
    first, second, other = SwapWalk(1), SwapWalk(1), SwapWalk(2)
    for walk in (first, second, other):
        walk.run(500)
    assert state(first.space) == state(second.space) != state(other.space)


class ReturnsDeviceBlocksEarly(SwapSpace):
    """Signals the fence before the copies have run."""

    def _begin(self, transfer: Any) -> int:
        self._manager.fences.signal(transfer.fence)
        return super()._begin(transfer._replace(fence=self._manager.fences.open()))

    def swap_out(self, seq_id: Hashable) -> SwapOut | None:
        out = super().swap_out(seq_id)
        if out is not None:
            going = self._transfers[out.transfer]
            self._manager.fences.signal(going.fence)
            self._transfers[out.transfer] = going._replace(fence=self._manager.fences.open())
        return out


class ReturnsFilledBlocksEarly(SwapSpace):
    """Lets the blocks that a swap-in fills go before the copies have run."""

    def swap_in(self, seq_id: Hashable) -> SwapIn | None:
        back = super().swap_in(seq_id)
        if back is not None:
            coming = self._transfers[back.transfer]
            self._manager.fences.signal(coming.fence)
            self._transfers[back.transfer] = coming._replace(fence=-1)
        return back

    def done(self, transfer: int) -> None:
        if self._transfers[transfer].fence < 0:
            fence = self._manager.fences.open()
            self._transfers[transfer] = self._transfers[transfer]._replace(fence=fence)
        super().done(transfer)


class ReturnsHostBlocksEarly(SwapSpace):
    """Frees host blocks before the copies from them have run."""

    def swap_in(self, seq_id: Hashable) -> SwapIn | None:
        back = super().swap_in(seq_id)
        if back is not None:
            coming = self._transfers[back.transfer]
            self._free(coming.freed)
            self._transfers[back.transfer] = coming._replace(freed=coming.freed[:0])
        return back


class DropsEarly(SwapSpace):
    """Frees host blocks that are still being written."""

    def drop(self, seq_id: Hashable) -> None:
        self._free(self._swapped.pop(seq_id).blocks)


class ComesBackEarly(SwapSpace):
    """Does not wait for the way out."""

    def swap_in(self, seq_id: Hashable) -> SwapIn | None:
        under_way, self._transfers = self._transfers, {}
        back = super().swap_in(seq_id)
        self._transfers = under_way | self._transfers
        return back


class ForgetsTheTail(SwapSpace):
    """Copies only full blocks back."""

    def swap_in(self, seq_id: Hashable) -> SwapIn | None:
        back = super().swap_in(seq_id)
        if back is None:
            return None
        copies = back.copies._replace(src=back.copies.src[:-1], dst=back.copies.dst[:-1])
        return back._replace(copies=copies)


class CommitsDrafts(SwapSpace):
    """Takes every token that has a slot for final."""

    def _read(self, seq_id: Hashable, blocks: Any) -> Any:
        swapped = super()._read(seq_id, blocks)
        return swapped._replace(num_committed=len(swapped.tokens))


@pytest.mark.parametrize(
    "bug",
    [
        ReturnsDeviceBlocksEarly,
        ReturnsFilledBlocksEarly,
        ReturnsHostBlocksEarly,
        DropsEarly,
        ComesBackEarly,
        ForgetsTheTail,
        CommitsDrafts,
    ],
)
def test_the_walk_finds_a_swap_space_with_this_bug(bug: type[SwapSpace]) -> None:
    """A walk that cannot fail would prove nothing."""

    class Buggy(SwapWalk):
        space_type = bug

    with pytest.raises(AssertionError):
        for seed in range(10):
            Buggy(seed).run(2_000)


# -- failures injected


class EveryStep(LRU):
    """An LRU that is told of every step, compiled core or not."""


POINTS: dict[str, list[tuple[Any, str]]] = {
    "swap_out": [
        (BlockPool, "acquire"),
        (Fences, "open"),
        (Fences, "hold"),
        (PageTable, "block_ids"),
        (BlockCache, "release"),
        (Sequences, "remove"),
        (KVCacheManager, "close"),
        (SwapSpace, "_read"),
        (SwapSpace, "_begin"),
    ],
    "swap_in": [
        (BlockPool, "acquire"),
        (PrefixIndex, "match"),
        (BlockTables, "add"),
        (Sequences, "add"),
        (Sequences, "commit"),
        (BlockCache, "share"),
        (PrefixIndex, "insert"),
        (LRU, "stored"),
        (KVCacheManager, "open"),
        (KVCacheManager, "commit"),
        (PageTable, "block_ids"),
        (Fences, "open"),
        (SwapSpace, "_begin"),
    ],
    "done": [(BlockPool, "release")],
    "drop": [(BlockPool, "release")],
}


@pytest.mark.parametrize(("operation", "point"), [(name, p) for name, ps in POINTS.items() for p in ps])
def test_running_out_of_memory_leaves_both_pools_as_they_were(
    operation: str, point: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call of each function in turn; afterwards the same operation succeeds."""
    owner, name = point
    original = getattr(owner, name)
    fail_at = calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise MemoryError("injected")
        return original(*args, **kwargs)

    def prepared() -> SwapSpace:
        manager = KVCacheManager(8, 2, policy=EveryStep())
        for seq_id, tokens in (("0", [1, 2, 3, 4, 5]), ("1", [1, 2, 9])):
            manager.open(seq_id, tokens)
            manager.commit(seq_id, tokens[manager.tables.num_committed(seq_id) :])
        space = SwapSpace(manager, 8)
        if operation != "swap_out":
            space.swap_out("0")
            space.done(0)
            manager.open("filler", np.arange(12))
            manager.close("filler")
        if operation == "done":
            space.swap_in("0")
        return space

    acts: dict[str, Callable[[SwapSpace], object]] = {
        "swap_out": lambda space: space.swap_out("0"),
        "swap_in": lambda space: space.swap_in("0"),
        "done": lambda space: space.done(1),
        "drop": lambda space: space.drop("0"),
    }
    finished = False
    while not finished:
        space = prepared()
        before, counts = state(space), (space._manager.counts, space.counts)
        calls, fail_at = 0, fail_at + 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            try:
                acts[operation](space)
                finished = True
            except MemoryError:
                assert (space._manager.counts, space.counts) == counts
                assert state(space) == before
        space._manager.check_invariants()
        space.check_invariants()
        if not finished:
            acts[operation](space)
            assert state(space) != before
    assert fail_at > 1, "no failure was injected"
