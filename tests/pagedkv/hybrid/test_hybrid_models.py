"""How the layers of real models become groups, which hits those can serve, and what a long context holds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, LayerSpec, PagedKVError, SpecError
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager, bytes_per_block, groups_for
from pagedkv.hybrid.group import longest_hit

FULL = CacheGroup("full", (0,))
GEMMA_3 = KVCacheSpec(tuple(LayerSpec(8, 256, window=None if i % 6 == 5 else 1024) for i in range(48)))
"""Gemma-3 12B: 48 layers, every sixth global, 8 kv heads of 256."""
GPT_OSS = KVCacheSpec((LayerSpec(8, 64, window=128), LayerSpec(8, 64)) * 12)
"""gpt-oss-20b: 24 layers, every other one with a window, 8 kv heads of 64."""


# -- groups


def test_gemma_3_layers_become_groups_of_equal_blocks() -> None:
    """Five groups of 8 local layers each, and one of the 8 global ones."""
    groups = groups_for(GEMMA_3)
    assert [(g.name, g.window, len(g.layers)) for g in groups] == [
        *((f"window1024/{i}", 1024, 8) for i in range(5)),
        ("full", None, 8),
    ]
    assert sorted(layer for g in groups for layer in g.layers) == list(range(48))
    assert groups[-1].layers == (5, 11, 17, 23, 29, 35, 41, 47)
    assert bytes_per_block(GEMMA_3, groups) * len(groups) == GEMMA_3.bytes_per_block


def test_gpt_oss_layers_become_two_groups() -> None:
    """The even and the odd layers."""
    groups = groups_for(GPT_OSS)
    assert [(g.name, g.layers) for g in groups] == [
        ("window128", tuple(range(0, 24, 2))),
        ("full", tuple(range(1, 24, 2))),
    ]
    assert bytes_per_block(GPT_OSS, groups) == 16 * 12 * 2048


def test_layers_of_other_sizes_share_blocks_when_their_groups_have_equal_bytes() -> None:
    """Two heads fewer mean twice the layers per group; sinks go to the groups with a window."""
    spec = KVCacheSpec((LayerSpec(4, 64),) * 2 + (LayerSpec(2, 64, window=8),) * 8)
    groups = groups_for(spec, sinks=3)
    assert [(g.name, len(g.layers), g.sinks) for g in groups] == [
        ("full", 2, 0),
        ("window8/0", 4, 3),
        ("window8/1", 4, 3),
    ]
    assert len({sum(spec.bytes_per_token_layer(i) for i in g.layers) for g in groups}) == 1


def test_a_model_of_equal_layers_is_one_group() -> None:
    """Nothing to split."""
    (group,) = groups_for(KVCacheSpec.uniform(num_layers=3, num_kv_heads=1, head_dim=8, window=5))
    assert group == CacheGroup("window5", (0, 1, 2), window=5)


def test_classes_with_equal_windows_but_other_sizes_get_distinct_names() -> None:
    """Names are keys of ``tables``."""
    spec = KVCacheSpec((LayerSpec(2, 8), LayerSpec(1, 8), LayerSpec(1, 8)))
    assert [g.name for g in groups_for(spec)] == ["full/0", "full/1"]


def test_layers_that_cannot_share_blocks_are_refused() -> None:
    """One layer of one class is larger than all of another."""
    with pytest.raises(SpecError, match=r"one layer of 256 bytes per token is larger than .* with 32"):
        groups_for(KVCacheSpec((LayerSpec(1, 8), LayerSpec(8, 8, window=4))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", (0,)), "needs a name"),
        (("a", ()), "needs a tuple of layers"),
        (("a", "01"), "needs a tuple of layers"),
        (("a", (0, 0)), "names a layer twice"),
        (("a", (-1,)), "a layer must be an integer of at least 0, got -1"),
        (("a", (0,), 0), "window must be an integer of at least 1, got 0"),
        (("a", (0,), 4, -1), "sinks must be an integer of at least 0, got -1"),
        (("a", (0,), None, 4), "has 4 sinks but no window"),
    ],
)
def test_impossible_groups_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    """With the number that is wrong."""
    with pytest.raises(PagedKVError, match=message):
        CacheGroup(*arguments)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "at least one CacheGroup"),
        (["full"], "must be CacheGroup, got 'full'"),
        ([FULL, CacheGroup("full", (1,))], "two groups are called 'full'"),
        ([FULL, CacheGroup("other", (0,), 4)], "layer 0 is in group 'full' and in group 'other'"),
    ],
)
def test_groups_of_a_manager_must_be_distinct(groups: Any, message: str) -> None:
    """Names and layers."""
    with pytest.raises(PagedKVError, match=message):
        HybridKVCacheManager(groups, 8)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    windows=st.lists(
        st.one_of(st.none(), st.tuples(st.integers(1, 20), st.integers(0, 9))), min_size=1, max_size=3
    ),
    bits=st.lists(st.integers(0, 7), max_size=12),
    block_size=st.integers(1, 4),
)
def test_the_longest_hit_is_found_position_by_position(
    windows: list[tuple[int, int] | None], bits: list[int], block_size: int
) -> None:
    """A hit is accepted iff all positions that the next token sees, in any group, are there."""
    groups = [CacheGroup(f"g{i}", (i,), *(w or (None, 0))) for i, w in enumerate(windows)]
    present = np.array([[bool(b >> g & 1) for b in bits] for g in range(len(groups))], bool)

    def served(depth: int) -> bool:
        position = depth * block_size
        return all(
            present[g, q // block_size]
            for g, group in enumerate(groups)
            for q in range(position)
            if group.window is None or q > position - group.window or q < group.sinks
        )

    expected = max(depth for depth in range(len(bits) + 1) if served(depth))
    assert longest_hit(groups, present.reshape(len(groups), len(bits)), block_size) == expected


# -- worked examples


def decode(manager: HybridKVCacheManager, seq_id: str, tokens: list[int]) -> None:
    """Grow by one token at a time, each committed before the next."""
    for token in tokens:
        assert manager.step([seq_id])
        manager.commit_step([seq_id], [token])


def long_context(spec: KVCacheSpec, num_blocks: int, chunk: int) -> tuple[HybridKVCacheManager, int]:
    """A context of 32,768 tokens, prefilled in chunks; the manager, and the most blocks held meanwhile."""
    manager = HybridKVCacheManager(groups_for(spec), num_blocks, 16, max_seqs=2, max_seq_len=40_960)
    tokens = list(range(32_768))
    assert manager.open("a", tokens, max_fresh_tokens=chunk) == (chunk, 0)
    most = 0
    for start in range(0, len(tokens), chunk):
        assert not start or manager.append("a", chunk)
        most = max(most, manager.counts.active)
        manager.commit("a", tokens[start : start + chunk])
    manager.check_invariants()
    held = manager.counts.active * bytes_per_block(spec, manager.groups)
    assert held == spec.resident_bytes(32_768)  # the same, counted layer by layer
    return manager, most


def test_gemma_3_at_32k_by_hand() -> None:
    """2048 blocks of the global group; the next token of a local one sees positions above 31744, in 64."""
    manager, most = long_context(GEMMA_3, 4096, chunk=2048)
    held = {name: group.held for name, group in manager.stats().groups.items()}
    assert held == {"full": 2048, **{f"window1024/{i}": 64 for i in range(5)}}
    assert manager.counts.active == 2048 + 5 * 64 == 2368  # all layers in full would be 6 * 2048 = 12288
    assert bytes_per_block(GEMMA_3, manager.groups) == 2**20
    # before the last chunk was committed: 2048, and of each local group its 64 and 128 of the chunk
    assert most == 2048 + 5 * (64 + 128)
    decode(manager, "a", [7])
    assert manager.counts.active == 2049 + 5 * 65


def test_gpt_oss_at_32k_by_hand() -> None:
    """2048 blocks of the full group, 8 of the other one: the 127 positions before the next token."""
    manager, most = long_context(GPT_OSS, 3000, chunk=512)
    held = {name: group.held for name, group in manager.stats().groups.items()}
    assert held == {"window128": 8, "full": 2048}  # all layers in full would be 4096
    assert most == 2048 + 8 + 32
    table = manager.tables["window128"].block_ids("a")
    assert np.flatnonzero(table).tolist() == list(range(2040, 2048))  # 32768 - 127 = 2040 * 16 + 1
    # 9 while it decodes, 8 when a block has become full, whatever the length
    for token in range(40):
        decode(manager, "a", [token])
        assert manager.stats().groups["window128"].held == 9 - ((token + 1) % 16 == 0)
