"""Priorities and their time: which content stays, and for how long."""

import copy
from typing import Any

import pytest

from pagedkv import KVCacheManager, PagedKVError, SequenceError
from pagedkv.policies.priority import Priority


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(manager: KVCacheManager, token: int, priority: int | None = None, **options: Any) -> None:
    """Serve a prompt of two blocks of two tokens that begins with ``token``."""
    prompt = range(token, token + 4)
    opened = manager.open("a", prompt, max_cached_tokens=4)
    assert opened is not None
    manager.commit("a", prompt[opened.num_cached_tokens :])
    if priority is not None:
        assert manager.retention.set_priority("a", priority, **options) > 0
    manager.close("a")


def cached(manager: KVCacheManager, start: int) -> int:
    """Tokens of that prompt in the cache, asked of a copy."""
    trial = copy.deepcopy(manager)
    opened = trial.open("look", range(start, start + 4), max_cached_tokens=4)
    return opened.num_cached_tokens if opened else 0


def test_higher_priorities_stay_longer_and_equals_go_by_age() -> None:
    """0 before the default 35 before 100, whatever was used last."""
    manager = KVCacheManager(8, 2, policy="priority")
    run(manager, 10, 100)
    run(manager, 20)
    run(manager, 30)
    run(manager, 40, 0)
    run(manager, 50)
    assert [cached(manager, start) for start in (10, 20, 30, 40, 50)] == [4, 4, 4, 0, 4]
    run(manager, 60)
    run(manager, 70)
    assert [cached(manager, start) for start in (10, 20, 30, 50, 60, 70)] == [4, 0, 0, 4, 4, 4]


def test_a_range_of_tokens_has_its_own_priority() -> None:
    """Only blocks with a token of the range: the second block goes, the first stays."""
    manager = KVCacheManager(4, 2, policy="priority")
    run(manager, 10, 90, start=0, stop=1)
    run(manager, 20, 50)
    run(manager, 30, 50, start=3)
    assert (cached(manager, 10), cached(manager, 20)) == (2, 2)


def test_a_low_parent_waits_for_its_high_child() -> None:
    """Children first holds against any priority."""
    manager = KVCacheManager(3, 2, policy="priority")
    run(manager, 10, 0, stop=2)
    manager.open("b", [1, 2, 3])
    manager.close("b")
    assert cached(manager, 10) == 2
    manager.check_invariants()


def test_the_priority_belongs_to_the_content_and_goes_with_it() -> None:
    """It survives hits, and the next content of the block starts with the default."""
    manager = KVCacheManager(4, 2, policy="priority")
    run(manager, 10, 0)
    run(manager, 10)
    run(manager, 20)
    run(manager, 30)
    assert (cached(manager, 10), cached(manager, 20)) == (0, 4)
    run(manager, 40)
    assert (cached(manager, 20), cached(manager, 30)) == (0, 4)


def test_a_time_to_live_ends_by_the_clock_that_was_passed_in() -> None:
    """One tick before, the content stays; at the end it is like all others, and the oldest of them."""
    for now, left in ((4.5, 4), (5.0, 0)):
        clock = Clock()
        manager = KVCacheManager(4, 2, policy=Priority(clock=clock))
        run(manager, 10, 100, ttl=5.0)
        run(manager, 20)
        clock.now = now
        run(manager, 30)
        assert cached(manager, 10) == left
        assert cached(manager, 20) == 4 - left


def test_the_last_word_counts_and_time_passes_for_held_blocks_too() -> None:
    """A later retain replaces both; a time that is over while the block is in use is over all the same."""
    clock = Clock()
    manager = KVCacheManager(4, 2, policy=Priority(clock=clock))
    run(manager, 10, 100, ttl=5.0)
    run(manager, 10, 100)
    run(manager, 20, 100, ttl=5.0)
    clock.now = 6.0
    run(manager, 30)
    assert (cached(manager, 10), cached(manager, 20)) == (4, 0)
    manager = KVCacheManager(4, 2, policy=Priority(clock=clock))
    manager.open("held", range(10, 14))
    manager.commit("held", range(10, 14))
    manager.retention.set_priority("held", 100, ttl=1.0)
    run(manager, 20)
    clock.now = 8.0
    manager.open("more", [])
    manager.close("held")
    run(manager, 20)
    run(manager, 30)
    assert (cached(manager, 10), cached(manager, 20)) == (0, 4)


def test_retaining_again_and_again_does_not_pile_up() -> None:
    """The times that were replaced are dropped, and the last one still ends."""
    clock = Clock()
    policy = Priority(clock=clock)
    manager = KVCacheManager(4, 2, policy=policy)
    for i in range(300):
        run(manager, 10, 100, ttl=1_000.0 + i)
    assert len(policy._expiries) <= 2 * 2 + 64 + 2
    run(manager, 20)
    clock.now = 1_299.0
    run(manager, 30)
    assert (cached(manager, 10), cached(manager, 20)) == (0, 4)


@pytest.mark.parametrize(
    ("priority", "options", "message"),
    [
        (101, {}, "0 to 100, got 101"),
        (-1, {}, "0 to 100, got -1"),
        (True, {}, "0 to 100, got True"),
        (1.5, {}, r"0 to 100, got 1\.5"),
        (5, {"ttl": 0}, "above 0, got 0"),
        (5, {"ttl": True}, "above 0, got True"),
        (5, {"ttl": "x"}, "above 0, got 'x'"),
        (5, {"start": 3, "stop": 2}, r"4 tokens of 'a' are committed, got 3\.\.2"),
        (5, {"stop": 5}, r"4 tokens of 'a' are committed, got 0\.\.5"),
        (5, {"start": -1}, "start must be an integer of at least 0"),
    ],
)
def test_misuse_of_retain_is_refused_with_the_numbers(priority: Any, options: Any, message: str) -> None:
    """And the priority stays as it was."""
    policy = Priority(clock=Clock())
    manager = KVCacheManager(4, 2, policy=policy)
    manager.open("a", range(4))
    manager.commit("a", range(4))
    manager.retention.set_priority("a", 7)
    with pytest.raises(PagedKVError, match=message):
        manager.retention.set_priority("a", priority, **options)
    assert policy._priority[1:] == [7, 7, 35, 35] and not policy._until


def test_a_time_to_live_needs_a_clock_and_a_sequence_must_be_open() -> None:
    """The message says how to give one."""
    manager = KVCacheManager(4, 2, policy="priority")
    manager.open("a", range(4))
    manager.commit("a", range(4))
    with pytest.raises(PagedKVError, match=r"needs a clock: Priority\(clock=\.\.\.\)"):
        manager.retention.set_priority("a", 7, ttl=3.0)
    with pytest.raises(SequenceError, match="'b' is not open"):
        manager.retention.set_priority("b", 7)
    with pytest.raises(PagedKVError, match="0 to 100, got 500"):
        Priority(default=500)


def test_what_is_not_full_and_committed_has_no_priority() -> None:
    """Nothing that could be evicted, nothing to retain: also without prefix caching."""
    manager = KVCacheManager(4, 2, policy="priority")
    manager.open("a", range(5))
    manager.commit("a", range(3))
    assert manager.retention.set_priority("a", 9) == 1
    assert manager.retention.set_priority("a", 9, start=1, stop=1) == 0
    plain = KVCacheManager(4, 2, policy=None)
    plain.open("a", range(4))
    plain.commit("a", range(4))
    with pytest.raises(PagedKVError, match="knows no priorities"):
        plain.retention.set_priority("a", 9)
