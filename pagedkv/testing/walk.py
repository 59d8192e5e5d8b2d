"""Random walks: a workload on a checked manager, with what is in every slot compared too."""

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pagedkv.copies import BlockCopies
from pagedkv.manager import KVCacheManager
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.testing.checked import CheckedManager, MakeModel
from pagedkv.testing.failures import FAILURE_POINTS, FailureInjector
from pagedkv.testing.shadows import ShadowStorage
from pagedkv.testing.workload import Operation, Workload

MOVES = ("copies.take", "maintenance.defragment", "maintenance.resize")
"""Operations that hand over copies to run."""


class TrialEngine:
    """Runs operations as an engine would: writes tokens before a commit, runs copies, and reads all back.

    Copies that are taken while fences are open run as late as they may, in the order in which they come: when
    the last of those fences is about to be signalled, or somebody is about to write where they write.

    >>> engine = TrialEngine(CheckedManager(KVCacheManager(8, block_size=4)))
    >>> _ = engine.run(Operation("open", "a", [5, 6, 7])); _ = engine.run(Operation("commit", "a", [5, 6, 7]))
    >>> engine.storage.read(engine.manager, "a")
    [5, 6, 7]
    """

    def __init__(self, manager: CheckedManager) -> None:
        """Serve with a new manager and an empty storage."""
        self.manager = manager
        self.storage = ShadowStorage(manager.manager.num_blocks, manager.manager.block_size)
        self._late: deque[tuple[set[int], BlockCopies]] = deque()  # open fences, and what may wait for them

    def run(self, operation: Operation) -> Any:
        """Run one operation; raises ``AssertionError`` if a committed token is not in its slot then."""
        args = operation.args
        if operation.name == "open":
            self._look_up_first(operation)
        elif operation.name == "commit":
            self._write([args[0]], [args[1]])
        elif operation.name == "commit_step":
            self._write(args[0], [row if isinstance(row, Sequence) else [row] for row in args[1]])
        elif operation.name == "fences.signal":
            for fences, _ in self._late:
                fences.discard(args[0])
            self._run_late()
        result = operation(self.manager)
        if operation.name == "copies.take":
            self._copy(result)
        elif operation.name in MOVES and result is not None:
            self.storage.move(result)
            self.storage.resize(self.manager.num_blocks)
        self.check_contents()
        return result

    def check_contents(self) -> None:
        """Compare what slots hold, once all copies that wait have run, with what was committed."""
        then = ShadowStorage(self.manager.num_blocks, self.manager.block_size)
        then.slots = self.storage.slots.copy()
        for copies in (*(late for _, late in self._late), self.manager.copies.pending):
            then.move(copies)
        for seq_id, seq in self.manager.model.seqs.items():
            held = then.read(self.manager.manager, seq_id)
            assert held == seq.tokens, f"slots of {seq_id} hold {held}, committed were {seq.tokens}"

    def _write(self, seq_ids: Sequence[Hashable], tokens: Sequence[Sequence[int]]) -> None:
        """Take what copies wait, then store the next tokens of each, as far as there are slots."""
        if len(self.manager.copies):
            self._copy(self.manager.copies.take())
        for seq_id, row in zip(seq_ids, tokens, strict=True):
            start = self.manager.tables.num_committed(seq_id)
            stop = min(start + len(row), self.manager.tables.num_tokens(seq_id))
            slots = self.manager.tables.slots(seq_id, start, stop)
            self._run_late((slots // self.manager.block_size).tolist())
            self.storage.write(slots, row[: stop - start])

    def _copy(self, copies: BlockCopies) -> None:
        """Run copies that were taken, now or later."""
        assert set(copies.src.tolist()).isdisjoint(copies.dst.tolist()), f"an order is needed: {copies}"
        self._late.append((set(self.manager.model.open_fences), copies))
        self._run_late()

    def _run_late(self, written: Iterable[int] = ()) -> None:
        """Run all copies up to the last that wait for no fence, or write to blocks that are to be written."""
        blocks = set(written)
        while any(not fences or blocks & set(late.dst.tolist()) for fences, late in self._late):
            self.storage.move(self._late.popleft()[1])

    def _look_up_first(self, operation: Operation) -> None:
        """``lookup`` must say what ``open`` is about to do."""
        _, tokens, options = *operation.args, operation.options
        extra = {name: options[name] for name in ("namespace", "media") if name in options}
        found = self.manager.lookup(tokens, **extra)
        most = min(self.manager.max_seq_len, self.manager.num_blocks * self.manager.block_size)
        whole = self.manager.lookup(tokens, 1, **extra) if len(tokens) < most else found
        assert found.fits or not whole.fits, "more fits than less"


def random_walk(
    num_ops: int,
    *,
    seed: int = 0,
    num_blocks: int = 9,
    block_size: int = 3,
    max_seqs: int = 4,
    vocabulary: int = 2,
    watermark: float = 0.0,
    policy: str | EvictionPolicy | None = "lru",
    reference: MakeModel | None = None,
    events: bool = True,
    failures: float = 0.0,
    maintenance: bool = False,
    drain: bool = False,
    invariants_every: int = 1,
    before_op: Callable[[KVCacheManager], None] | None = None,
) -> KVCacheManager:
    """Do ``num_ops`` random operations on a manager and on the model; compare everything after each.

    Checks results, counts, events, contents of every slot, and ``check_invariants``. Raises
    ``AssertionError`` with the seed and the operation at the first difference. Tiny sizes make collisions,
    forks, evictions and refusals frequent. The share ``failures`` of the operations fails in the middle,
    at one of ``FAILURE_POINTS``; half of those are then tried again. With ``maintenance`` the pool is
    reset, defragmented and resized now and then. ``policy`` and ``reference`` as for ``CheckedManager``.
    Returns the manager as it was left; with ``drain`` everything is given back at the end.
    Cost: about 0.4 ms per operation.

    >>> random_walk(200, seed=1, policy="lfu").stats().num_opened > 10
    True
    """
    rng = random.Random(seed)
    manager = KVCacheManager(num_blocks, block_size, max_seqs=max_seqs, watermark=watermark, policy=policy)
    if events:
        manager.events.record(b"walk")
    failing = _Failing(rng, failures)
    checked = CheckedManager(
        manager, reference=reference, around=failing.around, invariants_every=invariants_every
    )
    engine = TrialEngine(checked)
    priorities = policy == "priority"
    weights = {"pin": 0} if policy is None else {}  # without prefix cache there is nothing to pin
    if maintenance:
        weights |= {"reset": 1, "defragment": 1, "resize": 1}
    workload = Workload(checked, seed=rng, vocabulary=vocabulary, priorities=priorities, weights=weights)
    for number in range(num_ops):
        if before_op is not None:
            before_op(manager)
        operation = next(workload)
        try:
            failing.run(engine, operation)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, operation {number}, {operation}: {error}") from error
        checked.taken.clear()
    for operation in workload.drain() if drain else ():
        engine.run(operation)
    return manager


class _Injected(Exception):
    """Not an error that the library raises or handles."""


class _Failing:
    """Lets some calls of the manager fail once before they are made."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._random, self._share = rng, share
        self._armed = False

    def run(self, engine: TrialEngine, operation: Operation) -> None:
        """Run an operation; sometimes it fails, and is tried again or not."""
        self._armed = bool(self._share) and self._random.random() < self._share
        try:
            engine.run(operation)
        except _Injected:
            engine.check_contents()
            self._armed = False
            if self._random.random() < 0.5:
                engine.run(operation)
        finally:
            self._armed = False

    def around(self, name: str) -> AbstractContextManager[Any]:
        """What a call of the manager is made in."""
        return self._fail(name)

    @contextmanager
    def _fail(self, name: str) -> Iterator[None]:
        points = FAILURE_POINTS.get(name)
        if not self._armed or points is None:
            yield
            return
        injector = FailureInjector(self._random.choice(points), error=_Injected)
        with injector.failing(at=self._random.choice([1, 1, 2, 3])):
            yield
