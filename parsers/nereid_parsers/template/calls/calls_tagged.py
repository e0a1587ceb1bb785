"""Infer how a template writes arguments whose key is inside a tag: `<arg key="a">1</arg>`.

Example: `<arg key="a">1</arg>` is the argument `a` with the value 1. The closing tag may repeat the
key, as in `<a>1</a>`.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import TaggedArguments
from nereid_parsers.pattern_syntax import escape_braces
from nereid_parsers.template.calls.call_heads import calls_with_head
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
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
    SPECIAL_VALUE,
)
from nereid_parsers.template.difference import difference, drop_common_suffix
from nereid_parsers.template.list_markup import ListMarkup, list_markup

# Matches a word, or a single character outside the words, such as `=`.
_WORD_OR_CHARACTER = re.compile(r"[^\W_]+|[\W_]")
_NUMBER_TEXT = str(NUMBER_VALUE)


def read_tagged(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes arguments whose key is inside a tag: `<arg key="a">1</arg>`.

    Return None if the tool calls have another form. Example: the tool call
    `<call f><arg key="a">1</arg></call>` gives these declarations:

        header of the tool call          `<call {name}>`
        tags of an argument              `<arg key="{key}">` and `</arg>`
        closing text of the tool call    `</call>`
    """
    # Some closing tags repeat the key, as in `<city>Rome</city>`. The functions below expect the
    # placeholder `{key}` in place of the repeated key.
    texts = CallTexts(*(_mask_repeated_keys(text) for text in texts))
    # In `<c f><k>a</k>1<k>b</k>2</c>`, the words are `f`, `a`, `1`, `b` and `2`, and the pieces are
    # `<c `, `><k>`, `</k>`, `<k>`, `</k>` and `</c>`.
    words = (FIRST_TOOL, FIRST_KEY, FIRST_VALUE, SECOND_KEY, SECOND_VALUE)
    pieces = split_at_words(texts.two_arguments, *words)
    if pieces is None:
        return None
    before_name, before_first_key, before_value, between_arguments, _, after = pieces
    # In this list, an item extends from a function's name to its last value.
    if texts.two_calls:
        markup_to_values = _markup_to_values(texts.two_calls)
    else:
        markup_to_values = ListMarkup(item_open=before_name, item_close=after)
    if markup_to_values is None:
        return None
    after_last_value = markup_to_values.item_close  # `</arg></call>`
    arguments = list_markup(before_first_key, between_arguments, after_last_value)
    call_close = arguments.close  # `</call>`, the text after the list of arguments
    call_markup = replace(markup_to_values, item_close=call_close)
    body = _infer_arguments(texts, arguments, before_value)
    calls = calls_with_head(call_markup, after_name=arguments.open, body=body)
    return CallFormat("tagged arguments", calls, call_markup)


def _mask_repeated_keys(text: str) -> str:
    """Replace the second occurrence of each key with `{key}`, as in `<a>1</{key}>` for `<a>1</a>`.

    The parser replaces `{key}` in a declared closing tag with the name of the argument.
    """
    for key in (FIRST_KEY, SECOND_KEY):
        before, first_key, after = text.partition(key)
        text = before + first_key + after.replace(key, "{key}", 1)
    return text


def _markup_to_values(two_calls: str) -> ListMarkup | None:
    """Return the markup of a list in which an item extends from a function's name to a value.

    The value is the last value of the tool call, so `item_close` closes the last argument and the
    tool call. Example: for the two tool calls `<c f><k a>1</k></c>;<c g><k b>2</k></c>`,
    `item_open` is `<c `, `item_close` is `</k></c>` and `separator` is `;`. Return None unless each
    of the two tool calls contains its name, its key and its value in this order.
    """
    first_item = (FIRST_TOOL, FIRST_KEY, FIRST_VALUE)
    second_item = (SECOND_TOOL, SECOND_KEY, SECOND_VALUE)
    pieces = split_at_words(two_calls, *first_item, *second_item)
    if pieces is None:
        return None
    # The other pieces are inside the items.
    before_first_item, between_items, after_second_item = pieces[0], pieces[3], pieces[6]
    return list_markup(before_first_item, between_items, after_second_item)


def _infer_arguments(texts: CallTexts, arguments: ListMarkup, before_value: str) -> TaggedArguments:
    """Infer the tags around the value of an argument, and the quotes, such as `<![CDATA[`, if any.

    Example: a template writes `<p k="a">x</p>`, and `<p k="a"><![CDATA[x<y]]></p>` for a value with
    special characters. The result declares two forms: `<p k="{key}"><![CDATA[` and `]]></p>`, and
    `<p k="{key}">` and `</p>`.

    In `arguments`, the markup of the list of arguments, `item_open` is the text before a key.
    `before_value` is the text between a key and its value, if the value is a string.
    """
    tags = _infer_value_tags(texts, arguments, before_value)
    quotes = _find_quotes(texts, before_value)
    if quotes is not None:
        return _add_quotes(tags, *quotes)
    return _add_escapes(tags, texts.special_value)


