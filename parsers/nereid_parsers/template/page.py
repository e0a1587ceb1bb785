"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.report import (
    AROUND,
    Report,
    Sample,
    part_lines,
    supports_rows,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #fbfaf7; --soft: #6b7280;
  --line: #dcd9d0; --box: #ffffff; --added: #c9efd2; --removed: #f8d2cf;
  --reasoning: #cfe6f7; --content: #d9f0d4; --call: #fbe6bd; --markup: #e7e5df; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e4de; --paper: #16181d; --soft: #9aa1ad;
  --line: #343841; --box: #1d2027; --added: #1f4d2e; --removed: #5a2623; --reasoning: #1d3f57;
  --content: #24452a; --call: #544017; --markup: #31343c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); }
p.why, .changed { color: var(--soft); margin: .1rem 0; }
pre, code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0;
  padding: .6rem .75rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.around { color: var(--soft); } ins { background: var(--added); text-decoration: none; }
del { background: var(--removed); text-decoration: none; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
mark { color: inherit; border-radius: 3px; padding: 0 .1em; }
mark.reasoning { background: var(--reasoning); } mark.content { background: var(--content); }
mark.call { background: var(--call); } mark.markup { background: var(--markup); }
.legend mark { margin-right: .5rem; padding: .1em .5em; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td:first-child { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
"""


def report_page(report: Report) -> str:
    """The whole page."""
    title = escape(report.title or "Chat template")
    body = "\n".join(_sections(report))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: chat format</title>\n<style>{_STYLE}</style></head>\n"
        f'<body><h1>{title}</h1>\n<p class="why">{escape(report.why)}</p>\n{body}\n</body></html>\n'
    )


def _sections(report: Report) -> Iterator[str]:
    analysis = report.analysis
    if analysis is not None and analysis.undecided:
        yield "<h2>Not decided</h2><ul>"
        yield from (f'<li class="bad">{escape(one)}</li>' for one in analysis.undecided)
        yield "</ul>"
    yield "<h2>Samples</h2>"
    yield (
        '<p class="legend"><mark class="reasoning">reasoning</mark>'
        '<mark class="content">content</mark><mark class="call">call</mark>'
        '<mark class="markup">markup</mark></p>'
    )
    yield from (_sample(sample) for sample in report.samples)
    if analysis is not None:
        yield "<h2>What the template supports</h2><table>"
        for name, value in supports_rows(analysis):
            yield f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>"
        yield "</table>"
    yield "<h2>Format</h2>"
    yield f"<pre>{escape(chr(10).join(part_lines(report.format)))}</pre>"
    if analysis is not None:
        yield "<h2>Comparisons</h2>"
        yield from (_comparison(one) for one in analysis.comparisons)
    yield "<h2>Constraint of a required call</h2>"
    yield f"<details><summary>structural tag</summary><pre>{escape(report.constraint)}</pre>"
    yield "</details>"


def _sample(sample: Sample) -> str:
    marks = "".join(
        f'<mark class="{escape(kind)}" title="{escape(kind)}">{_shown(text)}</mark>'
        for kind, text in sample.spans
    )
    state = "read back as it was" if not sample.differs else (
        f'<span class="bad">differs in {escape(", ".join(sample.differs))}</span>'
    )  # fmt: skip
    prompt = f'<span class="around">… {_shown(sample.prompt_end)}</span>'
    return f'<div class="changed">{escape(sample.name)}: {state}</div><pre>{prompt}\n{marks}</pre>'


def _comparison(one: Comparison) -> str:
    head = f"<summary>{escape(one.name)}</summary>"
    words = f'<div class="changed">{escape(one.changed)}</div><div>{escape(one.finding)}</div>'
    if one.left == one.right:
        return f"<details>{head}{words}</details>"
    start, left, right, end = one.parts()
    lead = f'<span class="around">{_shown(start[-4 * AROUND :])}</span>'
    tail = f'<span class="around">{_shown(end[: 4 * AROUND])}</span>'
    shown = f"{lead}<del>{_shown(left)}</del>{tail}\n\n{lead}<ins>{_shown(right)}</ins>{tail}"
    return f"<details open>{head}{words}<pre>{shown}</pre></details>"


def _shown(text: str) -> str:
    """Text with its line breaks seen."""
    return escape(text).replace("\n", '<span class="around">↵</span>\n')
