"""Describe tool calls whose name precedes the arguments, such as `<function=f>{"a": 1}`."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    JsonArguments,
    NestedTags,
    TaggedArguments,
)
from nereid_parsers.pattern_syntax import escape_braces
from nereid_parsers.template.conversation import FIRST_TOOL
from nereid_parsers.template.markup.markers import MARKER
from nereid_parsers.template.probe import COUNTER_MARK, ID_MARK

# These types describe arguments that follow the name of the function, as in `f{"a": 1}`.
ArgumentsBody = JsonArguments | TaggedArguments | BareKeyArguments | NestedTags

# Some templates render the id of a tool call, such as `functions.f:0`, instead of the function's
# name `f`. These are the patterns of such ids, with and without "functions.".
_NUMBERED_ID = "functions.{name}:{number}"
_SHORT_NUMBERED_ID = "{name}:{number}"
_ID_FIELD = "{id}"
# Each key is a text in a rendered tool call. Each value is the field that replaces this text in the
# pattern of the tool call. COUNTER_MARK and ID_MARK are the placeholder characters for the number
# and the id of a tool call.
_FIELD_OF_TEXT = {FIRST_TOOL: "{name}", COUNTER_MARK: "{number}", ID_MARK: _ID_FIELD}


class _TextBeforeName(NamedTuple):
    """The text before a function's name, such as `<call><function=`, in two parts.

    Attributes:
        opening: The opening marker of the tool call, such as `<call>`, and the white space around
            the marker.
        head_start: The rest of the text, which starts the header: `<function=`.
    """

    opening: str
    head_start: str


class _HeaderForm(NamedTuple):
    """One form in which a model may write the header of a tool call.

    Attributes:
        head: The pattern of the header, such as `<call>{name}:{number}`.
        id: The template of the tool call's id, such as `{name}:{number}`. The parser replaces each
            field with the text of this field in the header. If a field is missing in the header,
            the tool call has no id.
    """

    head: str
    id: str


def calls_with_head(
    before_name: str, after_name: str, body: ArgumentsBody, close: str
) -> tuple[Call, ...]:
    """Declare the forms of a tool call whose name precedes the arguments, as in `f{"a": 1}`.

    The header is the text around the name, without the opening marker of the tool call. The result
    contains one `Call` for each form in which a model may write the header. There are several forms
    only if the template renders an id such as `functions.f:0` instead of the name. In the header,
    the field `{name}` replaces the function's name:

    >>> [call] = calls_with_head("<call><function=", ">", JsonArguments(), close="</call>")
    >>> call.open, call.head, call.close
    ('<call>', '<function={name}>', '</call>')

    Args:
        before_name: The rendered text from the start of the tool call to the name.
        after_name: The rendered text between the name and the arguments.
        body: The declaration of the arguments. It shows whether a marker before the name opens a
            tool call, or precedes each argument, too.
        close: The rendered text after the arguments.
    """
    opening, head_start = _split_text_before_name(before_name, body)
    head = pattern_of_text(head_start + FIRST_TOOL + after_name)
    return tuple(
        Call(body, open=opening, head=form.head, close=close, id=form.id)
        for form in _forms_of_header(head)
    )


def _split_text_before_name(text: str, body: ArgumentsBody) -> _TextBeforeName:
    r"""Split the text before a function's name into the opening marker and the start of the header.

    >>> _split_text_before_name("<call>\n<function=", JsonArguments())
    _TextBeforeName(opening='<call>\n', head_start='<function=')

    If the text does not start with a marker, `opening` is the white space at the start. If the text
    is only white space, both parts are "". `body` is the declaration of the arguments that follow
    the name.
    """
    if not text.strip():
        return _TextBeforeName("", "")  # White space alone does not open a tool call.
    without_space = text.lstrip()
    marker = _opening_marker(without_space)
    if _starts_each_argument(marker, body):
        # In `<|sep|>f<|sep|>a=1`, the marker `<|sep|>` precedes both the name `f` and the argument
        # `a`. Alone, this marker does not show that a tool call starts, so it becomes a part of the
        # header `<|sep|>{name}`.
        return _TextBeforeName(opening="", head_start=text)
    head_start = without_space.removeprefix(marker).lstrip()
    marker_with_space = text.removesuffix(head_start)
    return _TextBeforeName(opening=marker_with_space, head_start=head_start)


def _opening_marker(text: str) -> str:
    """Return the opening marker of a tool call at the start of `text`, or "" if there is none.

    A marker with the number or the id of the tool call belongs to the header, because only the
    header may contain fields. The result is then "". In this example, ID_MARK is the placeholder
    for the id:

    >>> _opening_marker("<call><function="), _opening_marker(f"<call id={ID_MARK}>")
    ('<call>', '')
    """
    match = MARKER.match(text)
    if match is None or has_number_or_id(match.group()):
        return ""
    return match.group()


def _starts_each_argument(marker: str, body: ArgumentsBody) -> bool:
    """Return whether the opening tag of each argument starts with `marker`, such as `<|sep|>`.

    >>> _starts_each_argument("<|sep|>", TaggedArguments("<|sep|>{key}=", "<|end|>"))
    True

    If `marker` is "", return False.
    """
    if not marker or not isinstance(body, TaggedArguments):
        return False
    return body.open.startswith(escape_braces(marker))  # `body.open` is a pattern.


def _forms_of_header(head: str) -> list[_HeaderForm]:
    """Return the forms in which a model may write the header of a tool call.

    `head` is the pattern of the header that the template renders. Usually, models write only this
    form. The attribute `id` of a form is the template of the tool call's id. `{id}` is the default:
    the tool call has the id in the field `{id}` of the header, or no id if there is no such field.

    >>> _forms_of_header("<call>{name}")
    [_HeaderForm(head='<call>{name}', id='{id}')]

    Some templates render a numbered id, such as `functions.f:0`, instead of the name `f`. A model
    may then write the id, the id without "functions.", or only the name:

    >>> for form in _forms_of_header("<call>functions.{name}:{number}"): print(form)
    _HeaderForm(head='<call>functions.{name}:{number}', id='functions.{name}:{number}')
    _HeaderForm(head='<call>{name}:{number}', id='{name}:{number}')
    _HeaderForm(head='<call>{name}', id='{id}')
    """
    before_id, numbered_id, after_id = head.partition(_NUMBERED_ID)
    if not numbered_id:
        return [_HeaderForm(head, id=_ID_FIELD)]
    return [
        _HeaderForm(head, id=_NUMBERED_ID),
        _HeaderForm(before_id + _SHORT_NUMBERED_ID + after_id, id=_SHORT_NUMBERED_ID),
        _HeaderForm(before_id + "{name}" + after_id, id=_ID_FIELD),
    ]


def has_number_or_id(text: str) -> bool:
    r"""Return whether `text` contains the placeholder of a tool call's number or id.

    >>> has_number_or_id('<call id="\ufdd1">'), has_number_or_id("<call>")
    (True, False)
    """
    return COUNTER_MARK in text or ID_MARK in text


def pattern_of_text(rendered: str) -> str:
    r"""Return the pattern of a rendered text: fields replace a tool call's name, number and id.

    The fields are `{name}`, `{number}` and `{id}`. They replace the name FIRST_TOOL and the
    placeholder characters for the number and the id. In this example, "\ufdd0" is the placeholder
    for the number:

    >>> pattern_of_text(f'<call n="\ufdd0" name="{FIRST_TOOL}">')
    '<call n="{number}" name="{name}">'
    """
    pattern = escape_braces(rendered)
    for rendered_text, field in _FIELD_OF_TEXT.items():
        pattern = pattern.replace(rendered_text, field)
    return pattern