def _add_escapes(tags: TaggedArguments, special_value: str) -> TaggedArguments:
    """Declare the escape sequences that the template writes in values, if there are any.

    Example: a template that writes `x<y` as `<v>x&lt;y</v>` escapes values as in HTML.
    """
    if json.dumps(SPECIAL_VALUE) in special_value:
        # In JSON, only strings contain escape sequences. The tags in `tags.also` are not changed,
        # because these tags enclose only values of other types, such as numbers.
        return replace(tags, escapes="json")
    if html.escape(SPECIAL_VALUE) in special_value:
        also = tuple(replace(form, escapes="html") for form in tags.also)
        return replace(tags, escapes="html", also=also)
    return tags


class _TextAroundArgument(NamedTuple):
    """The texts before the key, between the key and the value, and after the value of an argument.

    Example: `<json key="a">41</json></call>` has `before_key` `<json key="`, `before_value` `">`
    and `after_value` `</json></call>`.
    """

    before_key: str
    before_value: str
    after_value: str


def _infer_value_tags(
    texts: CallTexts, arguments: ListMarkup, before_value: str
) -> TaggedArguments:
    """Infer the tags around the value of an argument. Strings and numbers may have different tags.

    Examples of an argument with a string and with a number, and the opening tags in the result:

        <p k="a">x</p>                 <p k="a">41</p>                 <p k="{key}">
        <p k="a" type="string">x</p>   <p k="a" type="number">41</p>   <p k="{key}" type="{type}">
        <text k="a">x</text>           <json k="a">41</json>           <text k="{key}">
                                                                       or <json k="{key}">
    """
    after_string = _text_after_plain_string(texts)
    around_string = _TextAroundArgument(arguments.item_open, before_value, after_string)
    # The text between two arguments, such as a line break, becomes a part of the closing tag.
    string_close = arguments.item_close + arguments.separator
    string_tags = TaggedArguments(_open_pattern(around_string), string_close)
    around_number = _cut_at_number(texts.number, arguments)
    if around_number is None:
        return string_tags
    open_with_type = _open_pattern_with_type(around_string, around_number)
    if open_with_type is not None:
        return replace(string_tags, open=open_with_type)
    number_close = _close_of_number(around_number.after_value, after_string, string_close)
    number_tags = TaggedArguments(_open_pattern(around_number), number_close)
    if number_tags == string_tags:
        return string_tags
    return replace(string_tags, also=(number_tags,))


def _close_of_number(after_number: str, after_string: str, string_close: str) -> str:
    """Return the closing tag of a number, such as `</json>`.

    >>> _close_of_number("</json></call>", "</text></call>", string_close="</text>")
    '</json>'

    Args:
        after_number: The text from the end of a number to the end of a tool call.
        after_string: The text from the end of a string to the end of a tool call. The closing text
            of the tool call, such as `</call>`, is equal in `after_number` and `after_string`.
        string_close: The closing tag of a string, with the closing quote if a template encloses
            strings in quotes: `"</arg>`.
    """
    number_close = drop_common_suffix(after_number, after_string)
    if number_close:  # The closing tags of numbers and strings differ.
        return number_close
    # `after_string` ends with the whole `after_number`, as `"</arg></call>` ends with
    # `</arg></call>`. The rest is the closing quote of the string, or "" if there are no quotes.
    closing_quote = after_string.removesuffix(after_number)
    return string_close.removeprefix(closing_quote)


def _cut_at_number(text: str, string_arguments: ListMarkup) -> _TextAroundArgument | None:
    """Return the texts around the key and the value of the argument in a rendered tool call.

    Example: the tool call `<call f><json key="a">41</json></call>` gives `<json key="`, `">` and
    `</json></call>`.

    `string_arguments` is the markup of a list of arguments that are strings. Return None if the
    template does not render the number as "41". If no text precedes the key, as in `<call f>a=41`,
    `before_key` is the text before the key of a string.
    """
    pieces = split_at_words(text, FIRST_TOOL, FIRST_KEY, _NUMBER_TEXT)
    if pieces is None:
        return None
    _before_name, after_name, before_value, after_value = pieces
    before_key = after_name.removeprefix(string_arguments.open)
    if not before_key:
        # The parser finds an argument only by the text before its key.
        before_key = string_arguments.item_open
    return _TextAroundArgument(before_key, before_value, after_value)


