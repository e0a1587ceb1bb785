r"""A chat format as data: frozen parts that describe what a model writes, and never act.

A `Format` is a policy plus a layout, and there are two layouts:

    Sections    one text in which markers open and close reasoning, content and tool calls
                  <think>..</think> text <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Messages    a row of messages, each with a header that says what its body is
                  <|channel|>analysis<|message|>..<|end|><|start|>assistant to=functions.f ..

Three conventions hold for all parts.

*Written form.* A marker is declared as the model writes it, with white space: `"<tool_call>\n"`.
The constraint demands exactly that; the parser looks for the marker without the white space around
it and skips whatever blanks stand between markers. The one place where blanks count is a tagged
value (`TaggedArguments`): at most the declared white space is taken off it, once.

*Patterns.* A head such as `"<function={name}>\n"` is literal text with fields: `{name}` the
function, `{key}` an argument's name, `{id}` the call's id, `{number}` digits, `{string}` true or
false ("the value is a string"), `{type}` the value's JSON type, `{word}` any one word, `{rest}`
anything up to what follows. A field ends where the next literal begins. A literal brace is written
`{{` or `}}`.

*Alternatives.* Where a part is a tuple, its first member is what a constraint makes the model
write; the parser takes them all, the first that fits winning.
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
    """What the next character of the output belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


class Opener(Enum):
    """Who opens the reasoning, where the prompt's tail does not show it.

    MODEL   the model writes the marker itself, or does not reason: output starts in content.
    PROMPT  the prompt writes the marker; without it: content; with no prompt at hand: reasoning.
    FORCED  output starts in reasoning, unless the prompt's tail has closed it.
    """

    MODEL = "model"
    PROMPT = "prompt"
    FORCED = "forced"


class Shown(Enum):
    """Where the client sees the reasoning.

    APART   as reasoning.
    INLINE  inside the content, markers included; the opening one is added where the prompt wrote it
            ("append think": for clients that send the whole text back to the model).
    """

    APART = "apart"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Reasoning:
    r"""Reasoning between two markers, at the output's start or right behind another marker.

    open, close     markers, written form: `"<think>\n"`, `"\n</think>\n\n"`.
    opener          who writes `open` where the prompt does not say; see `Opener`.
    also_open, also_close   other spellings, taken but never written.
    interrupted_by  markers that end the reasoning without closing it, if a call does follow them.
    shown           see `Shown`.
    """

    open: str
    close: str
    opener: Opener = Opener.MODEL
    also_open: tuple[str, ...] = ()
    also_close: tuple[str, ...] = ()
    interrupted_by: tuple[str, ...] = ()
    shown: Shown = Shown.APART

    def __post_init__(self) -> None:
        _need_markers("Reasoning", open=self.open, close=self.close)

    @property
    def opens(self) -> tuple[str, ...]:
        """Every spelling of the opening marker."""
        return (self.open, *self.also_open)

    @property
    def closes(self) -> tuple[str, ...]:
        """Every spelling of the closing marker."""
        return (self.close, *self.also_close)


@dataclass(frozen=True, slots=True)
class Wrapper:
    r"""Content between two markers (`<response>..</response>`). Text outside them is content too.

    Either marker may be empty: `Wrapper("[BEGIN FINAL RESPONSE]\n", "")`.
    """

    open: str
    close: str

    def __post_init__(self) -> None:
        if not self.open.strip() and not self.close.strip():
            raise FormatError("Wrapper: both markers are blank; use content=None for plain content")


# ---- what a call's arguments, or a section's calls, look like ------------------------------------


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a JSON object says what it calls; a path into nested objects where it has dots.

    `Keys("function.name", "function.arguments", id="id")` reads
    `{"id": .., "function": {"name": .., "arguments": ..}}`. `also` lists other argument keys.
    `extra` lists keys that may stand beside them and mean nothing here (`"type"`).
    `order` is how a constraint writes the object: any of "name", "arguments", "id".
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
                raise FormatError(f"Keys: {path!r} is not a path of key names")
        if not {"name", "arguments"} <= set(self.order) <= {"name", "arguments", "id"}:
            raise FormatError(f"Keys: order {self.order!r} must hold name, arguments, perhaps id")
        if "id" in self.order and self.id is None:
            raise FormatError("Keys: order names an id, but there is no id key")


