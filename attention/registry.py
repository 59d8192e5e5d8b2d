"""The backends by name: what runs here, why the others do not, and which one serves a call."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from pagedkv.attention.arguments import AttentionArguments
from pagedkv.errors import PagedKVError


class BackendInfo(NamedTuple):
    """A name that ``paged_attention(backend=...)`` accepts, and whether it can run here.

    reason: why it cannot, and what to do about it; empty if it can.
    """

    name: str
    available: bool
    reason: str


class Backend(NamedTuple):
    """What a backend module provides.

    attend: fills the outputs of the arguments.
    unsupported: says what a call asks for that the backend does not do; None if it serves it.
    """

    attend: Callable[[AttentionArguments], None]
    unsupported: Callable[[AttentionArguments], str | None]


# Each module is imported when its backend is first wanted: some need Triton, a compiler's output or a peer.
_MODULES = {
    "reference": "pagedkv.attention.reference",
    "torch": "pagedkv.attention.torch_backend",
    "native": "pagedkv.attention.cpu_backend",
    "triton": "pagedkv.attention.triton_backend",
    "flashinfer": "pagedkv.attention.flashinfer_backend",
    "flash-attn": "pagedkv.attention.flash_attn_backend",
}

# The fastest first, and no peer; the torch backend, which serves every call, ends each list.
_AUTO = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}


def backends() -> tuple[BackendInfo, ...]:
    """Every backend, available here or not.

    >>> from pagedkv.attention import backends
    >>> [info.name for info in backends()]
    ['reference', 'torch', 'native', 'triton', 'flashinfer', 'flash-attn']
    >>> backends()[1]
    BackendInfo(name='torch', available=True, reason='')
    """
    reasons = {name: _load(name)[1] for name in _MODULES}
    return tuple(BackendInfo(name, not reason, reason) for name, reason in reasons.items())


def backend_for(name: str, args: AttentionArguments) -> Backend:
    """The backend of that name, or for "auto" the fastest one that serves the call.

    Raises:
        PagedKVError: no such backend, not available here, or the call asks for what it does not do.
    """
    if name == "auto":
        return _fastest_for(args)
    if name not in _MODULES:
        raise PagedKVError(f"no attention backend {name!r}, there are: auto, {', '.join(_MODULES)}")
    backend, reason = _load(name)
    if backend is None:
        raise PagedKVError(f"the attention backend {name!r} is not available here: {reason}")
    missing = backend.unsupported(args)
    if missing is not None:
        raise PagedKVError(f"the attention backend {name!r} cannot serve this call: {missing}")
    return backend


def _fastest_for(args: AttentionArguments) -> Backend:
    for name in _AUTO.get(args.q.device.type, ("torch",)):
        backend, _ = _load(name)
        if backend is not None and backend.unsupported(args) is None:
            return backend
    raise AssertionError("the torch backend serves every call")


@cache
def _load(name: str) -> tuple[Backend | None, str]:
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pagedkv"):
            raise  # a mistake of ours is no missing package
        return None, f"no module {error.name}; install it with: pip install {error.name}"
    reason: str | None = module.unavailable()
    if reason is not None:
        return None, reason
    return Backend(module.attend, module.unsupported), ""
