r"""The dataclasses that describe how a model writes reasoning, content and tool calls.

A `Format` consists of a layout and a policy. There are two layouts:

    Sections    One text. Markers open and close the reasoning, the content and the tool calls:
                  <think>..</think> text <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Messages    A sequence of messages. The header of a message defines the type of its body:
                  <|channel|>analysis<|message|>..<|end|><|start|>assistant to=functions.f ..

Three conventions apply to all parts of a declaration.

*Markers* are declared with their white space, exactly as the model writes them: `"<tool_call>\n"`.
Constrained decoding makes the model write this text exactly. The parser searches for the marker
without the surrounding white space, and skips any white space between two markers. In the values of
`TaggedArguments`, white space may belong to the value. The parser therefore removes at most the
declared white space, once at each end of the value.

*Patterns* are literal text with fields, for example `"<function={name}>\n"`. The module
pattern_syntax describes the fields.

*Alternatives* are tuples. In constrained output, the model writes the first member of the tuple.
The parser tries all members in order and uses the first member that matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nereid_parsers.errors import FormatError
from nereid_parsers.pattern_syntax import check_markers, check_pattern
from nereid_parsers.policy import LENIENT, Policy
from nereid_parsers.tool_declarations import JsonArguments, TaggedArguments, ToolSection


class Stage(Enum):
    """A part of the message: the reasoning, the content or the tool calls.

    The stage of a parser is the part to which the next character of the output belongs.
    """

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


class Opener(Enum):
    """The rule that decides whether the output starts with reasoning or with content.

    The rule applies if the prompt does not end with a marker of the reasoning.

    MODEL   The model itself writes the opening marker of the reasoning. Up to this marker, the
            output is content.
    EITHER  Like MODEL, but some templates of the family write the opening marker into the prompt.
            If the prompt is not known, the parser stores all text until a marker shows whether the
            text is reasoning. Text without a marker is content.
    PROMPT  The prompt contains the opening marker if the model should reason. If the prompt ends
            without a marker, the output starts in the content. If the prompt is not known, the
            output starts in the reasoning.
    FORCED  The output starts in the reasoning, unless the prompt ends with the closing marker.
    """

    MODEL = "model"
    EITHER = "either"
    PROMPT = "prompt"
    FORCED = "forced"


class Shown(Enum):
    """The message field that contains the reasoning: a separate field, or the content field.

    APART   The reasoning is returned in the field for the reasoning, without its markers.
    INLINE  The reasoning and its markers are a part of the content. If the prompt contains the
            opening marker, the parser adds the opening marker to the content. Clients need this
            rule if they send the whole text back to the model ("append think").
    """

    APART = "apart"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Reasoning:
    r"""Describes the markers around the reasoning of a model, such as `<think>` and `</think>`.

    Attributes:
        open, close: The markers, as the model writes them: `"<think>\n"`, `"\n</think>\n\n"`.
        opener: The rule for the stage in which the output starts, see `Opener`.
        also_open, also_close: Alternative markers. The parser accepts these markers, but
            constrained output never contains them.
        interrupted_by: The markers of tool calls that end the reasoning without a closing marker.
            Such a marker ends the reasoning only if a tool call follows the marker.
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
        """Check that each of the two markers contains a visible character."""
        check_markers("Reasoning", open=self.open, close=self.close)

    @property
    def is_opened_by_model(self) -> bool:
        """Whether the model itself may write the opening marker of the reasoning."""
        return self.opener in (Opener.MODEL, Opener.EITHER)

    @property
    def opens(self) -> tuple[str, ...]:
        """The opening marker and its alternatives."""
        return (self.open, *self.also_open)

    @property
    def closes(self) -> tuple[str, ...]:
        """The closing marker and its alternatives."""
        return (self.close, *self.also_close)


@dataclass(frozen=True, slots=True)
class Wrapper:
    r"""The markers around content, as in `<response>..</response>`.

    Text before, between and after the markers is content. One of the two markers may be empty, as
    in `Wrapper("[BEGIN FINAL RESPONSE]\n", "")`.
    """

    open: str
    close: str

    def __post_init__(self) -> None:
        """Check that at least one of the two markers contains a visible character."""
        if not self.open.strip() and not self.close.strip():
            raise FormatError(
                f"Wrapper.open is {self.open!r} and Wrapper.close is {self.close!r}, but at least "
                "one of the two markers must contain a visible character. If no markers surround "
                "the content, set Sections.content to None."
            )


