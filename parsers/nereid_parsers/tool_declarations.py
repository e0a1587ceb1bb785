"""The dataclasses that declare how a model writes tool calls.

The conventions for markers, patterns and alternatives are described in declarations.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from nereid_parsers.errors import FormatError
from nereid_parsers.pattern_syntax import (
    PatternField,
    check_markers,
    check_pattern,
    first_literal,
    split_pattern,
)

_NO_PUNCTUATION = re.compile(r"[^\W_]|[^\x00-\x7F]")  # Matches any character except punctuation.


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a JSON object that represents a tool call, such as `{"name": .., "args": ..}`.

    A "path" is a list of keys, separated by dots. Example: the paths in
    `Keys("function.name", "function.arguments", id="id")` describe the object
    `{"id": .., "function": {"name": .., "arguments": ..}}`.

    Attributes:
        name: The path of the function's name.
        arguments: The path of the arguments.
        id: The path of the tool call's id, or None if the object has no id.
        also: Alternative paths of the arguments.
        extra: Other keys that the object may have. The parser ignores these keys.
        order: The order of the members in constrained output: "name" and "arguments", and
            optionally "id" and "type". The member "type" is always `"type": "function"`.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str | None = None
    also: tuple[str, ...] = ()
    extra: tuple[str, ...] = ("type",)
    order: tuple[str, ...] = ("name", "arguments")

    def __post_init__(self) -> None:
        """Raise FormatError if a path or the order of the keys is not valid."""
        self._check_paths()
        self._check_order()

    def path_of(self, member: str) -> str:
        """Return the path of the key for `member`: "name", "arguments", "id" or "type".

        `member` is one of the members of `order`. Examples: the path of the arguments may be
        `function.arguments`, and the path of the type is always `type`.
        """
        paths = {"name": self.name, "arguments": self.arguments, "id": self.id or ""}
        paths["type"] = "type"
        return paths[member]

    def _check_paths(self) -> None:
        """Raise FormatError if a path has an empty part. Example: `function..name`."""
        paths = [self.name, self.arguments, *self.also]
        if self.id:
            paths.append(self.id)
        for path in paths:
            has_empty_part = "" in path.split(".")
            if has_empty_part:
                raise FormatError(
                    f"Keys: the path {path!r} has an empty part. A path is a list of key names "
                    "that are separated by dots, such as 'function.name'."
                )

    def _check_order(self) -> None:
        """Raise FormatError unless `order` has "name" and "arguments", and optional other members.

        The optional members are "id" and "type". If the attribute `id` is None, `order` must not
        contain "id".
        """
        required = {"name", "arguments"}
        members = set(self.order)
        is_known = required <= members <= required | {"id", "type"}
        if not is_known or len(self.order) > len(members):
            raise FormatError(
                "Keys.order must contain 'name' and 'arguments' once, and may contain 'id' and "
                f"'type' once, but is {self.order!r}"
            )
        if "id" in self.order and self.id is None:
            raise FormatError(
                "Keys.order contains 'id', but Keys.id is None. Set Keys.id to the JSON key that "
                "holds a call's id, or remove 'id' from Keys.order."
            )


@dataclass(frozen=True, slots=True)
class NameIsKey:
    """A JSON object with one member, which maps the function's name to the arguments.

    Example: `{"f": {"a": 1}}` calls the function f.
    """


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A tool call that is written as one JSON object: `{"name": "f", "arguments": {"a": 1}}`."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArray:
    """Tool calls that are written as the members of one JSON array: `[{"name": "f", ..}, ..]`."""

    keys: Keys | NameIsKey = field(default_factory=Keys)


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments that are written as a JSON object, such as `{"a": 1}`.

    The header before the arguments contains the name of the function.
    """


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    r"""Arguments whose values are written between tags: `<parameter=city>Paris</parameter>`.

    The schema of the tool determines the type of each value. The text of a value does not show the
    type: `12` may be a number or a string.

    Attributes:
        open: The pattern before the value, with the field `{key}`: `"<parameter={key}>\n"`. If the
            pattern ends with white space, the parser removes this white space once from the start
            of the value.
        close: The text after the value: `"\n</parameter>\n"`. If this text starts with white space,
            the parser removes this white space once from the end of the value. In a text such as
            `"</{key}>"`, the parser replaces `{key}` with the name of the argument. All other
            braces are plain text. A line break or punctuation such as `;` may close a value, too.
            The last value may lack this text, and a value may contain it if no argument follows.
            If `close` is empty, a value ends before `separator`, or, if `separator` is empty, too,
            where the next argument or the end of the tool call starts.
        also: Other forms in which models write a value between tags, for example in CDATA. One tool
            call may contain several forms. The attribute `also` of these forms must be empty.
        escapes: The kind of escape sequences in the values: "json" for strings with sequences such
            as `\n`, "html" for values with entities such as `&lt;`, or "" for plain text. For
            "json", `open` and `close` contain the quotes of the string. The forms in `also` are
            then the forms of JSON values without quotes.
        separator: The text between two arguments, such as `; ` in `city=Paris; days=3`. This text
            does not follow the last argument.
    """

    open: str
    close: str
    also: tuple[TaggedArguments, ...] = ()
    escapes: Literal["", "json", "html"] = ""
    separator: str = ""

    def __post_init__(self) -> None:
        """Check the values of `open` and `close`.

        `open` must contain `{key}` exactly once, and a visible character before or after it.
        `close` must contain a visible character, start with a line break, or be empty. If `close`
        is empty, `separator` or the text before the key must show the end of a value.
        """
        check_pattern("TaggedArguments.open", self.open, "key")
        if not self.open.replace("{key}", "").strip():
            raise FormatError(
                f"TaggedArguments.open is {self.open!r}, but must contain a visible character "
                "before or after the key, because the parser could not find the end of the key"
            )
        if not self.close and not (self.separator or first_literal(self.open)):
            raise FormatError(
                f"TaggedArguments.close and TaggedArguments.separator are empty, and "
                f"TaggedArguments.open is {self.open!r}, so no text shows where a value ends. "
                "Declare the text after a value or between two arguments."
            )
        if self.close and not self.close.startswith("\n"):
            check_markers("TaggedArguments", close=self.close)

    @property
    def closing_marker(self) -> str:
        r"""The text that ends the value, without white space around it, or "" if there is none.

        White space alone may end the value, too. The result is then a line break, or a space if
        the white space contains no line break. Examples: `</p>` for the closing text `\n</p>\n`,
        and `;` for values that are only separated by `; `.
        """
        closing_text = self.close or self.separator
        whitespace = "\n" if "\n" in closing_text else closing_text[:1]
        return closing_text.strip() or whitespace

    @property
    def is_attribute(self) -> bool:
        """Whether the values are XML attributes, as in `days="3"`, with entities such as `&lt;`."""
        return self.escapes == "html" and self.closing_marker == '"'

    def for_key(self, key: str) -> TaggedArguments:
        """Return the tags of one argument: in `close`, the name of the argument replaces `{key}`.

        Example: `TaggedArguments("<{key}>", "</{key}>").for_key("city").close` is `"</city>"`.
        """
        if "{key}" not in self.close:
            return self
        also = tuple(form.for_key(key) for form in self.also)
        return replace(self, close=self.close.replace("{key}", key), also=also)


