"""The roofline, against arithmetic written out by hand."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError, SpecError
from pagedkv.sim.timing.gpus import gpu_names, load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.step_time import AttentionGroup, Contexts, Efficiency
from pagedkv.spec import KVCacheSpec, LayerSpec

LLAMA_KV_PER_TOKEN = 32 * 2 * 8 * 128 * 2  # layers, K and V, KV heads, head dim, bytes of bf16
BANDWIDTH = 800e9
WEIGHTS = 14e9


def contexts(*values: int) -> Contexts:
    return np.array(values, np.int64)


def of_rates(spec: KVCacheSpec | None = None) -> Roofline:
    return Roofline.from_rates(WEIGHTS, BANDWIDTH, spec)


def of_model(name: str, gpu: str = "h100", **options: Any) -> Roofline:
    return Roofline.from_gpu(load_model(name), load_gpu(gpu), **options)


class TestWorkedExamples:
    def test_14_gb_of_weights_at_800_gb_per_s_take_17_5_ms_or_57_1_tokens_per_s(self) -> None:
        """14e9 / 800e9 = 0.0175 and its inverse, with nothing cached."""
        seconds = of_rates().decode_s(contexts(0))
        assert seconds == 0.0175
        assert f"{1 / seconds:.1f}" == "57.1"

    @pytest.mark.parametrize(
        ("context", "kv_bytes", "added_ms"),
        [(4096, 2**29, 0.671), (32_768, 2**32, 5.369), (131_072, 2**34, 21.475)],
    )
    def test_llama_8b_adds_its_kv_bytes_over_the_bandwidth(
        self, context: int, kv_bytes: int, added_ms: float
    ) -> None:
        """131,072 bytes per token: 0.5, 4 and 16 GiB, each read once."""
        model = of_rates(load_model("llama-3.1-8b").spec)
        assert LLAMA_KV_PER_TOKEN * context == kv_bytes == model.kv_bytes(contexts(context))
        added = model.decode_s(contexts(context)) - model.decode_s(contexts(0))
        assert added == pytest.approx(kv_bytes / 800e9, rel=1e-12)
        assert added * 1e3 == pytest.approx(added_ms, abs=5e-4)

    def test_a_batch_reads_the_weights_once_and_every_context(self) -> None:
        """Three sequences cost the same as one of their summed length."""
        model = of_rates(load_model("llama-3.1-8b").spec)
        assert model.decode_s(contexts(10, 20, 70)) == model.decode_s(contexts(100))

    def test_int8_entries_are_read_with_their_scales(self) -> None:
        """Per layer and token 2 x 8 heads of 128 bytes, and 16 scales of 4 bytes."""
        model = of_rates(load_model("llama-3.1-8b", kv_dtype="int8").spec)
        assert model.kv_bytes(contexts(1000)) == 1000 * 32 * (2 * 8 * 128 + 16 * 4)

    def test_an_mla_token_is_one_latent_vector_per_layer(self) -> None:
        """DeepSeek-V2: 60 layers x (512 + 64) x 2 bytes, key and value in one read."""
        model = of_rates(load_model("deepseek-v2").spec)
        assert model.kv_bytes(contexts(4096)) == 4096 * 60 * 576 * 2

    def test_every_part_of_a_gpu_s_step_is_its_size_over_its_achieved_rate(self) -> None:
        """Llama-3.1-8B on a B200, one sequence: launches, weights without the embedding, KV."""
        params = load_model("llama-3.1-8b").params_total - 128_256 * 4096
        launch = 32 * 60e-6
        weights = params * 2 / (8e12 * 0.92)
        kv = 5000 * LLAMA_KV_PER_TOKEN / (8e12 * 0.90)
        assert of_model("llama-3.1-8b", "b200").decode_s(contexts(5000)) == pytest.approx(
            launch + weights + kv, rel=1e-12
        )

    def test_weight_bits_scale_the_weights_alone(self) -> None:
        """4 bits take a quarter of 16 and leave launch and KV alone."""
        wide, narrow = of_model("llama-3.1-8b"), of_model("llama-3.1-8b", weight_bits=4)
        assert narrow.weight_bytes(1) == wide.weight_bytes(1) / 4
        assert narrow.kv_bytes(contexts(77)) == wide.kv_bytes(contexts(77))
        assert narrow.launch_s == wide.launch_s

    def test_the_published_point_that_set_the_launch_cost_is_met(self) -> None:
        """8 requests of 1,024 + 512 tokens on an H100: weights 4.87, KV 0.45 and launches 1.92 ms."""
        middle = contexts(*[1024 + 256] * 8)
        model = of_model("llama-3.1-8b", efficiency=Efficiency())
        assert model.weight_bytes(8) / model.weight_bytes_per_s == pytest.approx(4.87e-3, abs=5e-6)
        assert model.kv_bytes(middle) / model.kv_bytes_per_s == pytest.approx(0.45e-3, abs=5e-6)
        assert model.decode_s(middle) == pytest.approx(7.42e-3 - 0.19e-3, rel=0.005)
        assert of_model("llama-3.1-8b").decode_s(middle) == pytest.approx(7.42e-3 - 0.19e-3, rel=0.005)


class TestGrowth:
    @pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "deepseek-v2"])
    def test_itl_is_affine_in_the_context(self, name: str) -> None:
        """Equally spaced contexts have ITLs whose second differences are zero."""
        model = of_model(name)
        itl = [model.decode_s(contexts(n)) for n in range(0, 131_073, 4096)]
        assert np.abs(np.diff(itl, 2)).max() <= 1e-12 * max(itl)
        assert itl[-1] > itl[0]

    def test_a_layer_with_a_window_stops_growing_there(self) -> None:
        """One sliding layer of 128 and one full layer: the slope falls to the full layer's share."""
        slide, full = LayerSpec(4, 64, window=128), LayerSpec(4, 64)
        model = of_rates(KVCacheSpec((slide, full)))
        per_layer = 2 * 4 * 64 * 2
        read = [model.kv_bytes(contexts(n)) for n in (0, 127, 128, 129, 1000)]
        assert read == [0, *(per_layer * n for n in (2 * 127, 2 * 128, 128 + 129, 128 + 1000))]

    def test_layers_that_all_slide_cost_the_same_at_any_length_beyond(self) -> None:
        """Mistral-like: every layer has a window of 4096."""
        spec = KVCacheSpec.uniform(num_layers=4, num_kv_heads=8, head_dim=128, window=4096)
        model = of_rates(spec)
        assert model.decode_s(contexts(4096)) == model.decode_s(contexts(4097, 0))
        assert model.decode_s(contexts(10**6)) == model.decode_s(contexts(4096))
        assert model.decode_kv_growth_s(contexts(4096, 10**6)) == 0

    @pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "deepseek-v3"])
    @settings(max_examples=30, deadline=None)
    @given(lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=6))
    def test_bytes_are_those_of_the_spec_and_growth_is_their_difference(
        self, name: str, lengths: list[int]
    ) -> None:
        """Sequence by sequence, `KVCacheSpec.bytes_read` says the same."""
        spec = load_model(name).spec
        model, now = of_rates(spec), contexts(*lengths)
        assert model.kv_bytes(now) == sum(spec.bytes_read(n) for n in lengths)
        growth = (model.kv_bytes(now + 1) - model.kv_bytes(now)) / model.kv_bytes_per_s
        assert model.decode_kv_growth_s(now) == pytest.approx(growth, rel=1e-12)
        assert model.decode_kv_s(now) == pytest.approx(model.kv_bytes(now) / model.kv_bytes_per_s, rel=1e-12)

    @settings(max_examples=50, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
        windows=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3),
    )
    def test_growth_is_the_same_for_as_many_steps_as_promised(
        self, lengths: list[int], windows: list[int | None]
    ) -> None:
        """Up to the first context that fills a window; None means for ever, and then it never changes."""
        spec = KVCacheSpec(tuple(LayerSpec(1, 8, window=window) for window in windows))
        model, now = of_rates(spec), contexts(*lengths)
        promised = model.steps_of_same_growth(now)
        steps = 200 if promised is None else promised
        assert steps >= 1
        assert {model.decode_kv_growth_s(now + k) for k in range(steps)} == {model.decode_kv_growth_s(now)}
        if promised is not None:
            assert model.decode_kv_growth_s(now + promised) < model.decode_kv_growth_s(now)

    def test_layers_of_one_window_form_one_group_whatever_their_heads(self) -> None:
        """Groups are keyed by the window alone; their bytes per token sum to the spec's."""
        spec = KVCacheSpec((LayerSpec(1, 8), LayerSpec(2, 8), LayerSpec(1, 8, window=4)))
        assert {g.window: g.bytes_per_token for g in of_rates(spec).groups} == {
            None: 2 * 8 * 2 * 3,
            4: 2 * 8 * 2,
        }

    def test_no_context_reads_nothing(self) -> None:
        """An empty batch has no KV bytes, no growth, and no window to fill."""
        model = of_model("gpt-oss-20b")
        assert (model.kv_bytes(contexts()), model.decode_kv_growth_s(contexts())) == (0, 0)
        assert model.steps_of_same_growth(contexts()) is None


