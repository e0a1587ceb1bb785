"""The result of an analysis, and the report that shows this result as text or JSON.

`page.py` shows the same report as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import Format
from nereid_parsers.stream.parser import StreamParser
from nereid_parsers.template.conversation import TOOLS
from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.proof import Proof

CONTEXT_CHARS = 60  # the number of characters that are shown before and after a difference
PROMPT_END_CHARS = 80  # the number of characters that are shown from the end of a prompt

# A function that adds colour to a text for a terminal. Its arguments are the kind of the text, such
# as "title", "reasoning" or "added", and the text.
Paint = Callable[[str, str], str]


_COMPARISONS_EXPLAINED = (
    "Each comparison renders two conversations that differ in one thing. The texts and names of",
    "the conversations, such as zqFirstTool, are made up, so that they occur in no template.",
    "Lines with - show the first rendering, lines with + show the second.",
)


def no_colour(kind: str, text: str) -> str:  # noqa: ARG001
    """Return `text` unchanged. This `Paint` function adds no colour."""
    return text


@dataclass(frozen=True, slots=True)
class Supports:
    """The features that a template supports, such as several tool calls in one message.

    Attributes:
        content: Whether the template renders content.
        reasoning: The message fields from which reasoning is rendered. ("parts",) or ("blocks",) if
            reasoning must be a part of the content.
        switches: The text that each thinking switch adds after the header in the generation prompt.
        calls: The form of tool calls, such as "JSON". "none" if tool calls are not rendered.
        parallel_calls: Whether one message can have several tool calls.
        content_with_calls: Whether one message can have both content and tool calls.
        arguments: "object", or "text" if the template expects arguments as a JSON string.
        ids: "plain", or "numbered" if the template renders the id of a tool call instead of its
            name.
    """

    content: bool = False
    reasoning: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    calls: str = "none"
    parallel_calls: bool = False
    content_with_calls: bool = False
    arguments: str = "object"
    ids: str = "plain"


@dataclass(frozen=True, slots=True)
class TemplateAnalysis:
    """The inferred format of a chat template, and the comparisons from which it was inferred.

    Attributes:
        format: The inferred format. It is plain content if nothing could be inferred.
        comparisons: The comparisons of renderings, in order. Each comparison contains its finding.
        supports: The parts of a conversation that the template can render.
        undecided: Sentences that state what could not be inferred, and the reasons.
        proofs: The rendered messages that were parsed with the format, and the results.
    """

    format: Format
    comparisons: tuple[Comparison, ...] = ()
    supports: Supports = Supports()
    undecided: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()

    def explain(self) -> str:
        """Return the analysis as text: comparisons, format, checked samples and open questions."""
        return report_text(report_of("", "", self.format, self))


# ---- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendered message, split into the parts that the parser recognised.

    Attributes:
        name: The kind of message, such as "content and a tool call".
        prompt_end: The end of the prompt before the message.
        spans: Pairs of kind and text. The kinds are "reasoning", "content", "call" and "markup".
        differs: The parts of the message that the parser returned wrongly, such as "content".
    """

    name: str
    prompt_end: str
    spans: tuple[tuple[str, str], ...]
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of the report that the command `template` shows.

    Attributes:
        title: The path of the template or checkpoint, or "" for a report without a title.
        why: Sentences that state the source of the format.
        format: The format.
        analysis: The result of the analysis, if the format was inferred.
        samples: The messages that were parsed to check the format.
        constraint: The structural tag of a required tool call as JSON, or the reason why there is
            none.
    """

    title: str
    why: str
    format: Format
    analysis: TemplateAnalysis | None
    samples: tuple[Sample, ...]
    constraint: str


def report_of(title: str, why: str, fmt: Format, analysis: TemplateAnalysis | None) -> Report:
    """Create a report on a format. `analysis` is the analysis that inferred the format, or None."""
    proofs = analysis.proofs if analysis is not None else ()
    samples = tuple(_sample(fmt, proof) for proof in proofs)
    constraint = _constraint(fmt, proofs)
    return Report(title, why, fmt, analysis=analysis, samples=samples, constraint=constraint)


def _sample(fmt: Format, proof: Proof) -> Sample:
    """Parse a rendered message again, and return the message split into spans for the report.

    A span is a pair of a kind and a text, such as ("reasoning", "Numbat thinks about it."). The
    report shows in this way how the parser with the format `fmt` reads the message. `proof`
    contains the rendered message, its prompt, and the parts that were parsed wrongly.
    """
    spans: list[tuple[str, str]] = []
    parser = StreamParser(
        fmt,
        tools=TOOLS,
        prompt=proof.prompt,
        # The parser calls this function with the kind and the text of each piece.
        trace=lambda kind, text: spans.append((kind, text)),
    )
    parser.feed(proof.text)
    parser.finish()
    prompt_end = proof.prompt[-PROMPT_END_CHARS:]
    joined_spans = tuple(_join_spans(spans))
    return Sample(proof.name, prompt_end, spans=joined_spans, differs=proof.differs)


def _join_spans(spans: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join adjacent spans of the same kind, and yield the resulting spans.

    >>> list(_join_spans([("content", "a"), ("content", "b"), ("markup", "<c>")]))
    [('content', 'ab'), ('markup', '<c>')]
    """
    for kind, group in groupby(spans, key=itemgetter(0)):
        joined_text = "".join(text for _, text in group)
        if joined_text:
            yield kind, joined_text


