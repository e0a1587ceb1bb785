r"""The declaration of a chat format: frozen dataclasses that describe the text a model writes.

A `Format` consists of a layout and a policy. There are two layouts:

    Sections    One text. Markers open and close the reasoning, the content and the tool calls:
                  <think>..</think> text <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Messages    A sequence of messages. The header of a message defines the type of its body:
                  <|channel|>analysis<|message|>..<|end|><|start|>assistant to=functions.f ..

Three conventions hold for all parts of a declaration.

*Markers are declared with their white space*, exactly as the model writes them: `"<tool_call>\n"`.
Constrained decoding makes the model write this text exactly. The parser searches for the marker
without the white space around it, and skips any white space between markers. White space matters
in one place only: of a tagged value (`TaggedArguments`), the parser removes at most the declared
white space, once at each end.

*Patterns* are literal text with fields, for example `"<function={name}>\n"`. The fields are:

    {name}      the name of the function
    {key}       the name of an argument
    {id}        the id of the call
    {number}    digits
    {string}    "true" if the value is a string, otherwise "false"
    {type}      the JSON type of the value
    {word}      any single word
    {rest}      any text up to the literal that follows

A field ends where the next literal begins. Literal braces are written `{{` and `}}`.

*Alternatives* are tuples. A constraint makes the model write the first member. The parser tries all
members in order and uses the first that matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from nereid_parsers.errors import FormatError

FIELDS = frozenset({"name", "key", "id", "number", "string", "type", "word", "rest"})
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


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
        _check_markers("Reasoning", open=self.open, close=self.close)

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
    r"""Content between two markers (`<response>..</response>`). Text outside them is content too.

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


# ---- the arguments of a call, and the calls of a section -----------------------------------------


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a JSON object that describes a call. A dot leads into a nested object.

    Example: `Keys("function.name", "function.arguments", id="id")` describes the object
    `{"id": .., "function": {"name": .., "arguments": ..}}`.

    Attributes:
        name: The path of the function's name.
        arguments: The path of the arguments.
        id: The path of the call's id, or None if the object has no id.
        also: Other paths of the arguments.
        extra: Keys that the object may also have, and that the parser ignores.
        order: The order in which a constraint writes "name", "arguments" and "id".
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str | None = None
    also: tuple[str, ...] = ()
    extra: tuple[str, ...] = ("type",)
    order: tuple[str, ...] = ("name", "arguments")

    def __post_init__(self) -> None:
        paths = [self.name, self.arguments, *self.also, *([self.id] if self.id else [])]
        for path in paths:
            if not all(path.split(".")):
                raise FormatError(f"Keys: {path!r} is not a path of key names separated by dots")
        if not {"name", "arguments"} <= set(self.order) <= {"name", "arguments", "id"}:
            raise FormatError(
                f"Keys: order must hold name, arguments and optionally id, but is {self.order!r}"
            )
        if "id" in self.order and self.id is None:
            raise FormatError("Keys: order contains id, but no id key is declared (id=None)")


@dataclass(frozen=True, slots=True)
class NameIsKey:
    """A JSON object with one member: the key is the function's name, the value its arguments."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A call written as one JSON object that contains the name and the arguments."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArray:
    """Calls written as the members of one JSON array."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments as a JSON object. The call's head contains the name."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    r"""Arguments written as a sequence of tagged values: `<parameter=city>Paris</parameter>`.

    The tool's schema determines the type of a value, because the text of a value shows no type.

    Attributes:
        open: The pattern before the value, with the field `{key}`: `"<parameter={key}>\n"`. White
            space at its end is padding, which the parser removes once from the value.
        close: The text after the value: `"\n</parameter>\n"`. White space before the marker is
            padding too.
        also: Other spellings, which may appear in the same call. A spelling in `also` has no
            further `also`.
    """

    open: str
    close: str
    also: tuple[TaggedArguments, ...] = ()

    def __post_init__(self) -> None:
        _check_pattern("TaggedArguments.open", self.open, "key")
        _check_markers("TaggedArguments", close=self.close)


