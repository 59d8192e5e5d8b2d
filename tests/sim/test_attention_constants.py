"""The attention constants: their formula, their bounds, and the committed file."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import SpecError
from pagedkv.sim.timing.attention_constants import AttentionConstants, fitted_kernels
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.rates import DeviceRates, nearest_dtype

positive = st.floats(1e-3, 1e3)


def seconds(constants: AttentionConstants, kv_bytes: float, heads: float, row: float = 256.0) -> float:
    return float(constants.seconds(np.array([kv_bytes]), np.array([heads]), np.array([row]), 1e12)[0])


def test_a_call_takes_its_fixed_time_and_the_dearer_of_bytes_and_heads() -> None:
    """1e9 bytes take 1 ms at peak: x (1.25 + 0.5 x 64 / 128) = 1.5 ms; one head alone x 8 = 8 ms."""
    constants = AttentionConstants(1e-5, byte_cost=1.25, row_cost=0.5, head_cost=8.0)
    assert seconds(constants, 1e9, heads=64.0, row=128.0) == pytest.approx(1.51e-3)
    assert seconds(constants, 1e9, heads=1.0, row=128.0) == pytest.approx(8.01e-3)


@given(costs=st.tuples(positive, positive, positive, positive), kv=positive, more=positive, heads=positive)
def test_time_never_falls_as_bytes_grow_nor_as_heads_fall(
    costs: tuple[float, float, float, float], kv: float, more: float, heads: float
) -> None:
    """For any constants."""
    constants = AttentionConstants(*costs)
    assert seconds(constants, kv + more, heads) >= seconds(constants, kv, heads)
    assert seconds(constants, kv, heads) >= seconds(constants, kv, heads + more)


def test_a_share_is_at_most_the_peak() -> None:
    """A fit may say that bytes come faster than the memory delivers; a step does not believe it."""
    assert AttentionConstants(0.0, byte_cost=0.5).share(256) == 1.0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fixed_s", "row_cost", "head_cost", "byte_cost"])
def test_impossible_constants_are_refused(name: str, value: float) -> None:
    """The message names the constant."""
    with pytest.raises(SpecError, match=name):
        AttentionConstants(**{"fixed_s": 0.0, "byte_cost": 1.0, name: value})
    with pytest.raises(SpecError, match="byte_cost"):
        AttentionConstants(0.0, 0.0)


def test_every_fitted_kernel_is_of_a_known_gpu_and_within_the_bounds() -> None:
    """Errors of at most 5 % (16-bit) and 8 % (8-bit) on the rows that were fitted; plausible constants."""
    assert len(fitted_kernels()) >= 9
    for kernel in fitted_kernels():
        assert load_gpu(kernel.gpu).name == kernel.gpu
        assert kernel.num_rows >= 20
        assert kernel.mape <= (5.0 if kernel.kv_dtype == "bf16" else 8.0), kernel
        assert 0.5 <= kernel.constants.share(256) <= 1.0
        assert kernel.constants.fixed_s < 50e-6


def test_a_gpu_and_dtype_has_one_default_kernel() -> None:
    """None twice, or a step would depend on the order of the file."""
    keys = [(k.gpu, k.kv_dtype) for k in fitted_kernels() if k.is_default]
    assert len(keys) == len(set(keys)) == 5


@pytest.mark.parametrize(
    ("dtype", "known", "found"),
    [("int8", ["bf16", "int8"], "int8"), ("fp32", ["bf16", "int8"], "bf16"), ("int8", ["bf16"], "bf16")],
)
def test_an_unknown_dtype_takes_the_nearest_in_width(dtype: str, known: list[str], found: str) -> None:
    """The same if it is there."""
    assert nearest_dtype(dtype, dict.fromkeys(known)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention": {}},
        {"attention": {"int3": AttentionConstants(0.0, 1.0)}},
        {"weights": 1.5},
        {"compute": 0.0},
        {"layer_s": -1.0},
        {"per_sequence_s": math.nan},
    ],
)
def test_impossible_rates_are_refused(wrong: dict[str, object]) -> None:
    """No attention, a dtype that no cache has, shares and times that are none."""
    good: dict[str, object] = {"attention": {"bf16": AttentionConstants(0.0, 1.0)}}
    DeviceRates(**good)  # type: ignore[arg-type]
    with pytest.raises(SpecError):
        DeviceRates(**{**good, **wrong})  # type: ignore[arg-type]