class TestExperts:
    MOE = ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b")

    @pytest.mark.parametrize("name", MOE)
    def test_one_token_reads_the_active_parameters(self, name: str) -> None:
        """A batch of one chooses exactly its top-k experts."""
        model = load_model(name)
        assert of_model(name).weight_bytes(1) == pytest.approx(2 * model.params_active, rel=1e-12)

    @pytest.mark.parametrize("name", MOE)
    def test_many_tokens_read_all_experts(self, name: str) -> None:
        """With 100,000 tokens no expert is left out: all parameters but an input embedding of its own."""
        model = load_model(name)
        embedding = model.params_total - (
            model.params_active + round(model.params_experts * (1 - model.expert_share))
        )
        assert embedding in (0, model.params_lm_head)
        assert of_model(name).weight_bytes(100_000) == pytest.approx(
            2 * (model.params_total - embedding), rel=1e-12
        )

    def test_mixtral_reads_the_share_of_experts_that_some_token_chooses(self) -> None:
        """2 of 8 experts each: two tokens leave an expert out with probability (6/8)^2."""
        step, model = of_model("mixtral-8x7b"), load_model("mixtral-8x7b")
        assert model.params_experts == 32 * 8 * 3 * 4096 * 14336
        grown = step.weight_bytes(2) - step.weight_bytes(1)
        assert grown == pytest.approx(2 * model.params_experts * ((6 / 8) - (6 / 8) ** 2), rel=1e-12)

    @pytest.mark.parametrize("name", MOE)
    def test_weight_bytes_never_fall_as_tokens_are_added(self, name: str) -> None:
        """More tokens choose more experts, with falling gains."""
        step = of_model(name)
        read = np.array([step.weight_bytes(n) for n in range(1, 200)])
        gains = np.diff(read)
        # rounding of sums near 1e12 bytes
        assert gains.min() >= -1e-3
        assert np.diff(gains).max() <= 1e-3

    def test_a_dense_model_reads_the_same_for_any_batch(self) -> None:
        """No experts: one token and a thousand stream the same bytes."""
        step = of_model("llama-3.1-8b")
        assert step.weight_bytes(1) == step.weight_bytes(1000)


