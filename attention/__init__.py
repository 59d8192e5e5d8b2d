"""Decode attention over paged blocks: one operation, several backends."""

from pagedkv.attention.api import backends, paged_attention

__all__ = ["backends", "paged_attention"]
