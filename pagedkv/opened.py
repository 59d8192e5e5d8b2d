"""What opening a sequence found, or would find."""

from typing import NamedTuple


class Opened(NamedTuple):
    """Result of ``open``: the first ``num_cached_tokens`` of ``num_tokens`` need no prefill."""

    num_tokens: int
    num_cached_tokens: int


class Lookup(NamedTuple):
    """What ``open`` would find: nothing is held, so the next call may change it.

    ``num_coming_tokens`` more than the ``num_cached_tokens`` are being computed by a sequence that was
    opened with ``announce=True``: who waits until they are committed need not compute them again.
    ``fits``: whether ``open``, and then the growth that was asked for, would fit now if nobody else grew.
    """

    num_tokens: int
    num_cached_tokens: int
    num_coming_tokens: int
    fits: bool
