"""Prefixes that stay, whether or not a sequence uses them."""

from pagedkv.block_pool import NO_BLOCKS
from pagedkv.errors import PagedKVError
from pagedkv.page_table import Int32Array


class Pins:
    """Which blocks each pin holds; a block may have several pins, and each is one reference on it."""

    def __init__(self) -> None:
        """Start with no pin."""
        self._held: dict[int, Int32Array] = {}
        self._next = 0

    def add(self, ids: Int32Array) -> int:
        """Note a pin on blocks; its number is never used again."""
        number, self._next = self._next, self._next + 1
        self._held[number] = ids
        return number

    def remove(self, number: int) -> Int32Array:
        """Forget a pin; returns its blocks. Raises ``PagedKVError`` if there is no such pin."""
        ids = self._held.get(number, NO_BLOCKS) if not isinstance(number, bool) else NO_BLOCKS
        if not len(ids):
            raise PagedKVError(f"there is no pin {number!r}, there are {list(self._held)}")
        del self._held[number]
        return ids

    def held(self) -> list[Int32Array]:
        """The blocks of each pin."""
        return list(self._held.values())
