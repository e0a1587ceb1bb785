"""Calls whose arguments stand in tags of their own, one by one."""

from __future__ import annotations

from nereid_parsers.format import NestedTags, TaggedArguments
from nereid_parsers.template.call_texts import (
    CallTexts,
    FoundCalls,
    cut,
    escaped,
    headed,
    in_order,
)
from nereid_parsers.template.difference import Row, row
from nereid_parsers.template.probe import (
    FIRST,
    KEY,
    OTHER_KEY,
    OTHER_VALUE,
    SECOND,
    VALUE,
    drop_common_end,
)

# ---- tagged arguments ---------------------------------------------------------------------------


def read_tagged(texts: CallTexts) -> FoundCalls | None:
    """`NAME <key>KEY</key> <value>VALUE</value>`, strings unquoted."""
    if not in_order(texts.arguments, FIRST, KEY, VALUE, OTHER_KEY, OTHER_VALUE):
        return None
    before_name, rest = cut(texts.arguments, FIRST)
    before_key, rest = cut(rest, KEY)
    before_value, rest = cut(rest, VALUE)
    between, rest = cut(rest, OTHER_KEY)
    if KEY in between:  # elements named after the arguments, with no mark before their tags
        return None
    _, behind = cut(rest, OTHER_VALUE)
    around = Row("", before_name, behind, "", "")
    if texts.two:
        if not in_order(texts.two, FIRST, KEY, VALUE, SECOND, OTHER_KEY, OTHER_VALUE):
            return None
        before, rest = cut(texts.two, FIRST)
        _, rest = cut(rest, VALUE)
        separating, rest = cut(rest, SECOND)
        _, ending = cut(rest, OTHER_VALUE)
        around = row(before, separating, ending)
    inner = row(before_key, between, around.item_close)
    values = _guarded(texts, _value_tags(texts, inner, before_value), before_value)
    around = Row(around.open, around.item_open, inner.close, around.separator, around.close)
    return FoundCalls("tagged arguments", headed(around, inner.open, values), around)


def _value_tags(texts: CallTexts, inner: Row, before_value: str) -> TaggedArguments:
    """How a value is tagged; strings and numbers may be tagged in different words."""
    close = inner.item_close + inner.separator
    opened = escaped(inner.item_open) + "{key}"
    plain = TaggedArguments(opened + escaped(before_value), close)
    if not in_order(texts.number, FIRST, KEY, "41"):
        return plain
    before_key, rest = cut(cut(texts.number, FIRST)[1], KEY)
    before_number, behind = cut(rest, "41")
    number_open = before_key[len(inner.open) :] if before_key.startswith(inner.open) else ""
    number_close = _unlike_end(behind, cut(cut(texts.one, KEY)[1], VALUE)[1])
    if before_number == before_value and number_open == inner.item_open and not number_close:
        return plain
    words = _differing_word(before_value, before_number)
    if words is not None and number_open == inner.item_open:
        lead, text_word, number_word, tail = words
        slot = _slot(text_word, number_word)
        if slot:
            return TaggedArguments(f"{opened}{escaped(lead)}{slot}{escaped(tail)}", close)
    other = TaggedArguments(
        f"{escaped(number_open or inner.item_open)}{{key}}{escaped(before_number)}",
        number_close or close,
    )
    return TaggedArguments(plain.open, close, also=(other,))


def _guarded(texts: CallTexts, values: TaggedArguments, before_value: str) -> TaggedArguments:
    """The tags with the marks in which texts that hold signs stand, if they stand in any."""
    if not in_order(texts.signs, FIRST, KEY, VALUE, OTHER_VALUE):
        return values
    before_text, rest = cut(cut(texts.signs, KEY)[1], VALUE)
    behind_text, usual = cut(rest, OTHER_VALUE)[1], cut(cut(texts.one, KEY)[1], VALUE)[1]
    mark = before_text.removeprefix(before_value)
    if not mark.strip() or not before_text.startswith(before_value):
        return values
    closing = behind_text.removesuffix(usual)
    if not closing.strip() or closing == behind_text:
        return values
    plain = TaggedArguments(values.open, values.close)
    open_, close = values.open + escaped(mark), closing + values.close
    return TaggedArguments(open_, close, also=(plain, *values.also))


def _unlike_end(text: str, usual: str) -> str:
    """What stands at the start of `text` in the place of the start of `usual`; "" if the same."""
    return "" if text == usual else drop_common_end(text, usual)


def _slot(text_word: str, number_word: str) -> str:
    if (text_word, number_word) == ("true", "false"):
        return "{string}"
    return "{type}" if text_word in ("string", "str") else ""


def _differing_word(one: str, other: str) -> tuple[str, str, str, str] | None:
    around = row_of_words(one, other)
    return around if around[1].isalnum() and around[2].isalnum() else None


def row_of_words(one: str, other: str) -> tuple[str, str, str, str]:
    """(common start, what differs in each, common end), cut between words."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    while size and one[size - 1].isalnum():
        size -= 1
    end = 0
    while end < min(len(one), len(other)) - size and one[-1 - end] == other[-1 - end]:
        end += 1
    while end and one[len(one) - end].isalnum():
        end -= 1
    tail = one[len(one) - end :]
    return one[:size], one[size : len(one) - end], other[size : len(other) - end], tail


# ---- elements named after the arguments ---------------------------------------------------------


def read_nested(texts: CallTexts) -> FoundCalls | None:
    """`NAME ~<KEY>VALUE~</KEY>`: elements, each tag behind a mark (`~`)."""
    text = texts.arguments
    if not in_order(text, FIRST, f"<{KEY}>", VALUE, f"</{KEY}>", OTHER_VALUE):
        return None
    before_name, rest = cut(text, FIRST)
    before_key, rest = cut(rest, f"<{KEY}>")
    _, rest = cut(rest, VALUE)
    mark = cut(rest, f"</{KEY}>")[0].strip()
    _, behind = cut(rest, f"</{OTHER_KEY}>")
    around = Row("", before_name, behind, "", "")
    if texts.two:
        before, rest = cut(texts.two, FIRST)
        _, rest = cut(rest, f"</{KEY}>")
        between, rest = cut(rest, SECOND)
        around = row(before, between, cut(rest, f"</{OTHER_KEY}>")[1])
    around = _mark_first(around, mark)
    between_name_and_key = before_key.removesuffix(mark)
    return FoundCalls(
        "nested elements", headed(around, between_name_and_key, NestedTags(mark)), around
    )


def _mark_first(around: Row, mark: str) -> Row:
    """The same row with the mark before each tag, not behind the tag before it."""
    if not mark or not around.item_close.endswith(mark):
        return around
    return Row(
        open=around.open.removesuffix(mark),
        item_open=mark + around.item_open,
        item_close=around.item_close.removesuffix(mark),
        separator=around.separator,
        close=mark + around.close,
    )
