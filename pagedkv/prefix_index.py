"""The prefix index: finds cached blocks by content, exactly, with no hash to trust."""

from typing import TYPE_CHECKING

from pagedkv import core
from pagedkv.numpy_prefix_index import ROOT, NumpyPrefixIndex

if TYPE_CHECKING or core.reason() is not None:
    _Engine = NumpyPrefixIndex
else:
    from pagedkv.native_prefix_index import NativePrefixIndex as _Engine

__all__ = ["ROOT", "PrefixIndex"]


class PrefixIndex(_Engine):
    """A tree of blocks by content.

    ::

        root -- b1 -- b2 -- b3 --+-- b4 -- b5        two prompts share three blocks, then part
                                 '-- b6

    A block is found behind its parent by its extra key (namespace, media) and its tokens. All three are
    compared, never their hashes alone, so that a hit is exact.

    Per block, as arrays: ``tokens`` [num_blocks + 1, block_size] int32, which the owner writes before it
    inserts, ``extra`` (id of the extra key, 0 for none) and ``indexed``.

    >>> import numpy as np
    >>> index = PrefixIndex(4, block_size=2)
    >>> ids, extra = np.array([3, 1], np.int32), np.zeros(2, np.int32)
    >>> index.tokens[ids] = [[5, 6], [7, 8]]
    >>> index.insert(ids, extra, parent=0)
    >>> index.match(np.array([[5, 6], [7, 9]], np.int32), extra).tolist()
    [3]
    >>> index.best_child(np.array([7, 9], np.int32), extra=0, parent=3)
    (1, 1)
    """
