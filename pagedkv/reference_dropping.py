"""The slow model of dropping blocks from the middle of a sequence."""

from collections.abc import Hashable, Iterable, Sequence

from pagedkv.reference_blocks import ModelBlock, ModelSequence, Path
from pagedkv.reference_manager import ReferenceManager


def drop_blocks(model: ReferenceManager, seq_id: Hashable, columns: Sequence[int]) -> int:
    """Take blocks out of the middle of a sequence; returns how many it gave up."""
    seq = model.seqs[seq_id]
    if not columns and seq.chain is None:
        return 0
    hidden, given_up = _drop_from(model.by_path, seq, columns, model.block_size)
    for block in hidden:
        model._forget(block, "dropped")
    for block in given_up:
        model._release(block)
    model.announced.pop(seq_id, None)
    model._count(dropped=len(columns))
    return len(given_up)


def _drop_from(
    by_path: Iterable[Path], seq: ModelSequence, columns: Sequence[int], block_size: int
) -> tuple[list[ModelBlock], list[ModelBlock]]:
    """Let a sequence be without some of its blocks.

    Returns the blocks that nobody can find any more, and those that it gives up; children first.
    """
    before = seq.chain
    if before is None:
        before = [block for block in seq.blocks if block.path is not None]
    dropped = [seq.blocks[i] for i in columns]
    seq.blocks = [block for block in seq.blocks if block not in dropped]
    seq.length -= len(dropped) * block_size
    del seq.tokens[len(seq.tokens) - len(dropped) * block_size :]
    paths = list(by_path)
    gap = min([len(before), *(i for i, block in enumerate(before) if block not in seq.blocks)])
    hidden: list[ModelBlock] = []
    # from the end, what is kept behind a gap hides, and takes with it all that comes behind it
    for i in reversed(range(gap, len(before))):
        theirs = [p for p in paths if p[: i + 2] == before[i].path and p not in {b.path for b in before[i:]}]
        if before[i] in seq.blocks:
            if theirs or any(block.refs > 1 for block in before[i:]):
                break
            hidden = before[i:]
    chain = [block for block in before if block not in hidden]
    while chain and chain[-1] not in seq.blocks:
        chain.pop()
    seq.chain = chain
    given_up = [block for block in before if block not in chain and block not in seq.blocks]
    given_up += [block for block in dropped if block not in before]
    return hidden[::-1], given_up[::-1]
