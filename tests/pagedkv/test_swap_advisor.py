"""The swap advisor: both costs by hand, and where one becomes the better."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from pagedkv import KVCacheSpec, PagedKVError
from pagedkv.swap_advisor import SwapAdvisor, SwapCosts

# 1 ms per block each way, 1.6 ms to compute a block's 16 tokens
SLOW_LINK = SwapAdvisor(
    bytes_per_block=1_000_000, block_size=16, link_bytes_per_s=1e9, prefill_tokens_per_s=10_000
)
# the same, but 4 ms to compute a block
SLOW_PREFILL = replace(SLOW_LINK, prefill_tokens_per_s=4_000)


def test_costs_are_those_worked_out_by_hand() -> None:
    """Llama-3.1-8B in bf16 over a 16 GiB/s link: 4096 tokens are 256 blocks of 2 MiB, half a GiB."""
    spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128)
    advisor = SwapAdvisor(spec.bytes_per_block, spec.block_size, 16 * 2**30, 8192)
    assert spec.bytes_per_block == 2 * 2**20
    costs = advisor.costs(4096)
    assert costs == SwapCosts(swap_out_s=1 / 32, swap_in_s=1 / 32, recompute_s=0.5)
    assert costs.swap_s == 1 / 16 and costs.prefers_swap


def test_a_partial_block_is_copied_whole_but_computed_by_token() -> None:
    """17 tokens are two blocks to copy, and 17 tokens to compute."""
    costs = SLOW_LINK.costs(17)
    assert (costs.swap_out_s, costs.swap_in_s) == pytest.approx((0.002, 0.002))
    assert costs.recompute_s == pytest.approx(0.0017)


def test_what_is_cached_is_neither_copied_back_nor_computed() -> None:
    """Whole blocks of it: 40 cached tokens are 2 hits. All of it goes out in any case."""
    costs = SLOW_PREFILL.costs(160, num_cached_tokens=40)
    assert costs.swap_out_s == pytest.approx(0.010)
    assert costs.swap_in_s == pytest.approx(0.008)
    assert costs.recompute_s == pytest.approx(0.032)


def test_without_fixed_costs_the_length_does_not_matter() -> None:
    """Both costs are linear in whole blocks: the same way is better at every length."""
    for blocks in (1, 10, 1000):
        assert not SLOW_LINK.prefers_swap(16 * blocks)
        assert SLOW_PREFILL.prefers_swap(16 * blocks)


def test_equal_costs_do_not_prefer_swap() -> None:
    """1 ms out, 1 ms in, 2 ms to compute: the host memory is better left free."""
    even = replace(SLOW_LINK, prefill_tokens_per_s=8_000)
    assert even.costs(16).swap_s == even.costs(16).recompute_s == 0.002
    assert not even.prefers_swap(16)


def test_more_cached_tokens_turn_it_to_recompute() -> None:
    """With h of 10 blocks cached: 10 ms out and 10 - h back against 4 (10 - h), so swap while h < 20/3."""
    preferred = [SLOW_PREFILL.prefers_swap(160, num_cached_tokens=16 * h) for h in range(11)]
    assert preferred == [True] * 7 + [False] * 4


def test_a_cost_per_transfer_turns_short_sequences_to_recompute() -> None:
    """Each way costs 9 ms more: 18 + 2 n < 4 n from 10 blocks on."""
    slow_start = replace(SLOW_PREFILL, transfer_s=0.009)
    preferred = [slow_start.prefers_swap(16 * n) for n in (1, 5, 8, 10, 11, 100)]
    assert preferred == [False, False, False, True, True, True]
    assert slow_start.costs(160).swap_s == pytest.approx(0.038)
    assert slow_start.costs(160).recompute_s == pytest.approx(0.040)


def test_nothing_to_copy_costs_no_transfer() -> None:
    """A sequence that is cached to its end comes back for nothing, and an empty one goes for nothing."""
    advisor = replace(SLOW_LINK, transfer_s=1.0)
    assert advisor.costs(32, num_cached_tokens=32) == SwapCosts(1.002, 0.0, 0.0)
    assert advisor.costs(0) == SwapCosts(0.0, 0.0, 0.0)
    assert not advisor.prefers_swap(0)


def test_attention_turns_long_sequences_to_swap() -> None:
    """Recompute is 0.4 ms a block cheaper than both copies, but its pairs grow with the square.

    n blocks: 2 n ms to copy against 1.6 n ms and 16 n (16 n + 1) / 2 pairs of 1 us to compute. 3 blocks:
    6 ms against 4.8 + 1.176 = 5.976 ms, recompute. 4 blocks: 8 ms against 6.4 + 2.08 = 8.48 ms, swap.
    """
    quadratic = replace(SLOW_LINK, attention_s_per_pair=1e-6)
    assert quadratic.costs(48).recompute_s == pytest.approx(0.0048 + 1176e-6)
    assert quadratic.costs(64).recompute_s == pytest.approx(0.0064 + 2080e-6)
    assert [quadratic.prefers_swap(16 * n) for n in (1, 2, 3, 4, 5, 100)] == [False] * 3 + [True] * 3


def test_cached_tokens_are_still_attended_to() -> None:
    """Tokens 17..20 behind 16 cached ones attend to 17 + 18 + 19 + 20 tokens."""
    quadratic = replace(SLOW_LINK, attention_s_per_pair=1e-3)
    assert quadratic.costs(20, num_cached_tokens=16).recompute_s == pytest.approx(0.0004 + 0.074)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_block", 0),
        ("bytes_per_block", 1.5),
        ("block_size", -1),
        ("link_bytes_per_s", 0),
        ("link_bytes_per_s", float("inf")),
        ("link_bytes_per_s", float("nan")),
        ("prefill_tokens_per_s", -5.0),
        ("prefill_tokens_per_s", True),
        ("prefill_tokens_per_s", "fast"),
        ("transfer_s", -0.1),
        ("attention_s_per_pair", float("nan")),
    ],
)
def test_impossible_inputs_are_refused(name: str, value: Any) -> None:
    """With the name and the value."""
    with pytest.raises(PagedKVError, match=name):
        replace(SLOW_LINK, **{name: value})


def test_impossible_lengths_are_refused() -> None:
    """Negative counts, and more cached tokens than there are."""
    for tokens, cached, words in ((-1, 0, "num_tokens"), (5, -1, "num_cached"), (5, 6, "6 cached .* the 5")):
        with pytest.raises(PagedKVError, match=words):
            SLOW_LINK.costs(tokens, cached)


def test_an_advisor_does_not_change() -> None:
    """Frozen, like what it returns."""
    with pytest.raises(FrozenInstanceError):
        SLOW_LINK.block_size = 8  # type: ignore[misc]