class TestComputeBound:
    MODEL = Roofline(
        launch_s=0.5,
        weight_bytes_per_s=10.0,
        kv_bytes_per_s=1.0,
        flops_per_s=100.0,
        dense_weight_bytes=40.0,
        flops_per_token=20.0,
        flops_per_sample=5.0,
    )

    @pytest.mark.parametrize(
        ("tokens", "samples", "attention", "seconds"),
        [
            (1, 1, 0.0, 0.5 + 4.0),  # 25 FLOP take 0.25 s, 40 bytes take 4 s
            (16, 16, 0.0, 0.5 + 4.0),  # 400 FLOP: both take 4 s
            (17, 16, 0.0, 0.5 + 4.2),  # 420 FLOP
            (17, 0, 0.0, 0.5 + 4.0),  # no token goes through the head
            (17, 16, 80.0, 0.5 + 5.0),  # 80 FLOP of attention more
            (0, 0, 0.0, 0.5 + 4.0),
        ],
    )
    def test_the_slower_of_compute_and_weights_counts(
        self, tokens: int, samples: int, attention: float, seconds: float
    ) -> None:
        """launch + max(FLOP / rate, bytes / rate), by hand."""
        assert self.MODEL.fixed_s(tokens, samples, attention) == pytest.approx(seconds, rel=1e-12)

    def test_kv_reads_come_on_top_of_the_slower(self) -> None:
        """A decode step adds its KV bytes to compute and weights alike."""
        model = replace(self.MODEL, groups=(AttentionGroup(None, 3),))
        assert model.decode_s(contexts(4, 6)) == pytest.approx(0.5 + 4.0 + 30.0)

    def test_a_long_prompt_is_bound_by_compute_and_a_decode_step_by_weights(self) -> None:
        """Llama-3.1-8B on an H100: 2,048 tokens cost 2 FLOP per parameter each, less the head."""
        step, model = of_model("llama-3.1-8b"), load_model("llama-3.1-8b")
        flops = 2048 * 2 * (model.params_active - model.params_lm_head) + 2 * model.params_lm_head
        assert step.fixed_s(2048, 1) - step.launch_s == pytest.approx(flops / (989e12 * 0.78), rel=1e-12)
        assert step.fixed_s(8, 8) == step.fixed_s(1, 1)

    def test_attention_costs_four_flops_per_pair_head_dim_and_layer(self) -> None:
        """Two products of 128 elements for 32 heads in 32 layers."""
        (group,) = of_model("llama-3.1-8b").groups
        assert group.prefill_flops == group.decode_flops == 4 * 32 * 128 * 32

    def test_mla_prefills_expanded_and_decodes_in_the_latent_space(self) -> None:
        """DeepSeek-V3: 128 heads of 192 + 128 dims expanded, of 576 + 512 absorbed, in 61 layers."""
        (group,) = of_model("deepseek-v3").groups
        assert group.prefill_flops == 2 * 128 * (192 + 128) * 61
        assert group.decode_flops == 2 * 128 * (576 + 512) * 61

    def test_mla_decode_attention_takes_the_longer_of_its_bytes_and_its_flops(self) -> None:
        """On an H200, 242 FLOP per byte are more than the chip has: compute counts, not bandwidth."""
        model = of_model("deepseek-v3", "h200", efficiency=Efficiency())
        flops = 2 * 128 * (576 + 512) * 61 * 32_768 * 64
        assert model.decode_kv_s(contexts(*[32_768] * 64)) == pytest.approx(flops / (989e12 * 0.78))
        assert flops / (989e12 * 0.78) > model.kv_bytes(contexts(*[32_768] * 64)) / (4.8e12 * 0.9)

    @settings(max_examples=100, deadline=None)
    @given(
        window=st.one_of(st.none(), st.integers(1, 50)), start=st.integers(0, 80), count=st.integers(0, 60)
    )
    def test_prefill_pairs_and_reads_are_what_a_count_token_by_token_gives(
        self, window: int | None, start: int, count: int
    ) -> None:
        """Each prompt token attends to itself and what its window leaves of the tokens before it."""
        group = AttentionGroup(window, 1)
        seen = [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(start, start + count)]
        assert group.pairs(start, count) == sum(map(len, seen))
        if count:
            assert group.tokens_read(start, count) == len(set().union(*seen))

    def test_a_long_prompt_of_a_sliding_model_does_not_pay_for_full_attention(self) -> None:
        """Mistral-7B-v0.1, 100,000 tokens, window 4,096: 12 times fewer pairs than full attention."""
        model = of_model("mistral-7b-v0.1")
        (group,) = model.groups
        assert model.prefill_flops(0, 100_000) / (
            group.prefill_flops * 100_000 * 100_001 / 2
        ) == pytest.approx(0.0802, abs=1e-4)


