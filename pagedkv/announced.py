"""Prompts that open sequences are about to compute, so that an equal one can wait instead."""

from pagedkv.block_tables import Int32Array
from pagedkv.content import SequenceExtra


class Announced:
    """The prompts of sequences opened with ``announce=True``, until they are committed.

    There are as many as prefills under way at a time, so each is simply compared.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.prompts: dict[int, tuple[Int32Array, SequenceExtra]] = {}

    def __len__(self) -> int:
        """Return how many prompts are announced."""
        return len(self.prompts)

    def add(self, row: int, prompt: Int32Array, extra: SequenceExtra) -> None:
        """Note that the sequence of ``row`` computes ``prompt``, an array of its own."""
        self.prompts[row] = prompt, extra

    def cut(self, row: int, committed: int, length: int) -> None:
        """Keep of the row's prompt what its first ``length`` tokens still hold and ``committed`` do not."""
        if row in self.prompts:
            prompt, extra = self.prompts.pop(row)
            if committed < min(len(prompt), length):
                self.prompts[row] = prompt[:length], extra

    def common(self, prompt: Int32Array, extra: SequenceExtra, block_size: int) -> int:
        """How many full blocks of ``prompt`` an announced one begins with. Cost: O(n) for each of them."""
        return max((_common(prompt, extra, *other, block_size) for other in self.prompts.values()), default=0)


def _common(
    prompt: Int32Array, extra: SequenceExtra, other: Int32Array, other_extra: SequenceExtra, block_size: int
) -> int:
    n = min(len(prompt), len(other))
    differ = prompt[:n] != other[:n]
    blocks = (int(differ.argmax()) if differ.any() else n) // block_size
    keys, other_keys = extra.by_block, other_extra.by_block
    unlike = [i for i in {*keys, *other_keys} if keys.get(i) != other_keys.get(i)]
    return min([blocks, *unlike])
