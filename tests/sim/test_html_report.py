"""The report: complete, self-contained, the same bytes for the same result, readable in light and dark."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.commands.replay_outputs import full_document
from pagedkv.sim.output.html_report import report_html
from pagedkv.sim.output.html_style import DARK, LIGHT, STYLE
from pagedkv.sim.output.latencies import latencies_of
from pagedkv.sim.output.result_file import result_text
from pagedkv.sim.output.slo import SLO, goodput
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

Capture = pytest.CaptureFixture[str]

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Parsed(HTMLParser):
    """Elements with attributes and the text inside, and an error for what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))


def document_of(trace: Trace, num_blocks: int, *slos: SLO) -> dict[str, Any]:
    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=num_blocks)
    result = run_replay(trace, setup)
    latencies = latencies_of(result.trace, result.records)
    found = goodput(latencies, slos, result.summary.makespan_s) if slos else None
    return full_document(result, {"seed": 0}, found)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A replay under load, with limits, and with counters over time."""
    made = document_of(chat_long(120), 9000, SLO("ttft", 1.0), SLO("tpot", 0.02))
    timeline = made["series"]["timeline"]
    rows = len(timeline["time_s"])
    timeline["queried_tokens"] = [1000 * i for i in range(rows)]
    timeline["hit_tokens"] = [250 * i for i in range(rows)]
    timeline["preemptions"] = [i // 7 for i in range(rows)]
    return made


@pytest.fixture(scope="module")
def html(document: dict[str, Any]) -> str:
    return report_html(document)


def figures_of(html: str) -> dict[str, str]:
    """The markup of each figure by its title."""
    found = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    return {re.findall(r"<h3>(.*?)</h3>", figure)[0]: figure for figure in found}


class TestPage:
    def test_it_is_well_formed(self, html: str) -> None:
        """Every element is closed in order, and every picture is XML."""
        Parsed(html)
        pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
        assert len(pictures) == 11
        for picture in pictures:
            ElementTree.fromstring(picture)

    def test_it_names_nothing_outside(self, html: str) -> None:
        """No address, no script, nothing that a browser would load, and a policy that forbids it."""
        parsed = Parsed(html)
        assert not {"script", "link", "img", "iframe", "image", "use"} & {tag for tag, _ in parsed.elements}
        for _, attributes in parsed.elements:
            assert not {"src", "href", "xlink:href", "style", "onclick"} & set(attributes)
        assert "//" not in html
        assert "url(" not in html and "@import" not in html
        (policy,) = [a for t, a in parsed.elements if t == "meta" and "http-equiv" in a]
        assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"

    def test_the_same_result_gives_the_same_bytes(self, document: dict[str, Any], html: str) -> None:
        """Also after a way through JSON."""
        assert report_html(json.loads(result_text(document))) == html
        assert len(html.encode()) < 300_000

    def test_conditions_stand_at_the_top(self, html: str) -> None:
        """Model, GPU, dtype, block size, policy, trace, seed and version, before the first figure."""
        top = html[: html.index("<figure>")]
        pairs = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", top))
        assert pairs["model"] == "llama-3.1-8b"
        assert pairs["GPU"] == "B200 SXM"
        assert pairs["KV dtype, weights"] == "bf16, 16 bits"
        assert pairs["blocks"] == "9,000 of 16 tokens"
        assert (pairs["policy"], pairs["seed"]) == ("lru", "0")
        assert pairs["trace"] == "chat-long, 120 requests"
        assert re.match(r"\d+\.\d+", pairs["pagedkv"])

    def test_names_are_text(self, document: dict[str, Any]) -> None:
        """A trace may have any name."""
        named = copy.deepcopy(document)
        named["inputs"]["trace"] = named["inputs"]["gpu"] = named["kind"] = '<script>alert("x")</script>&'
        named["inputs"]["<b>"] = named["formulas"]["<i>"] = "<u>"
        html = report_html(named)
        tags = {tag for tag, _ in Parsed(html).elements}
        assert not tags & {"script", "u"}
        assert "&lt;script&gt;" in html

    @pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
    def test_text_can_be_read(self, colours: dict[str, str]) -> None:
        """Contrast of at least 4.5 on page and cards; of lines and dots, at least 3."""
        for ground in ("page", "card"):
            for ink in ("ink", "soft"):
                assert contrast(colours[ink], colours[ground]) >= 4.5
        for line in ("c1", "c2", "c5", "ink"):
            assert contrast(colours[line], colours["card"]) >= 3

    def test_the_style_knows_dark_print_and_phones(self) -> None:
        """Every colour is a variable with a value in both."""
        assert "prefers-color-scheme:dark" in STYLE and "@media print" in STYLE and "max-width:720px" in STYLE
        assert set(LIGHT) == set(DARK)
        used = set(re.findall(r"var\(--(\w+)\)", STYLE)) - {"c"}
        assert used == set(LIGHT)


class TestFigures:
    def test_all_are_there(self, html: str) -> None:
        """What a planner looks at."""
        assert list(figures_of(html)) == [
            "Cache bytes over time",
            "ITL against context",
            "TTFT distribution",
            "ITL distribution",
            "TPOT distribution",
            "E2E distribution",
            "Requests within scaled SLOs",
            "Hit rate over time",
            "Internal fragmentation over time",
            "Requests over time",
            "Preemptions over time",
        ]

    def test_each_says_how_its_numbers_came_about_and_in_which_units(self, html: str) -> None:
        """Modelled or counted; labelled axes; a name for a screen reader; the data as a table."""
        for title, figure in figures_of(html).items():
            (kind,) = re.findall(r'class="kind">(.*?)<', figure)
            assert "modelled" in kind or "counted" in kind or "measured" in kind
            labels = re.findall(r'class="label"[^>]*>(.*?)</text>', figure)
            assert len(labels) == 2
            for label in labels:
                assert "[" in label or label in ("requests", "preemptions, so far", "factor on every limit")
            (about,) = re.findall(r'role="img" aria-label="(.*?)"', figure)
            assert title in about
            (rows,) = re.findall(r"<summary>data, (\d+) rows</summary>", figure)
            assert int(rows) == figure.count("<tr>") - 1 > 3

    def test_the_cache_stack_reaches_the_capacity(self, document: dict[str, Any], html: str) -> None:
        """In the drawing: the top of the last area is the line of the capacity, everywhere."""
        picture = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", html, re.DOTALL)[0])
        areas = [path.attrib["d"] for path in picture.iter("path") if "area" in path.attrib.get("class", "")]
        (line,) = [p.attrib["d"] for p in picture.iter("path") if "mark" in p.attrib.get("class", "")]
        assert len(areas) == 4
        level = float(line.split()[1].split("H")[0])
        points = [tuple(map(float, p.split())) for p in areas[-1].strip("MZ").split("L")]
        upper = points[: points.index(max(points))]
        assert [y for _, y in upper] == pytest.approx([level] * len(upper), abs=0.06)
        assert f"capacity {9000 * 16 * 131_072 / 2**30:.1f} GiB" in html

    def test_percentiles_are_marked_where_the_summary_has_them(
        self, document: dict[str, Any], html: str
    ) -> None:
        """By name and value, and where they are on the axis."""
        figure = figures_of(html)["TPOT distribution"]
        for name in ("p50", "p90", "p99"):
            value = document["latency_s"]["tpot"][name] * 1e3
            assert f">{name} {float(f'{value:.3g}'):g}<" in figure
        assert ">SLO 20<" in figure
        lines = re.findall(r'class="mark (?:ink|c2)" d="M([\d.]+) ', figure)
        assert len(lines) == 4

    def test_the_overtaking_context_is_marked_and_said(self, document: dict[str, Any], html: str) -> None:
        """The number is the document's."""
        tokens = document["series"]["itl_by_context"]["overtake_tokens"]
        figure = figures_of(html)["ITL against context"]
        assert f"KV bytes overtake weight bytes: {tokens:,}" in figure
        assert f"from {tokens:,} tokens of context" in figure

    def test_an_overtaking_far_away_is_said_alone(self, document: dict[str, Any]) -> None:
        """So that the plot keeps its scale; none at all is said too."""
        far = copy.deepcopy(document)
        far["series"]["itl_by_context"]["overtake_tokens"] = 10**9
        figure = figures_of(report_html(far))["ITL against context"]
        assert "overtake weight" not in figure and "from 1,000,000,000 tokens" in figure
        far["series"]["itl_by_context"]["overtake_tokens"] = None
        assert "never more than that" in figures_of(report_html(far))["ITL against context"]

    def test_hit_rate_over_time_is_hits_over_prompt_tokens(self, html: str) -> None:
        """A quarter, in each row but the first, which has no prompt yet."""
        figure = figures_of(html)["Hit rate over time"]
        cells = re.findall(r"<td>(.*?)</td>", figure)
        assert set(cells[4::3]) | set(cells[5::3]) == {"25.000"}

    def test_a_timeline_without_counters_says_what_lacks(self, document: dict[str, Any]) -> None:
        """Older results have no hits over time."""
        older = copy.deepcopy(document)
        for name in ("queried_tokens", "hit_tokens", "preemptions"):
            del older["series"]["timeline"][name]
        html = report_html(older)
        assert "Not recorded over time: hit rate, preemptions." in html
        assert "Hit rate over time" not in html

    def test_without_limits_the_report_says_how_to_state_them(self, document: dict[str, Any]) -> None:
        """No empty chart."""
        plain = copy.deepcopy(document)
        del plain["goodput"]
        html = report_html(plain)
        assert "--slo ttft=2" in html and "scaled SLOs" not in html

    def test_a_single_token_makes_a_report(self) -> None:
        """No ITL, no TPOT, one request."""
        made = document_of(Trace.from_lengths([0.0], [100], [1]), 100)
        html = report_html(made)
        Parsed(html)
        assert "No step decoded." in html
        assert "nan" not in html.lower().replace("finance", "")

    def test_measured_attention_is_not_called_modelled(self, document: dict[str, Any]) -> None:
        """The kind of the document decides."""
        measured = copy.deepcopy(document)
        measured["kind"] = "times are modelled, attention measured; blocks were counted"
        assert "attention measured, rest modelled" in figures_of(report_html(measured))["ITL distribution"]


