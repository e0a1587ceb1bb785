"""Declarations for templates whose renderings do not show the whole format.

- `QUARANTINE` lists the templates whose renderings are ambiguous. Keep this list short.
- `add_family_variants` adds variants of a tool call that the template does not render.
- `recognise_tool_section` finds the format of tool calls if the template renders no tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from nereid_parsers.format import (
    Call,
    Format,
    JsonArray,
    JsonObject,
    Keys,
    Messages,
    Route,
    Sections,
    Source,
    Stage,
    TaggedArguments,
    ToolSection,
)
from nereid_parsers.formats.registry import TOOLS, get_format
from nereid_parsers.template.difference import markers
from nereid_parsers.tool_declarations import Body

# ---- templates whose format is given ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A template whose format is declared here, because the analysis cannot infer the format.

    Attributes:
        model: The models that have the template.
        reason: Why comparisons cannot infer the format.
        matches: A function that takes the source of any template, and returns whether this entry
            declares the format of that template.
        make_layout: A function that returns the layout of the format.
    """

    model: str
    reason: str
    matches: Callable[[str], bool]
    make_layout: Callable[[], Messages | Sections]

    def make_format(self) -> Format:
        """Return the declared format."""
        source = Source(f"recognised in its chat template: {self.model}")
        return Format("recognised", self.make_layout(), sources=(source,))


def is_harmony(source: str) -> bool:
    """Return whether a chat template writes messages in Harmony, the format of gpt-oss models.

    Example: `<|channel|>analysis<|message|>` starts a message in the channel `analysis`.
    """
    return "<|channel|>analysis" in source and "<|message|>" in source


def is_recipient_lines(source: str) -> bool:
    r"""Return whether a template starts each message with `>>>`, the recipient and a line break.

    Example: ">>>all\nHello" is content, and ">>>get_weather\n{..}" is a tool call.
    """
    # `~` joins two texts in Jinja, so a template may contain `'>>>' ~ 'all'`.
    joined_source = source.replace("' ~ '", "")
    if ">>>all" in joined_source:
        return True
    words_of_template = (">>>", "'all", "recipient")
    return all(word in source for word in words_of_template)


def _harmony_layout() -> Messages:
    """Return the layout of gpt-oss from the registry."""
    layout = get_format("gpt_oss").layout
    assert isinstance(layout, Messages)
    return layout


def _recipient_lines_layout() -> Messages:
    """Return the layout of messages that start with `>>>` and a recipient."""
    return Messages(
        start=">>>",
        header_end="\n",
        routes=(Route(Stage.CONTENT, "all"), Route(Stage.CALLS, "{name}")),
    )


QUARANTINE = (
    QuarantineEntry(
        model="openai/gpt-oss-20b, openai/gpt-oss-120b",
        reason="The channel of a message depends on the whole conversation, and the recipient of "
        "a call is written in one of two places. A rendering shows only one of them.",
        matches=is_harmony,
        make_layout=_harmony_layout,
    ),
    QuarantineEntry(
        model="meetkai/functionary-medium-v3.2, functionary-small-v3.2",
        reason="Content and calls are messages to recipients, and the recipient of content is "
        "'all'. The generation prompt opens the first message, so that the first message is "
        "rendered differently from the messages after it.",
        matches=is_recipient_lines,
        make_layout=_recipient_lines_layout,
    ),
)


def find_quarantined(source: str) -> QuarantineEntry | None:
    """Return the first entry of `QUARANTINE` that matches the source of a template, or None."""
    return next((entry for entry in QUARANTINE if entry.matches(source)), None)


# ---- the variants of a model family --------------------------------------------------------------


def add_family_variants(section: ToolSection) -> ToolSection:
    """Return a copy of a tool section that also accepts the spellings of related models.

    A tool section declares how a model writes tool calls. A template renders one variant of a tool
    call, but models also write other variants, which the registry of formats declares.

    Example: a template renders `<tool_call><function=f>..</function></tool_call>`. Models of this
    family sometimes omit `<tool_call>`, so the result has a second variant that starts with
    `<function=f>`.
    """
    families = _families_of(section)
    if not families:
        return section
    first, *others = section.calls
    calls = [_accept_family_keys(first, families), *others]
    family_variants = [variant for family in families for variant in _other_variants(family, first)]
    return replace(
        section,
        calls=(*calls, *_new_variants(calls, family_variants)),
        also_open=_union(family.also_open for family in families),
        also_close=_union(family.also_close for family in families),
    )


def _families_of(section: ToolSection) -> list[ToolSection]:
    """Return the registered tool sections of the model families that write the same tool calls.

    A registered section is returned if the two sections have the same markers, and their first tool
    calls have the same markers and keys. The result is [] if the tool calls have no markers.
    """
    # A trigger is the text at which a single tool call starts, such as `<tool_call>`.
    has_marker = bool(section.opens or section.calls[0].trigger)
    if not has_marker:
        return []
    return [family for family in _registered_sections() if _is_same_family(family, section)]


def _new_variants(calls: list[Call], variants: list[Call]) -> list[Call]:
    """Return the variants of a tool call whose markers or keys differ from those of `calls`.

    If several variants have the same markers and keys, only the first of them is returned.
    """
    new_variants: list[Call] = []
    known_markup = {_markup_of(call) for call in calls}
    for variant in variants:
        markup = _markup_of(variant)
        if markup not in known_markup:
            known_markup.add(markup)
            new_variants.append(variant)
    return new_variants


