"""The charts of a report, each from the document of a replay alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.sim.output.html_page import Figure
from pagedkv.sim.output.report import time_kind
from pagedkv.sim.output.series import thinned
from pagedkv.sim.output.svg_axis import Axis, axis_over, short
from pagedkv.sim.output.svg_chart import Chart

MOST_TOLD = 40
"""Rows of a data table, and places where the pointer is told something."""

Document = Mapping[str, Any]
Columns = Mapping[str, Sequence[Any]]


def timeline_figures(document: Document) -> list[Figure]:
    """Charts over time: cache bytes, hit rate, fragmentation, requests, preemptions."""
    timeline = document["series"]["timeline"]
    found = [cache_bytes(document), fragmentation(document), requests(document)]
    if "hit_tokens" in timeline:
        found.insert(1, hit_rate(document))
    if "preemptions" in timeline:
        found.append(preemptions(document))
    return found


def cache_bytes(document: Document) -> Figure:
    """Bytes by state, stacked up to the capacity."""
    timeline, reserved = document["series"]["timeline"], document["cache"]["bytes"]["reserved"]
    unit, divisor = _bytes_unit(reserved)
    states = {
        "used slots": timeline["bytes_used"],
        "active, unused slots": [
            a - u for a, u in zip(timeline["bytes_active"], timeline["bytes_used"], strict=True)
        ],
        "cached for reuse": timeline["bytes_cached"],
        "free": timeline["bytes_free"],
    }
    scaled = {name: [value / divisor for value in values] for name, values in states.items()}
    chart = Chart(
        "Cache bytes over time", _time_axis(timeline), Axis(f"bytes [{unit}]", 0, reserved / divisor * 1.1)
    )
    chart.stack(
        _times(timeline), [(f"c{i}", name, values) for i, (name, values) in enumerate(scaled.items(), 1)]
    )
    chart.mark("y", reserved / divisor, f"capacity {reserved / divisor:,.1f} {unit}")
    active = document["cache"]["bytes"]["peak_active"]
    caption = (
        f"Blocks of open sequences (used and unused slots), blocks kept for reuse, free blocks; together "
        f"the pool. Active at most {active / divisor:,.1f} {unit}, {active / reserved:.1%} of it."
    )
    columns = {name: [f"{v:,.3f}" for v in values] for name, values in scaled.items()}
    return _over_time(document, chart, caption, {f"{name} [{unit}]": c for name, c in columns.items()})


def hit_rate(document: Document) -> Figure:
    """Share of prompt tokens found in the cache: so far, and since the row before."""
    timeline = document["series"]["timeline"]
    hits, asked = timeline["hit_tokens"], timeline["queried_tokens"]
    so_far = [_percent(hit, ask) for hit, ask in zip(hits, asked, strict=True)]
    # over as many rows as are told, since a single row holds few admissions
    every = max(1, len(hits) // MOST_TOLD)
    recent = [
        _percent(hits[i] - hits[max(0, i - every)], asked[i] - asked[max(0, i - every)])
        for i in range(len(hits))
    ]
    top = max([1.0, *(v for v in (*so_far, *recent) if v is not None)])
    chart = Chart(
        "Hit rate over time",
        _time_axis(timeline),
        Axis("hit tokens / prompt tokens [%]", 0, min(100, top * 1.15)),
    )
    times = _times(timeline)
    chart.line(times, recent, "c5", f"recent: {every} rows of the timeline")
    chart.line(times, so_far, "c1", "since the start")
    rate = document["cache"]["token_hit_rate"]
    caption = f"Each admission counts, a repeated one too; of first admissions {rate:.2%} over the whole run."
    columns = {"since the start [%]": list(map(_cell, so_far)), "recent [%]": list(map(_cell, recent))}
    return _over_time(document, chart, caption, columns)


def fragmentation(document: Document) -> Figure:
    """Share of active slots without a token."""
    timeline = document["series"]["timeline"]
    pairs = zip(timeline["bytes_active"], timeline["bytes_used"], strict=True)
    shares = [100 * (1 - used / active) if active else None for active, used in pairs]
    top = max([v for v in shares if v is not None], default=0.0)
    chart = Chart(
        "Internal fragmentation over time",
        _time_axis(timeline),
        Axis("unused / active slots [%]", 0, top * 1.15),
    )
    chart.line(_times(timeline), shares, "c2", "active slots without a token", steps=True)
    mean = document["cache"]["mean_fragmentation"]
    caption = f"Mean over the whole run {mean:.3%}: slots of blocks that are held, in which no token is."
    return _over_time(document, chart, caption, {"unused / active [%]": list(map(_cell, shares))})


def requests(document: Document) -> Figure:
    """Sequences that run and requests that wait."""
    timeline = document["series"]["timeline"]
    running, waiting = timeline["running"], timeline["waiting"]
    axis = axis_over("requests", [*running, *waiting], whole=True)
    chart = Chart("Requests over time", _time_axis(timeline), axis)
    times = _times(timeline)
    chart.line(times, waiting, "c2", "waiting", steps=True)
    chart.line(times, running, "c1", "running", steps=True)
    caption = f"Admitted requests, and those that have arrived and wait: at most {max(waiting):,}."
    columns = {"running": [f"{v:,}" for v in running], "waiting": [f"{v:,}" for v in waiting]}
    return _over_time(document, chart, caption, columns)


def preemptions(document: Document) -> Figure:
    """Preemptions so far."""
    timeline = document["series"]["timeline"]
    counts = timeline["preemptions"]
    axis = axis_over("preemptions, so far", counts, whole=True)
    chart = Chart("Preemptions over time", _time_axis(timeline), axis)
    chart.line(_times(timeline), counts, "c2", "since the start", steps=True)
    caption = f"A preempted request gives up its blocks and is admitted again: {counts[-1]:,} times in all."
    return _over_time(document, chart, caption, {"preemptions": [f"{v:,}" for v in counts]})


def itl_by_context(document: Document, kind: str) -> Figure:
    """Steps as dots, a decode step without prefill as a line, and where KV bytes overtake weight bytes."""
    series = document["series"]["itl_by_context"]
    points, model, overtake = series["points"], series["model"], series["overtake_tokens"]
    itl = [value * 1e3 for value in points["itl_s"]]
    top = max([*points["context_tokens"], 1]) * 1.03
    if overtake is not None and overtake <= 2 * top:
        top = max(top, overtake * 1.03)
    high = sorted(itl)[int(0.99 * (len(itl) - 1))] if itl else 1.0
    above = sum(value > 1.3 * high for value in itl)
    chart = Chart(
        "ITL against context",
        Axis("context of the batch [tokens]", 0, top),
        Axis("ITL [ms]", 0, max([1.3 * high, *(v * 1e3 for v in model["itl_s"])])),
    )
    batch = series["batch"]
    line = [value * 1e3 for value in model["itl_s"]]
    if batch is not None:
        label = f"decode step, {batch} sequences (the median): {kind}"
        chart.line(model["context_tokens"], line, "ink", label)
    mixed = [bool(tokens) for tokens in points["prefill_tokens"]]
    for wanted, colour, label in ((True, "c2", "steps with prefill"), (False, "c1", "decode steps")):
        chosen = [i for i, is_mixed in enumerate(mixed) if is_mixed == wanted]
        chart.dots([points["context_tokens"][i] for i in chosen], [itl[i] for i in chosen], colour, label)
    told = _overtaking(series)
    if overtake is not None and overtake <= top:
        chart.mark("x", overtake, f"KV bytes overtake weight bytes: {overtake:,}", "c5")
    caption = told + (f" {above:,} of {len(itl):,} dots lie above the plot, at its edge." if above else "")
    rows = {
        "context [tokens]": [f"{v:,}" for v in model["context_tokens"]],
        "ITL of the line [ms]": [f"{v:,.3f}" for v in line],
    }
    chart.tell(model["context_tokens"], [f"{a} tokens: {b} ms" for a, b in zip(*rows.values(), strict=True)])
    return Figure(chart, kind, caption, rows)


def _overtaking(series: Document) -> str:
    batch, weights, overtake = series["batch"], series["weight_bytes"], series["overtake_tokens"]
    if batch is None or weights is None:
        return "No step decoded."
    unit, divisor = _bytes_unit(weights)
    reads = f"A decode step of {batch} sequences reads {weights / divisor:,.1f} {unit} of weights"
    if overtake is None:
        return f"{reads} and never more than that of K and V."
    return f"{reads}; from {overtake:,} tokens of context on it reads more K and V than that."


def distribution(document: Document, name: str, kind: str) -> Figure:
    """The cumulative distribution of a latency with its percentiles and, if there is one, its limit."""
    quantiles, stated = document["series"]["quantiles"], document["latency_s"][name]
    finite = [
        (p, v) for p, v in zip(quantiles["percent"], quantiles[f"{name}_s"], strict=False) if v is not None
    ]
    unit, factor = ("s", 1.0) if finite and finite[-1][1] >= 1 else ("ms", 1e3)
    percents, values = [p for p, _ in finite], [v * factor for _, v in finite]
    of = "tokens" if name == "itl" else "requests"
    label = f"{name.upper()} [{unit}]"
    is_log = bool(values) and values[0] > 0 and values[-1] > 20 * values[0]
    x = Axis(f"{label}, logarithmic", values[0], values[-1], log=True) if is_log else axis_over(label, values)
    chart = Chart(f"{name.upper()} distribution", x, Axis(f"share of {of} [%]", 0, 100))
    chart.line(values, percents, "c1", f"share with at most this {name.upper()}")
    for percentile in ("p50", "p90", "p99"):
        if stated[percentile] is not None:
            value = stated[percentile] * factor
            chart.mark("x", value, f"{percentile} {short(value)}")
    limit = (document.get("goodput") or {"slo_s": {}})["slo_s"].get(name)
    if limit is not None and values and limit * factor <= values[-1]:
        chart.mark("x", limit * factor, f"SLO {limit * factor:g}", "c2")
    told = [(v, f"p{p:g}: {v:,.4g} {unit}") for p, v in zip(percents, values, strict=True) if not p % 5]
    told = list({v: (v, line) for v, line in told}.values())
    chart.tell([v for v, _ in told], [line for _, line in told])
    caption = f"{name.upper()} = {document['formulas'][name]}. {stated['count']:,} values."
    rows = {"percentile": [f"{p:g}" for p in percents], label: [f"{v:,.4g}" for v in values]}
    return Figure(chart, kind, caption, {key: _few(column) for key, column in rows.items()})


def attainment(document: Document, kind: str) -> Figure:
    """Share of requests that would meet the limits if all were this many times as large."""
    goodput, quantiles = document["goodput"], document["series"]["quantiles"]
    pairs = [
        (factor, percent)
        for percent, factor in zip(quantiles["percent"], quantiles["slo_factor"], strict=True)
        if factor is not None
    ]
    factors = [factor for factor, _ in pairs]
    limits = ", ".join(f"{name.upper()} {seconds:g} s" for name, seconds in goodput["slo_s"].items())
    top = min(max([2.0, *factors]), max(4.0, 2 * (factors[len(factors) // 2] if factors else 0)))
    chart = Chart(
        "Requests within scaled SLOs", Axis("factor on every limit", 0, top), Axis("requests [%]", 0, 100)
    )
    inside = [(f, p) for f, p in pairs if f <= top]
    chart.line([f for f, _ in inside], [p for _, p in inside], "c1", f"meet {limits}, times the factor")
    chart.mark("x", 1.0, f"as stated: {goodput['share']:.1%}", "c2")
    caption = (
        f"Goodput {goodput['requests_per_s']:,.3g} requests/s: {goodput['requests_met']:,} requests "
        f"meet {limits}. The line says how many would with looser or tighter limits."
    )
    rows = {"factor": [f"{f:,.4g}" for f, _ in pairs], "requests [%]": [f"{p:g}" for _, p in pairs]}
    return Figure(chart, kind, caption, {key: _few(column) for key, column in rows.items()})


def _over_time(document: Document, chart: Chart, caption: str, columns: Mapping[str, list[str]]) -> Figure:
    """A chart over time whose pointer and data table tell the same rows."""
    times = _times(document["series"]["timeline"])
    rows = {chart.x.label: [f"{t:,.2f}" for t in times], **columns}
    few = {name: _few(column) for name, column in rows.items()}
    told = [
        "\n".join(f"{name}: {cell}" for name, cell in zip(few, row, strict=True))
        for row in zip(*few.values(), strict=True)
    ]
    chart.tell(_few(times), told)
    return Figure(chart, f"counted; {time_kind(document)}", caption, few)


def _few(column: Sequence[Any]) -> list[Any]:
    return thinned(column, MOST_TOLD)


def _time_axis(timeline: Columns) -> Axis:
    unit, _ = _time_unit(timeline)
    return Axis(f"time [{unit}]", 0, _times(timeline)[-1])


def _times(timeline: Columns) -> list[float]:
    _, divisor = _time_unit(timeline)
    return [value / divisor for value in timeline["time_s"]]


def _time_unit(timeline: Columns) -> tuple[str, float]:
    last = timeline["time_s"][-1]
    return ("s", 1.0) if last < 600 else ("min", 60.0) if last < 36_000 else ("h", 3600.0)


def _bytes_unit(most: float) -> tuple[str, float]:
    units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20))
    return next(((unit, size) for unit, size in units if most >= size), ("KiB", 2.0**10))


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"