class TestErrors:
    @pytest.mark.parametrize("name", ["weights", "kv", "compute"])
    @pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan, math.inf])
    def test_a_share_outside_0_to_1_is_refused(self, name: str, value: float) -> None:
        """The message names the share and the value."""
        with pytest.raises(SpecError, match=f"{name}.*{value}"):
            Efficiency(**{name: value})

    @pytest.mark.parametrize("name", ["launch_s_per_layer", "per_sequence_s"])
    @pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
    def test_a_launch_time_that_is_no_time_is_refused(self, name: str, value: float) -> None:
        """Negative, NaN and infinite: a clock that adds one of them never recovers."""
        with pytest.raises(SpecError, match=name):
            Efficiency(**{name: value})

    def test_extreme_shares_are_allowed(self) -> None:
        """The bounds: a full peak, and no launch cost."""
        assert Efficiency(1.0, 1.0, 1.0, 0.0).launch_s_per_layer == 0.0

    def test_a_gpu_without_known_flops_says_which_option_states_them(self) -> None:
        """No figure is made up for a device that the table has none for."""
        unknown = [name for name in gpu_names() if load_gpu(name).fp16_flops is None]
        gpu = load_gpu(unknown[0]) if unknown else replace(load_gpu("h100"), fp16_flops=None)
        with pytest.raises(SpecError, match=f"{re.escape(gpu.name)}.*--tflops"):
            Roofline.from_gpu(load_model("llama-3.1-8b"), gpu)

    @pytest.mark.parametrize(
        ("weight_bytes", "bandwidth"), [(14e9, 0.0), (14e9, -1.0), (-1.0, 8e11), (math.nan, 8e11)]
    )
    def test_rates_that_make_no_sense_are_refused(self, weight_bytes: float, bandwidth: float) -> None:
        """Not a ZeroDivisionError later, and no negative seconds."""
        with pytest.raises(PagedKVError):
            Roofline.from_rates(weight_bytes, bandwidth)
