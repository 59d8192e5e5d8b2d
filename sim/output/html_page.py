"""The parts of a page: cards, tables, figures, and the page itself. Text is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pagedkv.sim.output.html_style import STYLE
from pagedkv.sim.output.svg_chart import Chart


@dataclass(frozen=True)
class Figure:
    """A chart with what belongs to it."""

    chart: Chart
    kind: str
    """How its numbers came about: modelled, counted, measured."""
    caption: str
    rows: Mapping[str, Sequence[str]]
    """The columns of its data table, as text."""


def page(title: str, *body: str) -> str:
    """A page that loads nothing: its policy forbids the browser any request and any script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def paragraph(content: str) -> str:
    """A line of less important text."""
    return f'<p class="soft">{escape(content)}</p>'


def heading(content: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(content)}</h{level}>"


def conditions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values under which numbers hold."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="conditions">{items}</dl>'


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """A row of large numbers: (number, what it is, more about it)."""
    made = "".join(
        f'<div class="card"><b>{escape(number)}</b>'
        f"<span>{escape(what)}</span><span>{escape(more)}</span></div>"
        for number, what, more in items
    )
    return f'<div class="cards">{made}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    named = f' class="{class_}"' if class_ else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="table"><table{named}>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Content that is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def figure(item: Figure) -> str:
    """A chart under its title, how its numbers came about and its legend; caption and data below."""
    chart = item.chart
    legend = "".join(f'<li><i class="{k.shape} {k.colour}"></i>{escape(k.label)}</li>' for k in chart.keys)
    rows = list(zip(*item.rows.values(), strict=True))
    return (
        f"<figure><header><h3>{escape(chart.title)}</h3>"
        f'<span class="kind">{escape(item.kind)}</span></header>'
        f'<ul class="legend">{legend}</ul>{chart.svg()}'
        f"<figcaption>{escape(item.caption)}</figcaption>"
        f"{details(f'data, {len(rows)} rows', table(list(item.rows), rows))}</figure>"
    )


def figures(items: Iterable[Figure]) -> str:
    """A grid of figures: two beside each other where there is room."""
    return f'<div class="figures">{"".join(map(figure, items))}</div>'
