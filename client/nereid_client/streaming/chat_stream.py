"""Convert the postprocessor's deltas to chat completion chunks, or to a whole chat completion.

Example: the delta {"index": 0, "content": "Hello"} becomes a chunk whose field `choices` is
[{"index": 0, "delta": {"content": "Hello"}, "logprobs": null, "finish_reason": null}].
"""

from collections.abc import AsyncGenerator, Container, Sequence

from nereid_client.streaming.chat_calls import ToolCallConverter, whole_call
from nereid_client.streaming.chunk_events import ChunkBuilder, chunk_events
from nereid_client.streaming.completion_frame import CompletionFrame, Json, total_usage
from nereid_client.streaming.deltas import Delta
from nereid_client.streaming.openai_logprobs import chat_logprobs, prompt_logprobs
from nereid_client.streaming.reasoning_view import ReasoningView

_TOKEN_FIELDS = ("logprobs", "token_ids", "prompt_token_ids")
"""The fields of a delta that describe tokens. A delta with such a field may have no text."""


def chat_events(
    frame: CompletionFrame,
    view: ReasoningView,
    first: Delta | None,
    rest: AsyncGenerator[Delta],
    custom_tools: Container[str] = (),
) -> AsyncGenerator[bytes]:
    """Yield a chat completion as server-sent events, as described by `chunk_events`.

    Args:
        frame: the fields that all chunks have in common.
        view: decides when reasoning is sent.
        first: the first delta, or None if there is none.
        rest: the deltas after the first one.
        custom_tools: the names of the custom tools.
    """
    return chunk_events(_ChatChunks(frame, view, custom_tools), first, rest)


