"""Which blocks of a long context a sequence can best do without: attention sinks, heavy hitters, windows.

All of it is arithmetic on one number per block of one sequence, in the order of its block table; what it says
to drop goes to ``manager.context.drop_blocks``. Budgets are in blocks, the newest one included.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import Int64Array
from pagedkv.errors import PagedKVError, require_count

FloatArray = npt.NDArray[np.float64]


def outside_window(num_blocks: int, budget: int, *, sinks: int = 1) -> Int64Array:
    """What StreamingLLM drops: all but the first ``sinks`` blocks and the newest, ``budget`` blocks in all.

    Returns block table columns, int64 [num_blocks - budget], ascending; none within the budget. Raises
    ``PagedKVError`` unless ``0 <= sinks < budget``. Cost: O(what is dropped).

    >>> outside_window(8, budget=4, sinks=1)
    array([1, 2, 3, 4])
    """
    num_blocks = require_count("num_blocks", num_blocks, 0)
    budget, sinks = _checked(budget, sinks, 1)
    return np.arange(sinks, sinks + max(0, num_blocks - budget))


def lightest_blocks(mass: Any, budget: int, *, sinks: int = 1, recent: int = 1) -> Int64Array:
    """What H2O and SnapKV drop: the blocks that get the least attention, between sinks and the newest.

    ``mass`` float [num_blocks]: the attention that each block got, as `BlockMass` adds it up. The first
    ``sinks`` and the newest ``recent`` blocks stay whatever they got; of equals the newer stays. Returns
    block table columns, int64 [num_blocks - budget], ascending; none within the budget. Raises
    ``PagedKVError`` unless ``sinks >= 0``, ``recent >= 1`` and ``sinks + recent <= budget``, or for a mass
    that is no finite vector. Cost: O(num_blocks log num_blocks).

    >>> lightest_blocks([0.1, 0.9, 0.2, 0.3, 0.0, 0.0], budget=4)
    array([2, 4])
    """
    budget, sinks = _checked(budget, sinks, require_count("recent", recent, 1))
    given = _as_mass(mass)
    surplus = max(0, len(given) - budget)
    between = given[sinks : len(given) - recent]
    # stable: of equals the older goes first
    dropped: Int64Array = np.sort(np.argsort(between, kind="stable")[:surplus]) + sinks
    return dropped


class BlockMass:
    """The attention that the blocks of one sequence got, per column of its block table.

    Over its whole life, as H2O adds it up; or, with ``window``, over the last so many calls of ``add``, as
    SnapKV does with the last queries of a prompt. Tell it of every drop, so that its columns stay those of
    the table.

    ::

        paged_attention(..., block_mass=buffer)            # fp32 [num_seqs, num_q_heads, max_blocks]
        mass.add(buffer[i, :, :num_blocks].sum(0))         # of one layer, or the sum over several
        columns = lightest_blocks(mass.total, budget)
        manager.context.drop_blocks(seq_id, columns); mass.drop(columns)

    >>> mass = BlockMass()
    >>> mass.add([0.5, 0.5]); mass.add([0.25, 0.25, 0.5]); mass.total.tolist()
    [0.75, 0.75, 0.5]
    >>> mass.drop([0]); mass.total.tolist()
    [0.75, 0.5]
    """

    def __init__(self, window: int | None = None) -> None:
        """Start with no block."""
        self._sums_up = window is None
        self._num_blocks = 0
        self._parts: deque[FloatArray] = deque(
            maxlen=1 if window is None else require_count("window", window, 1)
        )

    @property
    def total(self) -> FloatArray:
        """[num_blocks] float64: what each block got. Cost: O(window x num_blocks)."""
        total = np.zeros(self._num_blocks)
        for part in self._parts:
            total[: len(part)] += part
        return total

    def add(self, mass: Any) -> None:
        """Add what one query, or several together, gave each block: float [num_blocks].

        Blocks may have come at the end since the last call. Raises ``PagedKVError`` if it is no finite
        vector, or shorter than the last one, as if a drop had not been told. Cost: O(num_blocks).
        """
        given = _as_mass(mass)
        if len(given) < self._num_blocks:
            raise PagedKVError(f"attention to {len(given)} blocks, but there were {self._num_blocks}")
        self._num_blocks = len(given)
        self._parts.append(given + self.total if self._sums_up else given)

    def drop(self, columns: Any) -> None:
        """Forget columns that were dropped from the block table; ``PagedKVError`` if one is not there."""
        gone = as_columns(columns, self._num_blocks)
        self._num_blocks -= len(gone)
        for i, part in enumerate(self._parts):
            self._parts[i] = np.delete(part, gone[gone < len(part)])


def as_columns(columns: Any, num_columns: int) -> Int64Array:
    """Distinct columns of a block table, ascending: int64 [n].

    Raises ``PagedKVError`` for what is no list of whole numbers, or names one twice or outside.
    """
    if not isinstance(columns, (Sequence, np.ndarray)) or isinstance(columns, (str, bytes)):
        raise PagedKVError(f"columns must be a list of whole numbers, got {columns!r}")
    given = np.asarray(columns)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise PagedKVError(f"columns must be a list of whole numbers, got {columns!r}")
    found: Int64Array = np.unique(given.astype(np.int64))
    if len(found) != len(given):
        raise PagedKVError(f"{len(given)} columns, but only {len(found)} distinct ones")
    if len(found) and not 0 <= found[0] <= found[-1] < num_columns:
        raise PagedKVError(f"columns {found[0]}..{found[-1]} of a block table row of {num_columns}")
    return found


def _checked(budget: int, sinks: int, recent: int) -> tuple[int, int]:
    budget, sinks = require_count("budget", budget, 1), require_count("sinks", sinks, 0)
    if sinks + recent > budget:
        raise PagedKVError(f"{sinks} sinks and {recent} recent blocks exceed the budget of {budget}")
    return budget, sinks


def _as_mass(mass: Any) -> FloatArray:
    try:
        given = np.asarray(mass, np.float64)
    except (TypeError, ValueError) as error:
        raise PagedKVError(f"mass must be a vector of numbers: {error}") from None
    if given.ndim != 1 or not np.isfinite(given).all():
        raise PagedKVError(f"mass must be finite, one number per block, got shape {given.shape}")
    return given
