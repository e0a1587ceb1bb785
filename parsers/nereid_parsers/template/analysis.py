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

The comparisons cannot show everything. The module known_formats.py declares three things: the
formats of templates whose renderings are ambiguous, forms of tool calls that a model writes but its
template does not render, and the formats of tool calls for templates that render no tool calls.
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

    The result contains a `Format`: the parser splits the output of the model with this format. The
    result also contains the comparisons of rendered conversations that show this format.

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

    In addition, this function uses the tokens that were added to the tokenizer's vocabulary. If the
    template renders no tool calls, added tokens such as "<tool_call>" can show the format of the
    tool calls.

    Args:
        jinja_source: The template.
        bos_token: The tokenizer's token for the beginning of a text, if known.
        eos_token: The tokenizer's token for the end of a turn, if known.
        template_kwargs: Template variables that are set in every rendering.
        added_tokens: The tokens that were added to the tokenizer's vocabulary.
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
    has_calls = _choose_message_form(prober)  # `_choose_message_form` sets `prober.form`.
    turn = compare_generation_prompt(prober)  # the text around the model's answers
    # The format of a few templates cannot be inferred. known_formats.py declares these formats.
    known_format = find_quarantined(jinja_source)
    if known_format is None:
        return _infer(turn)
    return _use_known_format(turn, known_format, has_calls=has_calls)


