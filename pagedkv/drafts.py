"""Drafted tokens, of which verification accepted some."""

from collections.abc import Sequence
from typing import Any

from pagedkv.block_tables import BlockTables, Int32Array, SeqId, is_batch
from pagedkv.content import as_token_array
from pagedkv.copies import PendingCopies
from pagedkv.errors import SequenceError, require_count


def accepted_tokens(
    tables: BlockTables,
    copies: PendingCopies,
    seq_ids: Sequence[SeqId],
    drafts: Any,
    num_accepted: Sequence[int],
) -> list[Int32Array]:
    """The first ``num_accepted[i]`` of each row of ``drafts``, once all of them can be committed.

    Raises ``SequenceError`` if they are not one row and one count for each sequence, if a count exceeds its
    row or what the sequence has uncommitted, or if a copy into it is pending. Changes nothing. Cost: O(n).
    """
    for name, given in (("tokens", drafts), ("num_accepted", num_accepted)):
        if not is_batch(given):
            raise SequenceError(f"{name} must have an entry for each sequence, got {given!r}")
    rows = [as_token_array(row) for row in drafts]
    counts = [require_count("num_accepted", count, 0) for count in num_accepted]
    if not len(rows) == len(counts) == len(seq_ids):
        raise SequenceError(
            f"{len(seq_ids)} sequences, but {len(rows)} rows of tokens and {len(counts)} counts"
        )
    for seq_id, ids, count in zip(seq_ids, rows, counts, strict=True):
        row = tables.row(seq_id)
        start, length = int(tables.committed[row]), int(tables.seq_len[row])
        if count > len(ids) or start + count > length:
            raise SequenceError(
                f"cannot accept {count} of {len(ids)} tokens of {seq_id!r}: "
                f"{start} of its {length} are committed"
            )
        copies.require_done(tables.blocks[row, start // tables.block_size : tables.num_blocks(row)])
    return [ids[:count] for ids, count in zip(rows, counts, strict=True)]
