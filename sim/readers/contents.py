"""Names of a prompt's blocks: checked against its length, or made from its tokens or bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Row
from pagedkv.sim.trace import TraceError

DEFAULT_BLOCK_SIZE = 16
"""Tokens per content where a file has tokens or text, and nobody asks for another."""

BYTES_PER_TOKEN = 4
"""The rule for text without a tokenizer: a token is four bytes of UTF-8, the last one perhaps fewer."""

_LOOKAHEAD = 1000  # requests that are held back until the block size is settled


def check_num_contents(place: Place, field: str, num_ids: int, input_len: int, block_size: int) -> None:
    """Refuse a number of ids that contradicts the prompt's length."""
    possible = possible_num_ids(input_len, block_size)
    if num_ids not in possible:
        raise place.error(
            f"{field} has {num_ids} ids for {input_len} prompt tokens, but blocks of {block_size} tokens "
            f"make {' or '.join(map(str, possible))}"
        )


def possible_num_ids(input_len: int, block_size: int) -> list[int]:
    """How many ids a prompt may have: its full blocks, and the partial one if there is one.

    >>> possible_num_ids(40, 16), possible_num_ids(32, 16)
    ([2, 3], [2])
    """
    full, rest = divmod(input_len, block_size)
    return [full, full + 1] if rest else [full]


def with_block_size(
    rows: Iterator[Row], field: str, input_field: str, sizes: Sequence[int], *, guessed: bool
) -> Iterator[Row]:
    """Yield the rows with the first of ``sizes`` that agrees with all of them.

    Up to 1,000 rows are held back until one size is left; from then on it is settled, and a row that
    contradicts it is refused. An error behind rows that are fine comes after them.
    """
    left, held, pending = list(sizes), [], None
    try:
        for row in rows:
            left = _narrowed(row, field, input_field, left, guessed)
            held.append(row)
            if len(left) == 1 or len(held) == _LOOKAHEAD:
                break
    except TraceError as error:
        pending = error
    size = left[:1]
    for row in held:
        yield row._replace(block_size=size[0])
    if pending is not None:
        raise pending
    for row in rows:
        _narrowed(row, field, input_field, size, guessed)
        yield row._replace(block_size=size[0])


def _narrowed(row: Row, field: str, input_field: str, sizes: list[int], guessed: bool) -> list[int]:
    num_ids = len(row.contents)
    left = [size for size in sizes if num_ids in possible_num_ids(row.input_len, size)]
    if not left:
        wanted = "; ".join(
            f"blocks of {size} tokens make {' or '.join(map(str, possible_num_ids(row.input_len, size)))}"
            for size in sizes
        )
        hint = "; state the right block_size (--trace-block-size)" if guessed else ""
        raise row.place.error(
            f"{field} has {num_ids} ids for {input_field} {row.input_len}, but {wanted}{hint}"
        )
    return left


def token_contents(tokens: Sequence[int], block_size: int) -> list[int]:
    """Ids of a prompt's blocks, the partial last one included: 64 bits of a chained hash.

    The same in every process. O(tokens), about 1 us per block.

    >>> a, b = token_contents([1, 2, 3, 4, 5], 2), token_contents([1, 2, 3, 9], 2)
    >>> len(a), len(b), a[0] == b[0], a[1] == b[1]
    (3, 2, True, False)
    """
    content = np.asarray(tokens, "<i4").tobytes()
    return _chained(content, 4 * block_size, -(-len(tokens) // block_size))


def text_contents(text: bytes, block_size: int) -> list[int]:
    """Ids of the full blocks of a text, at four bytes a token."""
    return _chained(text, BYTES_PER_TOKEN * block_size, text_tokens(text) // block_size)


def text_tokens(text: bytes) -> int:
    """Tokens of a text, at least one.

    >>> text_tokens(b"hello"), text_tokens(b"")
    (2, 1)
    """
    return max(1, -(-len(text) // BYTES_PER_TOKEN))


def _chained(content: bytes, step: int, num_ids: int) -> list[int]:
    ids, digest = [], b""
    for start in range(0, step * num_ids, step):
        digest = hashlib.blake2b(digest + content[start : start + step], digest_size=8).digest()
        ids.append(int.from_bytes(digest, "big"))
    return ids
