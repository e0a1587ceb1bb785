"""Infer how a template writes tool calls in JSON, such as `{"name": "f", "arguments": {}}`.

There are two forms. In `{"name": "f", "arguments": {"a": 1}}`, the JSON contains the function's
name. In `f{"a": 1}`, the name precedes the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nereid_parsers.format import Call, JsonArguments, JsonArray, JsonObject, Keys, NameIsKey
from nereid_parsers.template.calls.call_heads import (
    calls_with_head,
    has_number_or_id,
    pattern_of_text,
)
from nereid_parsers.template.calls.call_texts import CallFormat, CallTexts
from nereid_parsers.template.calls.json_keys import find_path, infer_keys
from nereid_parsers.template.conversation import FIRST_KEY, FIRST_TOOL, SECOND_KEY, SECOND_TOOL
from nereid_parsers.template.markup.list_markup import ListMarkup, markup_of_calls

# Only the last 100 brackets before the name of a function are tried as the start of the JSON,
# because each attempt may read the whole text.
_MAX_JSON_STARTS = 100
_DECODER = json.JSONDecoder(strict=False)


class _JsonInText(NamedTuple):
    """A JSON value in a text, such as `{"a": 1}` in `<call>{"a": 1}</call>`.

    Attributes:
        value: The decoded value.
        text: The whole text.
        start, end: The indices of the JSON in the text: `text[start:end]` is the JSON.
    """

    value: Any
    text: str
    start: int
    end: int

    @property
    def before(self) -> str:
        """The text before the JSON, such as `<call>`."""
        return self.text[: self.start]

    @property
    def after(self) -> str:
        """The text after the JSON, such as `</call>`."""
        return self.text[self.end :]


class _JsonOfTwoCalls(NamedTuple):
    """The JSON of the two tool calls of a message.

    Attributes:
        first, second: The JSON values that contain the first and the second tool call. If one array
            contains both tool calls, both attributes represent this array.
    """

    first: _JsonInText
    second: _JsonInText

    @property
    def is_one_value(self) -> bool:
        """Whether one JSON value contains both tool calls, as in `[{..}, {..}]`."""
        return self.first.start == self.second.start

    def markup(self) -> ListMarkup:
        """Return the texts before, between and after two separate JSON values.

        Example: for `<c>{..}</c>, <c>{..}</c>`, `item_open` is "<c>", `item_close` is "</c>" and
        `separator` is ", ".
        """
        between = self.first.text[self.first.end : self.second.start]
        return markup_of_calls(self.first.before, between, self.second.after)


def read_json(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls as JSON objects or as members of a JSON array.

    Return None if the text of a tool call contains no JSON with the function's name. Examples of
    one tool call:

        <call>{"name": "f", "arguments": {"a": 1}}</call>        an object
        <calls>[{"name": "f", "arguments": {"a": 1}}]</calls>    an array

    For the first example, the result declares that a tool call is an object with the keys `name`
    and `arguments` between the markers `<call>` and `</call>`.
    """
    json_of_call = _find_json_call(texts.one_call, FIRST_TOOL)
    if json_of_call is None:
        return None
    if isinstance(json_of_call.value, list):
        return _read_arrays(texts, json_of_call)
    return _read_objects(texts, json_of_call)


def _read_objects(texts: CallTexts, json_of_call: _JsonInText) -> CallFormat | None:
    """Infer the format of the tool calls of a template that writes a single call as a JSON object.

    `json_of_call` is this object. There are three ways in which the template may write two tool
    calls:

        not at all          A message has only one tool call.
        one array           `<call>[{..}, {..}]</call>`
        separate objects    `<call>{..}</call>, <call>{..}</call>`

    Return None if the JSON of one of the two tool calls is not found.
    """
    keys = infer_keys(json_of_call.value)
    if not texts.two_calls:
        markup = ListMarkup(item_open=json_of_call.before, item_close=json_of_call.after)
        return _declare_separate_calls("JSON", markup, [JsonObject(keys)])
    two_calls = _find_two_calls(texts.two_calls)
    if two_calls is None:
        return None
    is_one_array = two_calls.is_one_value and isinstance(two_calls.first.value, list)
    if is_one_array:
        # `two_calls.first` and `two_calls.second` represent the same array.
        return _declare_object_and_array(keys, json_of_call, array=two_calls.first)
    markup = two_calls.markup()
    possible_bodies = _object_and_possible_array(keys, markup)
    return _declare_separate_calls("JSON", markup, possible_bodies)


