"""Show a report (`report.py`) as one HTML page that loads no other file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.report import (
    CONTEXT_CHARS,
    Report,
    Sample,
    part_lines,
    supports_rows,
)

# A page has more space than a terminal.
_CONTEXT_CHARS = 4 * CONTEXT_CHARS

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


_COMPARISONS_EXPLAINED = (
    "Each comparison renders two conversations that differ in one thing. The texts and names of "
    "the conversations, such as zqFirstTool, are made up, so that they occur in no template. The "
    "first block shows the first rendering, the second block shows the second."
)


def report_page(report: Report) -> str:
    """Return the report as an HTML page."""
    title = escape(report.title or "Chat template")
    body = "\n".join(_sections(report))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: chat format</title>\n<style>{_STYLE}</style></head>\n"
        f'<body><h1>{title}</h1>\n<p class="why">{escape(report.why)}</p>\n{body}\n</body></html>\n'
    )


def _sections(report: Report) -> Iterator[str]:
    """Yield the HTML of each section of the page."""
    analysis = report.analysis
    if analysis is not None and analysis.undecided:
        yield "<h2>Not decided</h2><ul>"
        for sentence in analysis.undecided:
            yield f'<li class="bad">{escape(sentence)}</li>'
        yield "</ul>"
    yield "<h2>Samples</h2>"
    yield (
        "<p>Each sample is a message that the template renders. The parser split it into "
        '<span class="legend"><mark class="reasoning">reasoning</mark>'
        '<mark class="content">content</mark><mark class="call">call</mark>'
        '<mark class="markup">markup</mark></span></p>'
    )
    for sample in report.samples:
        yield _sample(sample)
    if analysis is not None:
        yield "<h2>What the template supports</h2><table>"
        for name, value in supports_rows(analysis):
            yield f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>"
        yield "</table>"
    yield "<h2>Format</h2>"
    format_text = "\n".join(part_lines(report.format))
    yield f"<pre>{escape(format_text)}</pre>"
    if analysis is not None:
        yield "<h2>Comparisons</h2>"
        yield f"<p>{escape(_COMPARISONS_EXPLAINED)}</p>"
        for comparison in analysis.comparisons:
            yield _comparison(comparison)
    yield "<h2>Constraint of a required call</h2>"
    yield f"<details><summary>structural tag</summary><pre>{escape(report.constraint)}</pre>"
    yield "</details>"


def _sample(sample: Sample) -> str:
    """Return the HTML of a sample: whether it was parsed correctly, and its coloured text."""
    coloured_text = "".join(
        f'<mark class="{escape(kind)}" title="{escape(kind)}">{_with_line_ends(text)}</mark>'
        for kind, text in sample.spans
    )
    state = "parsed correctly"
    if sample.differs:
        parts = escape(", ".join(sample.differs))
        state = f'<span class="bad">parsed wrongly: {parts} differ</span>'
    heading = f'<div class="changed">{escape(sample.name)}: {state}</div>'
    prompt = f'<span class="around">… {_with_line_ends(sample.prompt_end)}</span>'
    return f"{heading}<pre>{prompt}\n{coloured_text}</pre>"


def _comparison(comparison: Comparison) -> str:
    """Return the HTML of a comparison: the finding, and both renderings where they differ."""
    summary = f"<summary>{escape(comparison.name)}</summary>"
    changed = f'<div class="changed">{escape(comparison.changed)}</div>'
    finding = f"<div>{escape(comparison.finding)}</div>"
    if comparison.left == comparison.right:
        return f"<details>{summary}{changed}{finding}</details>"
    difference = comparison.parts()
    before = _context(difference.prefix[-_CONTEXT_CHARS:])
    after = _context(difference.suffix[:_CONTEXT_CHARS])
    left = f"{before}<del>{_with_line_ends(difference.left)}</del>{after}"
    right = f"{before}<ins>{_with_line_ends(difference.right)}</ins>{after}"
    return f"<details open>{summary}{changed}{finding}<pre>{left}\n\n{right}</pre></details>"


def _context(text: str) -> str:
    return f'<span class="around">{_with_line_ends(text)}</span>'


def _with_line_ends(text: str) -> str:
    """Return `text` as HTML, with a visible sign at the end of each line."""
    return escape(text).replace("\n", '<span class="around">↵</span>\n')
