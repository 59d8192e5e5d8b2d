"""The report in a real headless browser: nothing is loaded, nothing is cut off, nothing overlaps.

Needs Chromium or Chrome (Debian: ``apt-get install chromium-headless-shell``), and is skipped without.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.output.html_report import report_html
from pagedkv.sim.output.html_style import DARK, LIGHT

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is here")

MEASURE = """
const problems = [], box = e => e.getBoundingClientRect();
const all = selector => [...document.querySelectorAll(selector)];
for (const e of all("body *")) {
  const cut = e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline";
  if (cut && !e.closest(".wide") && !e.closest("svg")) problems.push("cut off: " + e.outerHTML.slice(0, 80));
}
for (const svg of all("figure svg")) {
  const title = svg.getAttribute("aria-label"), own = box(svg), texts = [...svg.querySelectorAll("text")];
  for (const t of texts) {
    const b = box(t);
    if (b.left < own.left - 1 || b.right > own.right + 1 || b.top < own.top - 1 || b.bottom > own.bottom + 1)
      problems.push("outside: " + t.textContent + " in " + title);
  }
  texts.forEach((t, i) => texts.slice(i + 1).forEach(u => {
    const a = box(t), b = box(u);
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 4) problems.push(`overlap: ${t.textContent} and ${u.textContent} in ${title}`);
  }));
}
const out = document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify({
  problems,
  charts: all("figure svg").map(svg => [box(svg).width, box(svg).height]),
  wider: document.documentElement.scrollWidth - innerWidth,
  width: innerWidth,
  ground: getComputedStyle(document.body).backgroundColor,
  smallest: Math.min(...all("figure svg text").map(t => box(t).height)),
  loaded: performance.getEntriesByType("resource").map(entry => entry.name),
});
document.body.append(out);
"""


def browse(
    page: Path, *options: str, width: int = 1280, dark: bool = False
) -> tuple[str, list[str], list[str]]:
    """The page's content after it was shown, what its console said, and the addresses it asked for."""
    net = page.with_suffix(".net.json")
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--log-net-log={net}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},900",
            "--dump-dom",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = re.findall(r":CONSOLE[:(]\S+ (.*)", done.stderr)
    return done.stdout, console, sorted(set(re.findall(r'"url":"([^"]+)"', net.read_text())))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a replay under load, with every chart: counters over time are made up where it has none."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    saved = path.with_name("result.json")
    options = ("--limit", "150", "--num-blocks", "9000", "--slo", "ttft=1", "--slo", "tpot=0.02")
    assert main(["replay", *options, "--json", str(saved)]) == 0
    document = json.loads(saved.read_text())
    timeline = document["series"]["timeline"]
    for name, pace in (("queried_tokens", 1000), ("hit_tokens", 250), ("preemptions", 1)):
        timeline.setdefault(name, [pace * i for i in range(len(timeline["time_s"]))])
    path.write_text(report_html(document))
    return path


def measured(report: Path, width: int, dark: bool) -> Any:
    """What a script finds in a copy of the report that allows one."""
    text = report.read_text()
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert text.count(policy) == 1
    copy = report.with_name(f"measured-{width}-{dark}.html")
    copy.write_text(
        text.replace(policy, f"{policy}; script-src 'unsafe-inline'") + f"<script>{MEASURE}</script>"
    )
    content, console, _ = browse(copy, width=width, dark=dark)
    assert console == []
    (found,) = re.findall(r'<pre id="measured">(.*?)</pre>', content, re.DOTALL)
    return json.loads(unescape(found))


def test_it_asks_for_nothing_and_complains_of_nothing(report: Path) -> None:
    """As it is, with its policy."""
    content, console, addresses = browse(report)
    assert "</svg>" in content
    assert (console, addresses) == ([], [])


def test_a_page_that_asks_and_complains_is_noticed(tmp_path: Path) -> None:
    """So that the test above can fail."""
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("oh")</script>')
    _, console, addresses = browse(page)
    assert '"oh"' in console[0]
    assert addresses == ["http://127.0.0.1:9/x.png"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_everything_fits(report: Path, width: int, dark: bool) -> None:
    """On a desktop, a tablet and phones: charts have a size, no text is cut off, outside or over another."""
    found = measured(report, width, dark)
    assert found["width"] == width
    assert found["problems"] == []
    assert found["wider"] <= 0
    assert found["loaded"] == []
    assert len(found["charts"]) == 11
    assert all(w >= 250 and h >= 150 for w, h in found["charts"])
    assert found["smallest"] >= 9
    ground = (DARK if dark else LIGHT)["page"]
    assert found["ground"] == f"rgb({', '.join(str(int(ground[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_what_does_not_fit_is_noticed(report: Path) -> None:
    """A word without a break, and a text that lies over another, so that the test above can fail."""
    text = report.read_text()
    broken = report.with_name("broken.html")
    wide = f'<div style="width:50px">{"x" * 99}</div>'
    text = text.replace("<main>", f"<main>{wide}").replace(
        "</svg>", '<text x="0" y="14">over</text></svg>', 1
    )
    broken.write_text(text)
    found = measured(broken, 1280, False)
    assert any(problem.startswith("cut off") for problem in found["problems"])
    assert any(problem.startswith("overlap: ") and "over" in problem for problem in found["problems"])