@dataclass(frozen=True, slots=True)
class BareKeyArguments:
    """Arguments written as an object with unquoted keys and with strings between `quote` markers.

    Example: `{city:<escape>Paris<escape>,days:3}` has the quote `<escape>`. A string contains no
    escape sequences.
    """

    quote: str

    def __post_init__(self) -> None:
        _check_markers("BareKeyArguments", quote=self.quote)


@dataclass(frozen=True, slots=True)
class NestedTags:
    """Arguments written as nested elements. The text `mark` precedes each tag.

    Example with the mark `~`: `~<city>Paris~</city>~<days>~<item>1~</item>~</days>`. The tool's
    schema determines the types. An element with children is an array if the schema declares an
    array, or if the schema declares no type and the children are called `item`.
    """

    mark: str

    def __post_init__(self) -> None:
        _check_markers("NestedTags", mark=self.mark)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    r"""Calls written in Python syntax: `[f(a=1, b="x"), g()]`.

    Attributes:
        open, close: The brackets around all calls: `"["` and `"]"`. Both may be empty.
        separator: The text between two calls: `", "` or `"\n"`.
        suffix: Text that may follow a name but is not a part of the name: `".call"`.
    """

    open: str = "["
    close: str = "]"
    separator: str = ", "
    suffix: str = ""


Body = (
    JsonObject
    | JsonArray
    | JsonArguments
    | TaggedArguments
    | BareKeyArguments
    | NestedTags
    | PythonCalls
)
# Bodies that contain only arguments, so that the head of the call must contain the name.
NAMED_BY_HEAD = (JsonArguments, TaggedArguments, BareKeyArguments, NestedTags)


@dataclass(frozen=True, slots=True)
class Call:
    """One spelling of a call: opening marker, head, body and closing marker.

    The *trigger* of a call is the text that shows the parser that a call starts: `open`, or the
    first literal of `head` if `open` is empty. A call that has neither is *bare*. The parser
    recognises a bare call by the first character of its body, and only where the output or the
    section starts.

    Attributes:
        open: The marker before the call. May be empty.
        head: The pattern between `open` and the body: `"{name}<｜tool▁sep｜>"`. Must be without
            `{name}` if the body contains the name, and must contain `{name}` if it does not. If
            `{name}` occurs several times, the model must write the same name each time.
        body: The spelling of the arguments, or of the whole call.
        close: The marker after the call. May be empty.
        id: The template of the call's id, from the fields of the head:
            `"functions.{name}:{number}"`.
    """

    body: Body
    open: str = ""
    head: str = ""
    close: str = ""
    id: str = "{id}"

    def __post_init__(self) -> None:
        has_name = Slot("name") in pattern(self.head)
        if isinstance(self.body, NAMED_BY_HEAD):
            if not has_name:
                raise FormatError(
                    f"Call.head: {self.head!r} must show {{name}}, because the body "
                    f"{type(self.body).__name__} has no name"
                )
        elif has_name:
            raise FormatError(
                f"Call.head: {self.head!r} may not show {{name}}, because the body holds the name"
            )
        pattern(self.id)

    @property
    def trigger(self) -> str:
        """The marker that shows, outside a section, that this call starts. "" for a bare call."""
        if self.open.strip():
            return self.open.strip()
        first = pattern(self.head)[0] if self.head else ""
        return first.strip() if isinstance(first, str) else ""


