"""Decode attention over paged blocks: one operation, several backends."""

from typing import TYPE_CHECKING, Any

from pagedkv.attention.api import paged_attention, paged_mla_attention
from pagedkv.attention.registry import BackendInfo, backends

if TYPE_CHECKING:
    from pagedkv.attention.triton_backend import default_target, plan_splits

__all__ = [
    "BackendInfo",
    "backends",
    "default_target",
    "paged_attention",
    "paged_mla_attention",
    "plan_splits",
]


def __getattr__(name: str) -> Any:
    """Import what needs Triton when it is asked for."""
    if name in ("default_target", "plan_splits"):
        from pagedkv.attention import triton_backend

        return getattr(triton_backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
