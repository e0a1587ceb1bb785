"""Describe tool calls whose name precedes the arguments, such as `<function=f>{"a": 1}`."""

from __future__ import annotations

from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    JsonArguments,
    NestedTags,
    TaggedArguments,
)
from nereid_parsers.pattern_syntax import escape_braces
from nereid_parsers.template.conversation import FIRST_TOOL
from nereid_parsers.template.difference import MARKER
from nereid_parsers.template.list_markup import ListMarkup
from nereid_parsers.template.probe import COUNTER_MARK, ID_MARK

# These types describe arguments that follow the name of the function, as in `f{"a": 1}`.
ArgumentsBody = JsonArguments | TaggedArguments | BareKeyArguments | NestedTags

# Some templates render the id of a tool call, such as `functions.f:0`, instead of the function's
# name `f`. This string is the pattern of such ids.
_NUMBERED_ID = "functions.{name}:{number}"
# Each key is a text in a rendered tool call. Each value is the field that replaces this text in the
# pattern of the tool call. COUNTER_MARK and ID_MARK are the placeholder characters for the number
# and the id of a tool call.
_FIELDS = {FIRST_TOOL: "{name}", COUNTER_MARK: "{number}", ID_MARK: "{id}"}


def calls_with_head(markup: ListMarkup, after_name: str, body: ArgumentsBody) -> tuple[Call, ...]:
    """Describe a tool call whose name precedes the arguments, such as `<function=f>{"a": 1}`.

    Such a tool call consists of an opening marker (`<call>`), a header (`<function=f>`), the
    arguments and a closing marker (`</call>`). In the declaration, the header is a pattern in which
    the field `{name}` replaces the name.

    >>> markup = ListMarkup(item_open="<call><function=", item_close="</call>")
    >>> [call] = calls_with_head(markup, ">", JsonArguments())
    >>> call.open, call.head, call.close
    ('<call>', '<function={name}>', '</call>')

    In `markup`, the markup of the list of tool calls, `item_open` is the text before the name. The
    result contains one declaration for each form of the header, see `_variants_of_head`.
    """
    opening, head_start = _split_text_before_name(markup.item_open)
    if _starts_each_argument(opening.strip(), body):
        # In `<|sep|>f<|sep|>a=1`, the marker `<|sep|>` alone does not show where a tool call
        # starts. Therefore, the marker becomes a part of the header.
        opening, head_start = "", markup.item_open
    head = pattern_of_text(head_start + FIRST_TOOL + after_name)
    return tuple(
        Call(body, open=opening, head=head_pattern, close=markup.item_close, id=id_pattern)
        for head_pattern, id_pattern in _variants_of_head(head)
    )


def _starts_each_argument(marker: str, body: ArgumentsBody) -> bool:
    """Return whether the opening tag of each argument starts with `marker`, such as `<|sep|>`.

    >>> _starts_each_argument("<|sep|>", TaggedArguments("<|sep|>{key}=", "<|end|>"))
    True

    If `marker` is "", return False.
    """
    return (
        bool(marker)
        and isinstance(body, TaggedArguments)
        and body.open.startswith(escape_braces(marker))  # `body.open` is a pattern.
    )


def _variants_of_head(head: str) -> list[tuple[str, str]]:
    """Return the patterns of all texts that may precede the arguments of a tool call.

    `head` is a pattern in which the field `{name}` replaces the name of the function. Most headers
    have only one form. But some templates render an id such as "functions.f:0" instead of the name
    `f`, so `head` contains `functions.{name}:{number}`. Then there are three forms:

        functions.f:0    The model writes the id.
        f:0              The model writes the id without "functions.".
        f                The model writes only the name.

    Each member of the result contains two patterns: the pattern of the header and the pattern of
    the id. In the third form, the model writes no id. The second pattern is then "{id}", which
    matches any id:

    >>> for variant in _variants_of_head("<call>functions.{name}:{number}"): print(variant)
    ('<call>functions.{name}:{number}', 'functions.{name}:{number}')
    ('<call>{name}:{number}', '{name}:{number}')
    ('<call>{name}', '{id}')
    """
    if _NUMBERED_ID not in head:
        return [(head, "{id}")]
    before_id, _, after_id = head.partition(_NUMBERED_ID)
    return [
        (head, _NUMBERED_ID),
        (before_id + "{name}:{number}" + after_id, "{name}:{number}"),
        (before_id + "{name}" + after_id, "{id}"),
    ]


def _split_text_before_name(text: str) -> tuple[str, str]:
    r"""Split the text before a function's name into a marker, such as `<call>`, and the rest.

    White space around the marker belongs to the marker. If there is no marker, as in the second
    example, the first part is the white space at the start of the text. A tag with the number or
    the id of the tool call, such as `<call id="1">`, belongs to the header. If the whole text is
    white space, both parts of the result are "", because white space alone does not open a tool
    call.

    >>> _split_text_before_name("<call>\n<function=")
    ('<call>\n', '<function=')
    >>> _split_text_before_name("\nAction: ")
    ('\n', 'Action: ')
    """
    without_space = text.lstrip()
    if not without_space:
        return "", ""
    match = MARKER.match(without_space)
    if match is None or has_number_or_id(match.group()):
        head_start = without_space
    else:
        head_start = without_space[match.end() :].lstrip()
    head_index = len(text) - len(head_start)
    return text[:head_index], head_start


def has_number_or_id(text: str) -> bool:
    r"""Return whether `text` contains the placeholder of a tool call's number or id.

    >>> has_number_or_id('<call id="\ufdd1">'), has_number_or_id("<call>")
    (True, False)
    """
    return COUNTER_MARK in text or ID_MARK in text


def pattern_of_text(rendered: str) -> str:
    r"""Put fields in the place of the name, the number and the id in the text of a tool call.

    The result is a pattern with the fields `{name}`, `{number}` and `{id}`.
    The fields replace the name FIRST_TOOL and the placeholder characters for the number and the id.
    In this example, "\ufdd0" is the placeholder for the number of the tool call:

    >>> pattern_of_text(f'<call n="\ufdd0" name="{FIRST_TOOL}">')
    '<call n="{number}" name="{name}">'
    """
    pattern = escape_braces(rendered)
    for rendered_text, field in _FIELDS.items():
        pattern = pattern.replace(rendered_text, field)
    return pattern
