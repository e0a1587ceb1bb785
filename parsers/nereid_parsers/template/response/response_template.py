r"""Convert a `response_template`, transformers' declaration of a chat format, into a Format.

The declaration is in tokenizer_config.json (transformers 5.23, utils/chat_parsing). For each field
of a message, the declaration states the literal or the regular expression that opens and closes the
field, and how the text of the field is parsed:

    {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                       "repeats": true, "transform": {"function": "{content}"}},
        "content": {"close": "<|im_end|>"}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Format, Reasoning, Sections, Source, Wrapper
from nereid_parsers.template.conversation import REASONING_FIELDS
from nereid_parsers.template.response.regex_parts import marker_spellings
from nereid_parsers.template.response.response_calls import tool_section

_VERSION = 1
_KNOWN_FIELDS = {*REASONING_FIELDS, "content", "tool_calls"}


def format_of_response_template(spec: Mapping[str, Any]) -> Format:
    """Convert a `response_template`, transformers' declaration of a chat format, into a Format.

    Example: {"fields": {"content": {"close": "<end>"}}} declares that `<end>` ends a turn.

    Raises:
        FormatError: The declaration is malformed, or declares something that a Format cannot
            express.
    """
    fields = _checked_fields(spec)
    # The field for reasoning has one of the names of REASONING_FIELDS, such as "reasoning_content".
    reasoning_fields = [fields[name] for name in REASONING_FIELDS if name in fields]
    reasoning = _reasoning(reasoning_fields[0]) if reasoning_fields else None
    content = _content_markers(fields.get("content") or {})
    tools = tool_section(fields["tool_calls"]) if "tool_calls" in fields else None
    return Format(
        "response_template",
        Sections(reasoning=reasoning, content=content.wrapper, tools=tools),
        ends=content.turn_ends,
        turn=marker_spellings(spec, "start_anchor"),  # the text that opens the model's turn
        sources=(Source("response_template in the checkpoint's tokenizer_config.json"),),
    )


def _checked_fields(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check a `response_template`, and return its member `fields`.

    Each field declares how the model writes one part of a message, such as "tool_calls".

    Raises:
        FormatError: The declaration is malformed, has another version, or has an unknown field.
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
    unknown = sorted(set(fields) - _KNOWN_FIELDS)
    if unknown:
        raise FormatError(
            f"the response_template has the unknown fields {unknown}. The known fields are "
            f"{sorted(_KNOWN_FIELDS)}."
        )
    return fields


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    """Convert the declaration of the field for reasoning into the reasoning part of a format.

    Example: {"open": "<think>", "close": "</think>"} gives `Reasoning("<think>", "</think>")`.

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


class _ContentMarkers(NamedTuple):
    """The markers around the content, if any, and the markers that end the turn."""

    wrapper: Wrapper | None
    turn_ends: tuple[str, ...]


def _content_markers(field: Mapping[str, Any]) -> _ContentMarkers:
    """Read the markers from the declaration of the field `content`.

    If the field has no opening marker, there is no wrapper, and the closing markers end the turn.
    Otherwise the first closing marker belongs to the wrapper.

    >>> _content_markers({"close": "<end>"})
    _ContentMarkers(wrapper=None, turn_ends=('<end>',))
    >>> _content_markers({"open": "<a>", "close": ["</a>", "<end>"]})
    _ContentMarkers(wrapper=Wrapper(open='<a>', close='</a>'), turn_ends=('<end>',))
    """
    opens = marker_spellings(field, "open")
    closes = marker_spellings(field, "close")
    if not opens:
        return _ContentMarkers(None, closes)
    wrapper_close = closes[0] if closes else ""
    return _ContentMarkers(Wrapper(opens[0], wrapper_close), turn_ends=closes[1:])