# ---- layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sections:
    """Describes an output in which markers separate reasoning, content and tool calls."""

    reasoning: Reasoning | None = None
    content: Wrapper | None = None
    tools: ToolSection | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Declares what messages with a certain header contain: reasoning, content or a tool call.

    Attributes:
        stage: The stage of the message's body.
        header: The pattern of the whole header.
        written: The header that the model must write if a grammar constrains its output. This
            header must be declared if `header` contains fields other than `{name}`, because the
            texts of such fields are not known.
        has_calls: Whether the body of a content message may contain tool calls.
    """

    stage: Stage
    header: str
    written: str = ""
    has_calls: bool = True

    def __post_init__(self) -> None:
        """Check that `header` contains the field `{name}` if the message is a tool call."""
        required = ["name"] if self.stage is Stage.CALLS else []
        check_pattern("Route.header", self.header, *required)

    @property
    def written_header(self) -> str:
        """The header that the model must write if a grammar constrains its output."""
        return self.written or self.header


@dataclass(frozen=True, slots=True)
class Messages:
    """Describes the output of a model that writes a sequence of messages, each with a header.

    Each message consists of `start`, a header, `header_end` and a body. One of the markers in
    `ends` may close the body. The generation prompt ends with `start` or inside a body. If the
    prompt ends with `start`, the output starts inside a header.

    Attributes:
        start: The marker before each header.
        header_end: The text between header and body.
        routes: The routes that assign a stage to each header. The parser uses the first route that
            matches. Constrained output contains the header of one route for each stage, see
            `first_route`.
        ends: The markers that close a body. The start of the next message closes a body too.
        call_end: The member of `ends` that closes only tool calls, or "".
        body: The form of the arguments in a message that is a tool call.
        tools: The tool calls inside content messages, or None if content messages contain no tool
            calls.
    """

    start: str
    header_end: str
    routes: tuple[Route, ...]
    ends: tuple[str, ...] = ()
    call_end: str = ""
    body: JsonArguments | TaggedArguments = field(default_factory=JsonArguments)
    tools: ToolSection | None = None

    def __post_init__(self) -> None:
        """Check that `start`, `header_end` and `routes` are not empty."""
        check_markers("Messages", start=self.start)
        if not self.header_end:
            raise FormatError(
                "Messages.header_end must not be empty, because this text separates the header of "
                "a message from its body"
            )
        if not self.routes:
            raise FormatError("Messages.routes must contain at least one Route, but is empty")


# ---- the format ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """The document that shows how a model writes its output, and the date of the document."""

    text: str
    date: str = ""

    def __str__(self) -> str:
        """Return the name of the document, and its date if the date is known."""
        return f"{self.text}, {self.date}" if self.date else self.text


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    r"""The markers around the reasoning, and whether the prompt ends inside the reasoning.

    Attributes:
        start: The opening marker, as the model writes it: `"<think>\n"`.
        end: The closing marker with its white space: `"\n</think>\n\n"`. A server that ends the
            reasoning must add exactly this text. A search for the marker must ignore the white
            space.
        is_open: Whether the prompt opens the reasoning and does not close the reasoning.
        may_open: Whether the model may still write the opening marker. False if the prompt opens or
            closes the reasoning.
    """

    start: str
    end: str
    is_open: bool
    may_open: bool


@dataclass(frozen=True, slots=True)
class FormatData:
    r"""Describes how a model writes its output. Only the subclass `Format` has methods.

    The modules that implement the methods of `Format` use this class, because they cannot import
    `Format` itself.

    Attributes:
        name: A name for logs and messages.
        layout: The markers and their order, `Sections` or `Messages`.
        policy: The default policy. A parser may use another policy.
        ends: The end-of-turn tokens (`"<|im_end|>"`). The parser removes these tokens from the
            text.
        turn: The texts that open the model's turn in the prompt (`"<|im_start|>assistant\n"`). The
            parser needs these texts if the prompt already contains the beginning of the answer.
        sources: The documents from which the declaration was derived.
    """

    name: str
    layout: Sections | Messages
    policy: Policy = LENIENT
    ends: tuple[str, ...] = ()
    turn: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
