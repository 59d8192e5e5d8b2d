"""The thirteen promises, one short test each; the thorough ones are named in tests/README.md."""

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pagedkv
from pagedkv import BlocksRemoved, BlocksStored, KVCacheManager, Media, Namespace, NeverFits, PagedKVError
from pagedkv.policies import POLICIES, make_policy
from pagedkv.policies.priority import Priority
from pagedkv.testing import FAILURE_POINTS, FailureInjector, ShadowIndex, random_walk, snapshot

SIZE = 4
UNSEEN = ("_seen", "_head", "_spare", "_last_batch", "_next")


def fill(manager: KVCacheManager, name: str, tokens: list[int], close: bool = False) -> int:
    """Open and commit; returns the cached tokens."""
    opened = manager.open(name, tokens)
    assert opened is not None
    manager.commit(name, tokens[opened.num_cached_tokens :])
    if close:
        manager.close(name)
    return opened.num_cached_tokens


def crowded() -> KVCacheManager:
    """Eight blocks: two of "a", two of "b" with an uncommitted token, three cached, one free."""
    manager = KVCacheManager(8, SIZE, max_seqs=3)
    manager.events.record()
    fill(manager, "old", list(range(100, 112)), close=True)
    fill(manager, "a", [1, 2, 3, 4, 5])
    fill(manager, "b", [11, 12, 13, 14, 15])
    manager.append("b")
    return manager


def test_promise_1_misuse_is_refused_with_the_numbers_and_changes_nothing() -> None:
    """Closing twice, truncating below zero, a foreign id, a repeated id, opening what is open."""
    manager = crowded()
    before = snapshot(manager)
    mistakes: dict[str, Callable[[], object]] = {
        "'c' is not open": lambda: manager.close("c"),
        "of 5 tokens to -1": lambda: manager.truncate("a", -1),
        "to 6": lambda: manager.truncate("a", 6),
        "only 1 distinct": lambda: manager.step(["a", "a"]),
        "open already": lambda: manager.open("a", [1]),
        "got -3": lambda: manager.append("a", -3),
        "5 of its 5 are committed": lambda: manager.commit("a", [6]),
        "fence 7": lambda: manager.fences.signal(7),
        "no pin 7": lambda: manager.retention.unpin(7),
        "block 9": lambda: manager._cache.pool.release(np.array([9], np.int32), np.array([False])),
    }
    for message, call in mistakes.items():
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert isinstance(error.value, PagedKVError)
        assert snapshot(manager) == before, message


def test_promise_2_all_or_nothing_even_when_it_fails_in_the_middle() -> None:
    """Every function that ``open`` depends on, failing at its first and second call.

    With media the blocks are taken step by step, so that the inner steps can fail, too.
    """
    failed = 0
    inner = ("pagedkv.policies.lru:LRU.first", "pagedkv.block_pool:BlockPool.acquire")
    for point in (*FAILURE_POINTS["open"], *inner):
        for at in (1, 2):
            manager = crowded()
            before = snapshot(manager, UNSEEN)
            injector = FailureInjector(point)
            try:
                with injector.failing(at):
                    manager.open("c", [1, 2, 3, 4, 9, *range(7)], namespace=None, media=[Media(5, "cat")])
            except MemoryError:
                failed += 1
                assert snapshot(manager, ("_seen", "_head", "_spare", "_last_batch", "_next")) == before, (
                    point
                )
            manager.check_invariants()
    assert failed >= 10


def test_promise_3_not_now_is_a_value_never_is_an_error_and_neither_evicts() -> None:
    """A prompt for later gets None, one for never ``NeverFits``; what was cached stays."""
    manager = crowded()
    before = snapshot(manager)
    assert manager.open("c", list(range(20))) is None
    assert not manager.append("a", 20)
    assert not manager.step(["a", "b"], 12)
    with pytest.raises(NeverFits, match="33 tokens can never fit"):
        manager.open("c", list(range(33)))
    with pytest.raises(NeverFits, match="can never fit"):
        manager.append("a", 28)
    assert snapshot(manager) == before
    assert manager.counts.cached == 3 and manager.stats().evicted_blocks == 0


