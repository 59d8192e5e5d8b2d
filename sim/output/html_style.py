"""The style of a report: light, dark, print and phone, without a file or a font from elsewhere."""

from __future__ import annotations

LIGHT = {
    "page": "#f4f6f8",
    "card": "#ffffff",
    "ink": "#18202b",
    "soft": "#525c69",
    "rule": "#d5dbe2",
    "c1": "#1f6fb2",
    "c2": "#c8452f",
    "c3": "#8cbfe6",
    "c4": "#e3e8ee",
    "c5": "#8a6d00",
}
"""Colours: of the page, its cards, text, less important text, lines, and five of charts."""

DARK = {
    "page": "#10141a",
    "card": "#181e26",
    "ink": "#e8ecf2",
    "soft": "#a7b1be",
    "rule": "#36404d",
    "c1": "#5aa9ec",
    "c2": "#f0795f",
    "c3": "#2d6491",
    "c4": "#2a323d",
    "c5": "#e0bd4a",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:32px 0 10px}
h3{font-size:1rem;margin:0}
p{margin:4px 0}
.soft,figcaption,footer{color:var(--soft);font-size:.875rem}
.conditions,.cards{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:10px 14px}
.conditions{margin:16px 0}
.conditions dt{color:var(--soft);font-size:.8rem}
.conditions dd{margin:0;overflow-wrap:anywhere}
.card,figure,.box{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.card,figure,.box{padding:12px 14px;margin:0;overflow-wrap:anywhere}
.card b{display:block;font-size:1.45rem;line-height:1.3;font-weight:600;font-variant-numeric:tabular-nums}
.card span{display:block;color:var(--soft);font-size:.85rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}
figure{min-width:0;break-inside:avoid}
figure header{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 12px;align-items:baseline}
.kind{color:var(--soft);border:1px solid var(--rule);border-radius:99px;padding:0 9px;font-size:.78rem}
.box{margin-bottom:14px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;padding:0;margin:6px 0;font-size:.85rem}
.legend i{display:inline-block;width:16px;height:10px;margin-right:6px;background:var(--c)}
.legend i.area{border:1px solid var(--soft)}
.legend i.line{height:0;border:0;border-top:3px solid var(--c);background:none;vertical-align:3px}
.legend i.dash{height:0;border:0;border-top:3px dashed var(--c);background:none;vertical-align:3px}
.legend i.dot{width:9px;height:9px;border:0;border-radius:9px}
.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.ink{--c:var(--ink)}
svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif;fill:var(--soft)}
svg path{fill:none}
svg .label{fill:var(--ink)}
svg .on{fill:var(--ink);font-size:11.5px}
svg .on{stroke:var(--card);stroke-width:3px;paint-order:stroke;stroke-linejoin:round}
svg .grid{stroke:var(--rule)}
svg .axis{stroke:var(--soft)}
svg .area{fill:var(--c)}
svg .line{stroke:var(--c);stroke-width:2;stroke-linejoin:round}
svg .dash{stroke:var(--c);stroke-width:2;stroke-dasharray:6 4}
svg .dot{stroke:var(--c);stroke-width:3.4;stroke-linecap:round;stroke-opacity:.75}
svg .mark{stroke:var(--c);stroke-width:1.2;stroke-dasharray:4 3}
svg .tell{fill:transparent}
svg .tell:hover{fill:var(--ink);fill-opacity:.08}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
.summary{width:100%}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}
.text td{text-align:left;white-space:normal;overflow-wrap:anywhere}
details{margin-top:6px}
summary{cursor:pointer;color:var(--soft);font-size:.85rem}
summary:focus-visible{outline:2px solid var(--c1)}
details .wide{max-height:320px;overflow-y:auto}
footer{margin-top:32px}
@media (max-width:720px){.conditions,.cards{grid-template-columns:repeat(2,minmax(0,1fr))}
main{padding:16px 10px 32px}.card,figure,.box{padding:10px}.card b{font-size:1.2rem}
svg{font-size:14px}svg .on{font-size:13px}.summary th,.summary td{padding:4px 6px}}
"""
    + f"@media print{{:root{{color-scheme:light;{_variables(LIGHT)}--page:#fff}}"
    "main{max-width:none;padding:0}details,.screen{display:none}"
    ".figures{grid-template-columns:1fr 1fr}*{print-color-adjust:exact}}"
)