def _object_and_possible_array(
    keys: Keys | NameIsKey, markup: ListMarkup
) -> list[JsonObject | JsonArray]:
    """Return the JSON values that a model may write between the markers of one tool call.

    The template writes one object between the markers: `<call>{..}</call>`. Some models also write
    several tool calls as an array between these markers: `<call>[{..}, {..}]</call>`. The array is
    returned only if `markup` has markers before and after each tool call.
    """
    is_call_enclosed = bool(markup.item_open.strip() and markup.item_close.strip())
    return [JsonObject(keys), JsonArray(keys)] if is_call_enclosed else [JsonObject(keys)]


def _declare_separate_calls(
    form: str, markup: ListMarkup, bodies: Sequence[JsonObject | JsonArray]
) -> CallFormat:
    """Describe a template that writes markers around each tool call, such as `<call>{..}</call>`.

    The result contains one `Call` for each of the `bodies`, which are the forms of the JSON between
    the markers `markup.item_open` and `markup.item_close`. `form` is the name for the report.
    """
    return CallFormat(form, tuple(_declare_call(body, markup) for body in bodies), markup)


def _declare_object_and_array(
    keys: Keys | NameIsKey, single_object: _JsonInText, array: _JsonInText
) -> CallFormat:
    """Declare the tool calls of a template that writes one call as an object, two as an array.

    A model may write both forms, so the result declares the array and the object. The markers
    around the array, such as `<calls>`, are declared as the markers around all tool calls of a
    message. The markers around the object are declared as a part of a single tool call, but only if
    they are other markers:

        template writes one call    template writes two calls       declared object
        `<call>{..}</call>`         `<calls>[{..}, {..}]</calls>`   `<call>{..}</call>`
        `<calls>{..}</calls>`       `<calls>[{..}, {..}]</calls>`   `{..}`

    Args:
        keys: The JSON keys of a tool call.
        single_object: The JSON in the rendering of one tool call, and the text around this JSON.
        array: The JSON in the rendering of two tool calls, and the text around this JSON.
    """
    array_format = _declare_one_array(keys, array)
    before_all_calls = array_format.markup.open  # `<calls>`
    has_own_markers = single_object.before.strip() != before_all_calls.strip()
    if has_own_markers:
        object_call = Call(JsonObject(keys), open=single_object.before, close=single_object.after)
    else:
        object_call = Call(JsonObject(keys))
    return replace(array_format, calls=(*array_format.calls, object_call))


def _read_arrays(texts: CallTexts, json_of_call: _JsonInText) -> CallFormat | None:
    """Infer the format of the tool calls of a template that writes a single call as a JSON array.

    `json_of_call` is this array. A template writes one array for each tool call, or one array for
    all tool calls:

        for each tool call     `<call>[{..}]</call><call>[{..}]</call>`
        for all tool calls     `<calls>[{..}, {..}]</calls>`

    If a message has only one tool call, the second case is assumed. Return None if the first member
    of the array is not an object, as in `["v1", {"name": ..}]`.
    """
    first_member = json_of_call.value[0]  # The array contains the tool call, so it is not empty.
    if not isinstance(first_member, dict):
        return None
    keys = infer_keys(first_member)
    two_calls = _find_two_calls(texts.two_calls)
    if two_calls is None or two_calls.is_one_value:  # One array contains all tool calls.
        return _declare_one_array(keys, json_of_call)
    return _declare_separate_calls("JSON array", two_calls.markup(), [JsonArray(keys)])


