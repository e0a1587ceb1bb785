"""Compiles the forms of a tool call, and groups them by their first text, such as `<call>`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.compiled.compiled_call import CompiledCall, SectionMarkers
from nereid_parsers.stream.marker_kinds import MarkerKind, marker_kinds, visible_markers
from nereid_parsers.stream.pattern_matching import marker_spellings
from nereid_parsers.tool_declarations import Call, JsonArray, JsonObject, ToolSection

# The minimum length, in characters, of a closing marker that the parser recognises in content.
# Shorter markers, such as "}", are ignored, because such texts often occur in content.
_MIN_CLOSING_MARKER_CHARS = 4
# If the opening marker is missing, the parser recognises a tool call by the first text of its
# header, such as `<function=`. This is the minimum length of such a text, in characters, because
# shorter texts often occur in content.
_MIN_HEAD_MARKER_CHARS = 8


@dataclass(frozen=True, slots=True)
class CompiledCalls:
    """The compiled forms of a tool call, grouped by their first text, such as `<call>`.

    A variant is one of several ways in which the model may write a tool call. The parser searches
    for the first text of each variant, and then tries the variants that start with this text.

    Attributes:
        all: All declared variants, in the order in which the parser tries them.
        by_marker: The variants that start with a marker, as in `<call><function=sum>`. The keys are
            the markers, here `<call>`.
        by_header: The variants that start with the header, because the model has omitted the
            marker, as in `<function=sum>`. The keys are the first literals of the headers, here
            `<function=`.
        unmarked: The variants for which the format declares no marker, as in `{"name": "sum"}`.
        kinds: The meaning of each tool call marker that the parser searches for in content.
            Example: `{"<tool_call>": OPEN_CALL, "</tool_call>": CLOSE_CALLS}`.
    """

    all: tuple[CompiledCall, ...] = ()
    by_marker: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    by_header: dict[str, tuple[CompiledCall, ...]] = field(default_factory=dict)
    unmarked: tuple[CompiledCall, ...] = ()
    kinds: dict[str, MarkerKind] = field(default_factory=dict)


def compile_calls(
    tools: ToolSection | None, message_ends: Iterable[str], *, allows_unmarked: bool
) -> CompiledCalls:
    """Compile all variants of a tool call. A variant is one way in which models write tool calls.

    The parser searches for the first text of each variant. Therefore, the attributes of the result
    contain different variants, depending on their first text:

        attribute   example of a tool call              first text
        by_marker   `<call><function=sum>..</call>`     `<call>`, the declared marker
        by_header   `<function=sum>..</call>`           `<function=`, because `<call>` is missing
        unmarked    `{"name": "sum", ..}`               `{`, because no marker is declared

    The attribute `all` contains all declared variants. The attribute `kinds` contains the meaning
    of each marker of a tool call.

    Args:
        tools: The declaration of the tool calls, or None if the content contains no tool calls.
        message_ends: The markers that end a message, such as `<|im_end|>`.
        allows_unmarked: Whether a tool call without a marker is recognised. If the format declares
            markers around all tool calls, such a tool call is never recognised.
    """
    if tools is None:
        return CompiledCalls()
    section = SectionMarkers(
        tuple(visible_markers(tools.opens)),
        tools.closes,
        tuple(visible_markers(message_ends)),
        tools.separator.strip(),
    )
    # A model may write a JSON array instead of the declared object, or the other way round.
    calls_to_compile = _with_json_variants(tools.calls)
    variants = tuple(CompiledCall(call, section) for call in calls_to_compile)
    by_marker = _group_by_trigger(_variants_after_content(variants, section))
    # If a text is the first text of both groups, `by_header` does not contain this text.
    by_header = _group_by_header(tools.calls, section, markers=by_marker.keys())
    recognises_unmarked = allows_unmarked and not tools.opens
    unmarked = _unmarked_variants(variants) if recognises_unmarked else ()
    calls = CompiledCalls(variants, by_marker, by_header, unmarked)
    return replace(calls, kinds=_kinds_of_call_markers(tools, calls))


def _kinds_of_call_markers(tools: ToolSection, calls: CompiledCalls) -> dict[str, MarkerKind]:
    """Return the meaning of each tool call marker that the parser searches for in content.

    Example: `{"<tool_call>": OPEN_CALL, "</tool_call>": CLOSE_CALLS}`. `tools` declares the markers
    around all tool calls. `calls` are the compiled ways to write a tool call.
    """
    # A tool call without a marker starts with one of these texts, for example `{`.
    unmarked_openings = [text for variant in calls.unmarked for text in variant.body_openings()]
    # The priority of these dicts increases from the first to the last. In content, no tool call is
    # open, so a marker that both opens and closes tool calls opens one.
    return (
        dict.fromkeys(calls.by_header, MarkerKind.CALL_HEAD)
        | dict.fromkeys(_long_closing_markers(calls.all), MarkerKind.CLOSE_CALLS)
        | dict.fromkeys(unmarked_openings, MarkerKind.UNMARKED_CALL)
        | dict.fromkeys(tools.closes, MarkerKind.CLOSE_CALLS)
        | dict.fromkeys(calls.by_marker, MarkerKind.OPEN_CALL)
        | marker_kinds(tools.opens, MarkerKind.OPEN_SECTION)
    )


def _long_closing_markers(variants: Iterable[CompiledCall]) -> list[str]:
    """Return the closing markers that are long enough to be recognised in content.

    Example: the result contains `</tool_call>`, but not `}`. Most occurrences of `}` in content are
    ordinary text. The result does not contain `</{name}>` either, because no function is known
    here whose name could replace `{name}`.
    """
    return [
        marker
        for variant in variants
        for marker in variant.closing_markers
        if len(marker) >= _MIN_CLOSING_MARKER_CHARS and "{name}" not in marker
    ]


def _variants_after_content(
    variants: tuple[CompiledCall, ...], section: SectionMarkers
) -> list[CompiledCall]:
    """Return the variants of a tool call that can directly follow content.

    If markers enclose all tool calls, as in `<calls><call>..</call></calls>`, a model may omit
    `<calls>`, and start with the tool call's own marker `<call>`. Only tool calls with such a
    marker are then returned. If no markers enclose all tool calls, all `variants` are returned.
    """
    if not section.opens:
        return list(variants)
    return [variant for variant in variants if variant.call.open.strip()]


def _unmarked_variants(variants: tuple[CompiledCall, ...]) -> tuple[CompiledCall, ...]:
    """Return the variants of a tool call without an opening marker, as in `{"name": "sum"}`."""
    return tuple(variant for variant in variants if variant.is_unmarked)


def _group_by_header(
    calls: tuple[Call, ...], section: SectionMarkers, markers: Collection[str]
) -> dict[str, tuple[CompiledCall, ...]]:
    """Compile the tool calls without their opening markers. Group them by their first text.

    The first text is the start of the header. Example: for a call with the header
    `<function={name}>`, the key is `<function=`. A text that is also one of the `markers` is
    treated as a marker, so the result does not contain this text.
    """
    groups = _group_by_trigger(_variants_with_missing_marker(calls, section))
    return {header: group for header, group in groups.items() if header not in markers}


def _variants_with_missing_marker(
    calls: tuple[Call, ...], section: SectionMarkers
) -> Iterator[CompiledCall]:
    """Yield variants of `calls` without opening marker, because a model may omit the marker.

    Example: the declaration `<tool_call><function={name}>..</tool_call>` gives the variant
    `<function={name}>..</tool_call>`. Only a header that shows the start of a tool call gives a
    variant. A header such as `{name}` gives none, because any text matches this header.
    """
    for call in calls:
        # Before the first tool call, a model may also omit the marker of the tool section. If the
        # format declares no marker at all, no marker can be missing.
        declares_marker = bool(call.open.strip() or section.opens)
        if declares_marker and _shows_call_start(first_literal(call.head)):
            yield CompiledCall(replace(call, open=""), section, lacks_opening_marker=True)


def _shows_call_start(text: str) -> bool:
    """Return whether the first fixed text of a header shows that a tool call starts.

    Such a text contains the start of a tag, and is so long that it rarely occurs in content.
    Examples: the result is True for `<function=`, and False for `<f=`, `function` and "".
    """
    starts_tag = "<" in text and not text[0].isalnum()
    return starts_tag and len(text) >= _MIN_HEAD_MARKER_CHARS


def _with_json_variants(calls: tuple[Call, ...]) -> list[Call]:
    """Add a variant with a JSON array for each JSON object in `calls`, and vice versa.

    A model sometimes writes an array, `[{"name": "f", ..}]`, although the format declares an
    object, `{"name": "f", ..}`, or writes an object instead of the declared array. Example: if an
    object is declared, the result contains this declaration, and then the declaration of an array
    of such objects.
    """
    json_variants: list[Call] = []
    for call in calls:
        if isinstance(call.body, JsonObject):
            json_variants.append(replace(call, body=JsonArray(call.body.keys)))
        elif isinstance(call.body, JsonArray):
            json_variants.append(replace(call, body=JsonObject(call.body.keys)))
    without_duplicates = dict.fromkeys((*calls, *json_variants))
    return list(without_duplicates)


def _group_by_trigger(variants: Iterable[CompiledCall]) -> dict[str, tuple[CompiledCall, ...]]:
    """Group the variants by their trigger, the first text of the tool call.

    The trigger is the opening marker, such as `<call>`, or the start of the header, such as
    `<function=`. The result is a dict. Its keys are all spellings of the triggers, which differ
    only in their white space. Example: two variants with the marker `<call>`, which has one
    spelling, give `{"<call>": (variant_1, variant_2)}`. Variants without a trigger are omitted.
    """
    groups: defaultdict[str, list[CompiledCall]] = defaultdict(list)
    for variant in variants:
        if not variant.is_unmarked:
            for spelling in marker_spellings(variant.call.trigger):
                groups[spelling].append(variant)
    return {spelling: tuple(group) for spelling, group in groups.items()}
