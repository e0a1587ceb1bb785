"""Renders chat requests as the library transformers does, but limits the time and the output."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from nereid_parsers.template.sandbox.environment import CompiledTemplate, RenderRefused
from nereid_parsers.template.sandbox.limits import Budget, Limits, limits_for_request

# The names under which clients send the reasoning of a message. The first one is preferred.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# The text `_END_OF_MESSAGE` is appended to the final message, to find the end of the message in the
# rendered text. If a template removes the white space at the end of a message, the rendered text
# contains only `_END_WORD`.
_END_WORD = "CONTINUE_FINAL_MESSAGE_TAG"
_END_OF_MESSAGE = f"{_END_WORD} "


class ContinuationRefused(RenderRefused):
    """A model cannot continue the final message. The text of this error gives the reason."""


class _MarkedMessages(NamedTuple):
    """The messages of a request, with `_END_OF_MESSAGE` at the end of the last message.

    Attributes:
        messages: The messages.
        final_text: The last text of the last message, without `_END_OF_MESSAGE`.
    """

    messages: list[dict[str, Any]]
    final_text: str


class RequestTemplate:
    """A chat template that renders the requests of a server. Several threads may use it.

    The text is the same as that of `apply_chat_template` in transformers. Each rendering has limits
    that grow with the size of the request, so that a template cannot block the server.

    >>> RequestTemplate("{{ messages[0].content }}!").render({"messages": [{"content": "Hi"}]})
    'Hi!'
    """

    def __init__(self, source: str) -> None:
        """Compile `source`.

        Raises:
            TemplateError: The source has a syntax error, is too long or takes too long to compile.
        """
        self._source = source
        self._template = CompiledTemplate(source, Budget(), datetime.now)
        # Each thread has its own template and budget, so that threads do not wait for each other.
        self._of_thread = threading.local()

    def render(self, variables: Mapping[str, Any], *, continue_final_message: bool = False) -> str:
        """Render the messages of one request as the prompt for the model, and return the prompt.

        Args:
            variables: The variables `messages`, `tools`, `documents`, `add_generation_prompt`,
                `bos_token`, `eos_token`, and the variables that the request adds, such as
                `enable_thinking`.
            continue_final_message: Whether the prompt ends with the content of the last message, so
                that the model continues this message. Example: if the user writes "Hi" and the
                assistant writes "Well,", the prompt may be "<user>Hi</user><assistant>Well,".

        Raises:
            ContinuationRefused: The last message has no content, or the template does not write
                this content.
            RenderRefused: The template failed, or raised an exception because of the messages. The
                error contains the message of this exception.
            LimitError: The rendering takes more than 5 seconds of processor time, or makes far more
                text than the request contains.
        """
        limits = limits_for_request(variables)
        messages = [_prepare_message(message) for message in variables.get("messages", ())]
        if not continue_final_message:
            return self._render_in_thread({**variables, "messages": messages}, limits)
        marked = self._mark_final_message(messages)
        text = self._render_in_thread({**variables, "messages": marked.messages}, limits)
        return _cut_after(marked.final_text, text)

    def _render_in_thread(self, variables: Mapping[str, Any], limits: Limits) -> str:
        """Render this thread's copy of the template. Create the copy if it does not exist."""
        if not hasattr(self._of_thread, "template"):
            self._of_thread.template = self._template.for_another_thread()
        text: str = self._of_thread.template.render(variables, Budget(limits))
        return text

    def _mark_final_message(self, messages: Sequence[dict[str, Any]]) -> _MarkedMessages:
        """Append `_END_OF_MESSAGE` to the content of the last message, in a copy of the messages.

        In the rendered text, `_END_OF_MESSAGE` then shows where the content of the last message
        ends. If the content is a list of parts, `_END_OF_MESSAGE` is appended to the last part with
        text.

        Raises:
            ContinuationRefused: The last message contains no text, or the template does not write
                the content of messages.
        """
        content = messages[-1].get("content") if messages else None
        if content is None:
            raise ContinuationRefused("the last message has no content to continue")
        if "content" not in self._source:  # Then the template cannot read the field `content`.
            raise ContinuationRefused("the chat template does not write the content of messages")
        if isinstance(content, str):
            return _replace_content(messages, content + _END_OF_MESSAGE, final_text=content)
        return _mark_last_part(messages, content if isinstance(content, list) else [])


def _mark_last_part(messages: Sequence[dict[str, Any]], parts: Sequence[Any]) -> _MarkedMessages:
    """Copy `messages`, and append `_END_OF_MESSAGE` to the last text of the copy.

    Args:
        messages: The messages of the request.
        parts: The parts of the last message's content, such as `{"type": "text", "text": "Hi"}`.

    Raises:
        ContinuationRefused: No part contains text.
    """
    indices_of_texts = [index for index, part in enumerate(parts) if _has_text(part)]
    if not indices_of_texts:
        raise ContinuationRefused("the content of the last message contains no text to continue")
    last_index = indices_of_texts[-1]
    last_text: str = parts[last_index]["text"]
    marked_part = {**parts[last_index], "text": last_text + _END_OF_MESSAGE}
    marked_parts = [*parts[:last_index], marked_part, *parts[last_index + 1 :]]
    return _replace_content(messages, marked_parts, final_text=last_text)


def _replace_content(
    messages: Sequence[dict[str, Any]], content: object, *, final_text: str
) -> _MarkedMessages:
    """Return a copy of the messages in which the last message has the given content."""
    return _MarkedMessages([*messages[:-1], {**messages[-1], "content": content}], final_text)


def _has_text(part: object) -> bool:
    """Return whether a part of a message's content contains text.

    >>> _has_text({"type": "text", "text": "Hi"}), _has_text({"type": "image"})
    (True, False)
    """
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _prepare_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message without null members, and with the fields that templates read.

    Some templates read the field `thinking`, and others read `reasoning_content`, so the result
    contains both fields. Example: `{"content": None, "reasoning": "Hm"}` gives
    `{"reasoning": "Hm", "thinking": "Hm", "reasoning_content": "Hm"}`. The fields that the client
    sends are not changed.
    """
    prepared = {name: value for name, value in message.items() if value is not None}
    sent_fields = [name for name in _REASONING_FIELDS if name in prepared]
    if sent_fields:
        reasoning = prepared[sent_fields[0]]
        prepared.setdefault("thinking", reasoning)
        prepared.setdefault("reasoning_content", reasoning)
    return prepared


def _cut_after(final_text: str, text: str) -> str:
    r"""Cut off the rendered `text` at the end of the final message, so that a model continues it.

    `_END_OF_MESSAGE` was appended to the final message before the rendering, and is not a part of
    the result. Some templates remove the white space at the end of a message. If so, the result
    does not end with white space either. Example: in the text
    `"<assistant>Well, CONTINUE_FINAL_MESSAGE_TAG</assistant>"`, the template has removed the space
    at the end of `_END_OF_MESSAGE`, so the result is `"<assistant>Well,"`.

    Args:
        final_text: The content of the last message, without `_END_OF_MESSAGE`.
        text: The rendered text of the whole request.

    Raises:
        ContinuationRefused: The text does not contain the whole content of the last message.
    """
    up_to_message_end, end_word, _ = text.rpartition(_END_WORD)
    if not end_word or final_text.strip() not in text:
        raise ContinuationRefused(
            "the chat template does not write the whole content of the last message"
        )
    keeps_whitespace = text.startswith(_END_OF_MESSAGE, len(up_to_message_end))
    return up_to_message_end if keeps_whitespace else up_to_message_end.rstrip()