def test_promise_4_acquiring_is_one_step_and_never_evicts_its_own_hit() -> None:
    """The only evictable blocks are the hit: it is held, and the rest is "not now"."""
    manager = KVCacheManager(4, SIZE, max_seq_len=100)
    fill(manager, "a", list(range(12)), close=True)
    fill(manager, "b", [50])
    assert manager.open("c", [*range(12), 1]) is None
    manager.close("b")
    opened = manager.open("c", [*range(12), 1])
    assert opened is not None and opened.num_cached_tokens == 12 and manager.stats().evicted_blocks == 0


def test_promise_5_a_hit_is_exact_and_digests_are_seeded() -> None:
    """Another token, parent, salt, adapter version, weights or image: no hit. Other seeds, other digests."""
    prompt, base = [1, 2, 3, 4, 5, 6, 7, 8, 9], Namespace("s", "lora", 1, "w")
    manager = KVCacheManager(64, SIZE)
    manager.open("a", prompt, namespace=base, media=[Media(5, "cat")])
    manager.commit("a", prompt)

    def hit(tokens: list[int], namespace: Namespace | None, *media: Media) -> int:
        return manager.lookup(tokens, namespace=namespace, media=media).num_cached_tokens

    assert hit(prompt, base, Media(5, "cat")) == 8
    others = [Namespace("t", "lora", 1, "w"), Namespace("s", "x", 1, "w"), Namespace("s", "lora", 2, "w")]
    for namespace in (None, *others, Namespace("s", "lora", 1, "v")):
        assert hit(prompt, namespace, Media(5, "cat")) == 0
    for media in ([], [Media(5, "dog")], [Media(6, "cat")], [Media(5, "cat"), Media(6, "cat")]):
        assert hit(prompt, base, *media) == 4
    assert hit([9, *prompt[1:]], base, Media(5, "cat")) == 0
    assert hit([*prompt[:6], 0, 0, 9], base, Media(5, "cat")) == 4
    digests = {pagedkv.prefix_digests(prompt, SIZE, seed=seed)[0] for seed in (b"", b"x", b"y")}
    assert len(digests) == 3


def test_promise_6_free_cached_and_active_add_up_after_every_call() -> None:
    """In a random walk, with the public check of all parts."""

    def check(manager: KVCacheManager) -> None:
        assert sum(manager.counts) == manager.num_blocks
        assert min(manager.counts) >= 0
        manager.check_invariants()

    random_walk(600, seed=6, before_op=check)


@pytest.mark.parametrize("name", POLICIES)
def test_promise_7_children_go_before_parents_and_no_more_than_the_shortfall(name: str) -> None:
    """A trunk with two branches in a full pool, evicted block by block under every policy."""
    manager = KVCacheManager(6, SIZE, policy=name)
    manager.events.record()
    for tail in ([*range(8, 16)], [*range(50, 58)]):
        fill(manager, "a", [*range(8), *tail], close=True)
    assert manager.counts.cached == 6
    follower = ShadowIndex()
    for i in range(6):
        fill(manager, f"new {i}", [900 + i] * 1)
        assert manager.stats().evicted_blocks == i + 1
        for event in manager.events.take():
            follower.apply(event)  # refuses a parent that goes before its child


def test_promise_8_scales_move_with_their_block() -> None:
    """A forked int8 tail is copied with its scales: what is read is what was written."""
    torch = pytest.importorskip("torch")
    spec = pagedkv.KVCacheSpec((pagedkv.LayerSpec(2, 8),), "int8", SIZE)
    cache = pagedkv.PagedKVCache(spec, 6)
    cache.open("a", [1, 2, 3])
    k, v = torch.randn(3, 2, 8) * 100, torch.randn(3, 2, 8)
    cache.write(0, k, v, cache.slots("a"))
    cache.commit("a", [1, 2, 3])
    tables = cache.manager.tables
    before = cache.storage.gather(0, tables.block_ids("a"), tables.num_tokens("a"))
    assert cache.fork("a", "b") and cache.step(["b"])
    cache.write(0, k[:1], v[:1], cache.slots("b"))
    for seq_id in "ab":
        after = cache.storage.gather(0, tables.block_ids(seq_id), 3)
        assert torch.equal(after.k, before.k) and torch.equal(after.v, before.v)
    assert float((before.k - k).abs().max()) <= float(k.abs().max()) / 254 * 1.01


