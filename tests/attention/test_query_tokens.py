"""Several query tokens per sequence: the causal tail, in every backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pagedkv.attention import backends
from pagedkv.attention.testing import Batch, make_batch

every_backend = pytest.mark.parametrize(
    "backend", ["auto", *(info.name for info in backends() if info.available and info.name != "triton")]
)

LENS = [5, 8, 37, 530, 1100]
FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 700},
    {"sinks": torch.tensor([4.0, -2.0, 0.5, 9.0]), "softcap": 2.0},
]


def one_by_one(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query token alone, over the sequence as it was when that token was its last."""
    outs, lses = [], []
    q_len = batch.q.shape[1]
    for i in range(q_len):
        lens = (batch.lens - (q_len - 1 - i)).clamp_min(0)
        single = replace(batch, q=batch.q[:, i], lens=lens)
        out, lse = single.attend_with_lse("reference", **options)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)


@every_backend
@pytest.mark.parametrize("options", FEATURES)
@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
def test_each_query_token_sees_what_it_would_see_alone(
    backend: str, options: dict[str, Any], q_len: int
) -> None:
    """Verification of speculated tokens gives what decoding them one at a time gives."""
    batch = make_batch([q_len, *LENS], q_len=q_len, dims=(16, 8), seed=q_len).to(torch.float32)
    out, lse = batch.attend_with_lse(backend, **options)
    wanted, wanted_lse = one_by_one(batch, **options)
    torch.testing.assert_close(out, wanted, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(lse, wanted_lse, rtol=5e-6, atol=5e-6)


@every_backend
def test_all_tokens_of_a_sequence_are_causal_attention(backend: str) -> None:
    """As torch computes it with a lower triangular mask."""
    batch = make_batch([7, 7], heads=(4, 4), q_len=7).to(torch.float32)
    got = batch.attend(backend)
    for row in range(2):
        q, k, v = (x.transpose(0, 1) for x in (batch.q[row], batch.ks[row], batch.vs[row]))
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(got[row], wanted, rtol=5e-6, atol=5e-6)


@every_backend
def test_query_tokens_before_the_sequence_see_nothing(backend: str) -> None:
    """A sequence shorter than q_len, a padded row of a batch: output 0, LSE -inf, nothing NaN."""
    batch = make_batch([0, 2, 4], q_len=4, unused=torch.nan).to(torch.float32)
    out, lse = batch.attend_with_lse(backend)
    blind = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    assert bool((out[blind] == 0).all()) and bool((lse[blind] == -torch.inf).all())
    assert bool(out[~blind].isfinite().all()) and bool(lse[~blind].isfinite().all())


@every_backend
@pytest.mark.parametrize("q_len", [1, 4])
def test_int8_with_several_query_tokens(backend: str, q_len: int) -> None:
    """Near the reference on the same integers and scales."""
    batch = make_batch([q_len, 40, 600], q_len=q_len, heads=(8, 2), dims=(32, 16), block_size=16).quantized()
    torch.testing.assert_close(
        batch.attend(backend).double(), batch.dequantized().attend("reference"), rtol=1e-4, atol=1e-4
    )


@every_backend
def test_bf16_strided_queries(backend: str) -> None:
    """Queries cut out of a fused projection, heads and tokens with strides of their own."""
    batch = make_batch(LENS, q_len=3, dims=(16, 16), block_size=16).to(torch.bfloat16)
    fused = torch.randn(len(LENS), 3, 6, 16, dtype=torch.bfloat16)
    fused[:, :, :4] = batch.q
    strided = replace(batch, q=fused[:, :, :4])
    assert torch.equal(strided.attend(backend), batch.attend(backend))