def _other_variants(family: ToolSection, inferred_call: Call) -> Iterator[Call]:
    """Yield the variants of a tool call that a model family declares, except the first variant.

    A variant declares another way in which models of the family write a tool call. Most variants
    differ from the first variant only in the markers, and have the same body, which is the text
    between the markers. Such a variant is yielded with the body of `inferred_call`, because
    `inferred_call` shows how this template writes the body. A variant with another body is yielded
    unchanged.

    Example: the family declares `<call>BODY</call>` and `[call]BODY`, and the template writes
    `<call>OTHER</call>`. The function yields `[call]OTHER`.

    Args:
        family: The tool section of the model family, from the registry of formats.
        inferred_call: The tool call that was inferred from the template.
    """
    first_of_family, *others = family.calls
    for variant in others:
        has_usual_body = variant.body == first_of_family.body
        yield replace(variant, body=inferred_call.body) if has_usual_body else variant


def _registered_sections() -> Iterator[ToolSection]:
    """Yield the tool sections of all formats in the registry."""
    return (entry.part for entry in TOOLS.values() if isinstance(entry.part, ToolSection))


def _is_same_family(section: ToolSection, other: ToolSection) -> bool:
    """Return whether two sections and their first tool calls have equal markers and keys."""
    return (
        section.open.strip() == other.open.strip()
        and section.close.strip() == other.close.strip()
        and _markup_of(section.calls[0]) == _markup_of(other.calls[0])
    )


class _Markup(NamedTuple):
    """The markers and the keys of a tool call, as values that can be compared.

    The white space around the markers is removed, because the comparison ignores white space.

    Attributes:
        body_type: The class of the body.
        open, head, close: The markers and the header of the tool call.
        around_arguments: The keys of the name and of the arguments in a JSON body, or the markers
            around a tagged argument. () for all other bodies.
    """

    body_type: type[Body]
    open: str
    head: str
    close: str
    around_arguments: tuple[str, ...] = ()


def _markup_of(call: Call) -> _Markup:
    """Return the markers and the keys of a tool call, so that two tool calls can be compared.

    White space around the markers is removed.

    >>> markup = _markup_of(Call(JsonObject(), open="<call> ", close=" </call>"))
    >>> markup.open, markup.close, markup.around_arguments
    ('<call>', '</call>', ('name', 'arguments'))
    """
    around_arguments: tuple[str, ...] = ()
    keys = _keys_of(call)
    if keys is not None:
        around_arguments = (keys.name, keys.arguments)
    elif isinstance(call.body, TaggedArguments):
        around_arguments = (call.body.open.strip(), call.body.close.strip())
    return _Markup(
        body_type=type(call.body),
        open=call.open.strip(),
        head=call.head.strip(),
        close=call.close.strip(),
        around_arguments=around_arguments,
    )


def _keys_of(call: Call) -> Keys | None:
    """Return the declared JSON keys of a tool call, or None if the body is not JSON."""
    if isinstance(call.body, JsonObject | JsonArray) and isinstance(call.body.keys, Keys):
        return call.body.keys
    return None


def _accept_family_keys(call: Call, families: list[ToolSection]) -> Call:
    """Return a copy of a tool call that also accepts the JSON keys of the given model families.

    Example: if a family also writes the arguments under the key "parameters", the result accepts
    this key (`Keys.also`). The result also accepts the keys that the families ignore
    (`Keys.extra`), such as "type". A call that is not JSON is returned unchanged.
    """
    keys = _keys_of(call)
    if keys is None or not isinstance(call.body, JsonObject | JsonArray):
        return call
    keys_of_families = [_keys_of(family.calls[0]) for family in families]
    all_keys = [keys, *(declared for declared in keys_of_families if declared is not None)]
    accepted_keys = replace(
        keys,
        also=_union(declared.also for declared in all_keys),
        extra=_union(declared.extra for declared in all_keys),
    )
    return replace(call, body=replace(call.body, keys=accepted_keys))


def _union(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Join several groups of strings into one tuple without duplicates.

    >>> _union([("a", "b"), ("b", "c")])
    ('a', 'b', 'c')
    """
    return tuple(dict.fromkeys(chain.from_iterable(groups)))


# ---- tool calls that a template does not render --------------------------------------------------

_MARKERS_OF_PHRASES = {
    # The templates of LFM2.5 contain this phrase. Older templates of the family contain markers
    # around the tools instead of the phrase.
    "List of tools: [": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""The tool call markers of some model families. A key is a phrase in the templates of the family.

These templates contain no markers of tool calls. They use the phrase when they offer the tools.
"""


def markers_of_phrases(text: str) -> list[str]:
    """Return the markers of all phrases in `_MARKERS_OF_PHRASES` that `text` contains.

    Args:
        text: The literal text of the template.
    """
    groups = (found for phrase, found in _MARKERS_OF_PHRASES.items() if phrase in text)
    return list(chain.from_iterable(groups))


def recognise_tool_section(known_markers: Collection[str]) -> ToolSection | None:
    """Find the registered tool section whose markers are all in `known_markers`.

    A tool section declares how a model writes tool calls. The registry of formats contains the tool
    sections of known models. The analysis calls this function if the template renders no tool
    calls. If several sections match, the section with the most markers is returned. Return None if
    no section matches, or if two sections tie for the most markers.

    Example: the markers `<|tool_call_start|>` and `<|tool_call_end|>` belong to one section, which
    contains Python calls.

    Args:
        known_markers: The markers in a template's text or in a model's vocabulary.
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
    """Return the markers of a tool section, without markers that contain a field such as `{name}`.

    Example: for `<tool_call>{name}<arg_key>{key}</arg_key>..</tool_call>`, the result contains
    `<tool_call>`, `</tool_call>`, `<arg_key>` and `</arg_key>`.
    """
    call = section.calls[0]
    texts = [section.open, section.close, call.open, call.head, call.close]
    if isinstance(call.body, TaggedArguments):
        texts += [call.body.open, call.body.close]
    return {marker for text in texts for marker in markers(text) if "{" not in marker}
