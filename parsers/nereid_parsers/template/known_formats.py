"""Describe tool call formats that a model uses but its chat template does not render.

- `add_family_variants` adds variants of a tool call that related models write, but that the
  template does not render.
- `recognise_tool_section` finds the format of tool calls if the template renders no tool calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from nereid_parsers.format import (
    Call,
    JsonArray,
    JsonObject,
    Keys,
    TaggedArguments,
    ToolSection,
)
from nereid_parsers.formats.registry import TOOLS
from nereid_parsers.template.markup.markers import markers
from nereid_parsers.tool_declarations import Body

# ---- the variants of a model family --------------------------------------------------------------


def add_family_variants(section: ToolSection) -> ToolSection:
    """Extend `section` with other ways in which related models write tool calls.

    A template renders only one way to write a tool call, but models often write others. Example: a
    template renders `<tool_call><function=f>..</function></tool_call>`. Models of this family
    sometimes omit `<tool_call>`, so the result has a second variant that starts with
    `<function=f>`.

    If the tool calls of `section` belong to no known family, `section` is returned unchanged.
    """
    families = _families_of(section)
    if not families:
        return section
    # The first call of a section is the form that the template renders. `_families_of` compares
    # only this form with the families. Therefore, only this form also accepts the alternative JSON
    # keys of the families.
    rendered_call, *other_calls = section.calls
    calls = [_accept_family_keys(rendered_call, families), *other_calls]
    all_sections = (section, *families)
    return replace(
        section,
        calls=(*calls, *_new_variants(families, calls, rendered_call.body)),
        # The alternative markers before and after all tool calls of a message.
        also_open=_union(each.also_open for each in all_sections),
        also_close=_union(each.also_close for each in all_sections),
    )


def _families_of(section: ToolSection) -> list[ToolSection]:
    """Return the registered sections whose markers and keys are equal to those of `section`.

    Each registered section declares how one family of models writes tool calls.

    The result is [] if no marker starts the tool calls of `section`. Different families write such
    tool calls, so their form does not show the family.
    """
    starts_with_marker = section.opens or section.calls[0].trigger
    if not starts_with_marker:
        return []
    return [family for family in _registered_sections() if _has_equal_markup(family, section)]


def _new_variants(
    families: list[ToolSection], known_calls: list[Call], rendered_body: Body
) -> list[Call]:
    """Return the variants of a tool call that `families` declare, except those in `known_calls`.

    Each family declares several ways in which its models write a tool call. The template renders
    the first way, with the body `rendered_body`. The other ways are the variants. Of several
    variants with equal markup (see `_markup_of`), only the first one is returned.
    """
    known_markup = {_markup_of(call) for call in known_calls}
    new_variants = []
    for family in families:
        for variant in _other_variants(family, rendered_body):
            markup = _markup_of(variant)
            if markup not in known_markup:
                known_markup.add(markup)
                new_variants.append(variant)
    return new_variants


def _other_variants(family: ToolSection, rendered_body: Body) -> list[Call]:
    """Return all ways in which a family of models writes a tool call, except the first way.

    The body is the part of a tool call between its markers. The template renders the first way, but
    the body in the template (`rendered_body`) may differ from the body that the family declares.
    Then this difference also applies to each variant with the declared body. Example: the family
    declares `<call>BODY</call>` and `[call]BODY`, and the template renders `<call>OTHER</call>`.
    The result contains `[call]OTHER`.
    """
    first_way, *variants = family.calls
    declared_body = first_way.body
    return [
        replace(variant, body=rendered_body) if variant.body == declared_body else variant
        for variant in variants
    ]


def _registered_sections() -> Iterator[ToolSection]:
    """Yield every registered description of how a model writes tool calls."""
    return (entry.part for entry in TOOLS.values() if isinstance(entry.part, ToolSection))


def _has_equal_markup(section: ToolSection, other: ToolSection) -> bool:
    """Return whether `section` and `other` describe tool calls with equal markers and JSON keys.

    A tool section may declare several ways to write a tool call. Only the first way of each section
    is compared. White space around the markers is ignored.
    """
    return (
        section.open.strip() == other.open.strip()
        and section.close.strip() == other.close.strip()
        and _markup_of(section.calls[0]) == _markup_of(other.calls[0])
    )


class _CallMarkup(NamedTuple):
    """The text that a model writes around the name and the arguments of a tool call.

    White space around the markers is removed. The attributes are explained with the tool call
    `<call>{"name": "f", "arguments": {}}</call>`.

    Attributes:
        body: The class that describes the body: `JsonObject`.
        opening: The opening marker: "<call>".
        head: The pattern of the text between the opening marker and the body: "".
        closing: The closing marker: "</call>".
        body_markup: The JSON keys or the tags in the body, see `_markup_of_body`:
            ("name", "arguments").
    """

    body: type[Body]
    opening: str
    head: str
    closing: str
    body_markup: tuple[str, ...]


def _markup_of(call: Call) -> _CallMarkup:
    """Return the markers and JSON keys of a tool call, to compare them with those of another call.

    >>> markup = _markup_of(Call(JsonObject(), open="<call> ", close=" </call>"))
    >>> markup.opening, markup.closing, markup.body_markup
    ('<call>', '</call>', ('name', 'arguments'))
    """
    return _CallMarkup(
        body=type(call.body),
        opening=call.open.strip(),
        head=call.head.strip(),
        closing=call.close.strip(),
        body_markup=_markup_of_body(call),
    )


def _markup_of_body(call: Call) -> tuple[str, ...]:
    """Return the JSON keys or the tags in the body of a tool call.

    The body is the part between the markers of the call. The result for each kind of body:

        JSON {"name": "f", "arguments": {}}    the keys of the name and the arguments
        arguments between tags                 the opening and the closing tag of an argument
        any other body                         ()
    """
    keys = _keys_of(call)
    if keys is not None:
        return (keys.name, keys.arguments)
    if isinstance(call.body, TaggedArguments):
        return (call.body.open.strip(), call.body.close.strip())
    return ()


def _keys_of(call: Call) -> Keys | None:
    """Return the JSON keys of a tool call, such as "name" and "arguments".

    Return None if the tool call is not JSON, or if the function's name is itself a key.
    """
    if isinstance(call.body, JsonObject | JsonArray) and isinstance(call.body.keys, Keys):
        return call.body.keys
    return None


def _accept_family_keys(call: Call, families: list[ToolSection]) -> Call:
    """Return a copy of `call` that also accepts the JSON keys of the given model families.

    The copy accepts the alternative keys of each family (`Keys.also`), such as "parameters" instead
    of "arguments", and ignores the same keys as each family (`Keys.extra`), such as "type". If
    `call` is not JSON, or if the function's name is itself a key, `call` is returned unchanged.
    """
    body = call.body
    if not isinstance(body, JsonObject | JsonArray) or not isinstance(body.keys, Keys):
        return call
    # A family may declare several forms of a tool call. The first form is the one in its templates.
    keys_of_families = [_keys_of(family.calls[0]) for family in families]
    all_keys = [body.keys, *(keys for keys in keys_of_families if keys is not None)]
    accepted_keys = replace(
        body.keys,
        also=_union(keys.also for keys in all_keys),
        extra=_union(keys.extra for keys in all_keys),
    )
    return replace(call, body=replace(body, keys=accepted_keys))


def _union(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Join several groups of strings into one tuple without duplicates.

    >>> _union([("a", "b"), ("b", "c")])
    ('a', 'b', 'c')
    """
    return tuple(dict.fromkeys(chain.from_iterable(groups)))


