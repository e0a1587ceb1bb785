"""The result of analysing a chat template, and its report as text or JSON.

The module `page` shows the report as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import Format
from nereid_parsers.stream.parser import StreamParser
from nereid_parsers.template.conversation import TOOLS
from nereid_parsers.template.format_lines import part_lines
from nereid_parsers.template.markup.difference import Comparison
from nereid_parsers.template.verify_format import Proof

CONTEXT_CHARS = 60  # the number of characters that are shown before and after a difference
PROMPT_END_CHARS = 80  # the number of characters at the end of a prompt that are shown

# The type of a function that adds a terminal colour to a text. The first argument is the kind of
# the text, such as "title", "reasoning" or "added". The second argument is the text.
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
        switches: The text that each setting of the thinking switches adds to the generation prompt.
            Example: {"enable_thinking=False": "<think></think>"}.
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
    """The `Format` that was inferred from a chat template, and the comparisons that led to it.

    Attributes:
        format: The inferred format. It is plain content if nothing could be inferred.
        comparisons: The comparisons of renderings, in the order in which they were made.
        supports: The parts of a conversation that the template can render.
        undecided: Sentences that state what could not be inferred, and the reasons.
        proofs: The rendered messages that were parsed to check the format, with the results.
    """

    format: Format
    comparisons: tuple[Comparison, ...] = ()
    supports: Supports = Supports()
    undecided: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()

    def explain(self) -> str:
        """Return a report on the analysis as text."""
        return report_text(report_of("", "", self.format, self))


# ---- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendered message for the report, split into spans such as reasoning and content.

    Attributes:
        name: The kind of message, such as "content and a tool call".
        prompt_end: The last characters of the prompt before the message.
        spans: The spans of the message in order, such as ("markup", "<think>"). A span is a pair of
            a kind and a text. The kinds are "reasoning", "content", "call" and "markup".
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
        format: The format of the reasoning and the tool calls.
        analysis: The analysis from which the format was inferred. None if the format has another
            source.
        samples: The messages that were parsed to check the format.
        constraint: The structural tag that forces the model to call a tool, as JSON text. If there
            is no such tag, a sentence with the reason.
    """

    title: str
    why: str
    format: Format
    analysis: TemplateAnalysis | None
    samples: tuple[Sample, ...]
    constraint: str


def report_of(title: str, why: str, fmt: Format, analysis: TemplateAnalysis | None) -> Report:
    """Create a report about a `Format`, with parsed messages as examples.

    The report also shows a constraint: the structural tag that forces the model to call a tool. A
    constraint depends on the end of the prompt, so the prompt of the first message is used.

    The arguments are the attributes of the report, see `Report`.
    """
    proofs = analysis.proofs if analysis is not None else ()
    first_prompt = next((proof.prompt for proof in proofs), None)
    samples = tuple(_parse_sample(fmt, proof) for proof in proofs)
    return Report(title, why, fmt, analysis, samples, _constraint_text(fmt, first_prompt))


def _parse_sample(fmt: Format, proof: Proof) -> Sample:
    """Parse a rendered message, and return the spans that the parser recognises, for the report.

    Example: the message "<think>Hm</think>" has the spans ("markup", "<think>"),
    ("reasoning", "Hm") and ("markup", "</think>").
    """
    pieces: list[tuple[str, str]] = []

    def add_piece(kind: str, text: str) -> None:
        """Store a small piece of the message."""
        pieces.append((kind, text))

    parser = StreamParser(fmt, tools=TOOLS, prompt=proof.prompt, trace=add_piece)
    parser.feed(proof.text)
    parser.finish()
    prompt_end = proof.prompt[-PROMPT_END_CHARS:]
    return Sample(proof.name, prompt_end, tuple(_join_spans(pieces)), differs=proof.differs)


