"""Infer the format of tool calls in which tags enclose each argument.

There are two forms. In `<arg key="a">1</arg>`, the name of the argument is inside the tag. In
`<a>1</a>`, the name of the argument is the name of the tag.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import NestedTags, TaggedArguments
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    calls_with_head,
    escape_braces,
    split_at_words,
)
from nereid_parsers.template.conversation import (
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    NUMBER_VALUE,
    SECOND_KEY,
    SECOND_TOOL,
    SECOND_VALUE,
)
from nereid_parsers.template.difference import (
    ListMarkup,
    difference,
    drop_common_suffix,
    list_markup,
)

_WORDS = re.compile(r"[^\W_]+|[\W_]")  # Matches a word or one other character.
_NUMBER_TEXT = str(NUMBER_VALUE)
# For both tool calls of the probe conversations: the name, the key and the value, in the order in
# which templates render them.
_FIRST_CALL = (FIRST_TOOL, FIRST_KEY, FIRST_VALUE)
_SECOND_CALL = (SECOND_TOOL, SECOND_KEY, SECOND_VALUE)
# Tags that are named after the arguments, as in `<zqKeyOne>zqValueOne</zqKeyOne>`.
_FIRST_OPEN = f"<{FIRST_KEY}>"
_FIRST_CLOSE = f"</{FIRST_KEY}>"
_SECOND_CLOSE = f"</{SECOND_KEY}>"

# ---- tagged arguments ---------------------------------------------------------------------------


def read_tagged(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls in which tags enclose the key and the value of each argument.

    Return None if the tool calls have another form. Example: `<call f><arg key="a">1</arg></call>`
    has the header `<call {name}>` and arguments between `<arg key="{key}">` and `</arg>`.

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
    """
    pieces = split_at_words(texts.two_arguments, *_FIRST_CALL, SECOND_KEY, SECOND_VALUE)
    if pieces is None:
        return None
    # `<c f><k>a</k>1<k>b</k>2</c>` is split into `<c `, `><k>`, `</k>`, `<k>`, `</k>` and `</c>`.
    before_name, before_key, before_value, between_arguments, _, after = pieces
    if FIRST_KEY in between_arguments:
        return None  # The closing tag repeats the key: see `read_nested`.
    if texts.two_calls:
        markup = _markup_of_two_calls(texts.two_calls)
    else:
        markup = ListMarkup(item_open=before_name, item_close=after)
    if markup is None:
        return None
    # The text was split at the last value, so `markup.item_close` also contains the closing tag of
    # the last argument: `</k></c>`. This tag belongs to the markup of the arguments.
    markup_of_arguments = list_markup(before_key, between_arguments, markup.item_close)
    markup_of_calls = replace(markup, item_close=markup_of_arguments.close)
    unquoted_tags = _infer_value_tags(texts, markup_of_arguments, before_value)
    all_tags = _add_quoted_variant(texts, unquoted_tags, before_value)
    # `markup_of_arguments.open` is the text between the name and the arguments, such as `>`.
    calls = calls_with_head(markup_of_calls, markup_of_arguments.open, all_tags)
    return CallFormat("tagged arguments", calls, markup_of_calls)


def _markup_of_two_calls(two_calls: str) -> ListMarkup | None:
    """Return the markup around two tool calls in which tags enclose the arguments.

    Return None if the words of the two tool calls (name, key and value) are not in the expected
    order. Example: for `<c f><k>a</k>1</k></c>;<c g><k>b</k>2</k></c>`, `item_open` is `<c `,
    `item_close` is `</k></c>` and `separator` is `;`.
    """
    pieces = split_at_words(two_calls, *_FIRST_CALL, *_SECOND_CALL)
    if pieces is None:
        return None
    before_first_name, _, _, after_first_value, _, _, after_second_value = pieces
    return list_markup(before_first_name, after_first_value, after_second_value)


