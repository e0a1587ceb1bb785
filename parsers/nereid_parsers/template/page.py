"""Show a report about a chat template as an HTML page. The page loads no other file.

The report describes the format of the model's output, see `report.py`.
"""

from __future__ import annotations

import jinja2

from nereid_parsers.template.format_lines import part_lines
from nereid_parsers.template.report import CONTEXT_CHARS, Report, supports_rows

# A page has more space than a terminal, so the page shows more text around each difference.
_CONTEXT_CHARS = 4 * CONTEXT_CHARS

# The macro `lines` shows the character ↵ at each line break. The macro `difference_of` shows two
# renderings, and highlights the parts in which they differ.
_PAGE = """\
{% set line_end %}<span class="around">↵</span>
{% endset %}
{% macro lines(text) %}{{ text | e | replace("\\n", line_end) }}{% endmacro %}
{% macro difference_of(comparison) %}
{% set parts = comparison.parts() %}
{% set before %}<span class="around">{{ lines(parts.prefix[-context_chars:]) }}</span>{% endset %}
{% set after %}<span class="around">{{ lines(parts.suffix[:context_chars]) }}</span>{% endset %}
<pre>{{ before }}<del>{{ lines(parts.left) }}</del>{{ after }}

{{ before }}<ins>{{ lines(parts.right) }}</ins>{{ after }}</pre>
{%- endmacro %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: chat format</title>
<style>
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
</style></head>
<body><h1>{{ title }}</h1>
<p class="why">{{ report.why }}</p>
{% if analysis and analysis.undecided %}
<h2>Not decided</h2><ul>
{% for sentence in analysis.undecided %}
<li class="bad">{{ sentence }}</li>
{% endfor %}
</ul>
{% endif %}
<h2>Samples</h2>
<p>Each sample is a message that the template renders. The parser split it into \
<span class="legend"><mark class="reasoning">reasoning</mark><mark class="content">content</mark>\
<mark class="call">call</mark><mark class="markup">markup</mark></span></p>
{% for sample in report.samples %}
<div class="changed">{{ sample.name }}: \
{% if sample.differs %}<span class="bad">parsed wrongly: {{ sample.differs | join(", ") }} differ\
</span>{% else %}parsed correctly{% endif %}</div>\
<pre><span class="around">… {{ lines(sample.prompt_end) }}</span>
{% for kind, text in sample.spans %}\
<mark class="{{ kind }}" title="{{ kind }}">{{ lines(text) }}</mark>\
{% endfor %}
</pre>
{% endfor %}
{% if analysis %}
<h2>What the template supports</h2><table>
{% for name, value in supports_rows(analysis) %}
<tr><td>{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Format</h2>
<pre>{{ part_lines(report.format) | join("\n") }}</pre>
{% if analysis %}
<h2>Comparisons</h2>
<p>Each comparison renders two conversations that differ in one thing. The texts and names of \
the conversations, such as zqFirstTool, are made up, so that they occur in no template. The first \
block shows the first rendering, the second block shows the second.</p>
{% for comparison in analysis.comparisons %}
{% set differs = comparison.left != comparison.right %}
<details{% if differs %} open{% endif %}><summary>{{ comparison.name }}</summary>\
<div class="changed">{{ comparison.changed }}</div><div>{{ comparison.finding }}</div>\
{% if differs %}{{ difference_of(comparison) }}{% endif %}</details>
{% endfor %}
{% endif %}
<h2>Constraint of a required call</h2>
<details><summary>structural tag</summary><pre>{{ report.constraint }}</pre>
</details>
</body></html>
"""


def report_page(report: Report) -> str:
    """Return the report as an HTML page."""
    env = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return env.from_string(_PAGE).render(
        report=report,
        analysis=report.analysis,
        title=report.title or "Chat template",
        context_chars=_CONTEXT_CHARS,
        part_lines=part_lines,
        supports_rows=supports_rows,
    )