def _constraint(fmt: Format, proofs: tuple[Proof, ...]) -> str:
    """Return the structural tag, as JSON text, that forces the model to call a tool.

    If the format has no constraint, return a sentence with the reason.
    """
    prompt = proofs[0].prompt if proofs else None
    try:
        tag = fmt.structural_tag(TOOLS, "required", prompt=prompt)
    except ConstraintError as error:
        return f"This format has no constraint: {error}"
    return json.dumps(tag, indent=2, ensure_ascii=False)


# ---- text ---------------------------------------------------------------------------------------


def report_text(report: Report, paint: Paint = no_colour) -> str:
    """Return the report as text, with the colours that `paint` adds."""
    return "\n".join(_report_lines(report, paint)) + "\n"


def _report_lines(report: Report, paint: Paint) -> Iterator[str]:
    """Yield the lines of the whole report.

    The sections are the title, the comparisons of the analysis, the format, the parsed samples,
    what the analysis could not decide, and the constraint of a tool call. Empty lines separate the
    sections.

    Args:
        report: The contents of the report.
        paint: A function that adds colour to a text of the given kind, such as "title".
    """
    analysis = report.analysis
    if report.title:
        yield paint("title", report.title)
        yield report.why
        yield ""
    if analysis is not None:
        yield from _analysis_lines(analysis, paint)
    yield from _section_lines("Format", part_lines(report.format), paint)
    for sample in report.samples:
        yield from _sample_lines(sample, paint)
    yield ""
    if analysis is not None and analysis.undecided:
        sentences = [paint("reason", sentence) for sentence in analysis.undecided]
        yield from _section_lines("Not decided", sentences, paint)
    yield paint("title", "Constraint of a required call")
    yield from _indented(report.constraint.splitlines())


def _analysis_lines(analysis: TemplateAnalysis, paint: Paint) -> Iterator[str]:
    """Yield the lines about the comparisons and about the parts that the template renders."""
    yield paint("title", "Comparisons")
    yield from _indented(_COMPARISONS_EXPLAINED)
    for comparison in analysis.comparisons:
        yield from _comparison_lines(comparison, paint)
    yield ""
    rows = [f"{name:20} {value}" for name, value in supports_rows(analysis)]
    yield from _section_lines("What the template supports", rows, paint)


def _section_lines(title: str, lines: Iterable[str], paint: Paint) -> Iterator[str]:
    """Yield the lines of a section of the report: the title, indented lines and an empty line."""
    yield paint("title", title)
    yield from _indented(lines)
    yield ""