@dataclass(frozen=True, slots=True)
class ToolSection:
    r"""The place of the calls: between the markers `open` and `close`, or inside the content.

    Both markers are empty if the calls stand inside the content.

    Attributes:
        calls: The spellings of a call. A constraint writes the first.
        open, close: The markers around all calls.
        separator: The text between two calls: `"\n"`, `"; "` or `", "`. It does not apply to the
            members of a JSON array.
        also_open: Other spellings of `open`.
    """

    calls: tuple[Call, ...]
    open: str = ""
    close: str = ""
    separator: str = ""
    also_open: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.calls:
            raise FormatError("ToolSection: calls must hold at least one spelling of a call")
        if self.close.strip() and not self.open.strip():
            raise FormatError(
                f"ToolSection: a section with close {self.close!r} needs an open marker, but open "
                "is blank"
            )

    @property
    def opens(self) -> tuple[str, ...]:
        """All spellings of the section's opening marker. () if calls stand in the content."""
        return (self.open, *self.also_open) if self.open.strip() else ()


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
        _check_pattern("Route.header", self.header, *required)

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
        _check_markers("Messages", start=self.start)
        if not self.header_end:
            raise FormatError("Messages: header_end is empty, so the end of a header is not marked")
        if not self.routes:
            raise FormatError("Messages: routes must hold at least one route")


# ---- policies ------------------------------------------------------------------------------------


class TextRule(Enum):
    """The rule for content that stands next to tool calls.

    FREE         Content may precede, separate and follow the calls. The parser returns all of it.
    CALLS_FIRST  Calls must start directly after the reasoning (or at the start of the output), and
                 only white space may separate them. After the first other text, everything is
                 content.
    """

    FREE = "free"
    CALLS_FIRST = "calls_first"


class StrayClose(Enum):
    """The meaning of a closing marker if no reasoning was opened and the prompt is not known.

    TEXT       The closing marker is content.
    REASONING  The text before the closing marker is reasoning. The parser holds text back until a
               marker shows whether the text is reasoning.
    """

    TEXT = "text"
    REASONING = "reasoning"


class UnknownTool(Enum):
    """The treatment of a call to a function that is not among the request's `tools`.

    If the request has no tools, every call is forwarded.

    FORWARD  Return the call.
    DROP     Discard the call and log a warning.
    CONTENT  Return the text of the call as content.
    """

    FORWARD = "forward"
    DROP = "drop"
    CONTENT = "content"