def _choose_message_form(prober: Prober) -> bool:
    """Find a form of messages that the template can render, and store the form in `prober.form`.

    Templates expect a message in different forms. For example, the content of a message is a string
    in one form and a list of parts in another form. The function first searches for a form with
    rendered content. Then it searches the variants of this form for one with rendered tool calls.

    Mutates: `prober.form`. If the template never renders content, a sentence for the report is
    appended to `prober.undecided`.

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
    call_form = prober.find_call_form()  # a variant of `prober.form`
    if call_form is not None:
        prober.form = call_form
    return call_form is not None


class _Findings(NamedTuple):
    """The findings of all comparisons of renderings, for each part of a model's output.

    Attributes:
        reasoning: The findings about reasoning.
        wrapper: The markers around the content, or None.
        tools: The findings about tool calls.
    """

    reasoning: ReasoningFindings
    wrapper: Wrapper | None
    tools: ToolFindings


class _CheckedFormat(NamedTuple):
    """A format, and the rendered messages that were parsed with this format to check it.

    Attributes:
        findings: The findings from which the format was made.
        format: The format.
        proofs: The parsed messages. A proof lists the parts that were parsed wrongly.
    """

    findings: _Findings
    format: Format
    proofs: list[Proof]


def _use_known_format(
    turn: ModelTurn, known_format: QuarantineEntry, *, has_calls: bool
) -> TemplateAnalysis:
    """Return the analysis of a template whose format is declared in known_formats.py.

    The declaration replaces the inference. Rendered conversations are still compared, because the
    report shows these comparisons. To check the declared format, the parser parses rendered
    messages with this format.

    Mutates: `turn.prober`, which stores the comparisons and the sentences for the report.

    Args:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations.
        known_format: The declared format, with the model and the reason for the declaration.
        has_calls: Whether the template renders tool calls.
    """
    turn.prober.undecided.append(
        f"The format was recognised, not inferred ({known_format.model}). {known_format.reason}"
    )
    reasoning = find_rendered_reasoning(turn)
    tools = _compare_known_calls(turn, has_calls=has_calls)
    # Only the markers that end a turn are inferred from this comparison. The declared format
    # contains the markers of reasoning and content, so empty findings about reasoning suffice.
    end_markers = compare_content(turn, ReasoningFindings()).end_markers
    turn = replace(turn, end_markers=end_markers)
    findings = _Findings(reasoning, wrapper=None, tools=tools)
    fmt = _with_turn_ends(known_format.make_format(), end_markers)
    proofs = parse_renderings(fmt, turn, reasoning, tools)
    return _result(turn, _CheckedFormat(findings, fmt, proofs))


def _compare_known_calls(turn: ModelTurn, *, has_calls: bool) -> ToolFindings:
    """Compare rendered tool calls whose format is already known, and return the findings.

    The report shows two comparisons: an answer with and without a tool call (the label is T1), and
    a message with one and with two tool calls (T2).

    Mutates: `turn.prober`, which records the comparisons for the report.

    Args:
        turn: The text around the model's answers in the renderings.
        has_calls: Whether the template renders tool calls.
    """
    renderer = CallRenderer(turn)
    compare_call_presence(renderer)  # Only the report needs this comparison.
    two_calls = compare_two_calls(renderer)  # "" if a message can have only one tool call
    form_of_calls = "recognised" if has_calls else NO_CALLS  # The report shows this word.
    return ToolFindings(form=form_of_calls, is_parallel=bool(two_calls))


def _with_turn_ends(fmt: Format, end_markers: tuple[str, ...]) -> Format:
    """Add the markers that end the model's turn to a copy of a known format.

    If the layout of the format is `Messages`, the layout already declares some of the markers, so
    only the other markers are added. A format with another layout is returned unchanged.
    """
    if not isinstance(fmt.layout, Messages):
        return fmt
    message_ends = fmt.layout.ends
    return replace(fmt, ends=tuple(end for end in end_markers if end not in message_ends))


def _infer(turn: ModelTurn) -> TemplateAnalysis:
    """Infer the format of a model's output from rendered conversations, and check the format.

    Example: a template that renders `<think>REASONING</think>CONTENT` gives a format in which
    `<think>` and `</think>` enclose reasoning. To check the format, the parser parses rendered
    messages with this format. If the parser does not return the rendered tool call, the result is a
    format without tool calls.

    Mutates: `turn.prober`, which stores the comparisons and the open questions for the report.

    Args:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations.
    """
    reasoning = find_reasoning(turn)
    content = compare_content(turn, reasoning)
    # The comparisons of tool calls need the markers that end a turn.
    turn = replace(turn, end_markers=content.end_markers)
    # Some templates write markers around the content only in messages with tool calls.
    wrapper = content.wrapper or compare_content_with_call(turn, reasoning.part)
    tools = find_tools(turn, reasoning.part, wrapper)
    checked = _make_checked_format(turn, _Findings(reasoning, wrapper, tools))
    wrong_call = _wrong_call(checked.proofs)
    if wrong_call is not None:
        checked = _make_format_without_calls(turn, checked.findings, wrong_call)
    turn.prober.undecided += [_wrong_parts(proof) for proof in checked.proofs if proof.differs]
    return _result(turn, checked)


def _make_format_without_calls(
    turn: ModelTurn, findings: _Findings, wrong_call: Proof
) -> _CheckedFormat:
    """Make a format from the findings about reasoning and content. Omit the form of tool calls.

    With this format, the parser returns the text of a tool call as content.

    Mutates: `turn.prober.undecided`. A sentence about `wrong_call` is appended for the report.

    Args:
        turn: The text around the model's answers in rendered conversations.
        findings: All findings.
        wrong_call: The rendered message whose tool call was parsed wrongly.
    """
    turn.prober.undecided.append(
        "The format of the calls could not be inferred: the parser did not return the call "
        f"that the template renders as {wrong_call.text!r}."
    )
    without_calls = ToolFindings(inner_headers=findings.tools.inner_headers)
    return _make_checked_format(turn, findings._replace(tools=without_calls))


def _make_checked_format(turn: ModelTurn, findings: _Findings) -> _CheckedFormat:
    """Combine the findings into a format, and parse rendered messages to check this format.

    Mutates: `turn.prober.undecided`. If the findings contradict each other, a sentence is appended.
    """
    fmt = _make_format(turn, findings)
    proofs = parse_renderings(fmt, turn, findings.reasoning, findings.tools)
    return _CheckedFormat(findings, fmt, proofs)


def _wrong_call(proofs: list[Proof]) -> Proof | None:
    """Return the proof with one tool call if the call was parsed wrongly, or else None."""
    wrong_calls = [proof for proof in proofs if proof.name == ONE_CALL_PROOF and proof.differs]
    return wrong_calls[0] if wrong_calls else None


def _wrong_parts(proof: Proof) -> str:
    """Return sentences for the report that name the wrongly parsed parts of a message."""
    return (
        f"The message with {proof.name} is parsed wrongly: {', '.join(proof.differs)} differ. "
        f"The template renders the message as {proof.text!r}."
    )


def _make_format(turn: ModelTurn, findings: _Findings) -> Format:
    """Combine the findings into a `Format`. The parser splits a model's output with this format.

    If the findings contradict each other, return a format in which all output is content.

    Mutates: `turn.prober.undecided`. A contradiction is appended as a sentence for the report.

    Args:
        turn: The text around the model's answers in rendered conversations.
        findings: The findings. `findings.reasoning.part` declares the markers of reasoning, and
            `findings.tools.part` declares the form of tool calls.
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
    """Return the texts that the parser removes from the output because these texts end a turn.

    Some models also write a header, the text that opens a turn, inside their output. The parser
    must remove such headers too. Example: `<|end|>` ends a turn, and `<|assistant|>` is a header,
    so the result is ("<|end|>", "<|assistant|>").

    Args:
        turn: The text around the model's answers. `turn.end_markers` are the markers that end a
            turn with content.
        findings: The findings. `findings.tools.end_markers` are the markers that end a turn with
            tool calls. The attributes `inner_headers` are the headers inside the output.
    """
    ends = [
        *turn.end_markers,
        *findings.tools.end_markers,
        *findings.tools.inner_headers,
        *findings.reasoning.inner_headers,
        header_after_result(turn),  # "" if the model writes no header after a tool's result
    ]
    return tuple(dict.fromkeys(end for end in ends if end))  # without duplicates


def _result(turn: ModelTurn, checked: _CheckedFormat) -> TemplateAnalysis:
    """Return the result of the whole analysis, which the report shows to the user.

    The result contains the format, the comparisons of renderings, the features that the template
    supports, the open questions, and the messages that were parsed to check the format.

    Args:
        turn: The text around the model's answers. `turn.prober` has recorded the comparisons and
            the open questions, and `turn.prober.form` is the form of messages that the template
            renders.
        checked: The format with its findings, and the parsed messages.
    """
    prober = turn.prober
    reasoning = checked.findings.reasoning
    tools = checked.findings.tools
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
