"""What the page table remembers of a sequence that has dropped blocks from the middle of its context."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class Dropped:
    """The gaps of one row, and the content that it can still be found by.

    ::

        was      | A | B | C | D | E | F |      A..E full and indexed, each behind the one before it
        dropped        x       x
        row      | A | C | E | F |              the first block behind a gap ends what others can hit
        chain    A                              B is cached behind A, D is free, C and E left the index

        but if somebody else holds, or builds on, D:
        chain    A  B* C  D*                    * held though not in the row, so that no parent of C goes
    """

    num_blocks: int
    """How many were dropped in all: what the row lacks of the sequence's true length."""
    chain: npt.NDArray[np.int32]
    """Indexed blocks that it holds, each the parent of the next; nothing else that it holds is indexed."""
    in_row: npt.NDArray[np.bool_]
    """Which of the chain are blocks of the row: its first ones, in this order."""
    least_columns: int
    """The row cannot be cut to fewer: a gap or a block of the chain comes before."""

    @property
    def held(self) -> npt.NDArray[np.int32]:
        """Blocks of the chain that are held for their children only."""
        return self.chain[~self.in_row]

    @property
    def num_chained(self) -> int:
        """How many leading columns of the row are blocks of the chain."""
        return int(np.count_nonzero(self.in_row))

    @property
    def num_whole(self) -> int:
        """How many of them come before the first gap."""
        return len(self.chain) if self.in_row.all() else int(self.in_row.argmin())

    def copy(self) -> "Dropped":
        """Another row's, after a fork."""
        return Dropped(self.num_blocks, self.chain.copy(), self.in_row.copy(), self.least_columns)

    def rename(self, name: npt.NDArray[np.int32]) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""
        self.chain = name[self.chain]
