"""Constrain free text that may contain tool calls, such as `Let me look.<call>f()</call>`."""

from __future__ import annotations

from nereid_parsers.constraints.constrain_calls import (
    ListBody,
    call_node,
    list_node,
    section_node,
    trigger_of,
)
from nereid_parsers.constraints.constrain_nodes import (
    Node,
    any_text,
    elements_of,
    one_of,
    optional,
    sequence,
    tag,
    without_outer_whitespace,
)
from nereid_parsers.constraints.constrain_request import Request
from nereid_parsers.declarations import FormatData, Sections
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.tool_declarations import ToolSection

# Matches one character that is neither `[` nor white space. Free text must start with such a
# character, because `[` would start a list of tool calls.
_NO_BRACKET: Node = {"type": "regex", "pattern": r"[^\[\s]"}


def text_with_calls(
    fmt: FormatData, layout: Sections, section: ToolSection, request: Request
) -> Node:
    """Return the grammar node for free text that may contain valid tool calls.

    The form of the tool calls, which `section` declares, decides which text the node matches:

        list without a marker      `[f(), g()]`, or text that does not start with `[`
        calls without end marker   `Let me look.<calls>f(), g()`
        calls with markers         `Let me look.<call>f()</call>Now g.<call>g()</call>`
    """
    if _is_unmarked_list(section):
        return _list_or_text(section, request)
    calls = _marked_calls(section, request)
    if any(_lacks_end_marker(node) for node in calls):
        return _text_then_calls(section, calls)
    return _text_around_calls(fmt, layout, section, calls, request)


def _list_or_text(section: ToolSection, request: Request) -> Node:
    """Return the grammar node for a list of tool calls without a marker, or for free text.

    A list such as `[f(a=1), g()]` starts with `[`, so free text must not start with `[`. Free text
    may contain `[` at any other place, so a list cannot follow free text.
    """
    free_text = sequence(_NO_BRACKET, any_text())
    return one_of(section_node(section, request), free_text)


def _is_unmarked_list(section: ToolSection) -> bool:
    """Return whether the format writes tool calls as a list without a marker: `[f(), g()]`."""
    call = section.calls[0]
    has_marker = bool(section.opens or call.trigger)
    return isinstance(call.body, ListBody) and not has_marker


def _marked_calls(section: ToolSection, request: Request) -> list[Node]:
    """Return the grammar nodes for tool calls that start with a marker, such as `<tool_call>`.

    If each tool call has its own markers, there is one node for each tool of the request. Otherwise
    one node matches all tool calls of a message.
    """
    if section.opens:  # As in `<calls><call>f{}</call></calls>`.
        return [section_node(section, request)]
    call = section.calls[0]
    if isinstance(call.body, ListBody):  # As in `<call>[f(), g()]</call>`.
        return [list_node(call, request)]
    return [call_node(call, tool) for tool in request.tools]  # As in `<call>f{}</call>`.


def _lacks_end_marker(node: Node) -> bool:
    """Return whether no marker shows where a node for tool calls ends, as in `<calls>f(), g()`.

    The last element of such a node allows any number of tool calls. The result is False for
    `<calls>f(), g()</calls>`, because `</calls>` is the last element.
    """
    last_element = elements_of(node)[-1]
    return last_element["type"] in ("star", "plus", "tags_with_separator")


def _text_then_calls(section: ToolSection, calls: list[Node]) -> Node:
    """Return the grammar node for free text, and optional tool calls after the text.

    Example of matching text: `Let me look.<calls>f(), g()`. No text can follow the tool calls,
    because no marker shows where they end. The node is a sequence and not a `triggered_tags` node,
    because xgrammar requires an end marker in each tag of a `triggered_tags` node.
    """
    text = any_text((trigger_of(section),))
    return sequence(text, optional(one_of(*map(without_outer_whitespace, calls))))


