r"""START HERE: `analyze_template` infers a Format from a chat template by comparing renderings.

Each comparison renders two conversations that differ in one thing. The difference between the two
renderings shows one part of the format. Take this template as an example:

    {%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}
    {{- m.content }}
    {%- for c in m.tool_calls %}
    {{- '<tool_call>' + c.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}

The tree below shows the modules and their comparisons. For each comparison, it shows the two
conversations, what the second rendering has in addition (+), and what follows for this template.

    analyze_template
    |
    |-- frame.py: how the model's turn opens
    |   `-- G   without, with generation prompt  + <|im_start|>assistant\n      header
    |
    |-- reasoning.py: how reasoning is marked (R2 to R5 are needed only if R1 finds no markers)
    |   |-- R1  message without, with reasoning  + <think>REASONING</think>     markers
    |   |-- R2  thinking switch on, off          (this template has no switch)
    |   |-- R3  thinking switch on, off          (this template has no switch)
    |   |-- R4  a message without reasoning      (this template has no empty <think></think>)
    |   |-- R5  the template's string constants  '<think>' and '</think>'       markers
    |   `-- R6  call without, with reasoning     + <think>REASONING</think>     always closed
    |
    |-- content.py: what surrounds content, and what ends a turn
    |   |-- C1  question without, with answer    + CONTENT<|im_end|>\n          no markers; turn end
    |   `-- C2  call without, with content       + CONTENT                      no markers
    |
    |-- tools.py: how calls are written
    |   |-- T1  content, a call instead          + <tool_call>{..}</tool_call>  a call
    |   |-- T2  one call, two calls              + <tool_call>{..}</tool_call>  calls in a row
    |   |-- T3  one function, another            inside {..}                    key of the name
    |   |-- T4 to T7  other arguments            inside {..}                    key of arguments
    |   |-- T8  call without, with content       + CONTENT                      both are possible
    |   `-- calls/: one reader for each form of calls; the first reader that matches is used
    |
    `-- proof.py: the renderings are parsed with the format; the result must be the messages again

Together, these findings are the layout `Sections(Reasoning("<think>", "</think>"), None, tools)`,
where `tools` is a section of JSON objects between `<tool_call>` and `</tool_call>`. Templates that
cannot be analysed by comparisons are listed in quarantine.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Messages, Reasoning, Sections, Source, Wrapper
from nereid_parsers.template.analysis_result import AnalysisResult, Supports
from nereid_parsers.template.content import compare_content, compare_content_with_call
from nereid_parsers.template.conversation import BOS_TOKEN, EOS_TOKEN
from nereid_parsers.template.difference import Comparison
from nereid_parsers.template.environment import CompiledTemplate
from nereid_parsers.template.frame import (
    TurnFrame,
    compare_generation_prompt,
    headers_after_results,
    turn_markers,
)
from nereid_parsers.template.limits import Budget
from nereid_parsers.template.probe import Prober, unmask_call_ids
from nereid_parsers.template.proof import ONE_CALL_PROOF, Proof, parse_renderings
from nereid_parsers.template.quarantine import find_quarantined
from nereid_parsers.template.reasoning import (
    ReasoningFindings,
    find_reasoning,
    find_rendered_reasoning,
)
from nereid_parsers.template.report import as_text
from nereid_parsers.template.tools import (
    CallRenderer,
    ToolFindings,
    compare_call_presence,
    compare_two_calls,
    find_tools,
)


@dataclass(frozen=True, slots=True)
class TemplateAnalysis(AnalysisResult):
    """The result of `analyze_template`, with a method that explains the result as text."""

    def explain(self) -> str:
        """Return the comparisons, the format, the checked samples and open questions as text."""
        return as_text(self)


def analyze_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    **template_kwargs: Any,  # noqa: ANN401  # a template may read variables of any type
) -> TemplateAnalysis:
    """Infer the format that a chat template implies.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering. The analysis does not
            try other values of these variables.

    Raises:
        TemplateError: The template does not compile.
        LimitError: The template exceeds a limit of `template/limits.py`. This is a TemplateError.
    """
    template = CompiledTemplate(jinja_source, Budget())
    quarantined = find_quarantined(jinja_source)
    prober = Prober(template, bos_token or BOS_TOKEN, eos_token or EOS_TOKEN, template_kwargs)
    notes: list[str] = []
    if template.changes_lists:
        notes.append("The template changes lists, which the sandbox of transformers forbids.")
    if not prober.find_content_form():
        notes.append(f"The template does not render plain content: {_first_refusal(prober)}")
    prober.find_call_form()
    frame, comparison = compare_generation_prompt(prober)
    if quarantined is not None:
        entry, fmt = quarantined
        notes.append(f"The format was recognised, not inferred ({entry.model}). {entry.reason}")
        return _analyze_recognised(fmt, frame, comparison, notes)
    return _infer(frame, comparison, notes)


def _first_refusal(prober: Prober) -> str:
    """Return the template's first error message, or a phrase that says that no error occurred."""
    return next(iter(prober.refusals.values()), "the rendering does not contain the content")


