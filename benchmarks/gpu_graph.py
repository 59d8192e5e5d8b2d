"""One captured CUDA graph, plan included, replayed while the sequences grow."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_cases import TOLERANCES, Outcome
from pagedkv.attention import paged_attention
from pagedkv.attention.bench.cell import Cell, ColdSets

WARM_UPS = 3


def run_graph(cell: Cell, grown: tuple[tuple[int, ...], ...], device: str, backend: str) -> Outcome:
    """Replay with lengths, tables and query changed in place, against the reference each time.

    ``cell.lens`` are the lengths at the capture; no sequence of ``grown`` may exceed the longest of them.
    Without a GPU the same steps run one by one.
    """
    sets = ColdSets(cell, 2 * cell.pool_bytes(1), device=device)
    kv, tables, lens, q = sets.kv, sets.tables[0].clone(), sets.lens.clone(), sets.q.clone()
    out = torch.empty_like(q)
    scales: dict[str, Any] = {} if kv.k_scale is None else {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    make_plan = _plan_maker(cell, lens) if backend == "triton" else None

    def step() -> None:
        plan = make_plan() if make_plan is not None else None
        paged_attention(q, kv.k, kv.v, tables, lens, plan=plan, out=out, backend=backend, **scales)

    replay = _captured(step) if torch.device(device).type == "cuda" else step
    errors, generator = [], torch.Generator().manual_seed(3)
    for index, now in enumerate((cell.lens, *grown)):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        tables.copy_(sets.tables[index % len(sets)])
        q.copy_(torch.randn(q.shape, generator=generator))
        out.fill_(torch.nan)
        replay()
        expected = paged_attention(q.double(), kv.k, kv.v, tables, lens, backend="reference", **scales)
        difference = (out.double() - expected).abs().max().nan_to_num(torch.inf)
        errors.append(float(difference / expected.abs().max()) / TOLERANCES[q.dtype][0])
    steps = "replays of one CUDA graph" if replay is not step else "calls without a graph, no GPU here"
    return Outcome(f"growing lengths, {cell.dtype}", max(errors), f"{len(errors)} {steps}")


def _plan_maker(cell: Cell, lens: torch.Tensor) -> Any:
    from pagedkv.attention import default_target, plan_splits

    target = default_target(lens.device, cell.num_kv_heads)
    buffer = plan_splits(lens, target=target)
    return lambda: plan_splits(lens, target=target, out=buffer)


def _captured(step: Any) -> Any:
    cuda: Any = torch.cuda  # some of it has no types
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()
    return graph.replay
