"""Infer how a template writes tool calls with unquoted keys, such as `f{a:<q>x<q>}`."""

from __future__ import annotations

from nereid_parsers.format import BareKeyArguments
from nereid_parsers.template.calls.call_heads import calls_with_head
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    markup_of_two_calls_until,
    split_at_words,
    text_around_call,
)
from nereid_parsers.template.conversation import FIRST_KEY, FIRST_TOOL, FIRST_VALUE
from nereid_parsers.template.markup.list_markup import ListMarkup


def read_unquoted_keys(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls with unquoted keys, as in `f{a:"x"}`.

    Return None if the keys have quotes, or if the strings have no quotes. A marker may replace the
    quotes of the strings, as in `f{a:<q>x<q>}`.
    """
    pieces = split_at_words(texts.one_call, FIRST_TOOL, FIRST_KEY, FIRST_VALUE)
    if pieces is None:
        return None
    # The pieces of `<call>f{a:<q>x<q>}</call>` are `<call>`, `{`, `:<q>` and `<q>}</call>`.
    _, before_key, before_value, after_value = pieces
    quote = _quote_after_colon(before_value)
    opening = before_key.rstrip()  # White space may follow the brace, as in `f{ a: "x" }`.
    has_unquoted_key = opening.endswith("{")
    has_quoted_value = bool(quote) and after_value.startswith(quote)
    if not has_unquoted_key or not has_quoted_value:
        return None
    markup = _markup_of_calls_in_braces(texts)
    calls = calls_with_head(
        before_name=markup.item_open,
        after_name=opening.removesuffix("{"),
        body=BareKeyArguments(quote),
        close=markup.item_close,
    )
    return CallFormat("bare keys", calls, markup)


def _markup_of_calls_in_braces(texts: CallTexts) -> ListMarkup:
    """Return the texts before, between and after tool calls with braces, such as `f{a:"x"}`.

    A tool call ends with the first "}" after its value. If the template allows only one tool call
    in a message, the result contains only the texts before and after each tool call.
    """
    if texts.two_calls:
        return markup_of_two_calls_until(texts.two_calls, last_character="}")
    around = text_around_call(texts.one_call, FIRST_TOOL, FIRST_VALUE, last_character="}")
    return ListMarkup(item_open=around.before, item_close=around.after)


def _quote_after_colon(text: str) -> str:
    """Return the quote after a colon. Return "" if `text` is not a colon with a quote after it.

    >>> _quote_after_colon(": <q>"), _quote_after_colon(":"), _quote_after_colon('": "')
    ('<q>', '', '')
    """
    before_colon, _, quote = text.partition(":")
    return "" if before_colon.strip() else quote.strip()
