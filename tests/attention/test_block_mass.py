"""The share of the attention per block, in every backend."""

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.attention import backends
from pagedkv.attention.testing import make_batch

every_backend = pytest.mark.parametrize(
    "backend", ["auto", *(info.name for info in backends() if info.available and info.name != "triton")]
)

LENS = [0, 1, 4, 5, 33, 700]


@every_backend
@pytest.mark.parametrize("window", [None, 6])
def test_mass_is_the_sum_of_the_softmax_over_the_block(backend: str, window: int | None) -> None:
    """By hand: softmax over the visible logits, summed block by block."""
    batch = make_batch(LENS, dims=(16, 8)).to(torch.float32)
    out, mass = batch.attend_with_mass(backend, window=window)
    assert torch.equal(out, batch.attend(backend, window=window))
    for row, n in enumerate(LENS):
        wanted = np.zeros((4, mass.shape[2]))
        first = 0 if window is None else max(0, n - window)
        for head in range(4):
            s = batch.ks[row][first:, head // 2].double().numpy() @ batch.q[row, head].double().numpy() / 4
            weights = np.exp(s - s.max(initial=-1e9)) if n else s
            for position in range(first, n):
                wanted[head, position // 4] += weights[position - first] / weights.sum()
        np.testing.assert_allclose(mass[row].numpy(), wanted, atol=2e-6)


@every_backend
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"window": 9}, {"sinks": torch.tensor([1.0, -torch.inf, 0.0, 5.0])}]
)
@pytest.mark.parametrize("q_len", [1, 3])
def test_mass_is_that_of_the_reference(backend: str, options: dict[str, Any], q_len: int) -> None:
    """With every feature, several query tokens and int8."""
    batch = make_batch(LENS, q_len=q_len, dims=(16, 8), unused=torch.nan).to(torch.float32)
    for some, tolerance in ((batch, 2e-6), (batch.quantized(), 1e-4)):
        exact = some.dequantized() if some.scales else some
        mass = some.attend_with_mass(backend, **options)[1]
        wanted = exact.attend_with_mass("reference", **options)[1]
        torch.testing.assert_close(mass, wanted, rtol=tolerance, atol=tolerance)


@every_backend
def test_mass_sums_to_one_less_the_sink(backend: str) -> None:
    """An empty sequence has none."""
    batch = make_batch(LENS).to(torch.float32)
    sinks = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    for given in (None, sinks):
        lse = torch.empty(len(LENS), 4)
        total = batch.attend_with_mass(backend, sinks=given, lse=lse)[1].sum(dim=2)
        wanted = torch.ones(len(LENS), 4) if given is None else 1 - torch.exp(given - lse)
        wanted[0] = 0
        torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)
