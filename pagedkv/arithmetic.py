"""The arithmetic of blocks, written once."""


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``, for ``b > 0``.

    >>> div_ceil(500, 16), div_ceil(512, 16), div_ceil(0, 16)
    (32, 32, 0)
    """
    return -(-a // b)


def last_block_num_tokens(num_tokens: int, block_size: int) -> int:
    """Tokens in the last block of a sequence: 1..block_size, or 0 for an empty sequence.

    >>> last_block_num_tokens(33, 16), last_block_num_tokens(32, 16), last_block_num_tokens(0, 16)
    (1, 16, 0)
    """
    return num_tokens - (div_ceil(num_tokens, block_size) - 1) * block_size if num_tokens else 0
