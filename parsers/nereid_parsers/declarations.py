r"""The declaration of a chat format: frozen dataclasses that describe the text a model writes.

A `Format` consists of a layout and a policy. There are two layouts:

    Sections    One text. Markers open and close the reasoning, the content and the tool calls:
                  <think>..</think> text <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Messages    A sequence of messages. The header of a message defines the type of its body:
                  <|channel|>analysis<|message|>..<|end|><|start|>assistant to=functions.f ..

Three conventions apply to all parts of a declaration.

*Markers are declared with their white space*, exactly as the model writes them: `"<tool_call>\n"`.
Constrained decoding makes the model write this text exactly. The parser searches for the marker
without the white space around it, and skips any white space between markers. White space matters
in one place only: of a tagged value (`TaggedArguments`), the parser removes at most the declared
white space, once at each end.

*Patterns* are literal text with fields, for example `"<function={name}>\n"`. The module
pattern_syntax describes them.

*Alternatives* are tuples. A constraint makes the model write the first member. The parser tries all
members in order and uses the first that matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nereid_parsers.errors import FormatError
from nereid_parsers.pattern_syntax import check_markers, check_pattern
from nereid_parsers.policy import LENIENT, Policy
from nereid_parsers.tool_declarations import JsonArguments, ToolSection


class Stage(Enum):
    """The part of the message that the next character of the output belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


class Opener(Enum):
    """The rule for the start of the output if the end of the prompt does not show it.

    MODEL   The model writes the opening marker itself if it reasons. Output starts in the content.
    PROMPT  The prompt contains the opening marker if the model is to reason. Output starts in the
            content if the prompt has no marker, and in the reasoning if the prompt is not known.
    FORCED  Output starts in the reasoning, unless the prompt ends after the closing marker.
    """

    MODEL = "model"
    PROMPT = "prompt"
    FORCED = "forced"


class Shown(Enum):
    """The field of the message in which the client receives the reasoning.

    APART   The reasoning is returned as reasoning.
    INLINE  The reasoning and its markers are part of the content. If the prompt contains the
            opening marker, the parser adds that marker to the content. Clients that send the whole
            text back to the model need this ("append think").
    """

    APART = "apart"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Reasoning:
    r"""Reasoning between two markers, at the start of the output or directly after another marker.

    Attributes:
        open, close: The markers, as the model writes them: `"<think>\n"`, `"\n</think>\n\n"`.
        opener: The rule for the start of the output, see `Opener`.
        also_open, also_close: Other spellings of the markers. The parser accepts these spellings, a
            constraint never writes them.
        interrupted_by: Markers of tool calls. Such a marker ends the reasoning without a closing
            marker, provided that a call follows the marker.
        shown: The field in which the client receives the reasoning, see `Shown`.
    """

    open: str
    close: str
    opener: Opener = Opener.MODEL
    also_open: tuple[str, ...] = ()
    also_close: tuple[str, ...] = ()
    interrupted_by: tuple[str, ...] = ()
    shown: Shown = Shown.APART

    def __post_init__(self) -> None:
        check_markers("Reasoning", open=self.open, close=self.close)

    @property
    def opens(self) -> tuple[str, ...]:
        """All spellings of the opening marker."""
        return (self.open, *self.also_open)

    @property
    def closes(self) -> tuple[str, ...]:
        """All spellings of the closing marker."""
        return (self.close, *self.also_close)


@dataclass(frozen=True, slots=True)
class Wrapper:
    r"""Content between two markers (`<response>..</response>`). Other text is content too.

    One of the two markers may be empty: `Wrapper("[BEGIN FINAL RESPONSE]\n", "")`.
    """

    open: str
    close: str

    def __post_init__(self) -> None:
        if not self.open.strip() and not self.close.strip():
            raise FormatError(
                "Wrapper: both markers are blank, but at least one marker is required. "
                "Use content=None for content without markers."
            )


# ---- layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sections:
    """The layout of one text with markers: first the reasoning, then content and calls."""

    reasoning: Reasoning | None = None
    content: Wrapper | None = None
    tools: ToolSection | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """The stage of all messages whose header matches a pattern.

    Attributes:
        stage: The stage of the message's body.
        header: The pattern of the whole header.
        written: The header that a constraint writes. It is needed if `header` contains fields other
            than `{name}`, because their text is not known.
    """

    stage: Stage
    header: str
    written: str = ""

    def __post_init__(self) -> None:
        required = ["name"] if self.stage is Stage.CALLS else []
        check_pattern("Route.header", self.header, *required)

    @property
    def form(self) -> str:
        """The header that a constraint writes."""
        return self.written or self.header


@dataclass(frozen=True, slots=True)
class Messages:
    """The layout of a sequence of messages: `start`, header, `header_end`, body, one of `ends`.

    The generation prompt ends with `start` or inside a body. In the first case, the output starts
    inside a header.

    Attributes:
        start: The marker before each header.
        header_end: The text between header and body.
        routes: The stages of the headers. The parser uses the first route that matches. A
            constraint writes the first route of a stage.
        ends: The markers that close a body. The start of the next message closes a body too.
        call_end: The member of `ends` that closes calls only. May be empty.
        body: The spelling of the arguments of a message that is a call.
        tools: The calls inside content messages, or None if content messages contain no calls.
    """

    start: str
    header_end: str
    routes: tuple[Route, ...]
    ends: tuple[str, ...] = ()
    call_end: str = ""
    body: JsonArguments = field(default_factory=JsonArguments)
    tools: ToolSection | None = None

    def __post_init__(self) -> None:
        check_markers("Messages", start=self.start)
        if not self.header_end:
            raise FormatError("Messages: header_end is empty, so the end of a header is not marked")
        if not self.routes:
            raise FormatError("Messages: routes must contain at least one route")


# ---- the format ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """The document that a declaration was derived from, and the date of that document."""

    text: str
    date: str = ""

    def __str__(self) -> str:
        return f"{self.text}, {self.date}" if self.date else self.text


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    r"""The markers of the reasoning, and the state of the reasoning at the end of a prompt.

    Attributes:
        start: The opening marker, as the model writes it: `"<think>\n"`.
        end: The closing marker, as the model writes it and as a server has to force it, with its
            white space: `"\n</think>\n\n"`. To find the marker in a text, strip it first.
        is_open: Whether the prompt opens the reasoning and does not close it.
        may_open: Whether the model itself may still open the reasoning.
    """

    start: str
    end: str
    is_open: bool
    may_open: bool


@dataclass(frozen=True, slots=True)
class FormatData:
    r"""The attributes of a `Format`, without its methods.

    The modules that implement these methods use this class, so that they do not import `Format`.

    Attributes:
        name: A name for logs and messages.
        layout: The markers and their order, `Sections` or `Messages`.
        policy: The default policy. A parser may be given another policy.
        ends: The end-of-turn tokens (`"<|im_end|>"`). If they appear in the text, they are markup.
        turn: The texts that open the model's turn in the prompt (`"<|im_start|>assistant\n"`). They
            are needed for prompts that already contain the beginning of the answer.
        sources: The documents that the declaration was derived from.
    """

    name: str
    layout: Sections | Messages
    policy: Policy = LENIENT
    ends: tuple[str, ...] = ()
    turn: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
