"""Renders chat requests like the `transformers` library, but limits the time and the output."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from nereid_parsers.template.sandbox.compile_template import CompiledTemplate, RenderRefused
from nereid_parsers.template.sandbox.limits import Budget, Limits, limits_for_request

# The fields in which clients send the reasoning of a message, and from which templates read it. If
# a client sends several of these fields, the field that is listed first here is used. The templates
# of Cohere read the field tool_plan.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning", "tool_plan")
# If a request asks the model to continue the last message, `_END_OF_MESSAGE` is appended to this
# message. After the rendering, `_END_OF_MESSAGE` shows where the message ends in the prompt. A
# template that removes white space at the end of a message leaves only `_END_WORD`, because
# `_END_OF_MESSAGE` ends with a space.
_END_WORD = "CONTINUE_FINAL_MESSAGE_TAG"
_END_OF_MESSAGE = f"{_END_WORD} "
_NO_TEXT = "the content of the last message contains no text to continue"


class ContinuationRefused(RenderRefused):
    """A request asks the model to continue the last message, but this is impossible.

    The text of the error contains the reason.
    """


class _MarkedMessages(NamedTuple):
    """The messages of a request, with `_END_OF_MESSAGE` at the end of the last message.

    Attributes:
        messages: The copied messages.
        final_text: The last text of the last message, without `_END_OF_MESSAGE`.
    """

    messages: list[dict[str, Any]]
    final_text: str


class _MarkedContent(NamedTuple):
    """The content of a message, with `_END_OF_MESSAGE` after its last text.

    Attributes:
        content: The copied content: a text, or a list of parts.
        final_text: The last text of the content, without `_END_OF_MESSAGE`.
    """

    content: str | list[Any]
    final_text: str


class RequestTemplate:
    """A chat template that renders the requests of a server. Several threads may call `render`.

    The result is the text that the function `apply_chat_template` of transformers returns. Unlike
    this function, the class limits the time and the output of each rendering, so that a template
    cannot block the server.

    >>> RequestTemplate("{{ messages[0].content }}!").render({"messages": [{"content": "Hi"}]})
    'Hi!'
    """

    def __init__(self, source: str) -> None:
        """Compile the template `source`.

        Raises:
            TemplateError: The source has a syntax error, is too long or takes too long to compile.
        """
        self._source = source
        self._template = CompiledTemplate(source, Budget(), datetime.now)
        # Each thread renders its own copy of the template, so that no thread waits for another.
        self._of_thread = threading.local()

    def render(self, variables: Mapping[str, Any], *, continue_final_message: bool = False) -> str:
        """Return the prompt for the model: the text of all messages of one request.

        Args:
            variables: The variables that the template reads, such as `messages`, `tools` and
                `add_generation_prompt`.
            continue_final_message: Whether the prompt ends with the content of the last message, so
                that the model continues this message. Example: if the user writes "Hi" and the
                assistant writes "Well,", the prompt may be "<user>Hi</user><assistant>Well,".

        Raises:
            ContinuationRefused: The last message has no content, or the template does not write
                the content of the last message.
            RenderRefused: The template failed, or rejected the messages. The text of the error is
                the template's error message.
            LimitError: The rendering exceeds the limits on its time, steps and sizes, see
                `limits_for_request`.
        """
        # The limits depend on the size of the request as the client has sent it. The prepared
        # messages are larger, because they contain the reasoning several times.
        limits = limits_for_request(variables)
        messages = [_prepare_message(message) for message in variables.get("messages", ())]
        if not continue_final_message:
            return self._render_within({**variables, "messages": messages}, limits)
        # The rendered text contains a placeholder at the end of the last message. The text is cut
        # at this placeholder.
        marked = self._mark_final_message(messages)
        rendered = self._render_within({**variables, "messages": marked.messages}, limits)
        return _cut_at_message_end(rendered, marked.final_text)

    def _render_within(self, variables: Mapping[str, Any], limits: Limits) -> str:
        """Render the template within the given limits, and return the text.

        Each thread renders a copy of the template, because the budget of a rendering belongs to one
        thread. The first call in a thread creates this copy and stores it in `_of_thread`.
        """
        if not hasattr(self._of_thread, "template"):
            self._of_thread.template = self._template.for_another_thread()
        template: CompiledTemplate = self._of_thread.template
        template.set_budget(Budget(limits))
        return template.render(variables)

    def _mark_final_message(self, messages: Sequence[dict[str, Any]]) -> _MarkedMessages:
        """Copy the messages, and append `_END_OF_MESSAGE` to the content of the last message.

        In the rendered prompt, `_END_OF_MESSAGE` shows where the content of the last message ends.
        Example: the content "Well," becomes "Well,CONTINUE_FINAL_MESSAGE_TAG ".

        Raises:
            ContinuationRefused: The last message contains no text, or the template cannot write the
                content of messages.
        """
        content = messages[-1].get("content") if messages else None
        if content is None:
            raise ContinuationRefused("the last message has no content to continue")
        # A template without the word "content" cannot read the field `content`.
        if "content" not in self._source:
            raise ContinuationRefused("the chat template does not write the content of messages")
        marked = _mark_content(content)
        marked_message = {**messages[-1], "content": marked.content}
        return _MarkedMessages([*messages[:-1], marked_message], marked.final_text)


def _mark_content(content: object) -> _MarkedContent:
    """Copy the content of a message, and append `_END_OF_MESSAGE` to its last text.

    The content is a text, or a list of parts, some of which contain text.

    >>> _mark_content("Well,")
    _MarkedContent(content='Well,CONTINUE_FINAL_MESSAGE_TAG ', final_text='Well,')

    Raises:
        ContinuationRefused: The content contains no text.
    """
    if isinstance(content, str):
        return _MarkedContent(content + _END_OF_MESSAGE, final_text=content)
    if isinstance(content, list):
        return _mark_last_text(content)
    raise ContinuationRefused(_NO_TEXT)


def _mark_last_text(parts: Sequence[Any]) -> _MarkedContent:
    """Copy the parts of a message, and append `_END_OF_MESSAGE` to the last part with text.

    >>> _mark_last_text([{"type": "text", "text": "Hi"}, {"type": "image"}]).content
    [{'type': 'text', 'text': 'HiCONTINUE_FINAL_MESSAGE_TAG '}, {'type': 'image'}]

    Raises:
        ContinuationRefused: No part contains text.
    """
    for index, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text: str = part["text"]
            marked_parts = list(parts)
            marked_parts[index] = {**part, "text": text + _END_OF_MESSAGE}
            return _MarkedContent(marked_parts, final_text=text)
    raise ContinuationRefused(_NO_TEXT)


def _prepare_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message in the form that templates expect.

    Members with the value None are omitted. Clients send reasoning in one of several fields, and
    each template reads only one of them, so the copy contains the reasoning in each of these
    fields:

    >>> _prepare_message({"content": None, "reasoning": "Hm"})
    {'reasoning': 'Hm', 'reasoning_content': 'Hm', 'thinking': 'Hm', 'tool_plan': 'Hm'}
    """
    prepared = {name: value for name, value in message.items() if value is not None}
    # Some templates render tool calls only if the content is None.
    if prepared.get("tool_calls") and "content" in message:
        prepared["content"] = message["content"]
    first_sent_field = next((name for name in _REASONING_FIELDS if name in prepared), None)
    if first_sent_field is not None:
        reasoning = prepared[first_sent_field]
        for name in _REASONING_FIELDS:  # A field that the client has sent keeps its value.
            prepared.setdefault(name, reasoning)
    return prepared


