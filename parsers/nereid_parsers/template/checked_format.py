"""Build a `Format` from the findings about a chat template, and check this `Format`."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Sections, Source, Wrapper
from nereid_parsers.template.content import stripped_markers
from nereid_parsers.template.marker_lengths import check_marker_lengths
from nereid_parsers.template.model_turn import ModelTurn, header_after_result, turn_markers
from nereid_parsers.template.parse_renderings import ONE_CALL_PROOFS, Proof, parse_renderings
from nereid_parsers.template.rendered_reasoning import ReasoningFindings
from nereid_parsers.template.tools import ToolFindings

_SOURCES = (Source("inferred from the chat template"),)


class Findings(NamedTuple):
    """The findings about reasoning, content and tool calls in the output of a model.

    Attributes:
        reasoning: The findings about reasoning.
        wrapper: The markers around the content, or None.
        tools: The findings about tool calls.
    """

    reasoning: ReasoningFindings
    wrapper: Wrapper | None
    tools: ToolFindings


class CheckedFormat(NamedTuple):
    """An inferred `Format`, and the rendered messages that were parsed to check this `Format`.

    Attributes:
        findings: The findings from which the format was made.
        format: The format.
        proofs: The parsed messages. A proof lists the parts that were parsed wrongly.
    """

    findings: Findings
    format: Format
    proofs: list[Proof]


def make_checked_format(turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Build a `Format` from the findings, and parse rendered messages to check this `Format`.

    If the parser does not return the tool call of a rendered message, the inferred tool calls are
    wrong. The result is then a format without tool calls, so that their text becomes content.

    Mutates: `turn.prober.undecided`. A sentence for the report is appended for each message that
    was parsed wrongly, and for findings that contradict each other.
    """
    undecided = turn.prober.undecided
    checked = _check_findings(turn, findings)
    wrong_call = _wrongly_parsed_call(checked.proofs)
    if wrong_call is not None:
        undecided.append(
            "The format of the calls could not be inferred: the parser did not return the call "
            f"that the template renders as {wrong_call.text!r}."
        )
        checked = _check_findings(turn, _without_calls(findings))
    undecided += [_describe_wrong_parts(proof) for proof in checked.proofs if proof.differs]
    return checked


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


def _describe_wrong_parts(proof: Proof) -> str:
    """Return sentences for the report that name the wrongly parsed parts of a message."""
    return (
        f"The message with {proof.name} is parsed wrongly: {', '.join(proof.differs)} differ. "
        f"The template renders the message as {proof.text!r}."
    )


def check_format(fmt: Format, turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Parse rendered messages with a `Format`. Return the `Format` together with the results.

    `findings` shows which messages the template renders.
    """
    proofs = parse_renderings(fmt, turn, findings.reasoning, findings.tools)
    return CheckedFormat(findings, fmt, proofs)


def _check_findings(turn: ModelTurn, findings: Findings) -> CheckedFormat:
    """Build a `Format` from the findings, and parse rendered messages to check this `Format`.

    If the findings contradict each other, the result is a format in which all output is content.

    Mutates: `turn.prober.undecided`. A contradiction is appended as a sentence for the report.

    Raises:
        LimitError: A marker of the format is too long.
    """
    try:
        fmt = _make_format(turn, findings)
    except FormatError as error:
        turn.prober.undecided.append(f"The inferred parts contradict each other: {error}")
        # This format has no reasoning, so the texts that open the model's answer (`Format.turn`)
        # are not needed.
        ends = _ends_of_format(turn, findings)
        fmt = Format("plain", Sections(), ends=ends, sources=_SOURCES)
    return check_format(fmt, turn, findings)


def _make_format(turn: ModelTurn, findings: Findings) -> Format:
    """Build the `Format` with which the parser reads the output, based on the findings.

    Raises:
        FormatError: The findings contradict each other.
        LimitError: A marker of the format is too long.
    """
    tools = findings.tools.part  # The declared form of tool calls, or None.
    reasoning = findings.reasoning.part  # The declared markers of reasoning, or None.
    # In a prompt that ends with `<|assistant|><think>`, only `<|assistant|>` opens the answer.
    turn_starts = turn_markers(turn, reasoning_markers=stripped_markers(reasoning))
    fmt = Format(
        "inferred",
        Sections(reasoning=reasoning, content=findings.wrapper, tools=tools),
        ends=_ends_of_format(turn, findings),
        turn=turn_starts,
        sources=_SOURCES,
    )
    check_marker_lengths(fmt)
    return fmt


def _ends_of_format(turn: ModelTurn, findings: Findings) -> tuple[str, ...]:
    """Return the texts between messages, such as `<|end|>`, that the parser must remove.

    There are two kinds of such texts:

        end markers      `<|end|>` ends a message.
        inner headers    `<|assistant|>` opens a message. Some models write this header inside their
                         output, for example between the content and a tool call.

    The end markers in `turn` end a turn with content, and the end markers in `findings.tools` end a
    turn with tool calls.
    """
    ends = [
        *turn.end_markers,
        *findings.tools.end_markers,
        *findings.tools.inner_headers,
        *findings.reasoning.inner_headers,
        header_after_result(turn),  # "" if the model writes no header after a tool's result
    ]
    return tuple(dict.fromkeys(end for end in ends if end))  # without duplicates
