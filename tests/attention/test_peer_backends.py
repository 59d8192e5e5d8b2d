"""The adapters of other kernels: what can be shown of them without a GPU or the packages.

Their results on a GPU are checked by ``benchmarks/gpu_check.py``.
"""

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import KVCacheManager
from pagedkv.attention import flash_attn_backend, flashinfer_backend
from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.testing import Batch, make_batch


def arguments(batch: Batch, **options: Any) -> AttentionArguments:
    names = ("scale", "k_scale", "v_scale", "window", "sinks", "softcap", "out", "lse", "block_mass", "plan")
    given = {
        **dict.fromkeys(names),
        "scale": 0.3,
        "out": torch.empty_like(batch.q),
        **batch.scales,
        **options,
    }
    return AttentionArguments(batch.q, batch.k, batch.v, batch.tables, batch.lens, **given)


def bf16(q_len: int | None = None, **options: Any) -> Batch:
    return make_batch([0, 1, 5, 300], q_len=q_len, **options).to(torch.bfloat16)


def test_csr_is_what_the_page_table_writes() -> None:
    """The two ways into FlashInfer's dialect agree: from the tensors of a call and from the manager."""
    manager = KVCacheManager(num_blocks=20, block_size=4)
    lens = [1, 4, 5, 17]
    for name, n in zip("abcd", lens, strict=True):
        assert manager.open(name, list(range(n)))
    tables, seq_lens, slots = np.zeros((4, 6), np.int32), np.empty(4, np.int32), np.empty(4, np.int64)
    manager.tables.write_block_tables(list("abcd"), tables, seq_lens, slots)
    batch = replace(make_batch(lens).to(torch.bfloat16), tables=torch.from_numpy(tables))
    csr = flashinfer_backend.to_csr(arguments(batch))
    wanted = np.empty(5, np.int32), np.empty(9, np.int32), np.empty(4, np.int32)
    assert manager.tables.write_csr(list("abcd"), *wanted) == len(csr.indices) == 9
    for got, expected in zip(csr, wanted, strict=True):
        assert got.dtype == torch.int32 and got.tolist() == expected.tolist()


def test_csr_forgets_what_lies_before_the_window() -> None:
    """Such entries may name no block at all; an empty sequence has no pages."""
    batch = bf16()
    batch.tables[3, :70] = 2**30
    csr = flashinfer_backend.to_csr(arguments(batch, window=18))
    assert csr.indptr.tolist() == [0, 0, 1, 3, 78] and csr.last_page_len.tolist() == [0, 1, 1, 4]
    assert csr.indices[3:].tolist() == [0] * 70 + batch.tables[3, 70:75].tolist()


SERVED: dict[str, Any] = {"dims": (64, 64), "block_size": 256}
REFUSED: list[tuple[Any, Batch, dict[str, Any], str]] = [
    (flashinfer_backend, make_batch([3]), {}, "queries of torch.float64"),
    (flashinfer_backend, bf16().quantized(), {}, "queries of torch.float32"),
    (flashinfer_backend, bf16(), {"sinks": torch.zeros(4)}, "sinks and block_mass"),
    (flashinfer_backend, bf16(q_len=2), {"window": 3}, "a window with several query tokens"),
    (flash_attn_backend, make_batch([3]), {}, "queries of torch.float64"),
    (flash_attn_backend, bf16(), {}, r"a block_size of 4 \(it has multiples of 256\)"),
    (flash_attn_backend, bf16(dims=(320, 320), block_size=256), {}, "dims 320 and 320"),
    (flash_attn_backend, bf16(**SERVED), {"sinks": torch.zeros(4)}, "sinks and block_mass"),
]


@pytest.mark.parametrize(("backend", "batch", "options", "reason"), REFUSED)
def test_what_a_peer_lacks_is_named(
    backend: ModuleType, batch: Batch, options: dict[str, Any], reason: str
) -> None:
    """With the numbers."""
    out = torch.empty_like(batch.q)
    assert re.search(reason, backend.unsupported(arguments(batch, out=out, **options)))


@pytest.mark.parametrize("backend", [flashinfer_backend, flash_attn_backend])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_what_a_peer_has_is_served(backend: ModuleType, layout: Any) -> None:
    """Both layouts, a window or several query tokens, a softcap."""
    assert backend.unsupported(arguments(bf16(layout=layout, **SERVED), window=9, softcap=2.0)) is None
    assert backend.unsupported(arguments(bf16(q_len=3, layout=layout, **SERVED))) is None