def _indented(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with an indent of four spaces."""
    for line in lines:
        yield f"    {line}"


def _comparison_lines(comparison: Comparison, paint: Paint) -> Iterator[str]:
    """Yield the lines of one comparison: its name, its finding and the differing texts."""
    yield f"{paint('name', comparison.name)}: {comparison.changed}"
    yield f"    {comparison.finding}"
    yield from _indented(difference_lines(comparison, paint))


def _sample_lines(sample: Sample, paint: Paint) -> Iterator[str]:
    """Yield the lines of a sample: its name, the result, the end of the prompt and the text."""
    state = paint("markup", "parsed correctly")
    if sample.differs:
        state = paint("reason", f"parsed wrongly: {', '.join(sample.differs)} differ")
    yield f"{paint('title', 'Sample')}: {sample.name}, {state}"
    yield f"    {paint('markup', _on_one_line(sample.prompt_end))}"
    for kind, text in sample.spans:
        yield f"    {paint(kind, f'{kind}:{text!r}')}"


def difference_lines(comparison: Comparison, paint: Paint = no_colour) -> Iterator[str]:
    """Yield two lines that show where two renderings differ, one line for each rendering.

    The minus sign marks the first rendering, and the plus sign marks the second rendering. Each
    line also shows some text before and after the difference. There are no lines if the renderings
    are equal.

    >>> list(difference_lines(Comparison("T", "", "<a>yes</a>", "<a>no</a>", "")))
    ['- <a>yes</a>', '+ <a>no</a>']
    """
    if comparison.left == comparison.right:
        return
    difference = comparison.parts()
    before = paint("markup", _on_one_line(difference.prefix[-CONTEXT_CHARS:]))
    after = paint("markup", _on_one_line(difference.suffix[:CONTEXT_CHARS]))
    yield f"- {before}{paint('removed', _on_one_line(difference.left))}{after}"
    yield f"+ {before}{paint('added', _on_one_line(difference.right))}{after}"


def _on_one_line(text: str) -> str:
    r"""Escape the line breaks in `text`, so that the text fits on one line.

    >>> _on_one_line("<a>\n")
    '<a>\\n'
    """
    return repr(text)[1:-1]


def supports_rows(analysis: TemplateAnalysis) -> list[tuple[str, str]]:
    """Return the rows of a table that shows what the template supports: pairs of name and text.

    Example: `Supports(parallel_calls=True)` gives the pair ("parallel calls", "yes").
    """
    rows = []
    for supported in fields(analysis.supports):
        name = supported.name.replace("_", " ")
        value = getattr(analysis.supports, supported.name)
        rows.append((name, _value_text(value)))
    return rows


def _value_text(value: object) -> str:
    """Return the text that the report shows for a value, such as "yes" for True.

    The value is an attribute of `Supports`. An empty dict or tuple gives "none".

    >>> _value_text(("reasoning", "thinking")), _value_text(True)
    ('reasoning, thinking', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    is_empty_collection = isinstance(value, dict | tuple) and not value
    if is_empty_collection:
        return "none"
    if isinstance(value, dict):
        return "; ".join(f"{key} -> {text!r}" for key, text in value.items())
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value)


def part_lines(part: Any, indent: str = "") -> Iterator[str]:  # noqa: ANN401  # any dataclass
    """Yield the lines that describe a part of a format, which is a dataclass with inner parts.

    Fields with default values are omitted. Example: `Reasoning("<think>", "</think>")` gives the
    lines "Reasoning", "  open: '<think>'" and "  close: '</think>'". `indent` is the white space
    before each line.
    """
    yield f"{indent}{type(part).__name__}"
    for declared in fields(part):
        value = getattr(part, declared.name)
        if value == _default_of(declared):
            continue
        inner_parts = _inner_parts(value)
        if not inner_parts:
            shown_value = value.value if isinstance(value, Enum) else value
            yield f"{indent}  {declared.name}: {shown_value!r}"
            continue
        yield f"{indent}  {declared.name}:"
        for inner_part in inner_parts:
            yield from part_lines(inner_part, indent + "    ")


def _inner_parts(value: object) -> tuple[object, ...]:
    """Return the dataclass instances in the value of a field.

    The value may be one instance, or a tuple of instances. The result is () for all other values.
    """
    values = value if isinstance(value, tuple) else (value,)
    contains_dataclasses = bool(values) and is_dataclass(values[0])
    return values if contains_dataclasses else ()


def _default_of(declared: Field[Any]) -> object:
    """Return the default value of a field of a dataclass, or MISSING if there is no default."""
    if declared.default is MISSING and declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


# ---- JSON ---------------------------------------------------------------------------------------


def report_json(report: Report) -> str:
    """Return the report as the text of a JSON object, for programs that read the report.

    The comparisons are included only if the format was inferred from a template.
    """
    analysis = report.analysis
    data: dict[str, Any] = {
        "title": report.title,
        "why": report.why,
        "format": as_data(report.format),
        "samples": as_data(report.samples),
        "constraint": report.constraint,
    }
    if analysis is not None:
        data["comparisons"] = as_data(analysis.comparisons)
        data["supports"] = as_data(analysis.supports)
        data["undecided"] = list(analysis.undecided)
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def as_data(value: Any) -> Any:  # noqa: ANN401  # any value of a report
    """Convert a value of a report into dicts, lists and plain values, which JSON can contain.

    A dataclass becomes a dict whose key `part` is the name of the class. Example:
    `Wrapper("<a>", "</a>")` gives `{"part": "Wrapper", "open": "<a>", "close": "</a>"}`.
    """
    is_dataclass_object = is_dataclass(value) and not isinstance(value, type)
    if is_dataclass_object:
        members = {member.name: as_data(getattr(value, member.name)) for member in fields(value)}
        return {"part": type(value).__name__, **members}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_data(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
