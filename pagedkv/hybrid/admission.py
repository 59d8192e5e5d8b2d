"""Who is let in: what a new sequence finds, how much room it takes, and whether that can be had now."""

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import NULL_BLOCK, Int32Array, Int64Array
from pagedkv.content import SequenceExtra
from pagedkv.errors import NeverFits, require_count
from pagedkv.hybrid.hits import Hit, Plan
from pagedkv.hybrid.rows import Rows


class Admission:
    """Says of new sequences, and of growing ones, what fits: never, not now, or now."""

    def __init__(self, rows: Rows, max_seq_len: int, watermark: float, prefix_caching: bool) -> None:
        """Keep the share ``watermark`` of the pool of ``rows`` free of new sequences, beside others."""
        self._pool, self._table = rows.tree.pool, rows.tables[0]
        self._hits, self._windows = rows.hits, rows.windows
        self._max_seq_len = max_seq_len
        self.watermark = watermark
        self._prefix_caching = prefix_caching

    def match(self, prompt: Int32Array, extra: SequenceExtra, limit: int, loaded: int = 0) -> Hit:
        """As ``Hits.match``; without a prefix cache, nothing."""
        return self._hits.match(prompt, extra, limit if self._prefix_caching else 0, loaded)

    def plan(
        self,
        prompt: Int32Array,
        extra: SequenceExtra,
        limit: int,
        room: int,
        *,
        loaded: int = 0,
        partial_hits: bool = False,
    ) -> Plan | None:
        """How to open a sequence with at most ``limit`` cached tokens, and ``room`` for more behind.

        ``loaded`` tokens come from elsewhere. None if it does not fit now; ``NeverFits`` if it never does.
        """
        num_tokens, size = len(prompt), self._windows.block_size
        hit = self.match(prompt, extra, limit, loaded)
        cached = len(hit.nodes) * size
        begin = max(cached, loaded)
        length = min(num_tokens, begin + room)
        self.require_fits(np.array([hit.position]), np.array([length]))
        fresh = self._hits.fresh(hit, length)
        if not self._table.num_free_rows or not self.fits_now(hit.held, fresh):
            return None
        if partial_hits and self._prefix_caching and begin == cached:
            source, count = self._hits.tail(prompt, extra, hit, limit)
            longer = min(num_tokens, cached + count + room)
            more = self._hits.fresh(hit, longer)
            # the copied blocks themselves must not be evicted to make the room
            if count and self.fits_now(np.concatenate([hit.held, source]), more):
                return Plan(hit, more, longer, cached + count, source)
        return Plan(hit, fresh, length, cached)

    def fits_now(self, held: Int32Array, fresh: npt.NDArray[np.bool_]) -> bool:
        """Tell whether ``fresh`` blocks and the idle ones among ``held`` can be had above the watermark."""
        need = int(np.count_nonzero(fresh))
        if len(held):
            need += int(np.count_nonzero(self._pool.ref_count[held] == 0))
        return self.can_have(need)

    def can_have(self, need: int) -> bool:
        """Tell whether so many of the available blocks can be had above the watermark."""
        reserve = int(self.watermark * self._pool.num_blocks) if len(self._table) else 0
        return need == 0 or need <= self._pool.num_available - reserve

    def most_needed(self, hit: Hit, num_tokens: int, growth: int, room: int) -> int:
        """Available blocks that a prompt with a hit and then ``growth`` tokens take at most.

        The prompt comes in chunks of ``room``, the rest token by token, each committed before the next.
        Raises ``NeverFits`` if they never fit. Cost: O(groups x (hit + chunks)).
        """
        self.require_length(num_tokens + growth)
        starts = np.arange(hit.position, max(num_tokens, hit.position + 1), room)
        ends = np.minimum(starts + room, num_tokens)
        if growth:
            starts, ends = np.append(starts, num_tokens + growth - 1), np.append(ends, num_tokens + growth)
        self.require_fits(starts, ends)
        return int(self.num_needed(hit, starts, ends).max())

    def num_needed(self, hit: Hit, committed: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """Available blocks that a sequence with a hit takes at such points of its life.

        As ``Windows.num_held``, less those of the hit that somebody else holds now.
        Cost: O(groups x (hit + points)).
        """
        windows, size = self._windows, self._windows.block_size
        needed, length = windows.num_held(committed, num_tokens), len(hit.nodes)
        in_use: Int64Array = np.zeros((len(hit.blocks), length + 1), np.int64)
        held = (hit.blocks != NULL_BLOCK) & (self._pool.ref_count[hit.blocks] > 0)
        np.cumsum(held, axis=1, out=in_use[:, 1:])
        at = committed // size * size
        for group, sinks, counts in zip(windows.groups, windows.sink_blocks.tolist(), in_use, strict=True):
            last_sink = min(sinks, length)
            first = np.clip(group.first_block(at, size), last_sink, length)
            needed = needed - counts[last_sink] - (counts[length] - counts[first])
        return needed

    def require_length(self, num_tokens: int) -> None:
        """Refuse more tokens than any sequence holds, and perhaps than an int64 can say."""
        if num_tokens > self._max_seq_len:
            raise NeverFits(
                f"{num_tokens} tokens can never fit: a sequence holds at most {self._max_seq_len}"
            )

    def require_fits(self, committed: Int64Array, num_tokens: Int64Array) -> None:
        """Refuse what a sequence could not hold if it were alone, with so many of its tokens committed."""
        have, longest = self._pool.num_blocks, int(num_tokens.max(initial=0))
        self.require_length(longest)
        if div_ceil(longest, self._windows.block_size) * len(self._windows.groups) <= have:
            return
        need = self._windows.num_held(committed, num_tokens)
        most = int(need.argmax())
        if need[most] > have:
            raise NeverFits(
                f"{num_tokens[most]} tokens, {committed[most]} of them computed before, can never fit: "
                f"all groups together need {need[most]} of {have} blocks"
            )


def chunk(max_fresh_tokens: int | None, num_tokens: int) -> int:
    """Tokens that a prompt takes room for at a time."""
    if max_fresh_tokens is None:
        return max(1, num_tokens)
    return min(require_count("max_fresh_tokens", max_fresh_tokens, 1), max(1, num_tokens))