@dataclass(frozen=True, slots=True)
class NameIsKey:
    """A JSON object with one key, the function's name, whose value is the arguments."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """One call as one JSON object that holds name and arguments."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArray:
    """Calls as the members of one JSON array."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments alone, as a JSON object; the name stands in the call's head."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    r"""Arguments as a row of tagged values, typed by the tool's schema where the text is bare.

    open        pattern with `{key}` up to where the value begins: `"<parameter={key}>\n"`. White
                space at its end is padding: taken off the value once, if it is there.
    close       what ends a value: `"\n</parameter>\n"`; white space before the marker is
                padding too.
    also        other spellings, which may stand beside this one in a call; none has an `also`.
    """

    open: str
    close: str
    also: tuple[TaggedArguments, ...] = ()

    def __post_init__(self) -> None:
        _need_pattern("TaggedArguments.open", self.open, "key")
        _need_markers("TaggedArguments", close=self.close)


@dataclass(frozen=True, slots=True)
class BareKeyArguments:
    """An object whose keys are unquoted and whose strings stand between `quote` marks.

    `{city:<escape>Paris<escape>,days:3}` has quote `<escape>`. Nothing inside a string is escaped.
    """

    quote: str

    def __post_init__(self) -> None:
        _need_markers("BareKeyArguments", quote=self.quote)


@dataclass(frozen=True, slots=True)
class NestedTags:
    """Arguments as elements named after them, nested where values are, each tag behind `mark`.

    With mark `~`: `~<city>Paris~</city>~<days>~<item>1~</item>~</days>`. Values are typed by the
    schema; an element that holds elements is an array where the schema, or their name `item`, says
    so.
    """

    mark: str

    def __post_init__(self) -> None:
        _need_markers("NestedTags", mark=self.mark)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    r"""Calls as Python writes them: `f(a=1, b="x")`, several between `open` and `close`.

    open, close   brackets around the row of calls: `"["` and `"]"`, or empty.
    separator     between calls: `", "` or `"\n"`.
    suffix        what may follow a name without belonging to it: `".call"`.
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
NAMED_BY_HEAD = (JsonArguments, TaggedArguments, BareKeyArguments, NestedTags)


@dataclass(frozen=True, slots=True)
class Call:
    """One spelling of a call: opening marker, head, body, closing marker.

    open    marker before each call, written form; may be empty.
    head    pattern between `open` and the body: `"{name}<｜tool▁sep｜>"`. Bodies that hold the name
            themselves have an empty head, all others must show `{name}` in it, each time the same.
    body    see the body parts.
    close   marker behind each call, written form; may be empty.
    id      the call's id, made from the head's fields: `"functions.{name}:{number}"`.

    What opens the call is `open`, else the head's first literal, else the body's first character; a
    call with none of the first two is *bare*, seen only where the output, or the section, starts.
    """

    body: Body
    open: str = ""
    head: str = ""
    close: str = ""
    id: str = "{id}"

    def __post_init__(self) -> None:
        if isinstance(self.body, NAMED_BY_HEAD):
            _need_pattern("Call.head", self.head)
            if not any(part == Slot("name") for part in pattern(self.head)):
                raise FormatError(f"Call.head: {self.head!r} must show {{name}}")
        elif self.head:
            _need_pattern("Call.head", self.head)
            if any(isinstance(part, Slot) and part.field == "name" for part in pattern(self.head)):
                raise FormatError(f"Call: the body holds the name, so head {self.head!r} may not")
        pattern(self.id)

    @property
    def trigger(self) -> str:
        """The marker that shows this call outside a section; "" if it is bare."""
        if self.open.strip():
            return self.open.strip()
        first = pattern(self.head)[0] if self.head else ""
        return first.strip() if isinstance(first, str) else ""


