"""The report of a replay: one HTML file that loads nothing, from the replay's document alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.sim.console import human_bytes
from pagedkv.sim.output.features import feature_rows
from pagedkv.sim.output.html_figures import attainment, distribution, itl_by_context, timeline_figures
from pagedkv.sim.output.html_page import cards, conditions, details, figures, heading, page, paragraph, table
from pagedkv.sim.output.report import time_kind

Document = Mapping[str, Any]

LATENCIES = ("ttft", "itl", "tpot", "e2e")
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


def report_html(document: Document) -> str:
    """The page of a ``pagedkv.replay`` document; the same document gives the same bytes.

    The document must be complete (see `pagedkv.sim.output.result_file`), its ``series`` included.
    """
    kind = time_kind(document)
    inputs = document["inputs"]
    title = f"{inputs['trace']} on {inputs['model']}, {inputs['gpu']}"
    latency = [distribution(document, name, kind) for name in LATENCIES]
    goodput = [attainment(document, kind)] if document.get("goodput") else []
    parts = [
        heading(title, 1),
        paragraph(document["kind"]),
        conditions(_conditions(document)),
        cards(_cards(document, kind)),
        heading("Cache and inter-token latency"),
        figures([*timeline_figures(document)[:1], itl_by_context(document, kind)]),
        heading("Latency"),
        _latency_table(document, kind),
        figures([*latency, *goodput]),
        _no_goodput(document),
        heading("Over time"),
        figures(timeline_figures(document)[1:]),
        _not_recorded(document),
        _features(document, kind),
        '<section class="screen">',
        heading("Everything it depends on"),
        details("all inputs", table(("input", "value"), flat(inputs), "text")),
        details("formulas", table(("figure", "formula"), list(document["formulas"].items()), "text")),
        "</section>",
        _footer(document),
    ]
    return page(f"pagedkv: {title}", *(part for part in parts if part))


def _conditions(document: Document) -> list[tuple[str, str]]:
    inputs = document["inputs"]
    seed = inputs.get("seed")
    return [
        ("model", str(inputs["model"])),
        ("GPU", str(inputs["gpu"])),
        ("KV dtype, weights", f"{inputs['kv_dtype']}, {inputs['weight_bits']:g} bits"),
        ("blocks", f"{inputs['num_blocks']:,} of {inputs['block_size']} tokens"),
        ("policy", str(inputs["policy"]) if inputs["prefix_caching"] else "no prefix caching"),
        ("trace", f"{inputs['trace']}, {inputs['requests']:,} requests"),
        ("seed", "-" if seed is None else str(seed)),
        ("pagedkv", document["pagedkv_version"]),
        *(("feature", name.replace("_", " ")) for name in document.get("features", {})),
    ]


def _cards(document: Document, kind: str) -> list[tuple[str, str, str]]:
    cache, latency, goodput = document["cache"], document["latency_s"], document.get("goodput")
    held = cache["bytes"]
    found = [
        (_ms(latency["itl"]["p50"]), "ITL, p50", f"p99 {_ms(latency['itl']['p99'])}; {kind}"),
        (_ms(latency["ttft"]["p50"]), "TTFT, p50", f"p99 {_ms(latency['ttft']['p99'])}; {kind}"),
        (
            f"{document['output_tokens_per_s']:,.0f}/s",
            "output tokens",
            f"over {document['makespan_s']:,.1f} s; {kind}",
        ),
        (
            f"{cache['token_hit_rate']:.2%}",
            "hit rate, tokens",
            f"{cache['hit_tokens']:,} prompt tokens; counted",
        ),
        (
            human_bytes(held["peak_active"]),
            "active bytes, peak",
            f"of {human_bytes(held['reserved'])}, {held['peak_active'] / held['reserved']:.1%}; counted",
        ),
        (f"{cache['mean_fragmentation']:.2%}", "internal fragmentation", "mean over time; counted"),
        (
            f"{document['preemptions']:,}",
            "preemptions",
            f"{cache['evicted_blocks']:,} evicted blocks; counted",
        ),
    ]
    if goodput:
        limits = ", ".join(f"{name.upper()} {seconds:g} s" for name, seconds in goodput["slo_s"].items())
        more = f"{goodput['share']:.1%} meet {limits}; {kind}"
        found.append((f"{goodput['requests_per_s']:,.3g}/s", "goodput, requests", more))
    return found


def _latency_table(document: Document, kind: str) -> str:
    rows = [
        (name.upper(), *(_ms(found[key]) for key in PERCENTILES), f"{found['count']:,}")
        for name, found in ((name, document["latency_s"][name]) for name in LATENCIES)
    ]
    made = table(("latency", *PERCENTILES, "values"), rows, "summary")
    return f'<div class="box">{made}{paragraph(kind)}</div>'


def _no_goodput(document: Document) -> str:
    if document.get("goodput"):
        return ""
    return paragraph("Goodput: no limits were stated (--slo ttft=2 --slo tpot=0.05).")


def _not_recorded(document: Document) -> str:
    lacking = [
        name
        for name, column in (("hit rate", "hit_tokens"), ("preemptions", "preemptions"))
        if column not in document["series"]["timeline"]
    ]
    return paragraph(f"Not recorded over time: {', '.join(lacking)}.") if lacking else ""


def _features(document: Document, kind: str) -> str:
    features = document.get("features")
    if not features:
        return ""
    made = table((f"feature ({kind}, the rest counted)", "value"), feature_rows(features), "text")
    return f'{heading("Features")}<div class="box">{made}</div>'


def _footer(document: Document) -> str:
    made_by = f"Made by pagedkv {document['pagedkv_version']} from a {document['schema']} document."
    thin = "Charts thin what they show; peaks of active bytes stay. The page loads nothing."
    return f"<footer>{paragraph(f'{made_by} {thin}')}</footer>"


def flat(inputs: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested inputs as (path, value)."""
    rows: list[tuple[str, str]] = []
    for name, value in inputs.items():
        if isinstance(value, Mapping):
            rows.extend(flat(value, f"{prefix}{name}."))
        else:
            rows.append((prefix + name, plain_text(value)))
    return rows


def plain_text(value: Any) -> str:
    """A value for reading.

    >>> plain_text(True), plain_text(4096), plain_text(4.5e11), plain_text(0.92), plain_text(None)
    ('True', '4,096', '450,000,000,000', '0.92', 'None')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
