"""Numbers for contents, so that a policy can remember what is gone."""

from collections import OrderedDict

from pagedkv.policies.policy import BlockView

_MASK = 2**64 - 1
_FACTOR = 0xD6E8FEB86659FD93


class Fingerprints:
    """64 bits for each block's content and whole prefix, kept in a list of the policy's.

    Equal in any process. Two contents may have the same one: that misleads an order, and never a hit.
    Cost: about 0.3 us per block, once per content.
    """

    def __init__(self, view: BlockView, of: list[int]) -> None:
        """Keep them in ``of``, 0 for each block now and whenever it is forgotten."""
        self._view = view
        self._of = of

    def __getitem__(self, block: int) -> int:
        """Return the fingerprint of a block that was learnt."""
        return self._of[block]

    def learn(self, block: int) -> None:
        """Work out those of a block and of all before it."""
        if self._of[block]:
            return
        path = self._view.path(block)
        blocks: list[int] = path.tolist()
        start = len(blocks)
        while start and not self._of[blocks[start - 1]]:
            start -= 1
        value = self._of[blocks[start - 1]] if start else 0
        for block, own in zip(blocks[start:], self._view.row_hashes(path[start:]), strict=True):
            value = (value ^ own) * _FACTOR & _MASK
            value = (value ^ value >> 32) * _FACTOR + 1 & _MASK or 1
            self._of[block] = value


class Ghosts:
    """Fingerprints of contents that are gone, oldest first."""

    def __init__(self) -> None:
        """Remember nothing."""
        # a plain dict would walk over what was deleted at its front
        self._prints: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._prints)

    def add(self, fingerprint: int) -> None:
        """Remember one more; one that is remembered keeps its age."""
        self._prints.setdefault(fingerprint)

    def remove(self, fingerprint: int) -> bool:
        """Forget one; tell whether it was remembered."""
        return self._prints.pop(fingerprint, self) is None

    def trim(self, count: int) -> None:
        """Forget the oldest until at most ``count`` are left."""
        while len(self._prints) > max(count, 0):
            self._prints.popitem(last=False)