def _infer_value_tags(
    texts: CallTexts, arguments: ListMarkup, before_value: str
) -> TaggedArguments:
    """Infer the tags around the value of an argument.

    Some templates write different tags for strings and for numbers. Each example shows the argument
    `a` with the string "x", the argument `a` with the number 41, and the result:

        <arg key="a">x</arg>                 <arg key="a">41</arg>
            open='<arg key="{key}">'
        <arg key="a" type="string">x</arg>   <arg key="a" type="number">41</arg>
            open='<arg key="{key}" type="{type}">'
        <text key="a">x</text>               <json key="a">41</json>
            open='<text key="{key}">' and a second variant with open='<json key="{key}">'

    Args:
        texts: The renderings of tool calls.
        arguments: The markup of the list of arguments. `item_open` ends where a key starts.
        before_value: The text between the key and the value, if the value is a string.
    """
    close = arguments.item_close + arguments.separator
    string_tags = TaggedArguments(_open_pattern(arguments.item_open, before_value), close)
    around_number = _cut_at_number(texts, arguments)
    if around_number is None:  # The template does not render numbers as text.
        return string_tags
    number_open = _open_pattern(around_number.before_key, around_number.before_value)
    number_close = _number_close(around_number.after_value, _text_after_string(texts))
    number_tags = TaggedArguments(number_open, number_close if number_close else close)
    if number_tags == string_tags:  # see the first example above
        return string_tags
    has_same_tag_name = around_number.before_key == arguments.item_open
    pattern_after_key = _pattern_with_type(before_value, around_number.before_value)
    if has_same_tag_name and pattern_after_key is not None:  # see the second example above
        pattern_to_key = _open_pattern(around_number.before_key)
        return TaggedArguments(pattern_to_key + pattern_after_key, close)
    return replace(string_tags, also=(number_tags,))  # see the third example above


class _TextAroundNumber(NamedTuple):
    """The texts around the key and around the value of an argument. The value is a number.

    Example: `<json key="a">41</json></call>` has `before_key` `<json key="`, `before_value` `">`
    and `after_value` `</json></call>`.
    """

    before_key: str
    before_value: str
    after_value: str


def _cut_at_number(texts: CallTexts, arguments: ListMarkup) -> _TextAroundNumber | None:
    """Split `texts.number`, a tool call whose argument is a number, at the key and at the number.

    The result shows the tags of the argument. Example: `<call f><json key="a">41</json></call>`
    gives `<json key="`, `">` and `</json></call>`.

    Args:
        texts: The rendered tool calls.
        arguments: The markup of the list of arguments. The text before the list, such as the `>`
            in the example, is not a part of the result.

    Returns:
        The texts around the key and the number, or None if the template does not render the number
        as text.
    """
    pieces = split_at_words(texts.number, FIRST_TOOL, FIRST_KEY, _NUMBER_TEXT)
    if pieces is None:
        return None
    _, after_name, before_value, after_value = pieces
    before_key = after_name.removeprefix(arguments.open)
    if not before_key:  # The tag of a string then also opens a number.
        before_key = arguments.item_open
    return _TextAroundNumber(before_key, before_value, after_value)


def _open_pattern(before_key: str, before_value: str = "") -> str:
    """Return the pattern of an opening tag, such as `<arg key="{key}">`.

    >>> _open_pattern('<arg key="', '">')
    '<arg key="{key}">'
    """
    return f"{escape_braces(before_key)}{{key}}{escape_braces(before_value)}"


def _text_after_string(texts: CallTexts) -> str:
    """Return the text after the string in `texts.one_call`, a tool call with one string argument.

    Example: `<call f><arg key="a">x</arg></call>` gives `</arg></call>`.
    """
    _, _, after_key = texts.one_call.partition(FIRST_KEY)
    _, _, after_value = after_key.partition(FIRST_VALUE)
    return after_value


def _number_close(after_number: str, after_string: str) -> str:
    """Return the closing tag of a number. Return "" if a string has the same closing tag.

    >>> _number_close("</json></call>", "</text></call>")
    '</json>'
    """
    if after_number == after_string:
        return ""
    return drop_common_suffix(after_number, after_string)


def _pattern_with_type(before_string: str, before_number: str) -> str | None:
    r"""Replace the type in an opening tag with a field: `type="string"` becomes `type="{type}"`.

    The two arguments are the texts between the key and the value, for a string and for a number.
    The type is the word that differs between the two texts. In some tags, this word states whether
    the value is a string: "true" or "false". Return None if the texts differ in more than one word,
    or if the word is not the name of a type.

    >>> _pattern_with_type('" type="string">', '" type="number">')
    '" type="{type}">'
    >>> _pattern_with_type('" string="true">', '" string="false">')
    '" string="{string}">'
    """
    parts = difference(before_string, before_number, split=_WORDS.findall)
    string_word = parts.left
    number_word = parts.right
    is_one_word = string_word.isalnum() and number_word.isalnum()
    if not is_one_word:
        return None
    if string_word == "true" and number_word == "false":
        field = "{string}"
    elif string_word in ("string", "str"):
        field = "{type}"
    else:
        return None
    return f"{escape_braces(parts.prefix)}{field}{escape_braces(parts.suffix)}"