@dataclass(frozen=True, slots=True)
class BareKeyArguments:
    """Arguments that are written as an object with unquoted keys, such as `{days:3}`.

    Example: `{city:<escape>Paris<escape>,days:3}`. The attribute `quote`, here `<escape>`, is the
    text before and after each string. A string contains no escape sequences, unless `quote` is a
    double quote, as in `{city:"Paris"}`. Strings are then written as in JSON.
    """

    quote: str

    def __post_init__(self) -> None:
        """Check that `quote` contains a visible character."""
        check_markers("BareKeyArguments", quote=self.quote)


@dataclass(frozen=True, slots=True)
class NestedTags:
    """Arguments that are written in nested tags. Before each tag, the model writes `tag_prefix`.

    Example with the prefix `~`: `~<city>Paris~</city>~<days>~<item>1~</item>~</days>`. The tool's
    schema determines the types of the values. An element with inner elements is an array if the
    schema declares an array. If the schema declares no type, such an element is an array if its
    first inner element is called `item`, and an object otherwise.
    """

    tag_prefix: str

    def __post_init__(self) -> None:
        """Check that `tag_prefix` contains a visible character."""
        check_markers("NestedTags", tag_prefix=self.tag_prefix)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    r"""Tool calls that are written in Python syntax: `[f(a=1, b="x"), g()]`.

    Attributes:
        open, close: The brackets around all tool calls: `"["` and `"]"`. Both may be empty.
        separator: The text between two tool calls: `", "` or `"\n"`. Empty if the markers of
            `Call` enclose each tool call.
        suffix: Optional text after a function's name, which is not a part of the name: `".call"`.
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
# These types describe only the arguments of a tool call. The model writes the function's name in
# the text before the arguments.
NAMED_BY_HEAD = (JsonArguments, TaggedArguments, BareKeyArguments, NestedTags)


@dataclass(frozen=True, slots=True)
class Call:
    """Describes one way in which a model writes a tool call: the markers, name and arguments.

    Example: in `<call><function=f>{"a": 1}</call>`, the opening marker is `<call>`, the header is
    `<function=f>`, the body is `{"a": 1}`, and the closing marker is `</call>`. A format declares
    several variants if models write tool calls in several ways, for example without `<call>`.

    The *trigger* of a tool call is the text by which the parser recognises that a tool call starts.
    The trigger is `open`, or the first literal of `head` if `open` is empty. A tool call without a
    trigger is *unmarked*. The parser recognises an unmarked tool call by the first characters of
    its body. An unmarked tool call may be at the start of the output, or at the start of the tool
    section. At any other place, an unmarked tool call is recognised only if the request offers the
    function.

    Attributes:
        open: The marker before the tool call. May be empty.
        head: The pattern of the header, which is the text between `open` and the body:
            `"{name}<｜tool▁sep｜>"`. The pattern must contain `{name}` if the body does not contain
            the name, and must not contain `{name}` if the body contains the name.
            If `{name}` occurs several times, the model must write the same name each time.
        body: The form of the arguments, or of the whole tool call.
        close: The marker after the tool call. May be empty. The parser replaces the text `{name}`,
            as in `"</{name}>"`, with the name of the function, which `head` must contain. All other
            braces are plain text.
        id: The template of the tool call's id, which contains fields of `head`:
            `"functions.{name}:{number}"`.
    """

    body: Body
    open: str = ""
    head: str = ""
    close: str = ""
    id: str = "{id}"

    def __post_init__(self) -> None:
        """Raise FormatError if `head`, `id` or `close` is not valid, or does not suit `body`."""
        self._check_name()
        self._check_id()
        self._check_close()

    def _check_name(self) -> None:
        """Raise FormatError unless exactly one of `head` and `body` contains the function's name.

        Example: in `<call><function=f>{"a": 1}</call>`, the header contains the name `f`.
        """
        head_has_name = PatternField("name") in split_pattern(self.head)
        body_has_name = not isinstance(self.body, NAMED_BY_HEAD)
        if not head_has_name and not body_has_name:
            raise FormatError(
                f"Call.head is {self.head!r}, but must contain the field {{name}}, because a "
                f"{type(self.body).__name__} body does not contain the function's name"
            )
        if head_has_name and body_has_name:
            raise FormatError(
                f"Call.head is {self.head!r}. A {type(self.body).__name__} body already contains "
                "the function's name, so remove {name} from Call.head."
            )
        if "{name}" in self.close and not head_has_name:
            raise FormatError(
                f"Call.close is {self.close!r} and contains the field {{name}}, so Call.head must "
                f"contain {{name}}, too, but is {self.head!r}"
            )

    def _check_id(self) -> None:
        """Raise FormatError if the pattern `id` is not valid, for example if a field is unknown."""
        split_pattern(self.id)

    def _check_close(self) -> None:
        """Raise FormatError if a body of nested tags has no marker `close` that ends the body."""
        if isinstance(self.body, NestedTags) and not self.close.strip():
            raise FormatError(
                f"Call.close is {self.close!r}, but must contain a marker, because the arguments "
                "of a NestedTags body end where this marker starts"
            )

    def for_name(self, name: str) -> Call:
        """Return the declaration of the calls of one function: its name replaces `{name}`.

        Only `close` is changed. Example: for the function `f`, `</{name}>` becomes `</f>`.
        """
        return replace(self, close=self.close.replace("{name}", name))

    @property
    def trigger(self) -> str:
        """The marker that starts the tool call, such as `<tool_call>`, or "" if there is none."""
        if self.open.strip():
            return self.open.strip()
        return first_literal(self.head)

    @property
    def starts_with_punctuation(self) -> bool:
        """Whether the trigger is only ASCII punctuation of the header: `<` in `<get_weather>`.

        Content often contains such a trigger, so only the name of an offered function shows that a
        tool call starts.
        """
        if self.open.strip():
            return False
        return bool(self.trigger) and _NO_PUNCTUATION.search(self.trigger) is None


@dataclass(frozen=True, slots=True)
class ToolSection:
    r"""Describes how a model writes each tool call, and which markers enclose all tool calls.

    If no markers surround the tool calls, `open` and `close` are empty.

    Attributes:
        calls: The variants of a tool call. Constrained output contains the first variant.
        open, close: The markers around all tool calls.
        separator: The text between two tool calls: `"\n"`, `"; "` or `", "`. This text does not
            separate the members of a JSON array.
        also_open, also_close: Alternatives to the markers `open` and `close`.
    """

    calls: tuple[Call, ...]
    open: str = ""
    close: str = ""
    separator: str = ""
    also_open: tuple[str, ...] = ()
    also_close: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that `calls` is not empty, and that a section with `close` also has `open`."""
        if not self.calls:
            raise FormatError("ToolSection.calls must contain at least one Call, but is empty")
        if self.close.strip() and not self.open.strip():
            raise FormatError(
                f"ToolSection.close is {self.close!r}, but ToolSection.open is {self.open!r}. A "
                "section with a closing marker also needs an opening marker."
            )

    @property
    def opens(self) -> tuple[str, ...]:
        """The opening markers of the tool section, such as `<tool_calls>`. Empty if none exist."""
        return (self.open, *self.also_open) if self.open.strip() else ()

    @property
    def closes(self) -> tuple[str, ...]:
        """The closing markers of the tool section, such as `</tool_calls>`. Empty if none exist."""
        markers = (self.close, *self.also_close)
        return tuple(marker.strip() for marker in markers if marker.strip())