def _open_pattern(around: _TextAroundArgument) -> str:
    """Return the pattern of an opening tag, such as `<arg key="{key}">`, with a field for the key.

    >>> _open_pattern(_TextAroundArgument('<arg key="', '">', "</arg>"))
    '<arg key="{key}">'
    """
    return f"{escape_braces(around.before_key)}{{key}}{escape_braces(around.before_value)}"


def _text_after_plain_string(texts: CallTexts) -> str:
    """Return the text that follows the value of the only argument in `texts.one_call`.

    The value is a string without markup. Example: the tool call
    `<call f><arg key="a">x</arg></call>` gives `</arg></call>`.
    """
    _, _, after_key = texts.one_call.partition(FIRST_KEY)
    _, _, after_value = after_key.partition(FIRST_VALUE)
    return after_value


def _open_pattern_with_type(string: _TextAroundArgument, number: _TextAroundArgument) -> str | None:
    """Return the pattern of an opening tag with a type, such as `<arg key="{key}" type="{type}">`.

    In the pattern, the field `{key}` replaces the key, and the field `{type}` replaces the type.
    The type is the only word that differs between the tag before a string and the tag before a
    number. Some templates write a flag instead of the type: `string="true"` before a string, and
    `string="false"` before other values. The field `{string}` then replaces the flag. Return None
    if the two tags differ in another way.

    >>> string = _TextAroundArgument('<arg key="', '" type="string">', "</arg>")
    >>> number = _TextAroundArgument('<arg key="', '" type="number">', "</arg>")
    >>> _open_pattern_with_type(string, number)
    '<arg key="{key}" type="{type}">'
    """
    if string.before_key != number.before_key:
        return None
    # In the example, `" type="` precedes the type, and `">` follows the type.
    before_type, string_word, number_word, after_type = difference(
        string.before_value, number.before_value, split=_WORD_OR_CHARACTER.findall
    )
    field = _type_field(string_word, number_word)
    if field is None:
        return None
    before_key = escape_braces(string.before_key)
    return f"{before_key}{{key}}{escape_braces(before_type)}{field}{escape_braces(after_type)}"


def _type_field(string_word: str, number_word: str) -> str | None:
    """Return the field that takes the place of a word in the pattern of a tag.

    The word depends on the type of the argument's value:

        tag of a string    tag of a number    result
        type="string"      type="number"      "{type}": the word is the name of the type
        string="true"      string="false"     "{string}": the word states whether it is a string
        kind="a"           kind="b"           None: the meaning of the word is unknown
    """
    if string_word == "true" and number_word == "false":
        return "{string}"
    # Templates use many words for the type of the number 41, such as "number", "int" and "float".
    # Therefore, any word is accepted.
    if string_word in ("string", "str") and number_word.isalnum():
        return "{type}"
    return None


def _find_quotes(texts: CallTexts, before_value: str) -> tuple[str, str] | None:
    """Find the quotes, such as `<![CDATA[`, around strings that contain characters like `<`.

    Example: the plain string `x` is rendered as `<v>x</v></call>`, and the string `x<&>y` is
    rendered as `<v><![CDATA[x<&>y]]></v></call>`. So the quotes are `<![CDATA[` and `]]>`. Return
    None if the template writes no quotes. `before_value` is the text between the key and a plain
    string, such as `<v>`.
    """
    words = (FIRST_TOOL, FIRST_KEY, FIRST_VALUE, SECOND_VALUE)
    pieces = split_at_words(texts.special_value, *words)
    if pieces is None:
        return None
    _, _, before_special, _, after_special = pieces  # `<v><![CDATA[` and `]]></v></call>`
    after_value = _text_after_plain_string(texts)  # `</v></call>`
    has_same_tags = before_special.startswith(before_value) and after_special.endswith(after_value)
    if not has_same_tags:
        return None
    quote_open = before_special.removeprefix(before_value)
    quote_close = after_special.removesuffix(after_value)
    is_quoted = bool(quote_open.strip() and quote_close.strip())
    return (quote_open, quote_close) if is_quoted else None


def _add_quotes(tags: TaggedArguments, quote_open: str, quote_close: str) -> TaggedArguments:
    """Add quotes to the tags around a value. The tags without quotes remain as an alternative.

    The attribute `also` of the result contains the alternatives.

    >>> quoted = _add_quotes(TaggedArguments("<{key}>", "</v>"), "<![CDATA[", "]]>")
    >>> quoted.open, quoted.close, quoted.also[0].open
    ('<{key}><![CDATA[', ']]></v>', '<{key}>')
    """
    unquoted = replace(tags, also=())
    return TaggedArguments(
        # In the opening tag, `{key}` is a field, so all other braces are doubled. The closing tag
        # has no fields, so its braces are not doubled.
        open=tags.open + escape_braces(quote_open),
        close=quote_close + tags.close,
        also=(unquoted, *tags.also),
    )