class _ChatChunks(ChunkBuilder[Delta]):
    """Builds the chunks of a chat completion."""

    def __init__(
        self, frame: CompletionFrame, view: ReasoningView, custom_tools: Container[str]
    ) -> None:
        super().__init__(frame, "chat.completion.chunk", num_prompts=1)
        self._reasoning_view = view
        self._call_converters = [ToolCallConverter(custom_tools) for _ in range(frame.num_choices)]

    def opening(self) -> list[Json]:
        """Return one chunk for each choice. Each chunk contains the role of the message."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk(_choice(index, delta)) for index in range(self.frame.num_choices)]

    def add(self, item: Delta) -> list[Json]:
        """Return one chunk for each new part of the message, and one for the finish reason.

        The first chunk also contains the fields that describe the tokens of the delta.

        If the client does not want partial reasoning, the view removes the reasoning from the
        deltas, and adds the whole reasoning to the first delta after it.

        If the text of a token may be a part of a marker such as `<tool_call>`, this text arrives
        with a later delta. The chunk for the token then contains the log-probability of the token
        and an empty delta.
        """
        delta = self._reasoning_view.apply(item)
        self.record_usage_and_end(prompt=0, delta=delta)  # a chat has only one prompt
        index = self.choice_number_of(prompt=0, delta=delta)
        parts = self._message_parts(index, delta)
        if not parts and any(delta.get(name) for name in _TOKEN_FIELDS):
            parts = [{}]
        chunks = []
        if parts:
            first, *others = parts
            chunks.append(self._text_chunk(index, first, delta))
            chunks += [self.chunk(_choice(index, part)) for part in others]
        if "finish_reason" in delta:
            choice = _choice(index, {})
            choice["finish_reason"] = delta["finish_reason"]
            choice["stop_reason"] = delta.get("stop_reason")  # the name of this field in vLLM
            choice["matched_stop"] = delta.get("stop_reason")  # its name in SGLang
            chunks.append(self.chunk(choice))
        return chunks

    def _text_chunk(self, index: int, part: Json, delta: Delta) -> Json:
        """Return a chunk with a new part of a message and the fields that describe the tokens.

        The fields are the log-probabilities and the ids of the new tokens. If the delta contains
        the token ids or log-probabilities of the prompt, the chunk contains them, too.
        """
        choice = _choice(index, part)
        if delta.get("logprobs"):
            choice["logprobs"] = _logprobs(self.frame, delta)
        if delta.get("token_ids"):
            choice["token_ids"] = delta["token_ids"]
        return self.chunk(choice) | _prompt_token_fields(delta)

    def _message_parts(self, index: int, delta: Delta) -> list[Json]:
        """Return the new parts of the message: reasoning, content and pieces of tool calls.

        Each part is the field `delta` of a chunk of its own, as in OpenAI's API. Some clients, such
        as AutoGen, would otherwise ignore the tool calls in a chunk that also has content.

        Example: {"reasoning": "Hm", "content": "Hi"} returns [{"reasoning": "Hm",
        "reasoning_content": "Hm"}, {"content": "Hi"}].
        """
        parts: list[Json] = []
        if reasoning := delta.get("reasoning"):
            # vLLM names this field `reasoning`. SGLang and llama.cpp name it `reasoning_content`.
            parts.append({"reasoning": reasoning, "reasoning_content": reasoning})
        if content := delta.get("content"):
            parts.append({"content": content})
        pieces = self._call_converters[index].convert(delta.get("tool_calls", ()))
        if "finish_reason" in delta:
            # The converter delays characters whose meaning depends on later text, such as a
            # quotation mark. At the end, `finish` returns the delayed characters that belong to a
            # custom tool's input.
            pieces += self._call_converters[index].finish()
        return parts + [{"tool_calls": [piece]} for piece in pieces]


def chat_completion(
    frame: CompletionFrame, totals: Sequence[Delta], custom_tools: Container[str]
) -> Json:
    """Return a whole chat completion.

    If the request asks for the token ids or log-probabilities of the prompt, the completion
    contains them, too. All choices have the same prompt, so those of the first choice are returned.

    Args:
        frame: the fields that do not depend on the choices.
        totals: for each choice, the sum of the deltas of this choice.
        custom_tools: the names of the custom tools. The calls of other tools are function calls.
    """
    choices = [
        _whole_choice(frame, index, total, custom_tools) for index, total in enumerate(totals)
    ]
    completion = frame.with_choices("chat.completion", choices)
    completion["usage"] = total_usage([[total.get("usage") for total in totals]])
    return completion | _prompt_token_fields(totals[0])


def _whole_choice(
    frame: CompletionFrame, index: int, total: Delta, custom_tools: Container[str]
) -> Json:
    """Return one choice of a whole completion.

    Two of the fields have different names in other servers, so the choice contains both names. One
    field is `reasoning` (vLLM) and `reasoning_content` (SGLang, llama.cpp). The other field is
    `stop_reason` (vLLM) and `matched_stop` (SGLang).
    """
    calls = total.get("tool_calls")
    reasoning = total.get("reasoning")
    message: Json = {
        "role": "assistant",
        # As in OpenAI's API, the content is null only if the message has tool calls.
        "content": total.get("content") or (None if calls else ""),
        "reasoning": reasoning,
        "reasoning_content": reasoning,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [whole_call(call, custom_tools) for call in calls]
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(frame, total),
        "finish_reason": total.get("finish_reason"),
        "stop_reason": total.get("stop_reason"),
        "matched_stop": total.get("stop_reason"),
    }
    if "token_ids" in total:
        choice["token_ids"] = total["token_ids"]
    return choice


def _prompt_token_fields(delta: Delta) -> Json:
    """Return the prompt's token ids and log-probabilities in vLLM's format.

    Each of these fields is present only if `delta` contains its value.
    """
    fields: Json = {}
    if "prompt_token_ids" in delta:
        fields["prompt_token_ids"] = delta["prompt_token_ids"]
    if "prompt_logprobs" in delta:
        fields["prompt_logprobs"] = prompt_logprobs(delta["prompt_logprobs"])
    return fields


def _logprobs(frame: CompletionFrame, delta: Delta) -> Json | None:
    """Return the field `logprobs` of a choice, or None if the delta has no log-probabilities."""
    if "logprobs" not in delta:
        return None
    return chat_logprobs(delta["logprobs"], tokens_as_ids=frame.tokens_as_ids)


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
