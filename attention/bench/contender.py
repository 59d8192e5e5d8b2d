"""What a measurement times."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Contender(NamedTuple):
    """Something to be timed.

    call: attends over the set of that index; returns [batch, num_q_heads, head_dim].
    num_bytes: of K, V and scales that a call has to read, at the least.
    """

    name: str
    call: Callable[[int], Tensor]
    num_bytes: int
