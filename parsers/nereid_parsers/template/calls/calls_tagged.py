"""Infer how a template writes arguments whose key is inside a tag: `<arg key="a">1</arg>`."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import TaggedArguments
from nereid_parsers.pattern_syntax import escape_braces
from nereid_parsers.template.calls.call_heads import calls_with_head
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    markup_of_two_calls,
    split_at_words,
)
from nereid_parsers.template.calls.tags_of_values import TextAroundArgument, add_tags_of_number
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
from nereid_parsers.template.markup.list_markup import ListMarkup, list_markup

_NUMBER_TEXT = str(NUMBER_VALUE)


class _TaggedMarkup(NamedTuple):
    """The markup of rendered tool calls such as `<call f><arg key="a">1</arg></call>`.

    Attributes:
        calls: The markup of the list of tool calls. In the example, `item_open` is `<call ` and
            `item_close` is `</call>`.
        arguments: The markup of the list of arguments in a tool call. In the example, `open` is
            `>`, `item_open` is `<arg key="` and `item_close` is `</arg>`.
        before_value: The text between the key and the value of an argument, such as `">`.
    """

    calls: ListMarkup
    arguments: ListMarkup
    before_value: str


class _TwoArguments(NamedTuple):
    """The texts around the name, the keys and the values of a tool call with two arguments.

    The comments show the texts of `<c f><k a>1</k><k b>2</k></c>`.
    """

    before_name: str  # `<c `
    before_key: str  # `><k `
    before_value: str  # `>`
    between_arguments: str  # `</k><k `, which precedes the second key
    before_second_value: str  # `>`
    after_last_value: str  # `</k></c>`


class _Delimiters(NamedTuple):
    """The texts directly before and after a string, such as `<![CDATA[` and `]]>`."""

    open: str
    close: str


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
    masked_texts = CallTexts._make(_mask_repeated_keys(text) for text in texts)
    markup = _find_markup(masked_texts)
    if markup is None:
        return None
    calls = calls_with_head(
        before_name=markup.calls.item_open,  # `<call `
        after_name=markup.arguments.open,  # `>`
        body=_infer_arguments(masked_texts, markup),
        close=markup.calls.item_close,  # `</call>`
    )
    return CallFormat("tagged arguments", calls, markup.calls)


def _find_markup(texts: CallTexts) -> _TaggedMarkup | None:
    """Find the markup of tool calls such as `<call f><arg key="a">1</arg></call>`.

    The markup is the text around the name, the keys and the values. Return None if these words do
    not occur in the usual order: the name first, and each key before its value.
    """
    words = (FIRST_TOOL, FIRST_KEY, FIRST_VALUE, SECOND_KEY, SECOND_VALUE)
    pieces = split_at_words(texts.two_arguments, *words)
    if pieces is None:
        return None
    call = _TwoArguments(*pieces)
    if texts.two_calls:
        undivided = _markup_with_undivided_close(texts.two_calls)
    else:  # A message can have only one tool call.
        undivided = ListMarkup(item_open=call.before_name, item_close=call.after_last_value)
    if undivided is None:
        return None
    # After the last value, `</arg></call>` closes the argument and the tool call. `list_markup`
    # finds `</arg>`, which also follows the first value. The rest, `</call>`, closes the tool call.
    arguments = _markup_of_arguments(
        call, after=undivided.item_close, after_number=_text_after_number(texts)
    )
    calls = replace(undivided, item_close=arguments.close)
    return _TaggedMarkup(calls, arguments, call.before_value)


def _markup_of_arguments(call: _TwoArguments, after: str, after_number: str) -> ListMarkup:
    r"""Return the markup of the list of arguments.

    In most formats, each value has a closing tag, as in `<k a>1</k><k b>2</k>`. In other formats,
    only white space is between two arguments, as in `f\na: 1\nb: 2</c>`. This white space is then a
    separator, see `_use_space_as_separator`.

    `after` is the text after the last value, which is a string. `after_number` is the text after a
    number. The two texts differ if only strings are closed, as in `a: "x"` and `a: 1`.
    """
    arguments = list_markup(call.before_key, call.between_arguments, after)
    closes_strings = bool(arguments.item_close)
    closes_numbers = after_number != arguments.close
    closes_all_values = closes_strings and closes_numbers
    is_separated_by_space = not arguments.separator and not arguments.item_open.strip()
    if is_separated_by_space and not closes_all_values:
        return _use_space_as_separator(arguments)
    return arguments


def _use_space_as_separator(arguments: ListMarkup) -> ListMarkup:
    r"""Turn the white space before each argument into a separator of two arguments.

    The white space before the first argument becomes a part of the text before the list.

    >>> _use_space_as_separator(ListMarkup(open="f", item_open="\n", close="</c>"))
    ListMarkup(open='f\n', item_open='', item_close='', separator='\n', close='</c>')
    """
    space = arguments.item_open
    return replace(arguments, open=arguments.open + space, item_open="", separator=space)


def _text_after_number(texts: CallTexts) -> str:
    """Return the text after the number in a rendered tool call, such as `</arg></call>`."""
    _, _, after_number = texts.number.partition(_NUMBER_TEXT)
    return after_number


def _markup_with_undivided_close(two_calls: str) -> ListMarkup | None:
    """Return the markup of two tool calls. All text after the last value belongs to `item_close`.

    Example: for the two tool calls `<c f><k a>1</k></c>;<c g><k b>2</k></c>`, `item_open` is `<c `,
    `separator` is `;`, and `item_close` is `</k></c>`, which is not divided into the closing text
    of the argument and of the tool call. Return None unless each of the two tool calls contains its
    name, its key and its value in this order.
    """
    return markup_of_two_calls(
        two_calls,
        first_words=(FIRST_TOOL, FIRST_KEY, FIRST_VALUE),
        second_words=(SECOND_TOOL, SECOND_KEY, SECOND_VALUE),
    )


def _mask_repeated_keys(text: str) -> str:
    """Replace the second occurrence of each key with `{key}`, as in `<a>1</{key}>` for `<a>1</a>`.

    The parser replaces `{key}` in a declared closing tag with the name of the argument.
    """
    for key in (FIRST_KEY, SECOND_KEY):
        before, first_key, after = text.partition(key)
        text = before + first_key + after.replace(key, "{key}", 1)
    return text


def _infer_arguments(texts: CallTexts, markup: _TaggedMarkup) -> TaggedArguments:
    """Infer the tags around the value of an argument, and its delimiters or escape sequences.

    Example: a template writes `<p k="a">x</p>`. If the string has special characters, the template
    may write the delimiters `<![CDATA[` and `]]>`, as in `<p k="a"><![CDATA[x<y]]></p>`, or escape
    sequences, as in `<p k="a">x&lt;y</p>`. `markup` is the markup of the rendered tool calls
    `texts`, in which the arguments are plain strings.
    """
    tags = _infer_value_tags(texts, markup)
    delimiters = _find_delimiters(texts, markup.before_value)
    if delimiters is not None:
        return _add_delimiters(tags, delimiters)
    return _add_escapes(tags, texts.special_value)


def _add_escapes(tags: TaggedArguments, rendered_call: str) -> TaggedArguments:
    """Declare the kind of escape sequences that the template writes in values, if there are any.

    `rendered_call` is a tool call whose argument is SPECIAL_VALUE, a string with a line break and
    the characters `<&>`. Example: the result declares "html" if the template writes `&lt;` for `<`.
    """
    # The alternative tags `tags.also` enclose numbers and other values that are not strings.
    if json.dumps(SPECIAL_VALUE) in rendered_call:
        # In JSON, only strings contain escape sequences, so `tags.also` is not changed.
        return replace(tags, escapes="json")
    if html.escape(SPECIAL_VALUE) in rendered_call:
        # In HTML, values of all types may contain escape sequences, for example an array with "<".
        tags_of_other_values = tuple(replace(form, escapes="html") for form in tags.also)
        return replace(tags, escapes="html", also=tags_of_other_values)
    return tags


def _infer_value_tags(texts: CallTexts, markup: _TaggedMarkup) -> TaggedArguments:
    """Infer the tags around the value of an argument, which is a string or a number.

    Example: if a template writes the string `<p k="a">x</p>` and the number `<p k="a">41</p>`, the
    result contains the tags `<p k="{key}">` and `</p>`. If strings and numbers have different tags,
    see `add_tags_of_number`.

    `texts` are the rendered tool calls. `markup` is the text around the names, keys and string
    values in these tool calls.
    """
    arguments = markup.arguments
    around_string = TextAroundArgument(
        before_key=arguments.item_open,  # `<p k="`
        before_value=markup.before_value,  # `">`
        after_value=_text_after_plain_string(texts),  # `</p></call>`
    )
    # The text `</p></call>` also closes the tool call, so the closing tag `</p>` comes from
    # `markup`.
    string_tags = TaggedArguments(
        around_string.opening_tag(), arguments.item_close, separator=arguments.separator
    )
    around_number = _text_around_number(texts.number, arguments)
    if around_number is None:
        return string_tags
    return add_tags_of_number(string_tags, around_string, around_number)


def _text_around_number(call: str, arguments: ListMarkup) -> TextAroundArgument | None:
    """Return the texts around the only argument of a rendered tool call, which is the number 41.

    Example: in `<call f><p k="a">41</p></call>`, `<p k="` precedes the key, `">` precedes the
    number, and `</p></call>` follows the number. Return None if `call`, the rendered tool call,
    does not contain the number as the text "41". `arguments` is the markup of the arguments in a
    tool call with strings. In the example, `arguments.open` is `>`, and `arguments.item_open` is
    `<p k="`.
    """
    around_number = _text_around_argument(call, _NUMBER_TEXT)
    if around_number is None:
        return None
    # The text between the name and the key is `><p k="`. Its start, `>`, belongs to the header of
    # the tool call.
    before_key = around_number.before_key.removeprefix(arguments.open)
    if not before_key:
        # The parser finds an argument by the text before its key, so this text must not be "".
        before_key = arguments.item_open
    return around_number._replace(before_key=before_key)


def _text_around_argument(call: str, *words_of_value: str) -> TextAroundArgument | None:
    """Return the texts around the only argument in a rendered tool call.

    Example: the tool call `<call f><json key="a">41</json></call>` gives `><json key="`, `">` and
    `</json></call>`. `words_of_value` are the first and the last word of the value, or its only
    word, such as `41`. Return None if the template does not render the value with these words.
    """
    pieces = split_at_words(call, FIRST_TOOL, FIRST_KEY, *words_of_value)
    if pieces is None:
        return None
    _before_name, before_key, before_value, *_inside_value, after_value = pieces
    return TextAroundArgument(before_key, before_value, after_value)


def _text_after_plain_string(texts: CallTexts) -> str:
    """Return the text that follows the value of the only argument in `texts.one_call`.

    The value is a string without markup. Example: the tool call
    `<call f><arg key="a">x</arg></call>` gives `</arg></call>`.
    """
    _, _, after_key = texts.one_call.partition(FIRST_KEY)
    _, _, after_value = after_key.partition(FIRST_VALUE)
    return after_value


def _find_delimiters(texts: CallTexts, before_value: str) -> _Delimiters | None:
    """Find the delimiters, such as `<![CDATA[`, around strings that contain characters like `<`.

    Example: the plain string `x` is rendered as `<v>x</v></call>`, and the string `x<&>y` is
    rendered as `<v><![CDATA[x<&>y]]></v></call>`. So the delimiters are `<![CDATA[` and `]]>`.
    Return None if the template writes no delimiters. `before_value` is the text between the key and
    a plain string, such as `<v>`.
    """
    around_special = _text_around_argument(texts.special_value, FIRST_VALUE, SECOND_VALUE)
    if around_special is None:
        return None
    before_special = around_special.before_value  # `<v><![CDATA[`
    after_special = around_special.after_value  # `]]></v></call>`
    after_value = _text_after_plain_string(texts)  # `</v></call>`
    has_same_tags = before_special.startswith(before_value) and after_special.endswith(after_value)
    if not has_same_tags:
        return None
    # The delimiters are the texts between the tags and the string.
    delimiters = _Delimiters(
        open=before_special.removeprefix(before_value),
        close=after_special.removesuffix(after_value),
    )
    is_delimited = bool(delimiters.open.strip() and delimiters.close.strip())
    return delimiters if is_delimited else None


def _add_delimiters(tags: TaggedArguments, delimiters: _Delimiters) -> TaggedArguments:
    """Add delimiters to the tags around a value. The tags alone remain as an alternative.

    The attribute `also` of the result contains the alternatives.

    >>> cdata = _Delimiters("<![CDATA[", "]]>")
    >>> delimited = _add_delimiters(TaggedArguments("<{key}>", "</v>"), cdata)
    >>> delimited.open, delimited.close, delimited.also[0].open
    ('<{key}><![CDATA[', ']]></v>', '<{key}>')
    """
    tags_alone = replace(tags, also=())
    return TaggedArguments(
        # In the opening tag, `{key}` is a field, so all other braces are doubled. The closing tag
        # has no fields, so its braces are not doubled.
        open=tags.open + escape_braces(delimiters.open),
        close=delimiters.close + tags.close,
        also=(tags_alone, *tags.also),
        separator=tags.separator,
    )
