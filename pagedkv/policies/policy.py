"""The contract of an eviction policy: who is given up next, and what it is told to decide that."""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError
from pagedkv.namespace import Namespace

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)
"""No ids."""


class BlockView(Protocol):
    """What a policy may ask about blocks whose content is indexed."""

    @property
    def num_blocks(self) -> int:
        """Ids are ``1..num_blocks`` when the policy is bound; later a ``resize`` says it."""

    def parent(self, block: int) -> int:
        """The block before this one, 0 for the first of a branch. Cost: O(1)."""

    def path(self, block: int) -> Int32Array:
        """All blocks from the first to this one. Cost: O(length) as arrays, O(1) per branch."""

    def namespace(self, block: int) -> Namespace | None:
        """Whose content it is; None for the default namespace. Cost: as ``path``."""

    def row_hashes(self, ids: Int32Array) -> list[int]:
        """64 bits for what each block holds itself, without its prefix; equal in any process."""


class EvictionPolicy(ABC):
    """Orders the idle blocks: those with content that nobody holds.

    ::

                      push                          first, evict
        held blocks  ------>  idle blocks of a policy  ------->  content gone
                     <------                           ------->
                      discard (hit, or held again)      forget (made room for a copy)

    The manager calls ``bind`` once and then tells what happens, in this order within one call of its
    own: ``first`` (which changes nothing, as the manager may still fail), ``discard``, ``evict``,
    ``hit``; after a ``push`` it asks for the ``surplus``. A block keeps its content, and whatever a
    policy knows of it, while it goes back and forth between held and idle, until ``evict`` or ``forget``.
    Content that moves to another block takes all that with it: ``rename``.

    Only ``first``, ``make_room`` and ``retain`` may raise: the manager undoes nothing for the others.

    Children come before parents: whoever holds a block holds its whole prefix, so below an idle block
    all are idle, and ``first`` must not name a block before all of them.

    To write a policy by score, read `pagedkv.policies.lfu`: a subclass of ``LeafPolicy`` says what a
    block's score is, and the base class keeps the order.
    """

    def bind(self, view: BlockView) -> None:
        """Prepare for ``view.num_blocks`` blocks; called once, before anything else."""
        if "view" in vars(self):
            raise PagedKVError(f"this {type(self).__name__} orders the blocks of another manager already")
        self.view = view
        self.num_blocks = view.num_blocks

    def stored(self, ids: Int32Array) -> None:  # noqa: B027  what most policies need not know
        """Held blocks have content from now on; in any order, of any branches."""

    @abstractmethod
    def push(self, ids: Int32Array) -> None:
        """Blocks became idle: consecutive ones of one branch, deepest first."""

    @abstractmethod
    def discard(self, ids: Int32Array) -> None:
        """Blocks are not idle any more, if they were."""

    @abstractmethod
    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Who goes next: ``count`` idle blocks, or all there are, none of ``keep``, children first.

        ``keep`` holds, with any block, its whole prefix or everything that builds on it. Changes nothing.
        """

    def hit(self, ids: Int32Array) -> None:  # noqa: B027  what most policies need not know
        """An open found these blocks and holds them now, shallowest first; others may hold them too."""

    def evict(self, ids: Int32Array) -> None:
        """What ``first`` named, and would name again now, has lost its content."""
        self.forget(ids)

    def forget(self, ids: Int32Array) -> None:
        """Blocks, idle or held, have lost their content for another reason."""
        self.discard(ids)

    @abstractmethod
    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Blocks ``old[i]``, idle or held, with content, are called ``new[i]`` from now on.

        No id of ``new`` has content. The order, and whatever is known of the content, stays as it was; the
        ``view`` may know the blocks by either name meanwhile.
        """

    @abstractmethod
    def resize(self, num_blocks: int) -> None:
        """Ids are ``1..num_blocks`` from now on; no block above has content."""
        self.num_blocks = num_blocks

    def surplus(self) -> Int32Array | None:
        """Idle blocks that shall go although nobody needs the room, as ``first`` would name them."""
        return None

    def retain(self, ids: Int32Array, priority: int, ttl: float | None) -> None:
        """Blocks with content, held or idle, get a priority, for ``ttl`` from now or for good."""
        raise PagedKVError(f"{type(self).__name__} knows no priorities: retain needs policy='priority'")

    def make_room(self, count: int) -> None:  # noqa: B027  only array logs need it
        """Make sure that ``count`` blocks can be pushed without a new allocation of any size."""

    def ids(self) -> Int32Array:
        """All idle blocks in the order in which they would go. Cost: O(n log n)."""
        return self.first(self.num_blocks, NO_BLOCKS)