class TestCommand:
    def test_a_saved_result_gives_the_same_report(self, capsys: Capture, tmp_path: Path) -> None:
        """Byte for byte, and both say how large it is."""
        saved, direct, later = (tmp_path / name for name in ("r.json", "direct.html", "later.html"))
        options = ("--limit", "30", "--num-blocks", "9000", "--slo", "e2e=5")
        assert main(["replay", *options, "--json", str(saved), "--html", str(direct)]) == 0
        size = f"{direct.stat().st_size / 1024:.1f} KiB"
        assert f"wrote {direct}, {size}" in capsys.readouterr().out
        assert main(["report", str(saved), "-o", str(later)]) == 0
        assert capsys.readouterr().out == f"wrote {later}, {size}\n"
        assert direct.read_bytes() == later.read_bytes()
        assert main(["report", str(saved), "-o", "-"]) == 0
        assert capsys.readouterr().out == direct.read_text()

    def test_what_has_no_series_is_refused(self, capsys: Capture, tmp_path: Path) -> None:
        """Nothing is written."""
        saved, hits = tmp_path / "r.json", tmp_path / "hits.json"
        assert main(["replay", "--limit", "5", "--json", str(saved)]) == 0
        assert main(["replay", "--limit", "5", "--hits-only", "--json", str(hits)]) == 0
        document = json.loads(saved.read_text())
        del document["series"]
        saved.write_text(json.dumps(document))
        capsys.readouterr()
        for path, message in ((saved, "has no series to draw"), (hits, "has the schema 'pagedkv.hits/1'")):
            assert main(["report", str(path), "-o", str(tmp_path / "x.html")]) == 2
            assert message in capsys.readouterr().err
        assert main(["report", str(saved), "-o", str(saved)]) == 2
        assert "which is read" in capsys.readouterr().err
        assert not (tmp_path / "x.html").exists()


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2 between two colours."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