def _text_around_calls(
    fmt: FormatData, layout: Sections, section: ToolSection, calls: list[Node], request: Request
) -> Node:
    """Return the grammar node for free text that may contain tool calls with markers.

    Example of matching text: `Let me look.<call>f()</call>Now g.<call>g()</call>`. Here `<call>` is
    the "trigger". xgrammar allows any text before the trigger. The text that starts with the
    trigger must match one of the nodes `calls`. `section` declares the markers of the tool calls.
    """
    tags: list[Node] = []
    for call in calls:
        call_tag = tag(call)
        # xgrammar requires that each tag starts with a trigger. Therefore white space before the
        # trigger is removed.
        tags.append({**call_tag, "begin": call_tag["begin"].lstrip()})
    return {
        "type": "triggered_tags",
        "triggers": _triggers(fmt, layout, section, tags),
        "tags": tags,
        "stop_after_first": request.is_single,
    }


def _triggers(
    fmt: FormatData, layout: Sections, section: ToolSection, tags: list[Node]
) -> list[str]:
    """Return the triggers: the texts that start a tool call, such as `<tool_call>`.

    If possible, one text is the trigger of all tool calls, see `_common_trigger`. Otherwise, the
    whole start of each tool call, such as `<|channel|>tool.f`, is a trigger, because a longer text
    is less likely to be the start of another marker.

    `tags` are the grammar nodes of the tool calls. The key `begin` of a tag contains the text at
    the start of the tool call.
    """
    starts = [node["begin"] for node in tags]
    common_trigger = _common_trigger(section, starts, _markers_outside_calls(fmt, layout))
    if common_trigger is not None:
        return [common_trigger]
    return list(dict.fromkeys(starts))  # Without duplicates.


def _common_trigger(
    section: ToolSection, starts: list[str], other_markers: list[str]
) -> str | None:
    """Return one trigger for all tool calls, or None if no text is usable.

    Two texts are tried. Example: `<|channel|>tool.f` calls the tool `f`, and `<|channel|>answer`
    opens the content:

        `<|channel|>`        The first marker. It is not usable, because `<|channel|>answer` starts
                             with this text, too.
        `<|channel|>tool.`   The text before the name of the tool. It is usable.

    If only punctuation, such as `<`, precedes the name of the tool, the result is None, because
    ordinary text often contains such a character. For `starts` and `other_markers`, see
    `_is_usable_trigger`.
    """
    call = section.calls[0]  # Constrained output contains only the first variant of a tool call.
    first_marker = trigger_of(section)
    text_before_name = call.open.lstrip() + first_literal(call.head)
    starts_with_punctuation = not section.opens and call.starts_with_punctuation
    if starts_with_punctuation:
        return None
    for trigger in (first_marker, text_before_name):
        if _is_usable_trigger(trigger, starts, other_markers):
            return trigger
    return None


def _is_usable_trigger(trigger: str, starts: list[str], other_markers: list[str]) -> bool:
    """Return whether all tool calls start with `trigger`, and no marker in `other_markers` does.

    `starts` are the texts at the start of the tool calls. Example: `<call>` is usable if the tool
    calls start with `<call>f:` and `<call>g:`, and the only other marker is `<think>`.
    """
    if not trigger:
        return False
    is_ambiguous = any(marker.startswith(trigger) for marker in other_markers)
    return not is_ambiguous and all(start.startswith(trigger) for start in starts)


def _markers_outside_calls(fmt: FormatData, layout: Sections) -> list[str]:
    """Return the markers around content and reasoning, and the markers that end a message.

    Examples: `<answer>` and `</answer>`, `<think>` and `</think>`, and `<|im_end|>`.
    """
    markers = list(fmt.ends)
    if layout.content is not None:
        markers += [layout.content.open, layout.content.close]
    if layout.reasoning is not None:
        markers += [*layout.reasoning.opens, *layout.reasoning.closes]
    return [marker.strip() for marker in markers]