# ---- tool calls that a template does not render --------------------------------------------------

# Some templates list tools, but contain no tool call markers. Such a template is recognised by a
# phrase at the start of its list of tools. This dict maps the phrase to the markers that the model
# writes around a tool call.
_MARKERS_OF_PHRASES = {
    # The templates of LFM2.5 contain this phrase. Older templates of this model family do not
    # contain the phrase, but write markers around the offered tools.
    "List of tools: [": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


def markers_of_phrases(text: str) -> list[str]:
    """Search `text` for phrases of known templates. Return the tool call markers for these phrases.

    >>> markers_of_phrases("List of tools: [")
    ['<|tool_call_start|>', '<|tool_call_end|>']
    """
    groups = (group for phrase, group in _MARKERS_OF_PHRASES.items() if phrase in text)
    return list(chain.from_iterable(groups))


def recognise_tool_section(known_markers: Collection[str]) -> ToolSection | None:
    """Return the registered `ToolSection` whose markers are all in `known_markers`, or None.

    A tool section declares how a model writes tool calls. If a template renders no tool calls, the
    tool section cannot be inferred from renderings. The analysis then searches the registry, which
    contains the tool sections of known models. Example: the known markers `<|tool_call_start|>` and
    `<|tool_call_end|>` belong to the section of the LFM2 models.

    If several sections match, the section with the most markers is returned. If two of these
    sections have equally many markers, the choice is ambiguous, and the result is None.
    """
    num_markers_by_section: dict[ToolSection, int] = {}
    for section in _registered_sections():
        section_markers = _markers_of(section)
        if section_markers and section_markers.issubset(known_markers):
            num_markers_by_section[section] = len(section_markers)
    max_markers = max(num_markers_by_section.values(), default=0)
    best_sections = [
        section
        for section, num_markers in num_markers_by_section.items()
        if num_markers == max_markers
    ]
    return best_sections[0] if len(best_sections) == 1 else None


def _markers_of(section: ToolSection) -> set[str]:
    """Return the markers of a model's tool calls, such as `<tool_call>` and `</tool_call>`.

    Example: if a tool call is written as `<tool_call>{name}<arg_key>{key}</arg_key>..</tool_call>`,
    the markers are `<tool_call>`, `<arg_key>`, `</arg_key>` and `</tool_call>`. A marker with a
    field, such as `<function={name}>`, is omitted, because its text varies.
    """
    call = section.calls[0]
    texts = [section.open, section.close, call.open, call.head, call.close]
    if isinstance(call.body, TaggedArguments):
        texts += [call.body.open, call.body.close]
    return {marker for text in texts for marker in markers(text) if "{" not in marker}