@dataclass(frozen=True, slots=True)
class ToolSection:
    r"""Where calls stand: in a section between `open` and `close`, or (both empty) in the content.

    calls       the spellings of a call; the first is what a constraint writes.
    separator   between calls, written form: `"\n"`, `"; "`, `", "`; not inside JSON arrays.
    also_open   other spellings of the section's opening.
    """

    calls: tuple[Call, ...]
    open: str = ""
    close: str = ""
    separator: str = ""
    also_open: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.calls:
            raise FormatError("ToolSection: needs at least one spelling of a call")
        if self.close.strip() and not self.open.strip():
            raise FormatError(f"ToolSection: close {self.close!r} without an open marker")

    @property
    def opens(self) -> tuple[str, ...]:
        """Every spelling of the section's opening marker; () if calls stand in the content."""
        return (self.open, *self.also_open) if self.open.strip() else ()


@dataclass(frozen=True, slots=True)
class Sections:
    """One text with markers: reasoning first, then content and calls."""

    reasoning: Reasoning | None = None
    content: Wrapper | None = None
    tools: ToolSection | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """What a message with this header is: `header` is a pattern over the whole header.

    `written` is what a constraint writes instead, where `header` has fields other than name.
    """

    stage: Stage
    header: str
    written: str = ""

    def __post_init__(self) -> None:
        _need_pattern("Route.header", self.header, *(["name"] if self.stage is Stage.CALLS else []))

    @property
    def form(self) -> str:
        """The header as a constraint writes it."""
        return self.written or self.header


@dataclass(frozen=True, slots=True)
class Messages:
    """A row of messages: `start`, header, `header_end`, body, and one of `ends`.

    routes      what each header means, tried in order; of each stage the first is what is written.
    ends        markers that close a body; a body also ends where the next message starts.
    call_end    the one of `ends` that closes a call, if calls have their own.
    body        of a call's arguments, where a message is a call.
    tools       calls that stand in the text of content messages, where they do.
    The generation prompt ends with `start` (so output begins in a header) or within a body.
    """

    start: str
    header_end: str
    routes: tuple[Route, ...]
    ends: tuple[str, ...] = ()
    call_end: str = ""
    body: JsonArguments = field(default_factory=JsonArguments)
    tools: ToolSection | None = None

    def __post_init__(self) -> None:
        _need_markers("Messages", start=self.start)
        if not self.header_end:
            raise FormatError("Messages: header_end is empty")
        if not self.routes:
            raise FormatError("Messages: needs at least one route")


# ---- policies ------------------------------------------------------------------------------------


class TextRule(Enum):
    """What text beside calls does to them.

    FREE         content may stand before, between and after calls; all of it is kept.
    CALLS_FIRST  calls must follow the reasoning (or the start) with only blanks between, and each
                 other likewise; from the first other text on, everything is content.
    """

    FREE = "free"
    CALLS_FIRST = "calls_first"


class StrayClose(Enum):
    """What the reasoning's closing marker means if nothing opened it and no prompt is known.

    TEXT       nothing: it is content.
    REASONING  what precedes it was reasoning. Text is held back until this is decided.
    """

    TEXT = "text"
    REASONING = "reasoning"


class UnknownTool(Enum):
    """What to do with a call of a function that `tools` lacks (no tools given: FORWARD)."""

    FORWARD = "forward"
    DROP = "drop"
    CONTENT = "content"


class BrokenArguments(Enum):
    """What to do with arguments that are no JSON.

    RAW             give them as they are, as they arrive.
    REPAIR_OR_RAW   repair with partial-json-parser, else give them as they are.
    REPAIR_OR_DROP  repair with partial-json-parser, else drop the call and log it.
    With the last two, each call's arguments come in one delta, because nothing is taken back.
    """

    RAW = "raw"
    REPAIR_OR_RAW = "repair_or_raw"
    REPAIR_OR_DROP = "repair_or_drop"


@dataclass(frozen=True, slots=True)
class Policy:
    """How to decide what a format leaves open."""

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