def _add_quoted_variant(
    texts: CallTexts, values: TaggedArguments, before_value: str
) -> TaggedArguments:
    """Return `values`, extended by the tags that the template writes around quoted strings.

    Some templates quote only strings that contain markup. Example: the string "a" is written as
    `<v>a</v>`, and the string "a<b" is written as `<v><![CDATA[a<b]]></v>`. The result declares the
    tags `<v><![CDATA[` and `]]></v>`, with the tags `<v>` and `</v>` as an alternative. If the
    template quotes no strings, the result is `values`.

    Args:
        texts: The renderings of tool calls.
        values: The declared tags of values that are not quoted.
        before_value: The text between the key and a value that is not quoted.
    """
    # SPECIAL_VALUE starts with FIRST_VALUE and ends with SECOND_VALUE.
    pieces = split_at_words(texts.special_value, *_FIRST_CALL, SECOND_VALUE)
    if pieces is None:
        return values
    _, _, before_special, _, after_special = pieces  # `"><![CDATA[` and `]]></v></call>`
    after_value = _text_after_string(texts)  # `</v></call>`
    has_same_tags = before_special.startswith(before_value) and after_special.endswith(after_value)
    if not has_same_tags:
        return values
    quote_open = before_special.removeprefix(before_value)  # `<![CDATA[`
    quote_close = after_special.removesuffix(after_value)  # `]]>`
    is_quoted = bool(quote_open.strip() and quote_close.strip())
    if not is_quoted:
        return values
    unquoted = TaggedArguments(values.open, values.close)
    return TaggedArguments(
        values.open + escape_braces(quote_open),
        quote_close + values.close,
        also=(unquoted, *values.also),
    )


# ---- elements with the names of the arguments ---------------------------------------------------


def read_nested(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls in which an argument is an element: `<city>Paris</city>`.

    Return None if the arguments have another form. A marker may precede every tag. Example:
    `f ~<a>1~</a>~<b>2~</b>` are elements with the marker `~`.

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
    """
    words = (FIRST_TOOL, _FIRST_OPEN, FIRST_VALUE, _FIRST_CLOSE, _SECOND_CLOSE)
    pieces = split_at_words(texts.two_arguments, *words)
    if pieces is None:
        return None
    # `f ~<a>1~</a>~<b>2~</b>` is split at `f`, `<a>`, `1`, `</a>` and `</b>`. The pieces are "",
    # " ~", "", "~", "~<b>2~" and "".
    before_name, before_first_tag, _, after_first_value, _, after = pieces
    marker = after_first_value.strip()
    if texts.two_calls:
        markup = _markup_of_two_nested(texts.two_calls)
    else:
        markup = ListMarkup(item_open=before_name, item_close=after)
    if markup is None:
        return None
    markup_of_calls = _move_marker_to_next_tag(markup, marker)
    after_name = before_first_tag.removesuffix(marker)
    calls = calls_with_head(markup_of_calls, after_name, NestedTags(marker))
    return CallFormat("nested elements", calls, markup_of_calls)


def _markup_of_two_nested(two_calls: str) -> ListMarkup | None:
    """Return the markup around two tool calls whose arguments are elements (`<a>1</a>`).

    Return None if the elements of the two tool calls are not in the expected order. Example: for
    `<c>f<a>1</a></c>;<c>g<b>2</b></c>`, `item_open` is `<c>`, `item_close` is `</c>` and
    `separator` is `;`.
    """
    pieces = split_at_words(two_calls, FIRST_TOOL, _FIRST_CLOSE, SECOND_TOOL, _SECOND_CLOSE)
    if pieces is None:
        return None
    before_first_call, _, between_calls, _, after_second_call = pieces
    return list_markup(before_first_call, between_calls, after_second_call)


def _move_marker_to_next_tag(calls: ListMarkup, marker: str) -> ListMarkup:
    """In the markup `calls`, move `marker` from the end of each text to the start of the next text.

    Example: in the calls `~<f>..~</f>~<g>..~</g>~`, the marker `~` precedes each tag. But
    `list_markup` treats the `~` before `<g>` as the end of the first call, `~</f>~`:

    >>> markup = ListMarkup(open="~", item_open="<f>", item_close="~</f>~")
    >>> _move_marker_to_next_tag(markup, "~")
    ListMarkup(open='', item_open='~<f>', item_close='~</f>', separator='', close='~')

    If `item_close` does not end with the marker, the markup is already correct.
    """
    if not marker or not calls.item_close.endswith(marker):
        return calls
    return replace(
        calls,
        open=calls.open.removesuffix(marker),
        item_open=marker + calls.item_open,
        item_close=calls.item_close.removesuffix(marker),
        close=marker + calls.close,
    )
