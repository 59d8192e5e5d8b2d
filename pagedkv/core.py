"""Which engine keeps the books of blocks: the compiled core, or numpy where there is none.

``setup.py`` compiles ``pagedkv/csrc_core`` into ``pagedkv/_core*.so``. `pagedkv.block_pool`,
`pagedkv.prefix_index` and `pagedkv.policies.lru` ask here which of two implementations to be; both do the
same, with the same ids in the same order. ``PAGEDKV_CORE`` in the environment says which one: ``auto``
(the default: the compiled one where it loads), ``native`` or ``numpy``.
"""

import os
from functools import cache
from importlib import import_module

from pagedkv.errors import PagedKVError

ENGINES = ("auto", "native", "numpy")

VERSION = 4
"""Of the calls between Python and the core, as csrc_core/module.cpp has it."""


@cache
def missing() -> str | None:
    """Why the compiled core does not load, whoever asks for it; None if it does."""
    try:
        _core = import_module("pagedkv._core")
    except ImportError as error:
        return f"the compiled core was not built or does not load: {error}"
    if _core.VERSION != VERSION:
        return (
            f"the compiled core is of another version ({_core.VERSION}, not {VERSION}): install pagedkv again"
        )
    return None


@cache
def reason() -> str | None:
    """Why the compiled core is not in use; None if it is. O(1) after the first call.

    Raises:
        PagedKVError: ``PAGEDKV_CORE`` is none of ``ENGINES``, or asks for a core that does not load.
    """
    asked = os.environ.get("PAGEDKV_CORE", "auto")
    if asked not in ENGINES:
        raise PagedKVError(f"PAGEDKV_CORE is {asked!r}, must be one of {', '.join(ENGINES)}")
    if asked == "numpy":
        return "PAGEDKV_CORE asks for numpy"
    why_not = missing()
    if asked == "native" and why_not is not None:
        raise PagedKVError(f"PAGEDKV_CORE asks for the compiled core: {why_not}")
    return why_not


def engine() -> str:
    """The engine in use, "native" or "numpy".

    >>> from pagedkv import core
    >>> core.engine() == ("native" if core.reason() is None else "numpy")
    True
    """
    return "native" if reason() is None else "numpy"