# ---- the whole -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where a format was read: a model card or chat template, and the date of that reading."""

    text: str
    date: str = ""

    def __str__(self) -> str:
        return f"{self.text}, {self.date}" if self.date else self.text


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    r"""How reasoning is delimited in the output that follows a prompt.

    start      what opens it, as the model writes it: `"<think>\n"`.
    end        what closes it, as the model writes it and as it is to be forced, blanks included:
               `"\n</think>\n\n"`. It is found without the blanks around it.
    is_open    whether the prompt has opened it and not closed it.
    may_open   whether the model may still open it itself.
    """

    start: str
    end: str
    is_open: bool
    may_open: bool


@dataclass(frozen=True, slots=True)
class Format:
    r"""All that is to be known of how a model writes a message.

    name      for people and logs.
    layout    `Sections` or `Messages`.
    policy    see `Policy`; a parser may be given another.
    ends      end-of-turn tokens (`"<|im_end|>"`): should they show up as text, they are markup.
    turn      what opens the model's turn in the prompt (`"<|im_start|>assistant\n"`). Where known,
              prompts that prefill a part of the answer are understood too.
    sources   where it comes from.
    """

    name: str
    layout: Sections | Messages
    policy: Policy = LENIENT
    ends: tuple[str, ...] = ()
    turn: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def with_policy(self, policy: Policy) -> Format:
        """The same format under another policy."""
        return replace(self, policy=policy)

    def stage(self, prompt: str | None) -> Stage:
        """Where output starts that follows `prompt` (rendered, generation prompt included)."""
        from nereid_parsers.stream.parser import stage_of

        return stage_of(self, prompt)

    def stage_of_ids(
        self, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> Stage:
        """The same from token ids: `decode` turns the last of them into text."""
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
        """The xgrammar structural tag that this request needs; None where output stays free.

        `response_format` is OpenAI's, or of type structural_tag, regex, grammar or choice; see
        constrain_answer. With `skip_reasoning` the tag covers only what stands behind the end of
        the reasoning, whether or not the prompt has opened any.

        Raises: ConstraintError when the request asks for what this format cannot write.
        """
        from nereid_parsers.constrain import Request, structural_tag
        from nereid_parsers.stream.parser import StreamParser

        request = Request.of(tools, tool_choice, response_format, parallel_tool_calls)
        begun = StreamParser(self, prompt=prompt)
        may_reason = not begun.has_reasoned
        return structural_tag(self, request, begun.stage, may_reason, skip_reasoning)

    def reasoning_gate(self, prompt: str | None = None) -> ReasoningGate | None:
        """How reasoning is delimited in output that follows `prompt`; None if there is none."""
        from nereid_parsers.constrain import gate_of
        from nereid_parsers.stream.parser import StreamParser

        begun = StreamParser(self, prompt=prompt)
        return gate_of(self, begun.stage, begun.has_reasoned)


# ---- patterns ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A field of a pattern."""

    field: str


def pattern(text: str) -> tuple[str | Slot, ...]:
    """Split a pattern into literals and fields.

    Raises: FormatError for an unknown field, a lone brace, or two fields with nothing between.
    """
    parts: list[str | Slot] = []
    at = 0
    for match in _FIELD.finditer(text):
        _add_literal(parts, text[at : match.start()])
        at = match.end()
        if match.group() in ("{{", "}}"):
            _add_literal(parts, match.group()[0])
        elif match.group(1) in FIELDS:
            if match.group(1) != "rest" and parts and isinstance(parts[-1], Slot):
                raise FormatError(f"pattern {text!r}: two fields with nothing between them")
            parts.append(Slot(match.group(1)))
        else:
            raise FormatError(f"pattern {text!r}: {match.group()!r} is not a field")
    _add_literal(parts, text[at:])
    return tuple(parts)


def _add_literal(parts: list[str | Slot], text: str) -> None:
    if not text:
        return
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    else:
        parts.append(text)


def _need_pattern(where: str, text: str, *fields: str) -> None:
    found = [part.field for part in pattern(text) if isinstance(part, Slot)]
    for name in fields:
        if found.count(name) != 1:
            raise FormatError(f"{where}: {text!r} must show {{{name}}} exactly once")


def _need_markers(where: str, **markers: str) -> None:
    for name, marker in markers.items():
        if not marker.strip():
            raise FormatError(f"{where}: {name} is blank, but text is told apart by it")
