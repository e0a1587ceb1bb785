r"""Convert a `response_template`, which describes a model's output, into a `Format`.

The declaration is in tokenizer_config.json (transformers 5.23, utils/chat_parsing). For each field
of a message, the declaration contains the literal or the regular expression that opens the field,
the literal or the regular expression that closes the field, and the form of the text between them:

    {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                       "repeats": true, "transform": {"function": "{content}"}},
        "content": {"close": "<|im_end|>"}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Reasoning, Sections, Source, Wrapper
from nereid_parsers.template.conversation import REASONING_FIELDS
from nereid_parsers.template.markup.marker_lengths import check_marker_lengths
from nereid_parsers.template.response.regex_parts import marker_spellings
from nereid_parsers.template.response.response_calls import tool_section
from nereid_parsers.template.sandbox.limits import LimitError

_VERSION = 1
_KNOWN_FIELDS = {*REASONING_FIELDS, "content", "tool_calls"}


def format_of_response_template(spec: Mapping[str, Any]) -> Format:
    """Convert a `response_template`, which describes a model's output, into a `Format`.

    A `Format` describes how a model writes reasoning, content and tool calls, so that the parser
    can read the generated text. Example: {"fields": {"reasoning": {"open": "<think>", "close":
    "</think>"}}} gives a format whose reasoning is between `<think>` and `</think>`.

    Raises:
        FormatError: The declaration is malformed, a marker is too long, or a Format cannot express
            the declaration.
    """
    fields = _validated_fields(spec)
    # The field for reasoning has one of several names, such as "reasoning_content".
    reasoning_fields = [fields[name] for name in REASONING_FIELDS if name in fields]
    reasoning = _declare_reasoning(reasoning_fields[0]) if reasoning_fields else None
    wrapper, turn_ends = _content_markers(fields.get("content", {}))
    tools = tool_section(fields["tool_calls"]) if "tool_calls" in fields else None
    fmt = Format(
        "response_template",
        Sections(reasoning=reasoning, content=wrapper, tools=tools),
        ends=turn_ends,
        turn=marker_spellings(spec, "start_anchor"),  # the text that opens the model's turn
        sources=(Source("response_template in the checkpoint's tokenizer_config.json"),),
    )
    try:
        check_marker_lengths(fmt)
    except LimitError as error:
        raise FormatError(str(error)) from error
    return fmt


def _validated_fields(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Validate a response template, and return its member `fields`.

    The keys of `fields` are the parts of a message, such as "tool_calls". The values declare how
    the model writes these parts. Members with the value None are omitted. Example:
    {"version": 1, "fields": {"content": {"close": "<end>"}, "tool_calls": None}} gives
    {"content": {"close": "<end>"}}.

    Raises:
        FormatError: The response template is malformed, has an unsupported version, or has an
            unknown field.
    """
    if not isinstance(spec, Mapping):
        raise FormatError(f"the response_template must be a JSON object, but it is {spec!r}")
    version = spec.get("version", _VERSION)
    if version != _VERSION:
        raise FormatError(
            f"the response_template has the version {version!r}, but only version {_VERSION} is "
            "supported"
        )
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise FormatError(
            "`fields` of the response_template must be a dict of fields with at least one field, "
            f"but it is {fields!r}"
        )
    declared = {name: field for name, field in fields.items() if field is not None}
    not_objects = [name for name, field in declared.items() if not isinstance(field, Mapping)]
    if not_objects:
        raise FormatError(f"the fields {not_objects} of the response_template must be JSON objects")
    unknown = sorted(set(declared) - _KNOWN_FIELDS)
    if unknown:
        raise FormatError(
            f"the response_template has the unknown fields {unknown}. The known fields are "
            f"{sorted(_KNOWN_FIELDS)}."
        )
    return declared


def _declare_reasoning(field: Mapping[str, Any]) -> Reasoning:
    """Convert the field for reasoning in a `response_template` into a `Reasoning` object.

    Example: {"open": "<think>", "close": "</think>"} gives `Reasoning("<think>", "</think>")`. If
    the declaration contains several spellings of a marker, the first spelling is the main spelling
    of the result. The parser also recognises the other spellings.

    Raises:
        FormatError: The declaration has no opening marker or no closing marker.
    """
    opens = marker_spellings(field, "open")
    closes = marker_spellings(field, "close")
    if not opens or not closes:
        raise FormatError(
            "the field for reasoning in the response_template requires both markers, `open` and "
            "`close`"
        )
    return Reasoning(opens[0], closes[0], also_open=opens[1:], also_close=closes[1:])


def _content_markers(field: Mapping[str, Any]) -> tuple[Wrapper | None, tuple[str, ...]]:
    """Separate the markers around the content from the markers that end the message.

    `field` is the declaration of the field `content`. If it declares no opening marker, all closing
    markers end the turn:

    >>> _content_markers({"close": "<end>"})
    (None, ('<end>',))

    If it declares an opening marker, the first closing marker closes the content, and the other
    closing markers end the turn. Only the first opening marker is used.

    >>> _content_markers({"open": "<a>", "close": ["</a>", "<end>"]})
    (Wrapper(open='<a>', close='</a>'), ('<end>',))
    """
    opens = marker_spellings(field, "open")
    closes = marker_spellings(field, "close")
    if not opens:
        return None, closes
    wrapper_close = closes[0] if closes else ""
    return Wrapper(opens[0], wrapper_close), closes[1:]
