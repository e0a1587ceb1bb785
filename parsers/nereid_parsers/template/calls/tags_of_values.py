"""Compare the tags around a string and around a number, such as `<str k="a">` and `<int k="a">`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import TaggedArguments
from nereid_parsers.pattern_syntax import escape_braces
from nereid_parsers.template.markup.difference import common_suffix, difference

# Matches a word, or a single character outside the words, such as `=`.
_WORD_OR_CHARACTER = re.compile(r"[^\W_]+|[\W_]")

# The names with which a tag states that the value is the number 41. If a tag contains another word,
# such as "json", all values except strings have this word.
_NUMBER_TYPES = frozenset({"number", "integer", "int", "float"})


class TextAroundArgument(NamedTuple):
    """The texts before the key, between the key and the value, and after the value of an argument.

    Example: `<json key="a">41</json></call>` has `before_key` `<json key="`, `before_value` `">`
    and `after_value` `</json></call>`.
    """

    before_key: str
    before_value: str
    after_value: str

    def opening_tag(self) -> str:
        """Return the pattern of the opening tag, in which `{key}` is the field for the key.

        >>> TextAroundArgument('<arg key="', '">', "</arg>").opening_tag()
        '<arg key="{key}">'
        """
        return escape_braces(self.before_key) + "{key}" + escape_braces(self.before_value)


def add_tags_of_number(
    string_tags: TaggedArguments,
    around_string: TextAroundArgument,
    around_number: TextAroundArgument,
) -> TaggedArguments:
    """Return the tags around strings and numbers. The tags `string_tags` enclose strings.

    `around_string` are the texts around a string in a rendered tool call, and `around_number` are
    the texts around a number. There are four cases:

        case   string                      number                       opening tags in the result
        1      <p k="a" type="str">x</p>   <p k="a" type="int">41</p>   <p k="{key}" type="{type}">
        2      <p k="a" type="str">x</p>   <p k="a" type="obj">41</p>   <p k="{key}" type="{type}">,
                                                               <p k="{key}" type="obj"> in `also`
        3      <p k="a">x</p>              <p k="a">41</p>              <p k="{key}">
        4      <str k="a">x</str>          <int k="a">41</int>          <str k="{key}">, and
                                                                        <int k="{key}"> in `also`
    """
    tag_with_type = _opening_tag_with_type(around_string, around_number)
    if tag_with_type is not None and not _has_unknown_type(tag_with_type, around_number):
        return replace(string_tags, open=tag_with_type)  # Case 1
    number_close = _closing_tag_of_number(
        around_number.after_value, around_string.after_value, string_close=string_tags.close
    )
    number_tags = TaggedArguments(
        around_number.opening_tag(), number_close, separator=string_tags.separator
    )
    if tag_with_type is not None:
        return replace(string_tags, open=tag_with_type, also=(number_tags,))  # Case 2
    if number_tags == string_tags:
        return string_tags  # Case 3
    return replace(string_tags, also=(number_tags,))  # Case 4


def _closing_tag_of_number(after_number: str, after_string: str, string_close: str) -> str:
    """Return the closing tag of a number, such as `</json>`.

    If the closing tags of numbers and strings differ, the result is the text that follows only a
    number. Here, `</call>` follows both values, so it closes the tool call:

    >>> _closing_tag_of_number("</json></call>", "</text></call>", string_close="</text>")
    '</json>'

    If the closing tags are equal, all text after a number also follows a string. The result is then
    the closing tag of a string, without the closing quote that follows only a string:

    >>> _closing_tag_of_number("</arg></call>", "'</arg></call>", string_close="'</arg>")
    '</arg>'

    Args:
        after_number: The text from the end of a number to the end of a tool call.
        after_string: The text from the end of a string to the end of a tool call.
        string_close: The closing tag of a string, and the closing quote before the tag, if any.
    """
    common_end = common_suffix(after_number, after_string)  # consists of whole tags
    only_after_number = after_number.removesuffix(common_end)
    if only_after_number:
        return only_after_number  # `</json>`
    closing_quote = after_string.removesuffix(common_end)
    return string_close.removeprefix(closing_quote)


def _opening_tag_with_type(string: TextAroundArgument, number: TextAroundArgument) -> str | None:
    """Return the pattern of an opening tag that states the type of the value: `type="{type}"`.

    `string` and `number` are the texts around a string and around a number. Their opening tags must
    differ in one word, such as "string" and "number", that states the type. Otherwise, return None.
    In the result, a field replaces this word: `{type}`, or the field `{string}`, see `_type_field`.

    >>> string = TextAroundArgument('<arg key="', '" type="string">', "</arg>")
    >>> number = TextAroundArgument('<arg key="', '" type="number">', "</arg>")
    >>> _opening_tag_with_type(string, number)
    '<arg key="{key}" type="{type}">'
    """
    if string.before_key != number.before_key:
        return None
    # The texts are compared word by word, because only one word of a tag states the type. By
    # default, `difference` compares whole tags. In the example, the common prefix is `" type="`,
    # the words "string" and "number" differ, and the common suffix is `">`.
    before_type, string_word, number_word, after_type = difference(
        string.before_value, number.before_value, split=_WORD_OR_CHARACTER.findall
    )
    field = _type_field(string_word, number_word)
    if field is None:
        return None
    after_key = escape_braces(before_type) + field + escape_braces(after_type)
    return escape_braces(string.before_key) + "{key}" + after_key


def _has_unknown_type(tag_with_type: str, around_number: TextAroundArgument) -> bool:
    """Return whether the opening tag of a number states a type that is not a name of numbers.

    `tag_with_type` is the pattern of the opening tag. Examples: the result is True for the number
    in `<p k="a" type="json">41</p>`, and False for the number in `<p k="a" type="int">41</p>`.
    """
    words = _WORD_OR_CHARACTER.findall(around_number.before_value)
    return "{type}" in tag_with_type and _NUMBER_TYPES.isdisjoint(words)


def _type_field(string_word: str, number_word: str) -> str | None:
    """Return the field that replaces a word in the pattern of a tag, such as `{type}`.

    The word depends on the type of the argument's value. `string_word` is from the tag of a
    rendered string, and `number_word` is from the tag of a rendered number:

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
