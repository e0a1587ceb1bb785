"""What an analysis shows to a person or a machine: the same findings for text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import Format
from nereid_parsers.stream.parser import StreamParser
from nereid_parsers.template.analysis import TemplateAnalysis
from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.probe import TOOLS
from nereid_parsers.template.proof import Proof

AROUND = 60  # characters shown of what two renderings have in common
PROMPT_TAIL = 80  # characters
Paint = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendering, cut into parts by the parser: (what it was taken for, text)."""

    name: str
    prompt_end: str
    spans: tuple[tuple[str, str], ...]
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is shown. `why` says where the format comes from."""

    title: str
    why: str
    format: Format
    analysis: TemplateAnalysis | None
    samples: tuple[Sample, ...]
    constraint: str


def report_of(title: str, why: str, fmt: Format, analysis: TemplateAnalysis | None) -> Report:
    """Collect what is shown of a format, and of the analysis that gave it."""
    proofs = analysis.proofs if analysis is not None else ()
    samples = tuple(_sample(fmt, proof) for proof in proofs)
    return Report(title, why, fmt, analysis, samples, _constraint(fmt, proofs))


def _sample(fmt: Format, proof: Proof) -> Sample:
    spans: list[tuple[str, str]] = []
    parser = StreamParser(
        fmt, tools=TOOLS, prompt=proof.prompt, trace=lambda kind, text: spans.append((kind, text))
    )
    parser.feed(proof.text)
    parser.finish()
    return Sample(proof.name, proof.prompt[-PROMPT_TAIL:], tuple(_merged(spans)), proof.differs)


def _merged(spans: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    kind, text = "", ""
    for one, piece in spans:
        if one != kind and text:
            yield kind, text
            text = ""
        kind, text = one, text + piece
    if text:
        yield kind, text


def _constraint(fmt: Format, proofs: tuple[Proof, ...]) -> str:
    """The structural tag of a required call, as JSON; why there is none, where there is none."""
    prompt = proofs[0].prompt if proofs else None
    try:
        tag = fmt.structural_tag(TOOLS, "required", prompt=prompt)
    except ConstraintError as error:
        return f"none: {error}"
    return json.dumps(tag, indent=2, ensure_ascii=False)


# ---- text ---------------------------------------------------------------------------------------


def as_text(analysis: TemplateAnalysis, paint: Paint = lambda _kind, text: text) -> str:
    """An analysis as text; see `report_text`."""
    return report_text(report_of("", "", analysis.format, analysis), paint)


def report_text(report: Report, paint: Paint = lambda _kind, text: text) -> str:
    """The report as lines; `paint(kind, text)` may colour parts of them."""
    return "\n".join(_lines(report, paint)) + "\n"


def _lines(report: Report, paint: Paint) -> Iterator[str]:
    if report.title:
        yield paint("title", report.title)
        yield report.why
        yield ""
    analysis = report.analysis
    if analysis is not None:
        yield paint("title", "Comparisons")
        for one in analysis.comparisons:
            yield f"{paint('name', one.name)}  ({one.changed})"
            yield f"    {one.finding}"
            yield from (f"    {line}" for line in difference_lines(one, paint))
        yield ""
        yield paint("title", "Supports")
        yield from (f"    {name:20} {value}" for name, value in supports_rows(analysis))
        yield ""
    yield paint("title", "Format")
    yield from (f"    {line}" for line in part_lines(report.format))
    yield ""
    for sample in report.samples:
        state = paint("markup", "read back") if not sample.differs else paint(
            "reason", f"differs in {', '.join(sample.differs)}"
        )  # fmt: skip
        yield f"{paint('title', 'Sample')}: {sample.name}  {state}"
        yield "    " + paint("markup", repr(sample.prompt_end)[1:-1])
        cut = [paint(kind, f"{kind}:{text!r}") for kind, text in sample.spans]
        yield from (f"    {line}" for line in cut)
    yield ""
    if analysis is not None and analysis.undecided:
        yield paint("title", "Not decided")
        yield from (f"    {paint('reason', one)}" for one in analysis.undecided)
        yield ""
    yield paint("title", "Constraint of a required call")
    yield from (f"    {line}" for line in report.constraint.splitlines())


def difference_lines(one: Comparison, paint: Paint) -> Iterator[str]:
    """The two renderings where they differ, with a little around."""
    if one.left == one.right:
        return
    start, left, right, end = one.parts()
    lead, tail = repr(start[-AROUND:])[1:-1], repr(end[:AROUND])[1:-1]
    for sign, kind, text in (("-", "removed", left), ("+", "added", right)):
        middle = paint(kind, repr(text)[1:-1])
        yield f"{sign} {paint('markup', lead)}{middle}{paint('markup', tail)}"


def supports_rows(analysis: TemplateAnalysis) -> list[tuple[str, str]]:
    """What the template supports, as (name, value) in words."""
    rows = []
    for part in fields(analysis.supports):
        value = getattr(analysis.supports, part.name)
        if isinstance(value, dict):
            value = "; ".join(f"{key} -> {text!r}" for key, text in value.items()) or "none"
        elif isinstance(value, tuple):
            value = ", ".join(value) or "none"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        rows.append((part.name.replace("_", " "), str(value)))
    return rows


def part_lines(part: Any, indent: str = "") -> Iterator[str]:  # noqa: ANN401  # a part of a format
    """A part of a format, one field a line, leaving out what is as by default."""
    yield f"{indent}{type(part).__name__}"
    for one in fields(part):
        value = getattr(part, one.name)
        default = one.default
        if default is MISSING and one.default_factory is not MISSING:
            default = one.default_factory()
        if value == default:
            continue
        if is_dataclass(value):
            yield f"{indent}  {one.name}:"
            yield from part_lines(value, indent + "    ")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            yield f"{indent}  {one.name}:"
            for item in value:
                yield from part_lines(item, indent + "    ")
        else:
            shown = value.value if isinstance(value, Enum) else value
            yield f"{indent}  {one.name}: {shown!r}"


# ---- JSON ---------------------------------------------------------------------------------------


def report_json(report: Report) -> str:
    """The report for machines."""
    analysis = report.analysis
    found: dict[str, Any] = {
        "title": report.title,
        "why": report.why,
        "format": as_data(report.format),
        "samples": [as_data(sample) for sample in report.samples],
        "constraint": report.constraint,
    }
    if analysis is not None:
        found["comparisons"] = [as_data(one) for one in analysis.comparisons]
        found["supports"] = as_data(analysis.supports)
        found["undecided"] = list(analysis.undecided)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def as_data(value: Any) -> Any:  # noqa: ANN401  # any part
    """A value as JSON data; a dataclass says its own name in `part`."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {one.name: as_data(getattr(value, one.name)) for one in fields(value)}
        return {"part": type(value).__name__, **inner}
    if isinstance(value, list | tuple):
        return [as_data(one) for one in value]
    if isinstance(value, dict):
        return {str(key): as_data(one) for key, one in value.items()}
    return value.value if isinstance(value, Enum) else value