def _declare_one_array(keys: Keys | NameIsKey, array: _JsonInText) -> CallFormat:
    """Describe a template that writes all tool calls of a message as one JSON array.

    There are two cases:

        only a marker before the array    `[TOOL_CALLS][{..}, {..}]`
        all other cases                   `<calls>[{..}, {..}]</calls>`

    In the first case, the marker is declared as the opening marker of each array, because no
    closing marker shows where a list of several arrays would end. In the second case, the markers
    are declared as markers around all tool calls, because a model may also write several arrays or
    objects between these markers.
    """
    has_only_opening = bool(array.before.strip()) and not array.after.strip()
    if has_only_opening:
        call = Call(JsonArray(keys), open=array.before)
        markup = ListMarkup()
    else:
        call = Call(JsonArray(keys))
        # The template shows no text between two arrays. The usual separator is assumed.
        markup = ListMarkup(open=array.before, separator=", ", close=array.after)
    return CallFormat("JSON array", (call,), markup)


def _declare_call(body: JsonObject | JsonArray, markup: ListMarkup) -> Call:
    """Return a `Call` with the markers `markup.item_open` and `markup.item_close` around `body`.

    If the opening marker contains the number or the id of the tool call, as in `<call n="1">`, this
    marker is declared as the header of the tool call, because only a header may contain fields.
    """
    opening = markup.item_open
    if has_number_or_id(opening):
        return Call(body, head=pattern_of_text(opening.lstrip()), close=markup.item_close)
    return Call(body, open=opening, close=markup.item_close)


def _find_two_calls(two_calls: str) -> _JsonOfTwoCalls | None:
    """Find the JSON of the two tool calls of a message.

    Return None if the JSON of one of the two tool calls is not found, or if `two_calls` is "".
    """
    first = _find_json_call(two_calls, FIRST_TOOL)
    second = _find_json_call(two_calls, SECOND_TOOL)
    if first is None or second is None:
        return None
    return _JsonOfTwoCalls(first, second)


def _find_json_call(text: str, name: str) -> _JsonInText | None:
    """Find the first JSON object or array that contains a call of the function `name`.

    Return None if there is no such object or array. The name is an invented word, such as
    "zqFirstTool", so its first occurrence in the text is in the tool call.

    >>> found = _find_json_call('<call>{"name": "f"}</call>', "f")
    >>> found.before, found.value, found.after
    ('<call>', {'name': 'f'}, '</call>')
    """
    before_name, found_name, _ = text.partition(name)
    if not found_name:
        return None
    # The JSON starts at one of the brackets before the name. Only the last brackets are tried,
    # because in a tool call, few brackets precede the name. Earlier brackets belong to other text.
    # Outer brackets are tried before inner brackets, so that a whole array is found.
    brackets = [index for index, char in enumerate(before_name) if char in "{["]
    for start in brackets[-_MAX_JSON_STARTS:]:
        found = _decode_json(text, start)
        if found is not None and _contains_call(found.value, name):
            return found
    return None