def _join_spans(spans: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the spans of a message. Adjacent spans of the same kind, such as "content", are joined.

    A span is a pair of a kind and a text.

    >>> list(_join_spans([("content", "a"), ("content", "b"), ("markup", "<c>")]))
    [('content', 'ab'), ('markup', '<c>')]
    """
    for kind, group in groupby(spans, key=itemgetter(0)):
        joined_text = "".join(text for _, text in group)
        if joined_text:
            yield kind, joined_text


def _constraint_text(fmt: Format, prompt: str | None) -> str:
    """Return the JSON text of the constraint that forces a model to call a tool.

    The text is a structural tag in JSON: a description of the allowed outputs, which the engine
    enforces. If the format allows no constraint, the text is a sentence with the reason.
    The constraint depends on the prompt, because a prompt may end with the marker that opens
    reasoning.
    """
    try:
        tag = fmt.structural_tag(TOOLS, "required", prompt=prompt)
    except ConstraintError as error:
        return f"This format has no constraint: {error}"
    return json.dumps(tag, indent=2, ensure_ascii=False)


# ---- text ---------------------------------------------------------------------------------------


def report_text(report: Report, paint: Paint = no_colour) -> str:
    """Return the report as text for a terminal. The function `paint` adds the colours."""
    sections = (section for section in _sections(report, paint) if section)
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _sections(report: Report, paint: Paint) -> Iterator[list[str]]:
    """Yield the lines of each section of the report. A section may be empty."""
    analysis = report.analysis
    if report.title:
        heading = paint("title", report.title)
        yield [heading, report.why]
    if analysis is not None:
        yield _comparison_section(analysis, paint)
        rows = [f"{name:20} {value}" for name, value in supports_rows(analysis)]
        yield _section("What the template supports", rows, paint)
    yield _section("Format", part_lines(report.format), paint)
    yield [line for sample in report.samples for line in _sample_lines(sample, paint)]
    if analysis is not None and analysis.undecided:
        sentences = [paint("problem", sentence) for sentence in analysis.undecided]
        yield _section("Not decided", sentences, paint)
    yield _section("Constraint of a required call", report.constraint.splitlines(), paint)


def _comparison_section(analysis: TemplateAnalysis, paint: Paint) -> list[str]:
    """Return the lines of the report that describe each comparison of two renderings."""
    lines = _section("Comparisons", _COMPARISONS_EXPLAINED, paint)
    for comparison in analysis.comparisons:
        lines.append(f"{paint('name', comparison.name)}: {comparison.changed}")
        lines += _indented([comparison.finding, *difference_lines(comparison, paint)])
    return lines


def _section(title: str, lines: Iterable[str], paint: Paint) -> list[str]:
    """Return a title and the indented `lines`."""
    return [paint("title", title), *_indented(lines)]


def _indented(lines: Iterable[str]) -> Iterator[str]:
    """Yield each line with four spaces before it."""
    for line in lines:
        yield f"    {line}"


def _sample_lines(sample: Sample, paint: Paint) -> Iterator[str]:
    """Yield the lines that the report contains about one parsed message.

    The first line contains the name of the sample and whether it was parsed correctly. The second
    line contains the end of the prompt. Each further line contains one span of the message, such as
    "reasoning:'Hm'".
    """
    if sample.differs:
        result = paint("problem", f"parsed wrongly: {', '.join(sample.differs)} differ")
    else:
        result = paint("markup", "parsed correctly")
    yield f"{paint('title', 'Sample')}: {sample.name}, {result}"
    yield f"    {paint('markup', _on_one_line(sample.prompt_end))}"
    for kind, text in sample.spans:
        yield f"    {paint(kind, f'{kind}:{text!r}')}"


def difference_lines(comparison: Comparison, paint: Paint = no_colour) -> Iterator[str]:
    """Yield two lines that show where the two renderings of a comparison differ.

    The line with `-` shows the first rendering, and the line with `+` shows the second rendering.
    Each line contains the differing text, with at most CONTEXT_CHARS characters before and after
    it. If the renderings are equal, nothing is yielded.

    >>> comparison = Comparison("T", "", left="<a>yes</a>", right="<a>no</a>", finding="")
    >>> list(difference_lines(comparison))
    ['- <a>yes</a>', '+ <a>no</a>']
    """
    if comparison.left == comparison.right:
        return
    prefix, removed, added, suffix = comparison.parts()
    before = paint("markup", _on_one_line(prefix[-CONTEXT_CHARS:]))
    after = paint("markup", _on_one_line(suffix[:CONTEXT_CHARS]))
    yield f"- {before}{paint('removed', _on_one_line(removed))}{after}"
    yield f"+ {before}{paint('added', _on_one_line(added))}{after}"


def _on_one_line(text: str) -> str:
    r"""Escape the line breaks in `text`, so that the text fits on one line.

    >>> _on_one_line("<a>\n")
    '<a>\\n'
    """
    return repr(text)[1:-1]


def supports_rows(analysis: TemplateAnalysis) -> list[tuple[str, str]]:
    """Return the rows of the table that shows which features the template supports.

    A row is a pair of a name and a value. Example: if one message can have several tool calls, one
    row is ("parallel calls", "yes").
    """
    rows = []
    for supported in fields(analysis.supports):
        name = supported.name.replace("_", " ")
        value = getattr(analysis.supports, supported.name)
        rows.append((name, _value_text(value)))
    return rows


def _value_text(value: object) -> str:
    """Convert a value into the text that the report shows. For example, True becomes "yes".

    A value is a bool, a text, a tuple of texts, or a dict of texts:

    >>> _value_text(True), _value_text("JSON"), _value_text(())
    ('yes', 'JSON', 'none')
    >>> _value_text(("reasoning", "thinking")), _value_text({"enable_thinking=False": "</think>"})
    ('reasoning, thinking', "enable_thinking=False -> '</think>'")
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


# ---- JSON ---------------------------------------------------------------------------------------


def report_json(report: Report) -> str:
    """Return the report as the text of a JSON object, which other programs can read.

    If the format was inferred from a template, the object also contains the comparisons, the
    supported features, and the sentences that state what could not be inferred.
    """
    analysis = report.analysis
    data: dict[str, Any] = {
        "title": report.title,
        "why": report.why,
        "format": _as_data(report.format),
        "samples": _as_data(report.samples),
        "constraint": report.constraint,
    }
    if analysis is not None:
        data["comparisons"] = _as_data(analysis.comparisons)
        data["supports"] = _as_data(analysis.supports)
        data["undecided"] = list(analysis.undecided)
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _as_data(value: Any) -> Any:  # noqa: ANN401  # any value of a report
    """Convert a value of a report into dicts, lists and plain values, for a JSON document.

    A dataclass becomes a dict of its attributes. The dict also contains the name of the class, as
    the value of the key `part`. Example: `Wrapper("<a>", "</a>")` gives
    `{"part": "Wrapper", "open": "<a>", "close": "</a>"}`.
    """
    is_dataclass_object = is_dataclass(value) and not isinstance(value, type)
    if is_dataclass_object:
        members = {member.name: _as_data(getattr(value, member.name)) for member in fields(value)}
        return {"part": type(value).__name__, **members}
    if isinstance(value, list | tuple):
        return [_as_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_data(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
