"""Converts tool calls into events. A policy decides about unknown tools and invalid arguments."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nereid_parsers.events import ArgumentsDelta, Event, ToolCallEnd, ToolCallStart
from nereid_parsers.policy import BrokenArguments, Policy, UnknownTool
from nereid_parsers.stream.values.argument_types import Tools
from nereid_parsers.stream.values.repair_json import is_json_object, repair_json_object
from nereid_parsers.stream.values.wrapped_arguments import WrapperFilter, may_be_wrapped, unwrap

log = logging.getLogger(__name__)

_EMPTY_ARGUMENTS = "{}"
# Descriptions of repaired or invalid arguments, for the event at the end of a tool call.
_WRAPPED_ARGUMENTS = "an object that encloses the arguments was removed"
_REPAIRED_ARGUMENTS = "the arguments were not valid JSON and have been repaired"
BROKEN_ARGUMENTS = "the arguments are not valid JSON"
# The maximum number of times that `cut_arguments_at` may remove text in one message. The parser
# reads removed text again, so without this limit the parsing time could grow with the square of the
# text's length.
_MAX_CUTS = 16


def generate_call_id() -> str:
    """Return a new id for a tool call to which the model gave no id."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class _StartedCall:
    """The most recently started tool call, which may already have ended.

    Attributes:
        name: The name of the function.
        model_id: The id that the model wrote, or "".
        is_discarded: Whether the policy discards calls of this function. Then no event is appended.
        wrapper_filter: Removes the outer object of arguments such as `{"arguments": {"a": 1}}`.
        stored_arguments: The pieces of the arguments, if the writer stores arguments.
        has_arguments_event: Whether an event with arguments has been appended.
    """

    name: str
    model_id: str
    is_discarded: bool
    wrapper_filter: WrapperFilter
    stored_arguments: list[str] = field(default_factory=list)
    has_arguments_event: bool = False


