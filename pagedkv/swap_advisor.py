"""Whether a preempted sequence is better swapped to the host, or dropped and computed again."""

import math
from dataclasses import dataclass, fields

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import PagedKVError, require_count


@dataclass(frozen=True)
class SwapCosts:
    """What the two ways of preempting one sequence cost, in seconds of the link or of the device.

    ``swap_out_s`` and ``swap_in_s`` are the copies of each way, ``recompute_s`` is the prefill.
    """

    swap_out_s: float
    swap_in_s: float
    recompute_s: float

    @property
    def swap_s(self) -> float:
        """Both ways."""
        return self.swap_out_s + self.swap_in_s

    @property
    def prefers_swap(self) -> bool:
        """Whether swapping is faster; at equal cost it is not worth the host memory."""
        return self.swap_s < self.recompute_s


@dataclass(frozen=True)
class SwapAdvisor:
    """Compares copying a sequence's blocks to the host and back with prefilling its tokens again.

    ::

        tokens     | cached on the device until it returns |      the rest      |
        swap out   |------------------- all blocks are copied ------------------|
        swap in    |  hit, not copied                      | blocks are copied  |
        recompute  |  hit, not computed                    | tokens are computed|

    Recompute is linear in the tokens by default: true while the weights dominate. Attention also reads every
    token before, which grows with the square of the context; give ``attention_s_per_pair`` to count it.
    Copies and prefill are counted as if nothing else ran meanwhile: where the copies overlap with other
    work and the prefill does not, swapping is better than it says.

    Args:
        bytes_per_block: bytes of one block in all layers, as ``spec.bytes_per_block``.
        block_size: tokens per block.
        link_bytes_per_s: bytes per second between device and host, one way, as measured.
        prefill_tokens_per_s: tokens per second of a prefill, as measured (with short contexts, if
            ``attention_s_per_pair`` is given).
        transfer_s: seconds of each way that do not depend on its size: launches, waiting for the copies.
        attention_s_per_pair: seconds per pair of a computed token and a token that it attends to, itself
            included: ``4 * num_layers * num_q_heads * head_dim`` FLOPs over the FLOPs per second reached.

    Raises:
        PagedKVError: counts below 1, rates that are not positive and finite, negative times.

    By hand: 1 ms per block, 2 ms to prefill a block's 16 tokens. 160 tokens are 10 blocks, which take 10 ms
    out and 10 ms back, or 20 ms to compute. With 80 of the tokens still cached the way back takes 5 ms, but
    computing 10 ms.

    >>> advisor = SwapAdvisor(
    ...     bytes_per_block=1_000_000, block_size=16, link_bytes_per_s=1e9, prefill_tokens_per_s=8000
    ... )
    >>> advisor.costs(160)
    SwapCosts(swap_out_s=0.01, swap_in_s=0.01, recompute_s=0.02)
    >>> advisor.costs(160, num_cached_tokens=80)
    SwapCosts(swap_out_s=0.01, swap_in_s=0.005, recompute_s=0.01)
    >>> advisor.prefers_swap(160), advisor.prefers_swap(160, num_cached_tokens=80)
    (False, False)
    """

    bytes_per_block: int
    block_size: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    transfer_s: float = 0.0
    attention_s_per_pair: float = 0.0

    def __post_init__(self) -> None:
        """Check every input."""
        for name in ("bytes_per_block", "block_size"):
            require_count(name, getattr(self, name), 1)
        for field in fields(self)[2:]:
            value, rate = getattr(self, field.name), field.name.endswith("per_s")
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not real or not math.isfinite(value) or value < 0 or (rate and value == 0):
                wanted = "positive" if rate else "at least 0"
                raise PagedKVError(f"{field.name} must be finite and {wanted}, got {value!r}")

    def costs(self, num_tokens: int, num_cached_tokens: int = 0) -> SwapCosts:
        """Seconds of both ways for a sequence of ``num_tokens`` with K and V.

        ``num_cached_tokens`` of them, from the first on, are expected to be cached on the device still when
        the sequence returns; only whole blocks of them count. Raises ``PagedKVError`` unless
        ``0 <= num_cached_tokens <= num_tokens``. Cost: O(1).
        """
        num_tokens = require_count("num_tokens", num_tokens, 0)
        num_cached_tokens = require_count("num_cached_tokens", num_cached_tokens, 0)
        if num_cached_tokens > num_tokens:
            raise PagedKVError(f"{num_cached_tokens} cached tokens are more than the {num_tokens} there are")
        hit = num_cached_tokens // self.block_size
        blocks, cached = div_ceil(num_tokens, self.block_size), hit * self.block_size
        pairs = (num_tokens * (num_tokens + 1) - cached * (cached + 1)) // 2
        return SwapCosts(
            self._copy_s(blocks),
            self._copy_s(blocks - hit),
            (num_tokens - cached) / self.prefill_tokens_per_s + pairs * self.attention_s_per_pair,
        )

    def prefers_swap(self, num_tokens: int, num_cached_tokens: int = 0) -> bool:
        """Whether swapping is faster than computing again; see ``costs``."""
        return self.costs(num_tokens, num_cached_tokens).prefers_swap

    def _copy_s(self, blocks: int) -> float:
        if not blocks:
            return 0.0
        return self.transfer_s + blocks * self.bytes_per_block / self.link_bytes_per_s
