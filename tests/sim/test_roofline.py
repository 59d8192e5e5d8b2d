"""The rates that a roofline starts from, and what the interface promises of it."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import SpecError
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import (
    Roofline,
    attention_fixed_s,
    efficiency_of,
    fitted_attention,
    origin_of,
)
from pagedkv.sim.timing.step_time import Contexts, Efficiency, StepTimeModel
from pagedkv.spec import KVCacheSpec


def contexts(*values: int) -> Contexts:
    return np.array(values, np.int64)


def of_model(name: str, gpu: str = "h100", **options: Any) -> Roofline:
    return Roofline.from_gpu(load_model(name), load_gpu(gpu), **options)


class TestRates:
    def test_a_fitted_gpu_reads_k_and_v_as_its_kernels_do_and_streams_weights_as_published(self) -> None:
        """H100: 1 / 1.0553 of the bandwidth, whose attention call is in the 60 us already."""
        spec = load_model("llama-3.1-8b").spec
        found = efficiency_of(load_gpu("h100"), spec)
        assert (found.kv, found.launch_s_per_layer) == pytest.approx((1 / 1.0553, 60e-6), rel=1e-3)
        assert (found.weights, found.compute) == (Efficiency.weights, Efficiency.compute)

    def test_narrow_rows_and_elements_cost_more_per_byte(self) -> None:
        """fp8 K and V of 128 bytes a row reach less than bf16; rows of 64 bytes less still."""
        gpu = load_gpu("h100")
        wide, narrow = (
            KVCacheSpec.uniform(num_layers=2, num_kv_heads=8, head_dim=dim, dtype="fp8-e4m3")
            for dim in (128, 64)
        )
        shares = [efficiency_of(gpu, spec).kv for spec in (load_model("llama-3.1-8b").spec, wide, narrow)]
        assert shares[0] > shares[1] > shares[2] > 0.5

    @pytest.mark.parametrize(
        ("gpu", "fitted_on"),
        [("h200", "H100 SXM"), ("rtx4090", "L40S"), ("a100", "A100-80 SXM"), ("rtx3090", "A100-80 SXM")],
    )
    def test_a_gpu_without_measurements_takes_its_architecture_s(self, gpu: str, fitted_on: str) -> None:
        """Ada from the L40S, Hopper from the H100; the origin says so."""
        kernel = fitted_attention(load_gpu(gpu), "bf16")
        assert kernel is not None and kernel.gpu == fitted_on
        assert origin_of(load_gpu(gpu), "bf16").endswith(f"fitted on {fitted_on}")

    @pytest.mark.parametrize("gpu", ["b200", "mi300x", "gaudi3"])
    def test_other_architectures_keep_what_is_published(self, gpu: str) -> None:
        """Nothing was measured on them."""
        assert efficiency_of(load_gpu(gpu), load_model("llama-3.1-8b").spec) == Efficiency()
        assert origin_of(load_gpu(gpu), "bf16") == "published efficiencies"

    def test_a_kernel_can_be_chosen_by_the_beginning_of_its_name(self) -> None:
        """SGLang's on the H100 itself; llama.cpp's from where it was fitted; others are refused by name."""
        gpu, spec = load_gpu("h100"), load_model("llama-3.1-8b", kv_dtype="fp8-e4m3").spec
        assert efficiency_of(gpu, spec, "sglang").kv < efficiency_of(gpu, spec).kv
        assert efficiency_of(gpu, spec, "llama.cpp").kv == pytest.approx(1 / 1.457, rel=1e-3)
        with pytest.raises(SpecError, match=r"no attention kernel 'abacus'.*VLLM"):
            efficiency_of(gpu, spec, "abacus")

    @pytest.mark.parametrize(("gpu", "fixed_us"), [("h100", 16.64), ("rtx4090", 21.35), ("b200", 16.64)])
    def test_the_call_s_share_of_the_launch_cost_is_known(self, gpu: str, fixed_us: float) -> None:
        """Of the published 60 us an H100's; elsewhere the GPU's own in its place."""
        assert attention_fixed_s(load_gpu(gpu), "bf16") == pytest.approx(fixed_us * 1e-6, rel=1e-2)

    def test_seconds_per_sequence_count_for_every_token_that_is_sampled(self) -> None:
        """8 sequences of 10 us; prompt tokens that are not sampled add nothing."""
        plain = of_model("llama-3.1-8b", efficiency=Efficiency())
        slow = of_model("llama-3.1-8b", efficiency=Efficiency(per_sequence_s=1e-5))
        now = contexts(*[100] * 8)
        assert slow.decode_s(now) - plain.decode_s(now) == pytest.approx(8e-5, rel=1e-9)
        chunk = [(0, 64)]
        assert slow.durations(now, chunk, 1)(0) - plain.durations(now, chunk, 1)(0) == pytest.approx(9e-5)


class TestInterface:
    def test_the_interface_makes_no_instances_and_its_factories_make_rooflines(self) -> None:
        """``from_rates`` and ``from_gpu`` are there for those who need no other model."""
        with pytest.raises(TypeError, match="abstract"):
            StepTimeModel()  # type: ignore[abstract]
        assert isinstance(StepTimeModel.from_rates(14e9, 800e9), Roofline)
        model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
        assert StepTimeModel.from_gpu(model, gpu, weight_bits=8) == Roofline.from_gpu(model, gpu, None, 8)

    @settings(max_examples=50, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
        longer=st.integers(0, 5),
        extra=st.integers(1, 100_000),
        name=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2", "mixtral-8x7b"]),
    )
    def test_a_step_never_gets_faster_with_more_context_or_more_sequences(
        self, lengths: list[int], longer: int, extra: int, name: str
    ) -> None:
        """One context grows; one sequence joins."""
        model, now = of_model(name), contexts(*lengths)
        grown = now.copy()
        grown[longer % len(grown)] += extra
        assert model.decode_s(grown) >= model.decode_s(now)
        assert model.decode_s(contexts(*lengths, extra)) >= model.decode_s(now)

    @settings(max_examples=50, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 60), min_size=0, max_size=4),
        chunks=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=2),
        k=st.integers(0, 5),
    )
    def test_the_kth_duration_is_that_of_the_first_step_k_tokens_later(
        self, lengths: list[int], chunks: list[tuple[int, int]], k: int
    ) -> None:
        """Contexts grow by one and chunks move on by their size; the model's windows are not reached."""
        model, now = of_model("llama-3.1-8b"), contexts(*lengths)
        moved = [(start + k * n, n) for start, n in chunks]
        first = model.durations(now + k, moved, len(chunks))(0)
        assert model.durations(now, chunks, len(chunks))(k) == pytest.approx(first, rel=1e-12)

    def test_every_step_model_is_there_without_torch(self) -> None:
        """Only measuring needs it."""
        modules = ("roofline", "table_step_time", "measured_step_time", "calibrate")
        imports = "; ".join(f"import pagedkv.sim.timing.{name}" for name in modules)
        code = f"import sys; sys.path[:] = {sys.path!r}; {imports}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