class CallWriter:
    """Appends the events of tool calls to a list, one tool call at a time.

    A body reader parses the text of a tool call. For each tool call, the reader calls `start` once,
    then `write` for each piece of the arguments, and then `end` once. If the policy may repair the
    arguments, or discard a tool call because of its arguments, the writer stores the arguments.
    All events of the tool call are then appended in `end`.

    Example: `start("f", "")`, `write('{"a"')`, `write(": 1}")` and `end()` append
    `ToolCallStart(0, id=.., name="f")`, `ArgumentsDelta(0, '{"a"')`, `ArgumentsDelta(0, ": 1}")`
    and `ToolCallEnd(0)`. If the arguments are stored, the same calls append only one
    `ArgumentsDelta`, with the text `{"a": 1}`.

    Attributes:
        tools: The tools that the request offers.
        stores_arguments: Whether the writer stores the arguments until the tool call ends.
        is_open: Whether a tool call has started and not ended.
        last_index: The index of the last tool call for which events were appended. -1 if there is
            none.
        num_started: The number of tool calls that have started, including discarded tool calls.
    """

    __slots__ = (
        "_call", "_deviations", "_events", "_new_id", "_num_cuts_left", "_policy", "is_open",
        "last_index", "num_started", "stores_arguments", "tools",
    )  # fmt: skip

    # The most recently started tool call. `start` sets this attribute, and must be called before
    # all methods that use it.
    _call: _StartedCall

    def __init__(
        self, events: list[Event], tools: Tools, policy: Policy, new_id: Callable[[], str]
    ) -> None:
        """Create a writer that appends the events of one message to `events`.

        `new_id` generates an id for a tool call to which the model gave no id.
        """
        self.tools = tools
        # To repair or discard invalid arguments, the writer must store all arguments until they are
        # complete. With the policy RAW, the arguments are returned at once.
        self.stores_arguments = policy.broken_arguments in (
            BrokenArguments.REPAIR_OR_RAW,
            BrokenArguments.REPAIR_OR_DROP,
        )
        self._policy = policy
        self._events = events
        self._new_id = new_id
        self.is_open = False
        self.last_index = -1  # The first tool call with an event gets the index 0.
        self.num_started = 0
        # The number of times that `cut_arguments_at` may still remove text from the stored
        # arguments. This number is limited, because the parser reads the removed text again.
        self._num_cuts_left = _MAX_CUTS
        self._deviations: list[str] = []  # See `add_deviation`.

    def add_deviation(self, deviation: str) -> None:
        """Store a description of how a tool call deviates from the model's usual syntax.

        The description becomes a part of the end event of the open tool call. If no tool call is
        open, the description becomes a part of the end event of the next tool call. Example:
        `add_deviation("the reasoning before the tool call is not closed")`.
        """
        if deviation not in self._deviations:
            self._deviations.append(deviation)

    def clear_deviations(self) -> None:
        """Delete the stored descriptions of deviations, because their tool call has ended."""
        self._deviations = []

    def start(self, name: str, call_id: str, *, is_confirmed: bool = True) -> bool:
        """Start a call of the tool `name`. Return False if the text is content instead.

        `_treatment_of` decides how the call is treated:

            treatment   result   effect
            FORWARD     True     The call starts, and its events are appended.
            DROP        True     The call starts, so that its text is read. No event is appended.
            CONTENT     False    No call starts.

        `call_id` is the id that the model wrote, or "". `is_confirmed` is true if a marker or an
        earlier tool call shows that the text is a tool call.
        """
        treatment = self._treatment_of(name, is_confirmed=is_confirmed)
        if treatment is UnknownTool.CONTENT:
            return False
        is_discarded = treatment is UnknownTool.DROP
        self._open_call(name, call_id, is_discarded=is_discarded)
        if is_discarded:
            log.warning(
                "discarded a call of the function %r, which the request does not offer", name
            )
        elif not self.stores_arguments:  # Otherwise `end` appends all events of the tool call.
            self._append_start()
        return True

    def _treatment_of(self, name: str, *, is_confirmed: bool) -> UnknownTool:
        """Decide whether a call of the tool `name` is returned, is discarded or becomes content.

        `is_confirmed` is true if a marker or an earlier tool call shows that the text is a tool
        call. The first case that applies decides:

            case                       result
            `name` is ""               CONTENT
            the tool is offered        FORWARD, which means that the call is returned
            `is_confirmed` is false    CONTENT
            any other                  the policy for tools that are not offered
        """
        if not name:
            return UnknownTool.CONTENT
        if self._is_offered(name):
            return UnknownTool.FORWARD
        return self._policy.unknown_tool if is_confirmed else UnknownTool.CONTENT

    def _is_offered(self, name: str) -> bool:
        """Return whether the request offers a tool with this name.

        If the tools of the request are not known, every tool counts as offered.
        """
        return not self.tools.is_known or name in self.tools

    def _open_call(self, name: str, model_id: str, *, is_discarded: bool) -> None:
        """Store a new tool call as the open tool call, and count it. No event is appended.

        `model_id` is the id that the model wrote, or "". If `is_discarded` is true, later methods
        append no events for this tool call either.
        """
        self.is_open = True
        self.num_started += 1
        # The filter removes an outer object: `{"arguments": {"a": 1}}` becomes `{"a": 1}`.
        wrapper_filter = WrapperFilter(is_passing=not may_be_wrapped(name, self.tools))
        self._call = _StartedCall(name, model_id, is_discarded, wrapper_filter)

    def _append_start(self) -> None:
        """Increase `last_index` by 1, and append the start event of the tool call with this index.

        If the model gave no id to the tool call, a new id is generated.
        """
        self.last_index += 1
        call_id = self._call.model_id or self._new_id()
        self._events.append(ToolCallStart(self.last_index, id=call_id, name=self._call.name))

    def write(self, text: str) -> None:
        """Add a piece of JSON text, such as `{"a": `, to the arguments of the open tool call.

        If `stores_arguments` is true, the piece is stored, and `end` appends one event for all
        arguments. Otherwise, an event for the piece is appended. The event is delayed if the piece
        may be a part of a superfluous outer object, such as `{"arguments": {"a": 1}}`.
        """
        call = self._call
        if self.stores_arguments:
            call.stored_arguments.append(text)
        elif call.is_discarded:
            return
        elif call.wrapper_filter.is_passing:  # There is no superfluous outer object.
            self._append_arguments(text)
        else:
            ready_text = call.wrapper_filter.add(text)  # "" if the filter stores the piece.
            self._append_arguments(ready_text)

    def _append_arguments(self, text: str) -> None:
        """Append an event for a piece of the arguments. Do nothing if `text` is empty."""
        if text:
            self._call.has_arguments_event = True
            self._events.append(ArgumentsDelta(self.last_index, text))

    def end(self, fault: str | None = None) -> None:
        """End the open tool call, and append its remaining events.

        `fault` is a description of the error in the text of the tool call, or None. The last event
        contains this description.
        """
        self.is_open = False
        if self._call.is_discarded:
            self.clear_deviations()  # No event of this tool call reports them.
            return
        if fault:
            self.add_deviation(fault)
        if self.stores_arguments:  # No event has been appended yet.
            self._append_stored_call()
        else:  # `start` and `write` have appended the other events.
            self._append_last_events()

    def _append_last_events(self) -> None:
        """Append the last events of a tool call. The earlier events have already been appended.

        The `wrapper_filter` may have stored the arguments, because an object such as
        `{"arguments": {"a": 1}}` seems to enclose the arguments. Now all arguments have arrived, so
        the filter removes the outer object, and `{"a": 1}` is appended. If the model has written no
        arguments, `{}` is appended.
        """
        wrapper_filter = self._call.wrapper_filter
        stored_text = wrapper_filter.finish()  # Without the outer object. "" if nothing is stored.
        if wrapper_filter.is_unwrapped:  # `finish` has removed an outer object.
            self.add_deviation(_WRAPPED_ARGUMENTS)
        if stored_text:
            self._append_arguments(stored_text)
        if not self._call.has_arguments_event:
            self._append_arguments(_EMPTY_ARGUMENTS)
        self._append_end()

    def _append_end(self) -> None:
        """Append the end event with the stored deviations, and delete the deviations."""
        description = "; ".join(self._deviations) if self._deviations else None
        self._events.append(ToolCallEnd(self.last_index, description))
        self.clear_deviations()

    def _append_stored_call(self) -> None:
        """Append all events of a tool call whose stored arguments are complete.

        Examples of stored arguments:

            `{"a": 1}`                 The arguments are not changed.
            `{"a": [1`                 The arguments are repaired: `{"a": [1]}`.
            `{"arguments": {"a": 1}}`  A superfluous outer object is removed: `{"a": 1}`.
            `[1]`                      The arguments are broken. The policy decides about the call.
        """
        model_text = "".join(self._call.stored_arguments).strip() or _EMPTY_ARGUMENTS
        json_object = self._repair_arguments(model_text)
        if json_object is None:
            self._append_or_discard_broken_call(model_text)
        else:
            self._append_whole_call(self._unwrap_arguments(json_object))

    def _append_whole_call(self, arguments: str) -> None:
        """Append all events of a tool call: its start, its arguments and its end."""
        self._append_start()
        self._append_arguments(arguments)
        self._append_end()

    def _append_or_discard_broken_call(self, arguments: str) -> None:
        """Append or discard a tool call with invalid arguments that cannot be repaired: `[1]`.

        The policy REPAIR_OR_DROP discards the tool call, so no event is appended. With any other
        policy, the events contain the `arguments` as the model wrote them.
        """
        if self._policy.broken_arguments is BrokenArguments.REPAIR_OR_DROP:
            log.warning(
                "discarded a call of %r with broken arguments: %.200r", self._call.name, arguments
            )
            self.clear_deviations()  # No event of this tool call reports them.
        else:
            self._append_whole_call(arguments)

    def _repair_arguments(self, text: str) -> str | None:
        """Return the arguments in `text` as a JSON object. Return None if that is impossible.

        Examples: `{"a": 1}` is returned unchanged. `{"a": [1` is repaired, so the result is
        `{"a": [1]}`. No repair gives an object for `[1]`, so the result is None. If `text` is not a
        JSON object, a description of this deviation is stored for the end event.
        """
        if is_json_object(text):
            return text
        repaired_object = repair_json_object(text)
        self.add_deviation(BROKEN_ARGUMENTS if repaired_object is None else _REPAIRED_ARGUMENTS)
        return repaired_object

    def _unwrap_arguments(self, json_object: str) -> str:
        """Remove a superfluous outer object: `{"arguments": {"a": 1}}` becomes `{"a": 1}`.

        If an object is removed, a description of this deviation is stored for the end event.
        Otherwise the result is `json_object`. The outer object is not superfluous if the function
        has an argument that is called "arguments".
        """
        if not may_be_wrapped(self._call.name, self.tools):
            return json_object
        inner_object = unwrap(json_object)
        if inner_object is None:  # There is no outer object.
            return json_object
        self.add_deviation(_WRAPPED_ARGUMENTS)
        return inner_object

    def cut_arguments_at(self, marker: str) -> str | None:
        """Remove the first `marker`, and all text after this marker, from the stored arguments.

        Return the removed text, so that the parser can read this text again. Example: after
        `write('{"a": "1}</call> Hi')`, `cut_arguments_at("</call>")` returns `"</call> Hi"`, and
        the stored arguments are `{"a": "1}`.

        Return None if no stored arguments contain `marker`, or after `_MAX_CUTS` removals.
        """
        has_stored_arguments = self.is_open and self.stores_arguments
        if not has_stored_arguments or self._num_cuts_left == 0:
            return None
        before, found_marker, after = "".join(self._call.stored_arguments).partition(marker)
        if not found_marker:
            return None
        self._num_cuts_left -= 1
        self._call.stored_arguments = [before]
        return found_marker + after

    def copy_events_of_open_call(self, events: list[Event]) -> list[Event]:
        """Copy the events of the open tool call, and set the index of each copy to 0.

        `events` are the events of the prompt, which ends inside this tool call. The client does not
        receive the earlier tool calls of the prompt, so the open tool call gets the first index, 0.
        Example: if the prompt ends with `f(a=1), g(b=`, the result contains the events of `g`. The
        result is empty if no event of an open tool call has been appended yet.
        """
        if not self._has_events_of_open_call():
            return []
        return [
            replace(event, index=0)
            for event in events
            if isinstance(event, ToolCallStart | ArgumentsDelta) and event.index == self.last_index
        ]

    def restart_numbering(self) -> None:
        """Restart the numbering, so that the first tool call of the output has the index 0.

        The client does not receive the tool calls that have ended in the prompt:

            open tool call at the end of the prompt   `num_started`   `last_index`
            none                                      0               -1
            without events                            1               -1
            with events                               1               0
        """
        self.num_started = 1 if self.is_open else 0
        self.last_index = 0 if self._has_events_of_open_call() else -1

    def forbid_cuts_in_prompt(self) -> None:
        """Prevent `cut_arguments_at` from removing text of a tool call that the prompt has opened.

        The parser reads removed text again, and may return the text as content. But the stored
        arguments of this tool call contain text of the prompt, which must not be returned.
        """
        if self.is_open:
            self._num_cuts_left = 0

    def _has_events_of_open_call(self) -> bool:
        """Return whether a tool call is open and its start event has been appended.

        An open tool call has no events in two cases: the policy discards the tool call, or the
        writer stores the arguments, so that `end` appends all events.
        """
        return self.is_open and not self.stores_arguments and not self._call.is_discarded
