"""Hypothesis drives the whole public API beside the model: tiny pools, every policy, misuse in between."""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv import KVCacheManager, Media, Namespace, NeverFits, PagedKVError, SequenceError
from pagedkv.announced import Announced
from pagedkv.block_cache import BlockCache
from pagedkv.copies import PendingCopies
from pagedkv.fences import Fences
from pagedkv.policies import POLICIES
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.policies.residency import Residency
from pagedkv.reference_policies import ReferencePolicy, ReferenceQuotas
from pagedkv.testing import CheckedManager, Operation, TrialEngine, check_nothing_is_held

TENANT = Namespace(salt="tenant")
LIMITS = {TENANT: 1}

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(dict, policy=name) for name in POLICIES},
    "none": lambda: {"policy": None},
    "quotas": lambda: {"policy": NamespaceQuotas(LIMITS)},
    "residency": lambda: {"policy": Residency("lru", count().__next__)},
}
REFERENCES: dict[str, Callable[[int, int], ReferencePolicy]] = {
    "quotas": partial(ReferenceQuotas, limits=LIMITS.items()),
    "residency": ReferencePolicy,
}

PICK = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, 1), max_size=12)
NAMESPACES = st.sampled_from([None, None, TENANT])
ITEM = st.tuples(st.integers(0, 11), st.sampled_from(["cat", "dog"]))
MEDIA = st.one_of(st.none(), st.none(), ITEM)