def _cut_at_message_end(rendered: str, final_text: str) -> str:
    """Cut a rendered prompt at the end of the last message, which the model will continue.

    Before the rendering, `_END_WORD`, an invented word, and a space were appended to the last
    message. The prompt is cut before `_END_WORD`:

    >>> _cut_at_message_end(f"<assistant>Well, {_END_WORD} </assistant>", "Well, ")
    '<assistant>Well, '

    If no space follows `_END_WORD` in `rendered`, the template removes white space at the end of
    each message. White space at the end of the result is then removed, too:

    >>> _cut_at_message_end(f"<assistant>Well, {_END_WORD}</assistant>", "Well, ")
    '<assistant>Well,'

    `final_text` is the last text of the last message, without `_END_WORD`.

    Raises:
        ContinuationRefused: The template has not written `_END_WORD`, or `rendered` contains
            `final_text` nowhere.
    """
    up_to_message_end, end_word, after_end_word = rendered.rpartition(_END_WORD)
    # Like transformers, this check accepts a `final_text` that is not directly before `_END_WORD`.
    contains_final_text = final_text.strip() in rendered
    if not end_word or not contains_final_text:
        raise ContinuationRefused(
            "the chat template does not write the whole content of the last message"
        )
    keeps_white_space = after_end_word.startswith(" ")
    return up_to_message_end if keeps_white_space else up_to_message_end.rstrip()
