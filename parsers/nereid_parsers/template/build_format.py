"""Build a `Format` from the findings about a chat template, and check this `Format`."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Sections, Source, Wrapper
from nereid_parsers.template.content import stripped_markers
from nereid_parsers.template.markup.marker_lengths import check_marker_lengths
from nereid_parsers.template.model_turn import ModelTurn, header_after_result, turn_markers
from nereid_parsers.template.reasoning.rendered_reasoning import ReasoningFindings
from nereid_parsers.template.tools import ToolFindings
from nereid_parsers.template.verify_format import ONE_CALL_PROOFS, Proof, parse_renderings

_SOURCES = (Source("inferred from the chat template"),)


class Findings(NamedTuple):
    """The findings about reasoning, content and tool calls in the output of a model.

    Attributes:
        reasoning: The findings about reasoning.
        tools: The findings about tool calls.
        wrapper: The markers around the content, or None.
    """

    reasoning: ReasoningFindings
    tools: ToolFindings
    wrapper: Wrapper | None = None


class CheckedFormat(NamedTuple):
    """An inferred `Format`, and the rendered messages that were parsed to check this `Format`.

    Attributes:
        findings: The findings from which the format was made.
        format: The format.
        proofs: The parsed messages. A proof lists the parts that were parsed wrongly.
        problems: Sentences for the report that state what could not be inferred, and why.
    """

    findings: Findings
    format: Format
    proofs: list[Proof]
    problems: tuple[str, ...] = ()


def make_checked_format(turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Build a `Format` from the findings, and parse rendered messages to check this `Format`.

    If the parser does not return the tool call of a rendered message, the inferred form of tool
    calls is wrong. The result is then a format without tool calls, so that their text becomes
    content.

    The attribute `problems` of the result contains a sentence for the report about each message
    that was parsed wrongly, and about findings that contradict each other.
    """
    with_calls = _build_and_check(turn, findings)
    wrong_call = _wrongly_parsed_call(with_calls.proofs)
    if wrong_call is None:
        problems = [*with_calls.problems, *_describe_wrong_messages(with_calls.proofs)]
        return with_calls._replace(problems=tuple(problems))
    without_calls = _build_and_check(turn, _without_calls(findings))
    problems = [
        *with_calls.problems,
        "The format of the calls could not be inferred: the parser did not return the call "
        f"that the template renders as {wrong_call.text!r}.",
        *without_calls.problems,
        *_describe_wrong_messages(without_calls.proofs),
    ]
    return without_calls._replace(problems=tuple(problems))


def _wrongly_parsed_call(proofs: list[Proof]) -> Proof | None:
    """Return the first wrongly parsed message with one tool call, or None if there is none.

    A proof is a rendered message that was parsed to check the format.
    """
    wrong_calls = (proof for proof in proofs if proof.name in ONE_CALL_PROOFS and proof.differs)
    return next(wrong_calls, None)


def _without_calls(findings: Findings) -> Findings:
    """Return a copy of the findings without the format of tool calls.

    The headers inside the output are kept. They were inferred without the format of tool calls, so
    they are correct even if that format is wrong, and the parser must remove them.
    """
    return findings._replace(tools=ToolFindings(inner_headers=findings.tools.inner_headers))


def _describe_wrong_messages(proofs: list[Proof]) -> list[str]:
    """For each message that was parsed wrongly, return one text for the report.

    The text contains the names of the wrongly parsed parts, such as "reasoning, content".
    """
    return [
        f"The message with {proof.name} is parsed wrongly: {', '.join(proof.differs)} differ. "
        f"The template renders the message as {proof.text!r}."
        for proof in proofs
        if proof.differs
    ]


def check_format(fmt: Format, turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Parse rendered messages with a `Format`. Return the `Format` together with the results.

    `findings` shows which messages the template renders.
    """
    proofs = parse_renderings(fmt, turn, findings.reasoning, findings.tools)
    return CheckedFormat(findings, fmt, proofs)


def _build_and_check(turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Build a `Format` from the findings, and parse rendered messages to check this `Format`.

    If the findings contradict each other, the result contains a format in which all output is
    content, and a sentence about the contradiction (`problems`).

    Raises:
        LimitError: A marker of the format is too long.
    """
    try:
        fmt = _make_format(turn, findings)
    except FormatError as error:
        contradiction = f"The inferred parts contradict each other: {error}"
        checked = check_format(_make_plain_format(turn, findings), turn, findings)
        return checked._replace(problems=(contradiction,))
    return check_format(fmt, turn, findings)


def _make_format(turn: ModelTurn, findings: Findings) -> Format:
    """Build the `Format` with which the parser reads the output, based on the findings.

    Raises:
        FormatError: The findings contradict each other.
        LimitError: A marker of the format is too long.
    """
    reasoning = findings.reasoning.part  # The declared markers of reasoning, or None.
    tools = findings.tools.part  # The declared form of tool calls, or None.
    # A prompt may end with `<|assistant|><think>`. Only `<|assistant|>` opens the answer, because
    # `<think>` is a part of the answer. Therefore, `turn_markers` ignores the reasoning markers.
    answer_openings = turn_markers(turn, reasoning_markers=stripped_markers(reasoning))
    fmt = Format(
        "inferred",
        Sections(reasoning=reasoning, content=findings.wrapper, tools=tools),
        ends=_texts_between_messages(turn, findings),
        turn=answer_openings,
        sources=_SOURCES,
    )
    check_marker_lengths(fmt)
    return fmt


def _make_plain_format(turn: ModelTurn, findings: Findings) -> Format:
    """Build a `Format` in which all output is content, except the texts between messages."""
    return Format(
        "plain", Sections(), ends=_texts_between_messages(turn, findings), sources=_SOURCES
    )


def _texts_between_messages(turn: ModelTurn, findings: Findings) -> tuple[str, ...]:
    """Return the texts around messages. The parser must remove these texts from the output.

    There are two kinds of such texts:

        end markers    `<|end|>` ends a message. Messages with content and messages with tool calls
                       may have different end markers.
        headers        `<|assistant|>` opens a message. Some models write this header inside their
                       output, for example between the content and a tool call, or after the result
                       of a tool.
    """
    end_markers = [*turn.end_markers, *findings.tools.end_markers]
    headers = [
        *findings.tools.inner_headers,
        *findings.reasoning.inner_headers,
        header_after_result(turn),  # "" if the model writes no header after a tool's result.
    ]
    without_duplicates = dict.fromkeys([*end_markers, *headers])
    return tuple(text for text in without_duplicates if text)