def test_promise_9_a_fenced_block_is_not_handed_out_before_its_signal() -> None:
    """Closed while a step runs, the block waits; then it is free."""
    manager = KVCacheManager(1, SIZE)
    manager.open("a", [1])
    fence = manager.fences.open()
    manager.close("a")
    assert manager.open("b", [2]) is None and manager.stats().fenced_blocks == 1
    manager.fences.signal(fence)
    assert manager.open("b", [2]) is not None


def test_promise_10_replaying_the_events_gives_the_index() -> None:
    """No gaps, and "removed" only with the last copy: after every operation of a walk."""
    follower = ShadowIndex()
    manager = crowded()
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [7] * 9, [1, 2, 3, 4, 9, 9, 9, 9]):
        if "x" in manager.tables:
            manager.close("x")
        manager.close("b") if "b" in manager.tables else None
        fill(manager, "x", tokens)
        for event in manager.events.take():
            assert isinstance(event, (BlocksStored, BlocksRemoved))
            follower.apply(event)
        assert follower.digests == manager.events.digests()
        assert len(follower.digests) == manager.stats().indexed_blocks


SCRIPT = """
import hashlib
from pagedkv.policies import POLICIES
from pagedkv.testing import random_walk
for policy in [*POLICIES, None]:
    tables = hashlib.sha256()
    def note(manager):
        ids = [manager.tables.block_ids(i).tolist() for i in manager.tables.seq_ids]
        tables.update(repr(ids).encode())
    manager = random_walk(400, seed=11, policy=policy, maintenance=True, before_op=note)
    digests = sorted(d.hex() for d in manager.events.digests())
    print(policy, tables.hexdigest(), manager.events._next, manager.stats(), digests)
"""


def test_promise_11_same_calls_give_same_ids_events_and_digests_in_any_process() -> None:
    """Three hash seeds, one output: block tables after every call, events, digests, counters."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(pagedkv.__file__).parents[1])},
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == len(POLICIES) + 1


def test_promise_12_time_is_passed_in() -> None:
    """A time to live runs by the clock that the policy was given, and by no other."""
    now = 0.0
    manager = KVCacheManager(4, SIZE, policy=Priority(clock=lambda: now))
    for name, start in (("keep", 0), ("other", 50)):
        fill(manager, name, list(range(start, start + 8)))
    manager.retention.set_priority("keep", 90, ttl=10.0)
    manager.close("keep")
    manager.close("other")
    late = copy.deepcopy(manager)
    fill(late, "new", [900], close=True)
    assert late.lookup(list(range(9))).num_cached_tokens == 8
    now = 10.0
    fill(manager, "new", [900], close=True)
    assert manager.lookup(list(range(9))).num_cached_tokens == 4
    for policy in POLICIES:
        assert "import time" not in inspect.getsource(sys.modules[type(make_policy(policy)).__module__])


def test_promise_13_the_simulator_reports_what_the_manager_counted() -> None:
    """Hits and blocks of a replay are those of the manager it ran on, which is a ``KVCacheManager``."""
    from pagedkv.sim.engine.engine import Engine, EngineConfig
    from pagedkv.sim.replay import ReplaySetup
    from pagedkv.sim.timing.gpus import load_gpu
    from pagedkv.sim.timing.models import load_model
    from pagedkv.sim.workload import chat_long

    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("h100"), num_blocks=20_000)
    trace = chat_long(6, seed=1)
    manager = KVCacheManager(setup.num_blocks, setup.model.spec.block_size)
    records = Engine(trace, manager, setup.step_time, EngineConfig()).run()
    stats = manager.stats()
    assert records.num_finished == len(trace) and records.num_preemptions == 0
    assert records.hit_tokens == stats.hit_tokens
    last = records.samples[-1]
    assert (last.free_blocks, last.cached_blocks, last.active_blocks) == tuple(manager.counts)
    assert records.occupancy.peak_active_blocks <= manager.num_blocks
