"""Measure decode attention: every contender once per round, cold, against a read-only pass and a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedkv.attention import backends, paged_attention
from pagedkv.attention.bench.cell import Cell, ColdSets
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.peers import BY_REQUEST, CONTIGUOUS, PEERS
from pagedkv.attention.bench.read_ceiling import read_ceiling
from pagedkv.attention.bench.rounds import Clock, Round, interleaved, median_ratio, median_seconds
from pagedkv.errors import PagedKVError
from pagedkv.storage import Layout

BASELINES = ("sdpa", "sdpa-rows")
"""The faster of them in a cell is its baseline."""


# Against the largest entry of the expected output. Peers round the probabilities to the dtype, too.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Plan:
    """What is measured in each cell, and how.

    backends, peers: names, None for all that are available without being asked for.
    seconds: of measuring per cell, after ``least_rounds`` rounds in which the slow ones take part, too.
    cold_bytes: of the pool, several times the last-level cache.
    max_bytes: of memory; what would need more is left out.
    clock: "wall", or "cpu" for one thread on a CPU that others use too.
    """

    backends: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    seconds: float = 3.0
    cold_bytes: int = 2**29
    max_bytes: int = 2**33
    device: str = "cpu"
    layout: Layout = "HND"
    least_rounds: int = 3
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        """Refuse names that do not exist, and a clock that would not see all of the work."""
        if self.clock == "cpu" and (torch.get_num_threads() > 1 or torch.device(self.device).type != "cpu"):
            raise PagedKVError(
                f"the clock of CPU time needs one thread on a CPU, got {torch.get_num_threads()} threads "
                f"on {self.device}"
            )
        for kind, given, known in (
            ("attention backend", self.backends, [info.name for info in backends()]),
            ("peer", self.peers, list(PEERS)),
        ):
            for name in given or ():
                if name not in known:
                    raise PagedKVError(f"no {kind} {name!r}, there are: {', '.join(known)}")


@dataclass(frozen=True)
class Row:
    """One contender in one cell; the figures are medians over the rounds, of ratios within a round.

    gb_per_s: bytes of K and V that it has to read, in 10^9 per second.
    of_ceiling: that rate against the rate of the read-only pass.
    speedup: times as fast as the baseline; None without one.
    note: why there are no figures, or what is wrong with the result.
    """

    name: str
    seconds: float | None = None
    gb_per_s: float | None = None
    of_ceiling: float | None = None
    speedup: float | None = None
    rounds: int = 0
    error: float | None = None
    note: str = ""
    is_wrong: bool = False


@dataclass(frozen=True)
class CellResult:
    """All contenders of a cell; ``rows[0]`` is the read-only pass. ``note`` says why there are no rows."""

    cell: Cell
    rows: tuple[Row, ...]
    ceiling: str = ""
    baseline: str | None = None
    num_sets: int = 0
    note: str = ""


def measure_cell(cell: Cell, plan: Plan) -> CellResult:
    """Make the pool, check that all contenders agree, and time them in interleaved rounds.

    Every contender reads other blocks at every call; the order in a round is a random one. Before the
    rounds each result is compared with that of the torch backend over the same set.
    """
    needed = cell.pool_bytes(plan.cold_bytes)
    if needed > plan.max_bytes:
        return CellResult(cell, (), note=f"the pool needs {_gib(needed)}, allowed are {_gib(plan.max_bytes)}")
    try:
        sets = ColdSets(cell, plan.cold_bytes, device=plan.device, layout=plan.layout)
    except RuntimeError as error:  # what torch raises when there is no memory
        return CellResult(cell, (), note=f"no pool of {_gib(needed)}: {str(error).splitlines()[0]}")
    ceiling, how = read_ceiling(sets)
    entrants, left_out = _contenders(sets, plan)
    expected = backend_contender(sets, "torch").call(0).float()
    checked = [_checked(contender, expected, TOLERANCES[cell.compute_dtype]) for contender in entrants]
    ready = [c for c, row in zip(entrants, checked, strict=True) if not row.note]
    ceiling.call(0)
    rounds = interleaved(
        [ceiling, *ready],
        len(sets),
        seconds=plan.seconds,
        least_rounds=plan.least_rounds,
        device=plan.device,
        clock=plan.clock,
    )
    baseline = _baseline(ready, rounds)
    rows = [_timed(ceiling, rounds, ceiling, None)]
    for contender, row in zip(entrants, checked, strict=True):
        timed = None if row.note else _timed(contender, rounds, ceiling, baseline, row.error)
        rows.append(row if timed is None else timed)
    return CellResult(cell, (*rows, *left_out), how, baseline, len(sets))


def _contenders(sets: ColdSets, plan: Plan) -> tuple[list[Contender], list[Row]]:
    """Those that take part, and a row with the reason for each of the others."""
    found: list[Contender] = []
    left_out: list[Row] = []
    for info in backends():
        if info.name == "reference" if plan.backends is None else info.name not in plan.backends:
            continue  # unless asked for, the reference is a definition and no contender
        if info.available:
            found.append(backend_contender(sets, info.name))
        else:
            left_out.append(Row(info.name, note=info.reason))
    budget = plan.max_bytes - sets.storage.nbytes
    for name, peer in PEERS.items():
        if not _is_wanted(name, peer.device, plan):
            continue
        is_shared = name in CONTIGUOUS and any(c.name in CONTIGUOUS for c in found)
        kept = 0 if is_shared else peer.of_pool * sets.cell.float_bytes * len(sets)
        needed = kept + peer.of_set * sets.cell.float_bytes
        if plan.peers is None and name in BY_REQUEST:
            made: Contender | str = BY_REQUEST[name]
        elif needed > budget:
            made = f"needs {_gib(needed)} more, {_gib(max(0, budget))} are left"
        else:
            made = peer.make(sets)
        if isinstance(made, str):
            left_out.append(Row(name, note=made))
        else:
            found.append(made)
            budget -= kept
    return found, left_out


def _is_wanted(name: str, device: str | None, plan: Plan) -> bool:
    if plan.peers is not None:
        return name in plan.peers
    return device in (None, torch.device(plan.device).type)


def backend_contender(sets: ColdSets, name: str) -> Contender:
    """A backend, through the operation as users call it, with a plan as an engine makes it once per step."""
    kv, q, lens, tables = sets.kv, sets.q, sets.lens, sets.tables
    options: dict[str, Any] = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    if name == "triton":
        from pagedkv.attention.triton_backend import default_target, plan_splits

        options["plan"] = plan_splits(lens, target=default_target(lens.device, sets.cell.num_kv_heads))

    def call(index: int) -> Tensor:
        return paged_attention(q, kv.k, kv.v, tables[index], lens, backend=name, **options)

    return Contender(name, call, sets.cell.kv_bytes)


def _checked(contender: Contender, expected: Tensor, tolerance: float) -> Row:
    """A row with a note if it cannot serve the call or gives another result."""
    try:
        out = contender.call(0).float()
    except (PagedKVError, RuntimeError) as refusal:
        return Row(contender.name, note=str(refusal).splitlines()[0])
    error = float((out - expected).abs().max() / expected.abs().max())
    if error <= tolerance:
        return Row(contender.name, error=error)
    note = f"wrong result: off by {error:.2g} of the largest entry, allowed is {tolerance:g}"
    return Row(contender.name, error=error, note=note, is_wrong=True)


def _baseline(contenders: Sequence[Contender], rounds: Sequence[Round]) -> str | None:
    names = [contender.name for contender in contenders if contender.name in BASELINES]
    return min(names, key=lambda name: median_seconds(rounds, name), default=None)


def _timed(
    contender: Contender,
    rounds: Sequence[Round],
    ceiling: Contender,
    baseline: str | None,
    error: float | None = None,
) -> Row:
    name = contender.name
    seconds = median_seconds(rounds, name)
    share = contender.num_bytes / ceiling.num_bytes
    return Row(
        name,
        seconds,
        contender.num_bytes / seconds / 1e9,
        median_ratio(rounds, ceiling.name, name) * share,
        None if baseline is None else median_ratio(rounds, baseline, name),
        sum(name in spent for spent in rounds),
        error,
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