def _analyze_recognised(
    fmt: Format, frame: TurnFrame, comparison: Comparison, notes: list[str]
) -> TemplateAnalysis:
    """Return the analysis of a template whose format is given in quarantine.py."""
    reasoning = find_rendered_reasoning(frame)
    renderer = CallRenderer(frame)
    _, presence = compare_call_presence(renderer)
    two_calls, parallel = compare_two_calls(renderer)
    tools = ToolFindings(is_parallel=bool(two_calls), comparisons=(presence, parallel))
    if frame.prober.has_call_form:
        tools = replace(tools, form="recognised")
    compare_content(frame, None, None)  # sets the end markers of the frame
    if isinstance(fmt.layout, Messages):
        message_ends = fmt.layout.ends
        turn_ends = tuple(end for end in frame.end_markers if end not in message_ends)
        fmt = replace(fmt, ends=turn_ends)
    proofs = parse_renderings(fmt, frame, reasoning, tools)
    return TemplateAnalysis(
        fmt,
        comparisons=_with_call_ids([comparison, *tools.comparisons]),
        supports=_supports(frame.prober, reasoning, tools),
        undecided=tuple(notes),
        proofs=tuple(proofs),
    )


def _infer(frame: TurnFrame, comparison: Comparison, notes: list[str]) -> TemplateAnalysis:
    """Make all comparisons, infer the format and check the format."""
    reasoning = find_reasoning(frame)
    wrapper, content_comparisons = compare_content(frame, reasoning.part, reasoning.wrapper)
    if wrapper is None:
        wrapper, more_comparisons = compare_content_with_call(frame, reasoning.part)
        content_comparisons += more_comparisons
    tools = find_tools(frame, reasoning.part, wrapper)
    fmt = _make_format(frame, reasoning.part, wrapper, tools, notes)
    proofs = parse_renderings(fmt, frame, reasoning, tools)
    wrong_call = _wrong_call(proofs)
    if wrong_call is not None:
        notes.append(
            "The format of the calls could not be inferred: the parser did not return the call "
            f"that the template renders as {wrong_call.text!r}."
        )
        tools = tools.without_calls()
        fmt = _make_format(frame, reasoning.part, wrapper, tools, notes)
        proofs = parse_renderings(fmt, frame, reasoning, tools)
    comparisons = [
        comparison,
        *reasoning.comparisons,
        *content_comparisons,
        *tools.comparisons,
    ]
    return TemplateAnalysis(
        fmt,
        comparisons=_with_call_ids(comparisons),
        supports=_supports(frame.prober, reasoning, tools),
        undecided=(*notes, *reasoning.undecided, *tools.undecided, *_failures(proofs)),
        proofs=tuple(proofs),
    )


def _wrong_call(proofs: list[Proof]) -> Proof | None:
    """Return the proof with one tool call if the parser did not return its tool call."""
    for proof in proofs:
        if proof.name == ONE_CALL_PROOF and proof.differs:
            return proof
    return None


def _failures(proofs: list[Proof]) -> list[str]:
    """Return a sentence for each proof in which the parser did not return the message."""
    return [
        f"The message with {proof.name} is parsed wrongly: {', '.join(proof.differs)} differ. "
        f"The template renders the message as {proof.text!r}."
        for proof in proofs
        if proof.differs
    ]


def _with_call_ids(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with real ids of tool calls instead of the masking characters."""
    return tuple(
        replace(
            comparison,
            left=unmask_call_ids(comparison.left),
            right=unmask_call_ids(comparison.right),
            finding=unmask_call_ids(comparison.finding),
        )
        for comparison in comparisons
    )


def _make_format(
    frame: TurnFrame,
    reasoning: Reasoning | None,
    wrapper: Wrapper | None,
    tools: ToolFindings,
    notes: list[str],
) -> Format:
    """Return the format with the inferred parts.

    If the parts contradict each other, return the format for plain content and append the reason to
    `notes`.
    """
    headers = (*frame.inner_headers, *headers_after_results(frame))
    ends = tuple(dict.fromkeys((*frame.end_markers, *tools.end_markers, *headers)))
    reasoning_markers = (*reasoning.opens, *reasoning.closes) if reasoning is not None else ()
    turn = turn_markers(frame, tuple(marker.strip() for marker in reasoning_markers))
    sources = (Source("inferred from the chat template"),)
    try:
        layout = Sections(reasoning, wrapper, tools.part)
        return Format("inferred", layout, ends=ends, turn=turn, sources=sources)
    except FormatError as error:
        notes.append(f"The inferred parts contradict each other: {error}")
        return Format("plain", Sections(), ends=ends, sources=sources)


def _supports(prober: Prober, reasoning: ReasoningFindings, tools: ToolFindings) -> Supports:
    return Supports(
        content=True,
        reasoning=reasoning.fields,
        switches=reasoning.switches,
        calls=tools.form,
        parallel_calls=tools.is_parallel,
        content_with_calls=tools.with_content,
        arguments=prober.call_form.arguments,
        ids=prober.call_form.ids,
    )
