"""A workload: random operations, each valid for the manager as it stands."""

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pagedkv.namespace import Media, Namespace
from pagedkv.page_table import PageTable

_NO_RESULT = object()


class Watched(Protocol):
    """What a workload looks at: a ``KVCacheManager`` or what stands in for one."""

    tables: PageTable
    block_size: int
    max_seq_len: int

    @property
    def num_blocks(self) -> int:
        """Usable blocks."""

    @property
    def copies(self) -> Any:
        """Copies that wait."""


class Operation:
    """One call of a manager: ``name`` is dotted, like "retention.pin". Printed, it is the call.

    >>> from pagedkv import KVCacheManager
    >>> operation = Operation("open", "a", [1, 2], partial_hits=True); operation
    open('a', [1, 2], partial_hits=True)
    >>> operation(KVCacheManager(4, block_size=2)), operation.result
    (Opened(num_tokens=2, num_cached_tokens=0), Opened(num_tokens=2, num_cached_tokens=0))
    """

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        """Name a call; it is made later."""
        self.name, self.args, self.options = name, args, options
        self.result: Any = _NO_RESULT

    @property
    def has_run(self) -> bool:
        """Whether the call was made and returned."""
        return self.result is not _NO_RESULT

    def __call__(self, manager: Any) -> Any:
        """Make the call, and note its ``result``."""
        call = manager
        for part in self.name.split("."):
            call = getattr(call, part)
        self.result = call(*self.args, **self.options)
        return self.result

    def __repr__(self) -> str:
        """Return the call as Python text."""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join([*map(repr, self.args), *options])})"


