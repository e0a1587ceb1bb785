"""Compare two rendered tool calls that differ in one detail, such as the name."""

from __future__ import annotations

from nereid_parsers.template.conversation import (
    FIRST_KEY,
    NUMBER_VALUE,
    ONE_CALL,
    SECOND_KEY,
    SECOND_TOOL,
    SECOND_VALUE,
    SPECIAL_VALUE,
    TWO_ARGUMENTS,
    Conversation,
    ProbeCall,
    conversation_with_calls,
)
from nereid_parsers.template.markup.difference import Difference, difference
from nereid_parsers.template.probe import Prober, restore_numbers_and_ids

# Tool calls in which one detail differs from the call in `ONE_CALL`. Each entry contains the label
# of the comparison in the report, a sentence that states the difference, and the changed tool call.
_CALL_CHANGES = (
    ("T3 function name", "The call names another function.", ProbeCall(SECOND_TOOL)),
    ("T4 no argument", "The call has no argument.", ProbeCall(arguments=())),
    (
        "T5 two arguments",
        "The call has a second argument.",
        ProbeCall(arguments=TWO_ARGUMENTS),
    ),
    (
        "T6 key and value",
        "The argument has another key and another value.",
        ProbeCall(arguments=((SECOND_KEY, SECOND_VALUE),)),
    ),
    (
        "T7 type",
        "The value is a number instead of a string.",
        ProbeCall(arguments=((FIRST_KEY, NUMBER_VALUE),)),
    ),
    (
        "T7b special characters",
        "The value is a string with a line break and characters of markup.",
        ProbeCall(arguments=((FIRST_KEY, SPECIAL_VALUE),)),
    ),
)


def record_changed_calls(prober: Prober) -> None:
    """For the report, compare the rendering of each changed call with the rendering of `ONE_CALL`.

    `_CALL_CHANGES` contains the changed calls. The comparisons explain to the user how the template
    writes tool calls. Example: if the changed call has a second argument, the recorded finding is
    `', "b": 2' is added.`

    Mutates: `prober.comparisons`. One comparison is appended for each changed call.
    """
    unchanged = conversation_with_calls(*ONE_CALL)
    unchanged_text = _text_for_report(prober, unchanged)
    for label, description, call in _CALL_CHANGES:
        changed = conversation_with_calls(call)
        changed_text = _text_for_report(prober, changed)
        if changed_text:
            finding = _describe_change(difference(unchanged_text, changed_text))
        else:
            finding = "The template refuses to render this call."
        prober.record(label, description, left=unchanged, right=changed, finding=finding)


def _text_for_report(prober: Prober, conversation: Conversation) -> str:
    """Render a conversation. Replace each placeholder with the number or the id of a tool call.

    Return "" if the template refuses to render the conversation.
    """
    return restore_numbers_and_ids(prober.render(conversation) or "")


def _describe_change(parts: Difference) -> str:
    """Return a sentence for the report about the difference between two rendered texts.

    `parts.left` is the text that only the first rendering contains. `parts.right` is the text that
    only the second rendering contains.

    >>> _describe_change(Difference(prefix="<a>", left="", right="<b>", suffix="</a>"))
    "'<b>' is added."
    """
    if not parts.left and not parts.right:
        return "The renderings are equal."
    if not parts.left:
        return f"{parts.right!r} is added."
    if not parts.right:
        return f"{parts.left!r} is removed."
    return f"{parts.left!r} becomes {parts.right!r}."