class BrokenArguments(Enum):
    """The treatment of arguments that are not valid JSON.

    With both REPAIR rules, the arguments of a call are returned as one delta after the call has
    ended, because a delta cannot be withdrawn.

    RAW             Return the arguments unchanged, piece by piece.
    REPAIR_OR_RAW   Repair the arguments with partial-json-parser. If that fails, return them
                    unchanged.
    REPAIR_OR_DROP  Repair the arguments with partial-json-parser. If that fails, discard the call
                    and log a warning.
    """

    RAW = "raw"
    REPAIR_OR_RAW = "repair_or_raw"
    REPAIR_OR_DROP = "repair_or_drop"


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for cases that the declaration of a format does not decide."""

    text: TextRule = TextRule.FREE
    stray_close: StrayClose = StrayClose.TEXT
    unknown_tool: UnknownTool = UnknownTool.FORWARD
    broken_arguments: BrokenArguments = BrokenArguments.RAW


LENIENT = Policy()
STRICT = Policy(
    text=TextRule.CALLS_FIRST,
    stray_close=StrayClose.REASONING,
    broken_arguments=BrokenArguments.REPAIR_OR_DROP,
)


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
class Format:
    r"""The complete description of how a model writes a message.

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

    def with_policy(self, policy: Policy) -> Format:
        """Return a copy of this format with another policy."""
        return replace(self, policy=policy)

    def stage(self, prompt: str | None) -> Stage:
        r"""Return the stage in which the output after `prompt` starts.

        Example: a format with the opening marker `<think>` returns `Stage.REASONING` for the prompt
        `"<|im_start|>assistant\n<think>\n"`.

        Args:
            prompt: The rendered prompt with its generation prompt. None if it is not known.
        """
        from nereid_parsers.stream.parser import stage_of

        return stage_of(self, prompt)

    def stage_of_ids(
        self, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> Stage:
        """Return the stage in which the output after the prompt `prompt_ids` starts.

        Args:
            prompt_ids: The token ids of the prompt.
            decode: A function that converts token ids to text. Only the last ids are decoded.
        """
        from nereid_parsers.stage import TAIL_TOKENS

        return self.stage(decode(prompt_ids[-TAIL_TOKENS:]))

    def structural_tag(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        *,
        parallel_tool_calls: bool = True,
        prompt: str | None = None,
        skip_reasoning: bool = False,
    ) -> dict[str, Any] | None:
        """Return the xgrammar structural tag for a request, or None if nothing is constrained.

        Args:
            tools: The OpenAI tools list.
            tool_choice: The OpenAI field `tool_choice`.
            response_format: The OpenAI field `response_format`. The types structural_tag, regex,
                grammar and choice are supported too, see `constrain_answer.answer_node`.
            parallel_tool_calls: Whether the model may make more than one call.
            prompt: The rendered prompt, or None if it is not known.
            skip_reasoning: Whether the tag describes only the text after the reasoning.

        Raises:
            ConstraintError: The request is invalid, or this format cannot express it.
        """
        from nereid_parsers.constrain import Request, structural_tag
        from nereid_parsers.stream.parser import StreamParser

        request = Request.of(tools, tool_choice, response_format, parallel_tool_calls)
        parser = StreamParser(self, prompt=prompt)
        may_reason = not parser.has_reasoned
        return structural_tag(self, request, parser.stage, may_reason, skip_reasoning)

    def reasoning_gate(self, prompt: str | None = None) -> ReasoningGate | None:
        """Return the markers and the state of the reasoning in the output after `prompt`.

        The result is None if the format has no reasoning, or no marker that closes it.
        """
        from nereid_parsers.constrain import gate_of
        from nereid_parsers.stream.parser import StreamParser

        parser = StreamParser(self, prompt=prompt)
        return gate_of(self, parser.stage, parser.has_reasoned)


# ---- patterns ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A field of a pattern."""

    field: str


def pattern(text: str) -> tuple[str | Slot, ...]:
    """Split a pattern into literals and fields.

    Example: `pattern("<f={name}>{{}}")` returns `("<f=", Slot("name"), ">{}")`.

    Raises:
        FormatError: A field is unknown, a brace has no counterpart, or no literal separates two
            fields.
    """
    parts: list[str | Slot] = []
    literal_start = 0
    for match in _FIELD.finditer(text):
        _append_literal(parts, text[literal_start : match.start()])
        literal_start = match.end()
        if match.group() in ("{{", "}}"):
            _append_literal(parts, match.group()[0])
        elif match.group(1) in FIELDS:
            if match.group(1) != "rest" and parts and isinstance(parts[-1], Slot):
                raise FormatError(
                    f"pattern {text!r}: there is nothing between two fields, so the end of the "
                    "first is not defined"
                )
            parts.append(Slot(match.group(1)))
        else:
            fields = ", ".join(sorted(FIELDS))
            raise FormatError(
                f"pattern {text!r}: {match.group()!r} is not a field. The fields are {fields}; "
                "literal braces are written {{ and }}"
            )
    _append_literal(parts, text[literal_start:])
    return tuple(parts)


def _append_literal(parts: list[str | Slot], text: str) -> None:
    """Append literal text to `parts`, or to the last part if that is a literal too."""
    if not text:
        return
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    else:
        parts.append(text)


def _check_pattern(place: str, text: str, *required: str) -> None:
    """Raise FormatError unless the pattern `text` contains each required field exactly once."""
    fields = [part.field for part in pattern(text) if isinstance(part, Slot)]
    for name in required:
        if fields.count(name) != 1:
            raise FormatError(f"{place}: {text!r} must show {{{name}}} exactly once")


def _check_markers(part: str, **markers: str) -> None:
    """Raise FormatError if one of the markers is empty or contains only white space."""
    for name, marker in markers.items():
        if not marker.strip():
            raise FormatError(f"{part}: {name} is blank, but the parser needs a visible marker")