def _decode_json(text: str, start: int) -> _JsonInText | None:
    """Decode the JSON value that starts at `text[start]`. Return None if no JSON starts there.

    >>> _decode_json('<call>{"a": 1}</call>', 6)
    _JsonInText(value={'a': 1}, text='<call>{"a": 1}</call>', start=6, end=14)
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return _JsonInText(value, text, start, end)


def _contains_call(value: object, name: str) -> bool:
    """Return whether `value` is a call of the function `name`, or an array with such a call.

    >>> _contains_call([{"name": "g"}, {"name": "f"}], "f"), _contains_call({"name": "g"}, "f")
    (True, False)
    """
    if isinstance(value, list):
        return any(_is_call(member, name) for member in value)
    return _is_call(value, name)


def _is_call(member: object, name: str) -> bool:
    """Return whether `member` is a JSON object that calls the function `name`.

    The object contains the name in one of two places:

        {"f": {"a": 1}}               the key of an inner object, which contains the arguments
        {"function": {"name": "f"}}   the value of any key of the object or of an inner object

    `name` must be an invented word, such as "zqFirstTool", that is not the value of an argument.

    >>> _is_call({"f": {"a": 1}}, "f"), _is_call({"function": {"name": "f"}}, "f")
    (True, True)
    >>> _is_call({"f": 1}, "f")
    False
    """
    if not isinstance(member, dict):
        return False
    if isinstance(member.get(name), dict):
        return True
    return find_path(member, lambda value: value == name) is not None


def read_json_arguments(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls as a name and JSON arguments, as in `f{"a": 1}`.

    Example: the result for `<call>f<args>{"a": 1}</call>` declares the opening marker `<call>`, the
    header `{name}<args>` and the closing marker `</call>`. Return None if no JSON object with the
    argument follows the name of each tool call.
    """
    json_of_call = _find_json_arguments(texts.one_call, FIRST_TOOL, FIRST_KEY)  # `{"a": 1}`
    if json_of_call is None:
        return None
    markup = _markup_of_named_calls(texts, json_of_call)
    if markup is None:
        return None
    _, _, after_name = json_of_call.before.partition(FIRST_TOOL)  # `<args>`
    calls = calls_with_head(
        # `json_of_call.before` may also contain a marker before all tool calls, such as `<calls>`.
        # `markup.item_open` contains only the text before each tool call.
        before_name=markup.item_open,
        after_name=after_name,
        body=JsonArguments(),
        close=markup.item_close,
    )
    return CallFormat("name, then JSON", calls, markup)


def _markup_of_named_calls(texts: CallTexts, json_of_call: _JsonInText) -> ListMarkup | None:
    """Return the texts before, between and after tool calls that look like `f{"a": 1}`.

    `json_of_call` is the JSON with the arguments in `texts.one_call`. If a message has only one
    tool call, the text between two tool calls is unknown. Return None if the JSON of one of two
    tool calls is not found.
    """
    if texts.two_calls:
        return _markup_of_two_calls(texts.two_calls)
    before_name, _, _ = json_of_call.before.partition(FIRST_TOOL)
    return ListMarkup(item_open=before_name, item_close=json_of_call.after)


def _markup_of_two_calls(two_calls: str) -> ListMarkup | None:
    """Return the texts before, between and after two tool calls that look like `f{"a": 1}`.

    Return None if the JSON of one of the two tool calls is not found. Example: for
    `<c>f{..}</c>, <c>g{..}</c>`, `item_open` is "<c>", `item_close` is "</c>" and `separator` is
    ", ".
    """
    first = _find_json_arguments(two_calls, FIRST_TOOL, FIRST_KEY)
    if first is None:
        return None
    second = _find_json_arguments(first.after, SECOND_TOOL, SECOND_KEY)
    if second is None:
        return None
    before_calls, _, _ = first.before.partition(FIRST_TOOL)
    between_calls, _, _ = second.before.partition(SECOND_TOOL)
    return markup_of_calls(before_calls, between_calls, second.after)


def _find_json_arguments(text: str, name: str, key: str) -> _JsonInText | None:
    """Find the JSON object with the arguments of a tool call: the first object after the name.

    Return None if the first "{" after the name does not start a JSON object, or if the object has
    no argument `key`.

    >>> found = _find_json_arguments('f<args>{"a": 1}</args>', "f", "a")
    >>> found.before, found.value, found.after
    ('f<args>', {'a': 1}, '</args>')
    """
    name_start = text.find(name)
    if name_start < 0:
        return None
    object_start = text.find("{", name_start)
    if object_start < 0:
        return None
    found = _decode_json(text, object_start)
    has_key = found is not None and key in found.value
    return found if has_key else None
