"""START HERE: `analyze_template` infers a Format from a chat template by comparing renderings.

prompt with and without generation prompt   how the model's turn opens        frame.py
with reasoning, switches turned             what marks reasoning              reasoning.py
an answer                                   what stands around content        content.py
calls: none, one, two; arguments            how calls are written             tools.py, calls_*.py
the same renderings, parsed                 that all of it is right           proof.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Messages, Reasoning, Sections, Source, Wrapper
from nereid_parsers.template.content import compare_content, compare_content_with_call
from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.environment import CompiledTemplate
from nereid_parsers.template.frame import (
    Frame,
    compare_generation_prompt,
    headers_behind_results,
    turn_markers,
)
from nereid_parsers.template.limits import Budget
from nereid_parsers.template.probe import BOS, EOS, Prober, without_marks
from nereid_parsers.template.proof import Proof, prove
from nereid_parsers.template.quarantine import exceptional
from nereid_parsers.template.reasoning import FoundReasoning, find_reasoning, note_reasoning
from nereid_parsers.template.tools import (
    FoundTools,
    compare_call_presence,
    compare_two_calls,
    find_tools,
)


@dataclass(frozen=True, slots=True)
class Supports:
    """What a template can render.

    reasoning   the message fields from which reasoning is rendered ("parts", "blocks" too).
    switches    what turns thinking, and what the generation prompt then opens.
    calls       in what form, "none" if not at all.
    arguments   "object" or "text", as calls' arguments must be put.
    ids         "plain", or "numbered" where a call is known by its id alone.
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
    """What a chat template says of the model's format.

    format        the format; plain content where nothing could be learned.
    comparisons   what was compared, and what followed.
    supports      what the template can render.
    undecided     what could not be decided, and why.
    proofs        renderings that were parsed with the format, and what differed.
    """

    format: Format
    comparisons: tuple[Comparison, ...] = ()
    supports: Supports = Supports()
    undecided: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()

    def explain(self) -> str:
        """The comparisons, the format, what was proven and what was not decided, as text."""
        from nereid_parsers.template.report import as_text

        return as_text(self)


def analyze_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    **template_kwargs: Any,  # noqa: ANN401  # whatever a template may ask for
) -> TemplateAnalysis:
    """Infer the format that a chat template implies.

    `bos_token` and `eos_token` as the tokenizer has them, where known. `template_kwargs` are what
    the template is always rendered with; switches among them are not tried out.

    Raises: TemplateError for a template that does not compile, renders nothing at all, or does not
    keep within the limits of `template/limits.py` (a `LimitError`).
    """
    template = CompiledTemplate(jinja_source, Budget())
    known = exceptional(jinja_source)
    prober = Prober(template, bos_token or BOS, eos_token or EOS, template_kwargs)
    notes: list[str] = []
    if template.changes_lists:
        notes.append("the template changes lists, which transformers' sandbox refuses")
    if not prober.find_content_form():
        notes.append(f"plain content does not come out: {_first_refusal(prober)}")
    prober.find_call_shape()
    frame, comparisons = compare_generation_prompt(prober)
    if known is not None:
        notes.append(f"recognised, not inferred ({known[0].model}): {known[0].reason}")
        return _recognised(known[1], frame, comparisons, notes)
    return _infer(prober, frame, comparisons, notes)


def _recognised(
    fmt: Format, frame: Frame, comparisons: list[Comparison], notes: list[str]
) -> TemplateAnalysis:
    """The analysis of a template in quarantine: its format is given, what it renders is not."""
    reasoning, tools = FoundReasoning(), FoundTools()
    note_reasoning(frame, reasoning)
    compare_call_presence(frame, None, None, tools)
    compare_two_calls(frame, None, None, tools)
    if frame.prober.has_call_shape:
        tools.form = "recognised"
    compare_content(frame, None, None)
    if isinstance(fmt.layout, Messages):  # what ends a turn is the template's own affair
        fmt = replace(fmt, ends=tuple(end for end in frame.ends if end not in fmt.layout.ends))
    proofs = prove(fmt, frame, reasoning, tools)
    supports = _supports(frame.prober, reasoning, tools)
    compared = (*comparisons, *tools.comparisons)
    return TemplateAnalysis(fmt, _readable(compared), supports, tuple(notes), tuple(proofs))


def _readable(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Comparisons with ids in the place of the marks that stand for them."""
    return tuple(
        replace(
            one, left=without_marks(one.left), right=without_marks(one.right),
            finding=without_marks(one.finding),
        )
        for one in comparisons
    )  # fmt: skip


def _infer(
    prober: Prober, frame: Frame, comparisons: list[Comparison], notes: list[str]
) -> TemplateAnalysis:
    reasoning = find_reasoning(frame)
    wrapper, compared = compare_content(frame, reasoning.part, reasoning.wrapper)
    if wrapper is None:
        wrapper, more = compare_content_with_call(frame, reasoning.part)
        compared += more
    tools = find_tools(frame, reasoning.part, wrapper)
    fmt = _format(frame, reasoning.part, wrapper, tools, notes)
    proofs = prove(fmt, frame, reasoning, tools)
    unread = next((one for one in proofs if one.name == "one call" and one.differs), None)
    if unread is not None:
        notes.append(f"calls are of no form that can be read back: {unread.text!r}")
        tools.forget_calls()
        fmt = _format(frame, reasoning.part, wrapper, tools, notes)
        proofs = prove(fmt, frame, reasoning, tools)
    return TemplateAnalysis(
        fmt,
        _readable((*comparisons, *reasoning.comparisons, *compared, *tools.comparisons)),
        _supports(prober, reasoning, tools),
        (*notes, *reasoning.undecided, *tools.undecided, *_unproven(proofs)),
        tuple(proofs),
    )


def _unproven(proofs: list[Proof]) -> list[str]:
    return [
        f"{proof.name}: {', '.join(proof.differs)} did not come back from {proof.text!r}"
        for proof in proofs
        if proof.differs
    ]


def _format(
    frame: Frame,
    reasoning: Reasoning | None,
    wrapper: Wrapper | None,
    tools: FoundTools,
    notes: list[str],
) -> Format:
    headers = (*frame.inner_headers, *headers_behind_results(frame))
    ends = tuple(dict.fromkeys((*frame.ends, *tools.ends, *headers)))
    marks = (*reasoning.opens, *reasoning.closes) if reasoning is not None else ()
    turn = turn_markers(frame, tuple(mark.strip() for mark in marks))
    source = (Source("inferred from the chat template"),)
    try:
        layout = Sections(reasoning, wrapper, tools.part)
        return Format("inferred", layout, ends=ends, turn=turn, sources=source)
    except FormatError as error:
        notes.append(f"the parts found do not make a format: {error}")
        return Format("plain", Sections(), ends=ends, sources=source)


def _supports(prober: Prober, reasoning: FoundReasoning, tools: FoundTools) -> Supports:
    return Supports(
        content=True,
        reasoning=reasoning.fields,
        switches=reasoning.switches,
        calls=tools.form,
        parallel_calls=tools.is_parallel,
        content_with_calls=tools.with_content,
        arguments=prober.shape.arguments,
        ids=prober.shape.ids,
    )


def _first_refusal(prober: Prober) -> str:
    return next(iter(prober.refusals.values()), "it is not in what is rendered")