class ManagerMachine(RuleBasedStateMachine):
    """A checked manager, an engine that writes and copies, and whatever Hypothesis thinks of."""

    policy = "lru"

    @initialize(
        num_blocks=st.integers(1, 7),
        block_size=st.integers(1, 4),
        max_seqs=st.integers(1, 4),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        events=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, max_seqs: int, watermark: float, events: bool) -> None:
        made = MAKERS[self.policy]()
        manager = KVCacheManager(num_blocks, block_size, max_seqs=max_seqs, watermark=watermark, **made)
        if events:
            manager.events.record(b"seed")
        self.checked = CheckedManager(manager, reference=REFERENCES.get(self.policy))
        self.engine = TrialEngine(self.checked)
        self.fences: list[int] = []
        self.pins: list[int] = []
        self.next_id = 0
        self.text: list[int] = []

    def run_operation(self, name: str, *args: Any, **options: Any) -> Any:
        return self.engine.run(Operation(name, *args, **options))

    def any(self, pick: int) -> Hashable:
        ids: list[Hashable] = self.checked.tables.seq_ids
        return ids[pick % len(ids)]

    def some(self, mask: int) -> list[Hashable]:
        return [seq_id for i, seq_id in enumerate(self.checked.tables.seq_ids) if mask >> i & 1]

    def new_id(self, reuse: bool) -> int:
        self.next_id += not reuse or self.next_id in self.checked.tables
        return self.next_id

    def left(self, seq_id: Hashable) -> int:
        tables = self.checked.tables
        return int(tables.num_tokens(seq_id) - tables.num_committed(seq_id))

    def is_open(self) -> bool:
        return hasattr(self, "checked") and len(self.checked.tables) > 0

    def fits_ever(self, num_tokens: int) -> bool:
        manager = self.checked.manager
        return num_tokens <= min(manager.max_seq_len, manager.num_blocks * manager.block_size)

    # -- sequences

    @rule(
        tokens=TOKENS,
        repeat=st.booleans(),
        namespace=NAMESPACES,
        media=MEDIA,
        limit=st.one_of(st.none(), st.none(), st.integers(0, 12)),
        partial_hits=st.booleans(),
        announce=st.booleans(),
        reuse=st.booleans(),
        growth=st.integers(0, 4),
        commit=st.booleans(),
    )
    def open(
        self,
        tokens: list[int],
        repeat: bool,
        namespace: Namespace | None,
        media: tuple[int, str] | None,
        limit: int | None,
        partial_hits: bool,
        announce: bool,
        reuse: bool,
        growth: int,
        commit: bool,
    ) -> None:
        tokens = (self.text + tokens)[:12] if repeat else tokens
        extra: dict[str, Any] = {"namespace": namespace}
        if media is not None and media[0] < len(tokens):
            extra["media"] = [Media(*media)]
        options: dict[str, Any] = {"max_cached_tokens": limit, "partial_hits": partial_hits}
        options["announce"] = announce
        seq_id = self.new_id(reuse)
        if not self.fits_ever(len(tokens) + growth):
            with pytest.raises(NeverFits, match="can never fit"):
                self.checked.lookup(tokens, growth, **extra)
        else:
            self.checked.lookup(tokens, growth, **extra)
        if not self.fits_ever(len(tokens)):
            with pytest.raises(NeverFits, match="can never fit"):
                self.checked.open(seq_id, tokens, **extra, **options)
        elif self.run_operation("open", seq_id, tokens, **extra, **options) is not None:
            self.text = tokens[: len(tokens) - len(tokens) // 4]
            if commit:
                self.run_operation("commit", seq_id, tokens[self.checked.tables.num_committed(seq_id) :])

    @precondition(is_open)
    @rule(mask=st.integers(0, 15), num_tokens=st.integers(0, 5), alone=st.booleans(), pick=PICK)
    def grow(self, mask: int, num_tokens: int, alone: bool, pick: int) -> None:
        batch = [self.any(pick)] if alone else self.some(mask)
        longest = max((self.checked.tables.num_tokens(i) for i in batch), default=0)
        name, args = ("append", batch[0]) if alone else ("step", batch)
        if not self.fits_ever(longest + num_tokens):
            with pytest.raises(NeverFits, match="can never fit"):
                self.run_operation(name, args, num_tokens)
        else:
            self.run_operation(name, args, num_tokens)

    @precondition(is_open)
    @rule(pick=PICK, tokens=TOKENS, everything=st.booleans(), media=MEDIA)
    def commit(self, pick: int, tokens: list[int], everything: bool, media: tuple[int, str] | None) -> None:
        seq_id = self.any(pick)
        left = self.left(seq_id)
        tokens = (tokens + [0] * left * everything)[:left]
        start = self.checked.tables.num_committed(seq_id)
        inside = media is not None and start <= media[0] < start + len(tokens)
        options: dict[str, Any] = {"media": [Media(*media)]} if media is not None and inside else {}
        self.run_operation("commit", seq_id, tokens, **options)

    @precondition(is_open)
    @rule(mask=st.integers(0, 15), token=st.integers(0, 1))
    def commit_step(self, mask: int, token: int) -> None:
        batch = [i for i in self.some(mask) if self.left(i)]
        self.run_operation("commit_step", batch, [token] * len(batch))

    @precondition(is_open)
    @rule(mask=PICK, width=st.integers(1, 3), accepted=st.integers(0, 3), token=st.integers(0, 1))
    def accept(self, mask: int, width: int, accepted: int, token: int) -> None:
        batch = self.some(mask)
        counts = [min(accepted, width, self.left(i)) for i in batch]
        if batch:
            self.run_operation("commit_step", batch, [[token] * width for _ in batch], counts)

    @precondition(is_open)
    @rule(pick=PICK, reuse=st.booleans())
    def fork(self, pick: int, reuse: bool) -> None:
        seq_id, child = self.any(pick), self.new_id(reuse)
        if not self.left(seq_id):
            self.run_operation("fork", seq_id, child)
        elif self.checked.prefix_caching:
            with pytest.raises(SequenceError, match="before a fork"):
                self.checked.fork(seq_id, child)

    @precondition(is_open)
    @rule(pick=PICK, num_tokens=st.integers(0, 12), again=st.booleans())
    def truncate(self, pick: int, num_tokens: int, again: bool) -> None:
        seq_id = self.any(pick)
        length = self.checked.tables.num_tokens(seq_id)
        self.run_operation("truncate", seq_id, min(num_tokens, length))
        if again and num_tokens < length:
            self.run_operation("append", seq_id, 1)

    @precondition(is_open)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        self.run_operation("close", self.any(pick))

    # -- what holds blocks besides, and what moves them

    @rule(kind=st.sampled_from(["fence", "signal", "pin", "unpin", "priority"]), pick=PICK, amount=PICK)
    def hold(self, kind: str, pick: int, amount: int) -> None:
        if kind == "fence":
            self.fences.append(self.run_operation("fences.open"))
        elif kind == "signal" and self.fences:
            self.run_operation("fences.signal", self.fences.pop(pick % len(self.fences)))
        elif kind == "pin" and self.is_open():
            self.pin(self.any(pick), amount)
        elif kind == "unpin" and self.pins:
            self.run_operation("retention.unpin", self.pins.pop(pick % len(self.pins)))
        elif kind == "priority" and self.is_open():
            self.set_priority(self.any(pick), amount)

    def pin(self, seq_id: Hashable, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.checked.tables.num_committed(seq_id))
        if num_tokens >= self.checked.block_size and self.checked.prefix_caching:
            self.pins.append(self.run_operation("retention.pin", seq_id, num_tokens))
        else:
            with pytest.raises(SequenceError, match="nothing to pin"):
                self.checked.retention.pin(seq_id, num_tokens)

    def set_priority(self, seq_id: Hashable, amount: int) -> None:
        start = min(amount, self.checked.tables.num_committed(seq_id))
        priority = (0, 35, 100)[amount % 3]
        if self.policy == "priority":
            self.checked.retention.set_priority(seq_id, priority, start=start)
        elif self.checked.prefix_caching and self.policy not in ("quotas", "residency"):
            with pytest.raises(PagedKVError, match="knows no priorities"):
                self.checked.retention.set_priority(seq_id, priority, start=start)

    @rule(
        call=st.sampled_from(["copies.take", "maintenance.reset", "maintenance.defragment", "resize"]),
        num_blocks=st.integers(1, 9),
    )
    def maintain(self, call: str, num_blocks: int) -> None:
        if call == "resize":
            self.run_operation("maintenance.resize", num_blocks)
        else:
            self.run_operation(call)

    # -- reading, and misuse

    @rule(case=st.integers(0, 19), pick=PICK)
    def look(self, case: int, pick: int) -> None:
        if case < 15:
            self.misuse(case, pick)
        else:
            self.write_batches(pick)

    def write_batches(self, mask: int) -> None:
        """Both dialects say what the tables hold, whatever was in the buffers."""
        tables, batch = self.checked.tables, self.some(mask)
        held = [tables.block_ids(seq_id).tolist() for seq_id in batch]
        block_tables, lens = np.full((5, 12), 77, np.int32), np.full(5, 77, np.int32)
        slots = np.full(5, 77, np.int64)
        tables.write_block_tables(batch, block_tables, lens, slots)
        assert [row[: len(ids)] for row, ids in zip(block_tables.tolist(), held, strict=False)] == held
        assert lens.tolist()[: len(batch)] == [tables.num_tokens(i) for i in batch]
        last = [int(tables.slots(i)[-1]) if tables.num_tokens(i) else -1 for i in batch]
        assert slots.tolist() == last + [-1] * (5 - len(batch))
        indptr, indices, in_last = np.empty(6, np.int32), np.empty(60, np.int32), np.empty(5, np.int32)
        total = tables.write_csr(batch, indptr, indices, in_last)
        assert indices[:total].tolist() == [block for ids in held for block in ids]

    def misuse(self, case: int, pick: int) -> None:
        """Refused with an error that is a ``ValueError``; that nothing changed, the checked manager sees."""
        checked = self.checked
        calls: list[Callable[[], object]] = [
            lambda: checked.close("nobody"),
            lambda: checked.append("nobody"),
            lambda: checked.commit("nobody", [1]),
            lambda: checked.fork("nobody", "child"),
            lambda: checked.open("bad", [-1]),
            lambda: checked.open("bad", [1.5]),
            lambda: checked.fences.signal(10_000),
            lambda: checked.retention.unpin(10_000),
            lambda: checked.maintenance.resize(0),
        ]
        if self.is_open():
            seq_id = self.any(pick)
            calls += [
                lambda: checked.open(seq_id, []),
                lambda: checked.truncate(seq_id, -1),
                lambda: checked.commit(seq_id, [0] * (self.left(seq_id) + 1)),
                lambda: checked.step([seq_id, seq_id]),
                lambda: checked.commit_step([seq_id], [[0]], [self.left(seq_id) + 1]),
                lambda: checked.retention.pin(seq_id, checked.tables.num_committed(seq_id) + 1),
            ]
        with pytest.raises(PagedKVError):
            calls[case % len(calls)]()

    def teardown(self) -> None:
        """Give everything back: nothing may be left."""
        if not hasattr(self, "checked"):
            return
        self.run_operation("copies.take")
        for fence in self.fences:
            self.run_operation("fences.signal", fence)
        for pin in self.pins:
            self.run_operation("retention.unpin", pin)
        for seq_id in self.checked.tables.seq_ids:
            self.run_operation("close", seq_id)
        check_nothing_is_held(self.checked.manager)
        assert self.checked.maintenance.reset()
        assert self.checked.counts.free == self.checked.num_blocks


def run(name: str, max_examples: int = 60, shrink: bool = True) -> None:
    """Let Hypothesis try the machine with one policy."""
    machine = type("Machine", (ManagerMachine,), {"policy": name})
    run_machine: Any = run_state_machine_as_test  # typed in some versions only
    run_machine(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=list(Phase) if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", MAKERS)
def test_whatever_is_called_the_manager_does_what_the_model_does(name: str) -> None:
    """Sixty runs of up to forty calls with each policy, the same in every run of the tests."""
    run(name)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (BlockCache, "withdraw", lambda self, ids: None),
        (Announced, "cut", lambda self, row, committed, length: None),
        (PendingCopies, "note", lambda self, src, dst: None),
        (Fences, "hold", lambda self, ids: self._give_up(ids)),
    ],
)
def test_a_manager_with_this_bug_is_found(
    owner: Any, name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that could not fail would prove nothing."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, PagedKVError, KeyError)):
        run("lru", max_examples=800, shrink=False)
