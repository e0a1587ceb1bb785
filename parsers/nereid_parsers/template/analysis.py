r"""Infers a Format from a chat template by comparing renderings. Start at `analyze_template`.

The analysis does not read the logic of a template. It renders *probes*, which are conversations
with texts that occur in no template, and compares the renderings. Two probes that differ in one
thing show one part of the format. An example:

    >>> template = '''
    ... {%- for m in messages %}
    ... {{- '<|im_start|>' + m.role + '\n' }}
    ... {%- if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}
    ... {{- m.content }}
    ... {%- for c in m.tool_calls %}
    ... {{- '<tool_call>' + c.function | tojson + '</tool_call>' }}
    ... {%- endfor %}
    ... {{- '<|im_end|>\n' }}
    ... {%- endfor %}
    ... {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}'''

    Probe                 user: "Quokka asks for something."
                          assistant: "Wombat gives the answer."
    Rendered answer       <|im_start|>assistant\nWombat gives the answer.<|im_end|>\n
    Changed probe         The assistant's message has the reasoning "Numbat thinks about it."
    Rendered answer       <|im_start|>assistant\n<think>Numbat thinks about it.</think>Wombat
                          gives the answer.<|im_end|>\n
    Added text            <think>Numbat thinks about it.</think>
    Derived markers       `<think>` opens reasoning, and `</think>` closes reasoning.

    >>> analyze_template(template).format.layout.reasoning.closes
    ('</think>',)

The analysis has seven phases, and each phase is a module. For each comparison, the table shows what
differs between the two probes, and what the analysis finds for the template of the example.

    probe.py       Find a form of messages that the template renders, see conversation.py.
    header.py      Find the text that opens the model's turn.
                     G   the generation prompt       <|im_start|>assistant\n is the header
    reasoning.py   Find the markers of reasoning. R2 to R4 are needed only if R1 finds no markers.
                     R1  reasoning in a message      <think> and </think> are the markers
                     R2  a thinking switch           (the template has no switch)
                     R3  a thinking switch           (the template has no switch)
                     R4  (searches the source)       (not needed)
                     R5  reasoning before a call     </think> is written there, too
    content.py     Find the markers around content, and what ends a turn.
                     C1  an answer                   no markers; <|im_end|> ends the turn
                     C2  content before a call       no markers
    tools.py       Find the markup of tool calls. The modules of calls/ infer its format.
                     T1  a call instead of content   <tool_call>{..}</tool_call> is a call
                     T2  a second call               calls follow each other without a separator
                     T3  another function            the key `name` contains the name
                     T4 to T7  other arguments       the key `arguments` contains the arguments
                     T8  content before a call       a message can have content and calls
    proof.py       Parse the renderings with the format. The result must be equal to the probes.
    report.py      Show the comparisons, the format and the samples.

For the example, the result is the layout `Sections(Reasoning("<think>", "</think>"), None, tools)`.
Here `tools` declares that each call is a JSON object between `<tool_call>` and `</tool_call>`.

The comparisons cannot show everything. The module known_formats.py declares the formats of
templates whose renderings are ambiguous, the other ways in which a model family writes calls, and
the formats of tool calls for templates that render no tool calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Messages, Reasoning, Sections, Source, Wrapper
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.content import compare_content, compare_content_with_call
from nereid_parsers.template.conversation import BOS_TOKEN, EOS_TOKEN
from nereid_parsers.template.header import compare_generation_prompt
from nereid_parsers.template.known_formats import QuarantineEntry, find_quarantined
from nereid_parsers.template.model_turn import ModelTurn, header_after_result, turn_markers
from nereid_parsers.template.probe import Prober
from nereid_parsers.template.proof import ONE_CALL_PROOF, Proof, parse_renderings
from nereid_parsers.template.reasoning import find_reasoning
from nereid_parsers.template.rendered_reasoning import ReasoningFindings, find_rendered_reasoning
from nereid_parsers.template.report import Supports, TemplateAnalysis
from nereid_parsers.template.sandbox.environment import CompiledTemplate
from nereid_parsers.template.sandbox.limits import Budget
from nereid_parsers.template.tools import (
    NO_CALLS,
    ToolFindings,
    compare_call_presence,
    compare_two_calls,
    find_tools,
)


def analyze_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    **template_kwargs: Any,  # noqa: ANN401  # a template may read variables of any type
) -> TemplateAnalysis:
    """Infer how a model writes reasoning, content and tool calls, from its chat template.

    The result contains a `Format`, with which the parser splits the output of the model. It also
    contains the comparisons of rendered conversations that show this format.

    Example: a template that renders `<think>REASONING</think>CONTENT` implies a format in which
    `<think>` and `</think>` enclose reasoning.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering. The analysis does not
            try other values of these variables.

    Raises:
        TemplateError: The template does not compile.
        LimitError: The template exceeds a limit of `template/sandbox/limits.py`. A LimitError is a
            TemplateError.
    """
    return analyze_checkpoint_template(jinja_source, bos_token, eos_token, template_kwargs)


def analyze_checkpoint_template(
    jinja_source: str,
    bos_token: str = "",
    eos_token: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    added_tokens: Collection[str] = (),
) -> TemplateAnalysis:
    """Infer how a model writes reasoning, content and tool calls, as `analyze_template` does.

    This function also uses the added tokens of the tokenizer. If the template renders no tool
    calls, the added tokens can show the format of the tool calls.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering.
        added_tokens: The tokens that were added to the tokenizer's vocabulary, such as
            "<tool_call>".
    """
    # The prober renders test conversations with the template, and stores findings for the report.
    prober = Prober(
        CompiledTemplate(jinja_source, Budget()),
        bos=bos_token or BOS_TOKEN,
        eos=eos_token or EOS_TOKEN,
        kwargs=template_kwargs or {},
        added_tokens=frozenset(added_tokens),
    )
    if prober.template.changes_lists:
        prober.undecided.append(
            "The template changes lists, which the sandbox of transformers forbids."
        )
    has_calls = _choose_message_form(prober)  # This function also sets `prober.form`.
    turn = compare_generation_prompt(prober)  # the text around the model's answers
    # The formats of a few templates cannot be inferred, so they are declared in known_formats.py.
    known_format = find_quarantined(jinja_source)
    if known_format is None:
        return _infer(turn)
    return _use_known_format(turn, known_format, has_calls=has_calls)


def _choose_message_form(prober: Prober) -> bool:
    """Find a form of messages that the template can render, and store the form in `prober.form`.

    Templates expect the same message in different forms. For example, content is a string or a list
    of parts. The chosen form is one in which the template renders content and tool calls. If the
    template never renders tool calls, the template renders only content in the chosen form.

    Mutates: `prober.form`, and `prober.undecided` if the template never renders content.

    Returns:
        Whether the template renders tool calls.
    """
    content_form = prober.find_content_form()
    if content_form is not None:
        prober.form = content_form
    else:
        error_messages = list(prober.refusals.values())
        why = error_messages[0] if error_messages else "the rendering does not contain the content"
        prober.undecided.append(f"The template does not render plain content: {why}")
    call_form = prober.find_call_form()  # This form is a variant of `prober.form`.
    if call_form is not None:
        prober.form = call_form
    return call_form is not None


class _Findings(NamedTuple):
    """What the comparisons of renderings show about each part of a model's output.

    Attributes:
        reasoning: The findings about reasoning.
        wrapper: The markers around the content, or None.
        tools: The findings about tool calls.
    """

    reasoning: ReasoningFindings
    wrapper: Wrapper | None
    tools: ToolFindings


class _CheckedFormat(NamedTuple):
    """A format, and the rendered messages that were parsed with the format to check it."""

    format: Format
    proofs: list[Proof]


def _use_known_format(
    turn: ModelTurn, known_format: QuarantineEntry, *, has_calls: bool
) -> TemplateAnalysis:
    """Return the analysis of a template whose format is declared in known_formats.py.

    The comparisons of renderings are made for the report, although the format is not inferred from
    these comparisons. As for an inferred format, rendered messages are parsed with the format to
    check it.

    Mutates: `turn.prober`, which stores the comparisons and the sentences for the report.

    Args:
        turn: The model's turn in the renderings. `turn.prober` renders the conversations.
        known_format: The declaration of the format.
        has_calls: Whether the template renders tool calls.
    """
    turn.prober.undecided.append(
        f"The format was recognised, not inferred ({known_format.model}). {known_format.reason}"
    )
    reasoning = find_rendered_reasoning(turn)
    tools = _compare_known_calls(turn, has_calls=has_calls)
    # The declared format contains the markers of reasoning and content. Only the markers that end a
    # turn are inferred, so no findings about reasoning are needed.
    content = compare_content(turn, ReasoningFindings())
    turn = replace(turn, end_markers=content.end_markers)
    findings = _Findings(reasoning, wrapper=None, tools=tools)
    fmt = _with_turn_ends(known_format.make_format(), content.end_markers)
    proofs = parse_renderings(fmt, turn, reasoning, tools)
    return _result(turn, findings, _CheckedFormat(fmt, proofs))


def _compare_known_calls(turn: ModelTurn, *, has_calls: bool) -> ToolFindings:
    """Make the comparisons T1 and T2 of tool calls whose format is known, and return the findings.

    Mutates: `turn.prober`, which records the comparisons for the report.

    Args:
        turn: The model's turn in the renderings.
        has_calls: Whether the template renders tool calls.
    """
    renderer = CallRenderer(turn)
    compare_call_presence(renderer)  # Only the report needs this comparison (T1).
    two_calls = compare_two_calls(renderer)
    form_of_calls = "recognised" if has_calls else NO_CALLS  # The report shows this word.
    return ToolFindings(form=form_of_calls, is_parallel=bool(two_calls))


def _with_turn_ends(fmt: Format, end_markers: tuple[str, ...]) -> Format:
    """Return a copy of a known format that declares the markers that end the model's turn.

    A layout of messages already declares some of these markers, so only the other markers are
    added. A format with another layout is returned unchanged.
    """
    if not isinstance(fmt.layout, Messages):
        return fmt
    message_ends = fmt.layout.ends
    return replace(fmt, ends=tuple(end for end in end_markers if end not in message_ends))


def _infer(turn: ModelTurn) -> TemplateAnalysis:
    """Infer the format of a model's output from rendered conversations, and check the format.

    To check the format, the parser parses rendered messages. If a tool call is parsed wrongly, the
    result contains no format of tool calls, and the parser then returns tool calls as content.

    Mutates: `turn.prober`, which stores the comparisons and the open questions for the report.

    Args:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations.
    """
    reasoning = find_reasoning(turn)
    content = compare_content(turn, reasoning)
    turn = replace(turn, end_markers=content.end_markers)  # for the comparisons of tool calls
    # Some templates write markers around the content only in messages with tool calls.
    wrapper = content.wrapper or compare_content_with_call(turn, reasoning.part)
    tools = find_tools(turn, reasoning.part, wrapper)
    findings = _Findings(reasoning, wrapper, tools)
    checked = _make_checked_format(turn, findings)
    wrong_call = _wrong_call(checked.proofs)
    if wrong_call is not None:
        turn.prober.undecided.append(
            "The format of the calls could not be inferred: the parser did not return the call "
            f"that the template renders as {wrong_call.text!r}."
        )
        without_calls = ToolFindings(inner_headers=tools.inner_headers)
        findings = _Findings(reasoning, wrapper, without_calls)
        checked = _make_checked_format(turn, findings)
    turn.prober.undecided += [_wrong_parts(proof) for proof in checked.proofs if proof.differs]
    return _result(turn, findings, checked)


def _make_checked_format(turn: ModelTurn, findings: _Findings) -> _CheckedFormat:
    """Combine the findings into a format, and parse rendered messages with this format.

    Mutates: `turn.prober.undecided`, see `_make_format`.
    """
    fmt = _make_format(turn, findings)
    return _CheckedFormat(fmt, parse_renderings(fmt, turn, findings.reasoning, findings.tools))


def _wrong_call(proofs: list[Proof]) -> Proof | None:
    """Return the message with one tool call if this message was parsed wrongly, or else None."""
    wrong_calls = [proof for proof in proofs if proof.name == ONE_CALL_PROOF and proof.differs]
    return wrong_calls[0] if wrong_calls else None


def _wrong_parts(proof: Proof) -> str:
    """Return a text for the report. The text names the wrongly parsed parts of a message."""
    return (
        f"The message with {proof.name} is parsed wrongly: {', '.join(proof.differs)} differ. "
        f"The template renders the message as {proof.text!r}."
    )


def _make_format(turn: ModelTurn, findings: _Findings) -> Format:
    """Combine the findings into a `Format`, with which the parser reads a model's output.

    If the findings contradict each other, return the format for plain content.

    Mutates: `turn.prober.undecided`. A contradiction is appended as a sentence for the report.

    Args:
        turn: The text around the model's answers in rendered conversations.
        findings: The findings. The attributes `part` declare the markers of reasoning and the form
            of tool calls.
    """
    reasoning = findings.reasoning.part
    ends = _ends_of_format(turn, findings)
    turn_starts = turn_markers(turn, _visible_markers(reasoning))
    sources = (Source("inferred from the chat template"),)
    try:
        layout = Sections(reasoning=reasoning, content=findings.wrapper, tools=findings.tools.part)
        return Format("inferred", layout, ends=ends, turn=turn_starts, sources=sources)
    except FormatError as error:
        turn.prober.undecided.append(f"The inferred parts contradict each other: {error}")
        return Format("plain", Sections(), ends=ends, sources=sources)


def _visible_markers(part: Reasoning | None) -> list[str]:
    """Return the markers of reasoning without the white space around them."""
    if part is None:
        return []
    return [marker.strip() for marker in (*part.opens, *part.closes)]


def _ends_of_format(turn: ModelTurn, findings: _Findings) -> tuple[str, ...]:
    """Return the texts that the parser removes from the output because they end a turn.

    Some models write the header of a turn, such as `<|assistant|>`, inside their output. The parser
    must remove these headers too. Example: ("<|end|>", "<|assistant|>").

    Args:
        turn: The text around the model's answers. It contains the markers that end a turn.
        findings: The findings about tool calls contain further markers that end a turn. The
            findings about tool calls and about reasoning contain the headers inside the output.
    """
    ends = [
        *turn.end_markers,
        *findings.tools.end_markers,
        *findings.tools.inner_headers,
        *findings.reasoning.inner_headers,
        header_after_result(turn),  # "" if the model writes no header after a tool's result
    ]
    return tuple(dict.fromkeys(end for end in ends if end))  # without duplicates


def _result(turn: ModelTurn, findings: _Findings, checked: _CheckedFormat) -> TemplateAnalysis:
    """Return the result of the whole analysis, which the report shows to the user.

    The result contains the format, and everything that supports it: the comparisons, the parts of a
    conversation that the template renders, the open questions, and the checked messages.

    Args:
        turn: The text around the model's answers. `turn.prober` has recorded the comparisons.
        findings: What the comparisons show.
        checked: The format, and the messages that were parsed to check the format.
    """
    prober = turn.prober
    reasoning = findings.reasoning
    tools = findings.tools
    supports = Supports(
        content=True,
        reasoning=reasoning.fields,
        switches=reasoning.switches,
        calls=tools.form,
        parallel_calls=tools.is_parallel,
        content_with_calls=tools.with_content,
        arguments=prober.form.arguments,
        ids=prober.form.ids,
    )
    return TemplateAnalysis(
        checked.format,
        comparisons=tuple(prober.comparisons),
        supports=supports,
        undecided=tuple(prober.undecided),
        proofs=tuple(checked.proofs),
    )
