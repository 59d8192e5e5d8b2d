"""Managers behind one small protocol, so that the same workload can drive any of them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagedkv import KVCacheManager
from pagedkv.block_tables import Int32Array

BLOCK_SIZE = 16


class Pool(NamedTuple):
    """What a manager has to manage: ``num_blocks`` blocks of ``BLOCK_SIZE`` tokens."""

    num_blocks: int
    max_seqs: int
    max_seq_len: int
    prefix_caching: bool = True


class Peer(Protocol):
    """A manager, driven as its own engine drives it. Only ``request`` and ``available`` are not timed."""

    def request(self, name: str, tokens: Int32Array) -> Any:
        """What the engine has before the manager sees the request, tokens in its own kind of container."""

    def open(self, request: Any) -> int | None:
        """Hash, look up, hold the hit and allocate the rest; cached tokens, or None if it does not fit."""

    def commit(self, request: Any) -> None:
        """Let others find the full blocks of the prompt, if ``open`` has not done so."""

    def step(self, requests: Sequence[Any], tokens: Int32Array) -> None:
        """Room for one more token of each request, whose id is then known and final."""

    def close(self, request: Any) -> None:
        """Give the request up; what it cached stays."""

    def fork(self, request: Any, child: Any) -> None:
        """Let ``child``, of the same tokens, share all blocks of an open request."""

    def available(self) -> int:
        """Blocks that could be handed out: free or evictable."""


MakePeer = Callable[[Pool], Peer]


class Prompt:
    """A request as a caller of `KVCacheManager` needs it: an id, and the prompt's tokens."""

    __slots__ = ("name", "num_cached", "tokens")

    def __init__(self, name: str, tokens: Any) -> None:
        self.name = name
        self.tokens = tokens
        self.num_cached = 0


class PagedKV:
    """This library: one call per phase, one call per decode step. Prompts are int32 arrays."""

    def __init__(self, pool: Pool) -> None:
        self.manager = KVCacheManager(
            pool.num_blocks,
            BLOCK_SIZE,
            max_seqs=pool.max_seqs,
            max_seq_len=pool.max_seq_len,
            policy="lru" if pool.prefix_caching else None,
        )

    def request(self, name: str, tokens: Int32Array) -> Prompt:
        return Prompt(name, tokens)

    def open(self, request: Prompt) -> int | None:
        opened = self.manager.open(request.name, request.tokens)
        if opened is None:
            return None
        request.num_cached = opened.num_cached_tokens
        return opened.num_cached_tokens

    def commit(self, request: Prompt) -> None:
        self.manager.commit(request.name, request.tokens[request.num_cached :])

    def step(self, requests: Sequence[Prompt], tokens: Int32Array) -> None:
        names = [request.name for request in requests]
        if not self.manager.step(names):
            raise MemoryError("the pool is too small for this step")
        self.manager.copies.take()
        self.manager.commit_step(names, tokens)

    def close(self, request: Prompt) -> None:
        self.manager.close(request.name)

    def fork(self, request: Prompt, child: Prompt) -> None:
        if not self.manager.fork(request.name, child.name):
            raise MemoryError("no row for the child")

    def available(self) -> int:
        counts = self.manager.counts
        return counts.free + counts.cached


class PagedKVLists(PagedKV):
    """This library, given prompts as lists of Python integers: what converting them costs."""

    def request(self, name: str, tokens: Int32Array) -> Prompt:
        return Prompt(name, tokens.tolist())


PEERS = {
    "pagedkv": "benchmarks.manager_peers:PagedKV",
    "pagedkv-lists": "benchmarks.manager_peers:PagedKVLists",
    "vllm": "benchmarks.manager_vllm:VLLM",
}
"""Where each peer is; imported when it is asked for by name."""


def find_peer(name: str) -> MakePeer | str:
    """What makes the peer, or why it cannot be had here."""
    module, peer = PEERS[name].split(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of somebody else's imports
            found: MakePeer = getattr(importlib.import_module(module), peer)
    except Exception as error:  # they fail in many ways, none of which concerns the others
        return f"{name} is not importable here: {type(error).__name__}: {error}"
    return found


def prompt(seed: int, num_tokens: int) -> Int32Array:
    """Token ids that no other seed has in common."""
    return np.random.default_rng(seed).integers(0, 32_000, num_tokens, np.int32)
