"""The work plan, which one Triton kernel computes, against the same in Python."""

import os
import random
from typing import Any

import pytest
import torch

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import PagedKVError

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/attention/test_triton_interpreter.py runs it", allow_module_level=True)

from pagedkv.attention.triton_backend import plan as plan_module
from pagedkv.attention.triton_backend import plan_splits


def plan_by_hand(
    lens: list[int], target: int, q_len: int = 1, window: int | None = None, min_chunk: int = 256
) -> list[int]:
    read = [n if window is None else min(n, window + q_len - 1) for n in lens]
    chunk = div_ceil(max(min_chunk, div_ceil(sum(read), target)), 128) * 128
    parts = [div_ceil(n, chunk) for n in read]
    indptr, items = [0], []
    for seq, count in enumerate(parts):
        split = count if count > 1 else 0
        indptr.append(indptr[-1] + split)
        items += [seq] * split
    items += [seq for seq, count in enumerate(parts) if count <= 1]
    items += [-1] * (len(lens) + target - len(items))
    return [chunk, *indptr, *items]


def tensor(lens: list[int]) -> torch.Tensor:
    return torch.tensor(lens, dtype=torch.int32)


def test_plan_of_the_drawing() -> None:
    """2000 tokens in chunks of 512 are four parts, 900 are two; the whole sequences come after the parts."""
    plan = plan_splits(tensor([900, 100, 0, 2000]), target=6, min_chunk=512)
    assert plan.tolist() == [512, 0, 2, 2, 2, 6, 0, 0, 3, 3, 3, 3, 1, 2, -1, -1]


@pytest.mark.parametrize("seed", range(40))
def test_plan_is_that_of_python_and_never_needs_more_items(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random lengths, also skewed ones, in one pass and in several."""
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(plan_module, "_SEQS_PER_PASS", 16)
    longest = rng.choice([1, 100, 5000, 200_000])
    lens = [
        rng.randint(0, longest) if rng.random() < 0.3 else rng.randint(0, 300)
        for _ in range(rng.randint(0, 40))
    ]
    target = rng.randint(1, 60)
    options: dict[str, Any] = {
        "q_len": rng.randint(1, 8),
        "window": rng.choice([None, 1, 128, 3000]),
        "min_chunk": rng.choice([1, 64, 256, 1000]),
    }
    plan = plan_splits(tensor(lens), target=target, **options)
    assert plan.tolist() == plan_by_hand(lens, target, **options)
    assert plan[len(lens) + 1] <= min(len(lens) + target, 2 * target)


def test_plan_is_written_into_the_callers_buffer() -> None:
    """The same buffers serve a step after another, as in a captured graph."""
    lens = tensor([10, 20, 30])
    out = torch.full((2 * 3 + 5 + 2,), -7, dtype=torch.int32)
    for step in range(4):
        assert plan_splits(lens, target=5, out=out) is out
        assert out.tolist() == plan_by_hand(lens.tolist(), 5)
        lens += 400 * step


def test_plan_reads_strided_lengths() -> None:
    """Lengths may be a column of a larger tensor."""
    lens = torch.tensor([[700, 1], [3, 1], [2000, 1]], dtype=torch.int32)[:, 0]
    assert plan_splits(lens, target=4).tolist() == plan_by_hand([700, 3, 2000], 4)


def test_negative_lengths_count_as_empty() -> None:
    """Contents are not checked on a device: nonsense must not derail the others."""
    assert plan_splits(tensor([-5, 700]), target=2).tolist() == plan_by_hand([0, 700], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0}, "target must be at least 1, got 0"),
        ({"target": 1, "q_len": 0}, "q_len must be at least 1, got 0"),
        ({"target": 1, "min_chunk": 0}, "min_chunk must be at least 1, got 0"),
        ({"target": 1, "window": 0}, "window must be an integer of at least 1"),
        ({"target": 1, "out": torch.zeros(6, dtype=torch.int32)}, r"out must be contiguous int32 \(7,\)"),
        ({"target": 1, "out": torch.zeros(7)}, "got torch.float32"),
    ],
)
def test_misuse_is_refused_with_numbers(options: dict[str, object], message: str) -> None:
    """A plan that the kernels would misread must not come into being."""
    with pytest.raises(PagedKVError, match=message):
        plan_splits(tensor([1, 2]), **options)  # type: ignore[arg-type]


def test_lengths_of_another_dtype_are_refused() -> None:
    """The kernel reads 32-bit lengths."""
    with pytest.raises(PagedKVError, match="seq_lens must be int32"):
        plan_splits(torch.tensor([1, 2]), target=1)
