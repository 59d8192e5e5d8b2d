"""Hypothesis drives the hybrid manager beside its model: tiny pools, all policies, any groups, misuse."""

from collections.abc import Hashable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv import Namespace, PagedKVError, SequenceError
from pagedkv.fences import Fences
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
from pagedkv.hybrid.checked import CheckedHybridManager
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.group_view import GroupView
from pagedkv.hybrid.rows import Rows
from pagedkv.policies import POLICIES
from pagedkv.testing import snapshot

TENANT = Namespace(salt="tenant")
PICK = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, 1), max_size=14)
NAMESPACES = st.sampled_from([None, None, TENANT])
WINDOW = st.one_of(st.none(), st.tuples(st.integers(1, 7), st.integers(0, 4)))
IGNORE = ("_seen", "_head", "_spare", "_next", "_last_batch")


class HybridMachine(RuleBasedStateMachine):
    """A checked manager of any groups, and whatever Hypothesis thinks of."""

    policy = "lru"

    @initialize(
        windows=st.lists(WINDOW, min_size=1, max_size=3),
        blocks_per_group=st.integers(2, 10),
        block_size=st.integers(1, 3),
        max_seqs=st.integers(1, 4),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def start(
        self, windows: list[Any], blocks_per_group: int, block_size: int, max_seqs: int, watermark: float
    ) -> None:
        groups = [CacheGroup(f"g{i}", (i,), *(window or (None, 0))) for i, window in enumerate(windows)]
        manager = HybridKVCacheManager(
            groups,
            blocks_per_group * len(groups),
            block_size,
            max_seqs=max_seqs,
            max_seq_len=20,
            watermark=watermark,
            policy=self.policy,
        )
        manager.events.record()
        self.checked = CheckedHybridManager(manager, self.policy)
        self.model = self.checked.model
        self.pins: list[int] = []
        self.next_id = 0

    def pick(self, number: int) -> Hashable:
        ids = list(self.model.seqs)
        return ids[number % len(ids)]

    def has_sequences(self) -> bool:
        return bool(self.model.seqs)

    @rule(tokens=TOKENS, namespace=NAMESPACES, fresh=st.sampled_from([None, 1, 3]), growth=st.integers(0, 4))
    def look_up(self, tokens: list[int], namespace: Namespace | None, fresh: int | None, growth: int) -> None:
        self.checked.lookup(tokens, growth, namespace, fresh)

    @rule(
        tokens=TOKENS,
        namespace=NAMESPACES,
        fresh=st.sampled_from([None, None, 1, 3]),
        cached=st.sampled_from([None, None, 0, 3, 12]),
        loaded=st.sampled_from([0, 0, 0, 4, 14]),
        partial_hits=st.booleans(),
        announce=st.booleans(),
        commit=st.sampled_from([True, True, False]),
    )
    def open(
        self,
        tokens: list[int],
        namespace: Namespace | None,
        fresh: int | None,
        cached: int | None,
        loaded: int,
        partial_hits: bool,
        announce: bool,
        commit: bool,
    ) -> None:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        opened = self.checked.open(
            seq_id,
            tokens,
            namespace=namespace,
            max_fresh_tokens=fresh,
            max_cached_tokens=cached,
            loaded_tokens=min(loaded, len(tokens)),
            partial_hits=partial_hits,
            announce=announce,
        )
        if opened is not None and commit:
            self.checked.take_copies()
            self.checked.commit(seq_id, tokens[opened.num_cached_tokens : opened.num_tokens])

    @precondition(has_sequences)
    @rule(number=PICK, tokens=st.lists(st.integers(0, 1), max_size=6))
    def commit(self, number: int, tokens: list[int]) -> None:
        seq_id = self.pick(number)
        self.checked.take_copies()
        seq = self.model.seqs[seq_id]
        self.checked.commit(seq_id, tokens[: seq.length - len(seq.tokens)])

    @precondition(has_sequences)
    @rule(number=PICK, count=st.integers(0, 5))
    def append(self, number: int, count: int) -> None:
        seq_id = self.pick(number)
        self.checked.append(seq_id, min(count, 20 - self.model.seqs[seq_id].length))

    @rule(
        chosen=st.sets(PICK, max_size=4),
        drafts=st.lists(st.integers(0, 1), max_size=4),
        accepted=st.sampled_from([None, 0, 1, 2, 5]),
    )
    def step(self, chosen: set[int], drafts: list[int], accepted: int | None) -> None:
        """One more of each, or some drafts, of which some are accepted."""
        count = len(drafts) or 1
        seqs = self.model.seqs
        ids = [i for n, i in enumerate(seqs) if n in chosen and seqs[i].length + count <= 20]
        if not self.checked.step(ids, count) or accepted is None:
            return
        self.checked.take_copies()
        left = [seqs[i].length - len(seqs[i].tokens) for i in ids]
        rows, counts = [([0] * n + drafts)[-n:] for n in left], [min(accepted, n) for n in left]
        if all(self.model.can_truncate(i, len(seqs[i].tokens) + n) for i, n in zip(ids, counts, strict=True)):
            self.checked.commit_step(ids, rows, counts)
        else:  # of one, not all that was to be loaded has been
            self.refused(SequenceError, lambda: self.checked.manager.commit_step(ids, rows, counts))

    @rule(call=st.sampled_from(["copies", "reset", "defragment", "resize"]), num_blocks=st.integers(1, 24))
    def maintain(self, call: str, num_blocks: int) -> None:
        if call == "copies":
            self.checked.take_copies()
        elif call == "resize":
            self.checked.resize(num_blocks)
        else:
            getattr(self.checked, call)()

    @precondition(has_sequences)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        seq_id = self.pick(number)
        seq = self.model.seqs[seq_id]
        if len(seq.tokens) == seq.length:
            child, self.next_id = self.next_id, self.next_id + 1
            self.checked.fork(seq_id, child)

    @precondition(has_sequences)
    @rule(number=PICK, cut=st.integers(0, 12))
    def truncate(self, number: int, cut: int) -> None:
        seq_id = self.pick(number)
        length = max(0, self.model.seqs[seq_id].length - cut)
        if self.model.can_truncate(seq_id, length):
            self.checked.truncate(seq_id, length)
        else:
            self.refused(SequenceError, lambda: self.checked.manager.truncate(seq_id, length))

    @precondition(has_sequences)
    @rule(number=PICK)
    def close(self, number: int) -> None:
        self.checked.close(self.pick(number))

    @precondition(has_sequences)
    @rule(number=PICK, count=st.integers(0, 4))
    def pin(self, number: int, count: int) -> None:
        seq_id, size = self.pick(number), self.checked.manager.block_size
        full = len(self.model.seqs[seq_id].tokens) // size
        if 0 < count <= full and self.model.can_pin(seq_id, count):
            self.pins.append(self.checked.pin(seq_id, count * size))
        else:
            self.refused(SequenceError, lambda: self.checked.manager.retention.pin(seq_id, count * size))

    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        if self.pins:
            self.checked.unpin(self.pins.pop(number % len(self.pins)))
        else:
            self.refused(PagedKVError, lambda: self.checked.manager.retention.unpin(number))

    @precondition(lambda self: self.has_sequences() and self.policy == "priority")
    @rule(number=PICK, priority=st.sampled_from([0, 50, 100]), start=st.integers(0, 12))
    def set_priority(self, number: int, priority: int, start: int) -> None:
        seq_id = self.pick(number)
        done = len(self.model.seqs[seq_id].tokens)
        self.checked.set_priority(seq_id, priority, min(start, done), done)

    @precondition(lambda self: len(self.model.open_fences) < 3)
    @rule()
    def open_fence(self) -> None:
        self.checked.open_fence()

    @rule(number=PICK)
    def signal(self, number: int) -> None:
        if self.model.open_fences:
            self.checked.signal(self.model.open_fences[number % len(self.model.open_fences)])
        else:
            self.refused(PagedKVError, lambda: self.checked.manager.fences.signal(number))

    @precondition(has_sequences)
    @rule(number=PICK)
    def misuse(self, number: int) -> None:
        """Wrong ids, lengths and states, one after the other."""
        manager, seq_id = self.checked.manager, self.pick(number)
        length = self.model.seqs[seq_id].length
        self.refused(SequenceError, lambda: manager.open(seq_id, [1]))
        self.refused(SequenceError, lambda: manager.commit(seq_id, [0] * 21))
        self.refused(SequenceError, lambda: manager.truncate(seq_id, length + 1))
        self.refused(SequenceError, lambda: manager.close("nobody"))
        self.refused(PagedKVError, lambda: manager.step([seq_id, seq_id]))
        self.refused(PagedKVError, lambda: manager.append(seq_id, 21))
        self.refused(PagedKVError, lambda: manager.open("new", [1], loaded_tokens=2))
        self.refused(PagedKVError, lambda: manager.maintenance.resize(0))
        left = length - len(self.model.seqs[seq_id].tokens)
        drafts = [0] * (left + 1)
        self.refused(SequenceError, lambda: manager.commit_step([seq_id], [drafts], [left + 1]))

    def refused(self, error: type[Exception], act: Any) -> None:
        before = snapshot(self.checked.manager, IGNORE)  # type: ignore[arg-type]
        with pytest.raises(error):
            act()
        assert snapshot(self.checked.manager, IGNORE) == before  # type: ignore[arg-type]

    def teardown(self) -> None:
        """Give everything back."""
        if not hasattr(self, "checked"):
            return
        self.checked.take_copies()
        for seq_id in list(self.model.seqs):
            self.checked.close(seq_id)
        for pin in self.pins:
            self.checked.unpin(pin)
        for fence in list(self.model.open_fences):
            self.checked.signal(fence)
        assert self.checked.counts.active == 0 and not self.checked.manager._rows.nodes.any()


def run_machine(policy: str, examples: int) -> None:
    machine = type("Machine", (HybridMachine,), {"policy": policy})
    run: Any = run_state_machine_as_test  # typed in some versions only
    chosen = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run(machine, settings=chosen)


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_called_in_whatever_order_manager_and_model_agree(policy: str) -> None:
    """Results, state, events and invariants after every step; misuse changes nothing."""
    run_machine(policy, 150 if policy == "lru" else 60)


_extend = Rows.extend


def _extend_and_slide(self: Rows, rows: Any, num_tokens: int) -> bool:
    extended = _extend(self, rows, num_tokens)
    for row in rows.tolist() if extended else []:
        self._slide(row, int(self.seq_len[row]) // self.block_size * self.block_size)
    return extended


BUGS: dict[str, tuple[type, str, Any]] = {
    "fences hold nothing": (Fences, "__bool__", lambda self: False),
    "pins hold nothing": (ContentTree, "hold", lambda self, ids: None),
    "no window ever moves": (Rows, "_slide", lambda self, row, position: None),
    "no block has a parent": (GroupView, "parent", lambda self, block: 0),
    "drafts move windows": (Rows, "extend", _extend_and_slide),
    "contents are never shared": (ContentTree, "adopt", lambda self, own, nodes: own),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_finds_this_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot fail would prove nothing."""
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises(AssertionError):
        run_machine("lfu", 1000)