class Workload:
    """An endless iterator of operations on one manager: the same seed on the same manager gives the same.

    Make each call, or leave it out, before you ask for the next: what comes next depends on the manager.
    An engine that writes tokens does so before a commit (``args`` are the sequence and its tokens), and
    runs the copies that "copies.take" hands over. Half of the prompts begin like earlier ones.

    >>> from itertools import islice
    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(9, block_size=3, max_seqs=4)
    >>> for operation in islice(Workload(manager, seed=1), 300):
    ...     _ = operation(manager)
    ...     manager.check_invariants()
    >>> manager.stats().evicted_blocks > 10
    True
    """

    WEIGHTS: Mapping[str, int] = {
        "lookup": 1,
        "open": 8,
        "step": 12,
        "append": 4,
        "commit": 14,
        "commit_step": 8,
        "accept": 2,
        "fork": 2,
        "truncate": 2,
        "close": 6,
        "copies": 1,
        "open_fence": 1,
        "signal": 2,
        "pin": 1,
        "unpin": 2,
        "retain": 2,
        "reset": 0,
        "defragment": 0,
        "resize": 0,
    }
    """How often each kind of operation is tried."""

    def __init__(
        self,
        manager: Watched,
        *,
        seed: int | random.Random = 0,
        vocabulary: int = 2,
        priorities: bool = False,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """Look at ``manager``; say whether its policy knows ``priorities``.

        ``weights`` replace some of ``WEIGHTS``: name "reset", "defragment" and "resize" to have them at all.
        """
        self.manager = manager
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.vocabulary = vocabulary
        self._weights = {**self.WEIGHTS, **(weights or {}), **({} if priorities else {"retain": 0})}
        self._last: Operation | None = None
        self._next_id = 0
        self._texts: dict[Hashable, list[int]] = {}  # prompts, and what was committed
        self._seen: deque[tuple[Namespace | None, list[int], list[Media]]] = deque(maxlen=40)
        self._fences: list[int] = []
        self._pins: list[int] = []
        self._most_blocks = 3 * manager.num_blocks // 2

    def __iter__(self) -> Iterator[Operation]:
        """Return itself."""
        return self

    def __next__(self) -> Operation:
        """The next operation; never the end."""
        if self._last is not None and self._last.has_run:
            self._note(self._last)
        names, weights = list(self._weights), list(self._weights.values())
        self._last = None
        while self._last is None:
            make: Callable[[], Operation | None] = getattr(self, f"_{self.random.choices(names, weights)[0]}")
            self._last = make()
        return self._last

    def drain(self) -> Iterator[Operation]:
        """Operations that give everything back: run each before you ask for the next.

        >>> from itertools import chain, islice
        >>> from pagedkv import KVCacheManager
        >>> manager = KVCacheManager(9, block_size=3, max_seqs=4)
        >>> workload = Workload(manager, seed=2)
        >>> for operation in chain(islice(workload, 50), workload.drain()):
        ...     _ = operation(manager)
        >>> manager.counts.active
        0
        """
        while True:
            if self._last is not None and self._last.has_run:
                self._note(self._last)
            self._last = self._copies() or self._signal() or self._unpin() or self._close()
            if self._last is None:
                return
            yield self._last

    def _note(self, operation: Operation) -> None:
        """Remember what an operation has done."""
        result, args = operation.result, operation.args
        if operation.name == "open" and result is not None:
            self._texts[args[0]] = list(args[1])
            media = list(operation.options.get("media", ()))
            self._seen.append((operation.options.get("namespace"), list(args[1]), media))
        elif operation.name == "commit":
            stop = self.manager.tables.num_committed(args[0])
            self._texts[args[0]][stop - len(args[1]) : stop] = args[1]
        elif operation.name == "commit_step":
            self._note_step(*args)
        elif operation.name == "fork" and result:
            self._texts[args[1]] = list(self._texts[args[0]])
        elif operation.name == "truncate":
            del self._texts[args[0]][args[1] :]
        elif operation.name == "close":
            self._seen.append((None, self._texts.pop(args[0]), []))
        elif operation.name == "fences.open":
            self._fences.append(result)
        elif operation.name == "fences.signal":
            self._fences.remove(args[0])
        elif operation.name == "retention.pin":
            self._pins.append(result)
        elif operation.name == "retention.unpin":
            self._pins.remove(args[0])

    def _note_step(
        self, seq_ids: Sequence[Hashable], tokens: Sequence[Any], num_accepted: Sequence[int] | None = None
    ) -> None:
        for i, (seq_id, row) in enumerate(zip(seq_ids, tokens, strict=True)):
            new = [row] if num_accepted is None else row[: num_accepted[i]]
            stop = self.manager.tables.num_committed(seq_id)
            self._texts[seq_id][stop - len(new) : stop] = new
            if num_accepted is not None:
                del self._texts[seq_id][stop:]

    # -- choosing

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def _any(self) -> Hashable | None:
        return self.random.choice(list(self._texts)) if self._texts else None

    def _new_id(self) -> int:
        """A number that nobody has; half the time one that somebody had."""
        used = [i for i in range(1, self._next_id + 1) if i not in self._texts]
        if used and self.random.random() < 0.5:
            return self.random.choice(used[-4:])
        self._next_id += 1
        return self._next_id

    @property
    def _max_len(self) -> int:
        return min(self.manager.max_seq_len, self.manager.num_blocks * self.manager.block_size)

    def _length(self, seq_id: Hashable) -> int:
        return self.manager.tables.num_tokens(seq_id)

    def _uncommitted(self, seq_id: Hashable) -> int:
        return self._length(seq_id) - self.manager.tables.num_committed(seq_id)

    def _next_tokens(self, seq_id: Hashable, count: int) -> list[int]:
        """What a sequence holds next: the rest of its prompt, then anything."""
        start = self.manager.tables.num_committed(seq_id)
        known = self._texts[seq_id][start : start + count]
        return known + self._tokens(count - len(known))

    def _prompt(self) -> tuple[list[int], dict[str, Any]]:
        namespace = self.random.choice([None, None, None, Namespace(salt="tenant")])
        tokens, media = self._tokens(self.random.randrange(self._max_len // 2 + 1)), []
        if self._seen and self.random.random() < 0.5:
            namespace, text, known = self.random.choice(self._seen)
            cut = self.random.randint(0, len(text))
            tokens = [*text[:cut], *tokens[: self.random.randrange(4)]]
            media = [item for item in known if item.offset < cut]
        tokens = tokens[: self._max_len - 1]
        if tokens and self.random.random() < 0.1:
            media.append(Media(self.random.randrange(len(tokens)), self.random.choice(["cat", "dog"])))
        media = [item for item in media if item.offset < len(tokens)]
        return tokens, {"namespace": namespace, **({"media": media} if media else {})}

    def _lookup(self) -> Operation:
        tokens, options = self._prompt()
        return Operation("lookup", tokens, self.random.randint(0, self._max_len - len(tokens)), **options)

    def _open(self) -> Operation:
        tokens, options = self._prompt()
        if self.random.random() < 0.2:
            options["max_cached_tokens"] = self.random.choice(
                [len(tokens), self.random.randint(0, len(tokens))]
            )
        options |= {
            name: True
            for name, often in (("partial_hits", 0.4), ("announce", 0.3))
            if self.random.random() < often
        }
        return Operation("open", self._new_id(), tokens, **options)

    def _step(self) -> Operation:
        ids = [i for i in self._texts if self._length(i) < self._max_len]
        return Operation("step", self.random.sample(ids, self.random.randint(0, len(ids))))

    def _append(self) -> Operation | None:
        seq_id, count = self._any(), self.random.randrange(6)
        if seq_id is None or self._length(seq_id) + count > self._max_len:
            return None
        return Operation("append", seq_id, count)

    def _commit(self) -> Operation | None:
        seq_id = self._any()
        if seq_id is None:
            return None
        if len(self.manager.copies):
            return self._copies()
        left = self._uncommitted(seq_id)
        count = self.random.choice([left, self.random.randint(0, left)])
        tokens, start = self._next_tokens(seq_id, count), self.manager.tables.num_committed(seq_id)
        if count and start + count > len(self._texts[seq_id]) and self.random.random() < 0.05:
            offset = self.random.randrange(max(start, len(self._texts[seq_id])), start + count)
            return Operation(
                "commit", seq_id, tokens, media=[Media(offset, self.random.choice(["cat", "dog"]))]
            )
        return Operation("commit", seq_id, tokens)

    def _commit_step(self) -> Operation | None:
        ids = [i for i in self._texts if self._uncommitted(i)]
        if not ids:
            return None
        if len(self.manager.copies):
            return self._copies()
        batch = self.random.sample(ids, self.random.randint(1, len(ids)))
        return Operation("commit_step", batch, [self._next_tokens(i, 1)[0] for i in batch])

    def _accept(self) -> Operation | None:
        ids, width = list(self._texts), self.random.randint(1, 4)
        if not ids:
            return None
        if len(self.manager.copies):
            return self._copies()
        batch = self.random.sample(ids, self.random.randint(1, len(ids)))
        counts = [self.random.randint(0, min(width, self._uncommitted(i))) for i in batch]
        return Operation("commit_step", batch, [self._next_tokens(i, width) for i in batch], counts)

    def _fork(self) -> Operation | None:
        seq_id = self._any()
        if seq_id is None or self._uncommitted(seq_id):
            return None
        return Operation("fork", seq_id, self._new_id())

    def _truncate(self) -> Operation | None:
        seq_id = self._any()
        if seq_id is None:
            return None
        return Operation("truncate", seq_id, self.random.randint(0, self._length(seq_id)))

    def _close(self) -> Operation | None:
        seq_id = self._any()
        return None if seq_id is None else Operation("close", seq_id)

    def _copies(self) -> Operation | None:
        return Operation("copies.take") if len(self.manager.copies) else None

    def _open_fence(self) -> Operation:
        return Operation("fences.open")

    def _signal(self) -> Operation | None:
        return Operation("fences.signal", self.random.choice(self._fences)) if self._fences else None

    def _pin(self) -> Operation | None:
        seq_id = self._any()
        if seq_id is None:
            return None
        num_tokens = self.random.randint(0, self.manager.tables.num_committed(seq_id))
        return (
            Operation("retention.pin", seq_id, num_tokens) if num_tokens >= self.manager.block_size else None
        )

    def _unpin(self) -> Operation | None:
        return Operation("retention.unpin", self.random.choice(self._pins)) if self._pins else None

    def _reset(self) -> Operation:
        return Operation("maintenance.reset")

    def _defragment(self) -> Operation:
        return Operation("maintenance.defragment")

    def _resize(self) -> Operation:
        return Operation("maintenance.resize", self.random.randint(1, self._most_blocks))

    def _retain(self) -> Operation | None:
        seq_id = self._any()
        if seq_id is None:
            return None
        committed = self.manager.tables.num_committed(seq_id)
        start, stop = sorted(self.random.randint(0, committed) for _ in range(2))
        priority = self.random.choice([0, 35, 100])
        return Operation("retention.set_priority", seq_id, priority, start=start, stop=stop)
