# SPDX-License-Identifier: Apache-2.0
"""The limits on the size of a request. They are checked before rendering and tokenising.

Most limits follow from max_model_len. A text of n bytes has at least n / b tokens, where b is the
number of bytes of the longest token. A prompt that is certainly too long is therefore refused
without being tokenised. The error message contains "N tokens ... L (max_model_len)". If N is larger
than L, the HTTP frontend sets OpenAI's error code `context_length_exceeded`.

The tokenizer also publishes the limits, because the HTTP frontend checks the size of a body and the
number of messages before the frontend sends a request to Triton server.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from nereid_backend.config import EngineConfig
from nereid_backend.errors import RequestError

# The limit of a model whose config.json contains no limit.
_DEFAULT_MODEL_LEN = 2**17
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
# A chat template can drop text of the messages, such as the reasoning of earlier answers. Therefore
# the messages of a chat can together be longer than the rendered prompt. max_prompt_bytes is the
# largest size of a prompt, and the messages may have up to `_DROPPED_TEXT_FACTOR` times this size.
_DROPPED_TEXT_FACTOR = 4
# JSON can write each byte of a text as an escape sequence of six bytes, such as \u0061. The JSON
# text of a prompt is therefore at most `_ESCAPE_FACTOR` times as long as the prompt.
_ESCAPE_FACTOR = 6
# The largest number of bytes that a request may have in addition to its prompt, for example for a
# grammar.
_NON_PROMPT_BYTES = 4 * 2**20
# The largest size of a prompt is max_model_len times the size of the longest token, but at least
# max_model_len times `_MIN_TOKEN_BYTES` bytes. The minimum is needed because some tokenizers
# shorten a text before they split the text into tokens. One token can then represent more bytes of
# the text than the token itself has.
_MIN_TOKEN_BYTES = 16
_MIN_MAX_MESSAGES = 16
# Some fields contain lists of token ids, with up to max_model_len ids in each list. The limit on
# the number of values in a request allows `_NUM_TOKEN_ID_LISTS` full lists.
_NUM_TOKEN_ID_LISTS = 4
_MIN_MAX_VALUES = 100_000
# The largest depth of nested lists and objects. msgpack can pack 511 levels, and Python's recursion
# limit is higher.
_MAX_DEPTH = 256
_MAX_TOOLS = 2048
_PROMPT_FIELDS = ("messages", "tools", "documents", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on the size of one request.

    Attributes:
        max_model_len: the largest number of tokens in the prompt and the output together. The
            engine may have a lower limit, because it also considers the memory.
        max_prompt_bytes: the largest number of bytes of a prompt's text in UTF-8.
        max_request_bytes: the largest number of bytes of a request's JSON text.
        max_messages: the largest number of messages in a chat.
        max_values: the largest number of strings, numbers, lists and objects in a request.
        max_depth: the largest number of levels of nested lists and objects in a request.
        max_tools: the largest number of tools.
    """

    max_model_len: int
    max_prompt_bytes: int
    max_request_bytes: int
    max_messages: int
    max_values: int
    max_depth: int = _MAX_DEPTH
    max_tools: int = _MAX_TOOLS

    @classmethod
    def derive(cls, max_model_len: int, max_token_bytes: int, min_message_tokens: int = 1) -> Self:
        """Compute the limits on the sizes of requests from the model's length limit.

        The limits are so high that no useful request exceeds them. A request that exceeds a limit
        is refused before it is parsed and tokenised, because both would take much time or memory.

        Args:
            max_model_len: the length limit of a request in tokens.
            max_token_bytes: the number of bytes of the longest token.
            min_message_tokens: the number of tokens that the chat template adds for a message
                without text.
        """
        # Some tokenizers shorten a text before they split the text into tokens. A token can then
        # represent more than `max_token_bytes` bytes of the original text.
        max_prompt_bytes = max_model_len * max(max_token_bytes, _MIN_TOKEN_BYTES)
        # A chat can be longer than its prompt, because a chat template can drop text, such as the
        # reasoning of earlier answers.
        max_chat_bytes = _DROPPED_TEXT_FACTOR * max_prompt_bytes
        # JSON can write each byte of the chat as an escape sequence. A request can also have fields
        # that are not part of the prompt, such as a grammar.
        max_request_bytes = _ESCAPE_FACTOR * max_chat_bytes + _NON_PROMPT_BYTES
        # A chat with more messages would have more than max_model_len tokens.
        max_messages = max_model_len // max(min_message_tokens, 1)
        # Some fields contain lists of up to max_model_len token ids. Each id is one value.
        max_values = _NUM_TOKEN_ID_LISTS * max_model_len
        return cls(
            max_model_len=max_model_len,
            max_prompt_bytes=max_prompt_bytes,
            max_request_bytes=max_request_bytes,
            max_messages=max(max_messages, _MIN_MAX_MESSAGES),
            max_values=max(max_values, _MIN_MAX_VALUES),
        )

    def check_json(self, field: str, text: str) -> None:
        """Refuse a JSON text that is too long, or that contains too many lists and objects.

        Args:
            field: the tensor or field that contains the text, for the error message.
            text: the JSON text.

        Raises:
            RequestError: the text has more than max_request_bytes characters, or more than
                max_values opening brackets.
        """
        # Each character has at least one byte. The exact number of bytes is not needed, and would
        # require that the text is encoded.
        min_bytes = len(text)
        if min_bytes > self.max_request_bytes:
            # Each byte of the prompt takes at most `_ESCAPE_FACTOR` bytes of the JSON text.
            min_prompt_bytes = min_bytes // _ESCAPE_FACTOR
            raise self._length_error(
                f"{field}: the request has {min_bytes} bytes", min_prompt_bytes
            )
        # Parsed objects take much more memory than their JSON text. Therefore the brackets are
        # counted before the text is parsed.
        num_brackets = text.count("[") + text.count("{")
        _check_count(field, "lists and objects", num_brackets, self.max_values, "max_values")

    def depth_error(self, field: str) -> RequestError:
        """Return the error for a field with lists or objects that are nested too deeply."""
        return RequestError(
            f"{field}: the field has more than {self.max_depth} nested levels, which is the limit "
            "(max_depth)."
        )

    def check_chat(self, body: Mapping[str, Any]) -> None:
        """Refuse a chat that exceeds a limit, before the chat is rendered and tokenised.

        The limits apply to the number of messages, the number of tools, the number and the nesting
        of all values in the JSON body, and the total length of the texts.

        Raises:
            RequestError: the chat exceeds a limit.
        """
        messages = body.get("messages")
        tools = body.get("tools")
        if isinstance(messages, list):
            self._check_num_messages(len(messages))
        if isinstance(tools, list) and len(tools) > self.max_tools:
            raise RequestError(
                f"tools: the request has {len(tools)} tools, but the limit is {self.max_tools} "
                "(max_tools). Send fewer tools."
            )
        self.check_values_and_depth(body)
        self._check_chat_text(body)

    def _check_num_messages(self, count: int) -> None:
        """Raise a RequestError if a chat has more than max_messages messages."""
        if count <= self.max_messages:
            return
        # `derive` has divided max_model_len by the smallest number of tokens that a message can
        # have. The result is `max_messages`.
        min_message_tokens = self.max_model_len // self.max_messages
        raise self._too_many_tokens_error(
            f"messages: the request has {count} messages",
            min_tokens=count * min_message_tokens,
            remedy=f"Send at most {self.max_messages} messages (max_messages).",
        )

    def _check_chat_text(self, body: Mapping[str, Any]) -> None:
        """Raise a RequestError if the total size of a chat's texts exceeds the limit."""
        prompt = {name: body[name] for name in _PROMPT_FIELDS if name in body}
        num_bytes = measure(prompt, self).num_bytes
        if num_bytes > _DROPPED_TEXT_FACTOR * self.max_prompt_bytes:
            raise self._length_error(
                f"messages: the messages and tools have {num_bytes} bytes of text", num_bytes
            )

    def check_values_and_depth(self, fields: Mapping[str, Any]) -> None:
        """Refuse a request with too many values or with too much nesting.

        Raises:
            RequestError: a field exceeds max_values or max_depth. The message names the field.
        """
        for name, value in fields.items():
            if isinstance(value, list | dict):
                size = measure(value, self)
                _check_count(name, "values", size.num_values, self.max_values, "max_values")
                if size.depth > self.max_depth:
                    raise self.depth_error(name)

    def check_text(self, text: str) -> None:
        """Refuse a prompt whose text has too many bytes, before the text is tokenised.

        Raises:
            RequestError: the text has more than max_prompt_bytes bytes.
        """
        num_bytes = num_utf8_bytes(text)
        if num_bytes > self.max_prompt_bytes:
            raise self._length_error(f"text_input: the prompt has {num_bytes} bytes", num_bytes)

    def check_token_ids(self, num_tokens: int) -> None:
        """Refuse a prompt that has too many token ids.

        Raises:
            RequestError: the prompt has more than max_model_len token ids.
        """
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"prompt has {num_tokens} tokens; the limit is {self.max_model_len} "
                "(max_model_len). Send a shorter prompt."
            )

    def _length_error(self, beginning: str, min_bytes: int) -> RequestError:
        """Return the error for a prompt of at least `min_bytes` bytes, which is too long.

        Example: a prompt of at least 6400 bytes has at least 400 tokens if the longest token has 16
        bytes. `beginning` is the beginning of the error message, which gives the size of the
        prompt.
        """
        # `derive` has multiplied max_model_len by the largest number of bytes of a token.
        max_token_bytes = self.max_prompt_bytes // self.max_model_len
        return self._too_many_tokens_error(
            beginning, min_tokens=min_bytes // max_token_bytes, remedy="Send a shorter prompt."
        )

    def _too_many_tokens_error(self, beginning: str, min_tokens: int, remedy: str) -> RequestError:
        """Return the error for a prompt that has more than max_model_len tokens.

        Example: "messages: the request has 99 messages, which need at least 99 tokens; the limit is
        64 (max_model_len). Send fewer messages." The HTTP frontend gets only this text. It compares
        the number before "tokens" with the number before "(max_model_len)".

        Args:
            beginning: the beginning of the message, which gives the size of the prompt.
            min_tokens: a lower bound of the number of tokens.
            remedy: the end of the message.
        """
        # The caller knows that the prompt exceeds the limit, so it has at least this many tokens.
        # `min_tokens` can be a weaker lower bound.
        num_over_limit = self.max_model_len + 1
        num_tokens = max(min_tokens, num_over_limit)
        return RequestError(
            f"{beginning}, which need at least {num_tokens} tokens; the limit is "
            f"{self.max_model_len} (max_model_len). {remedy}"
        )


class Size(NamedTuple):
    """The size of a JSON value.

    Attributes:
        num_bytes: the total number of bytes of all strings and keys in UTF-8.
        num_values: the number of strings, numbers, lists and objects.
        depth: the level of the most deeply nested value. The whole value has the level 0.
    """

    num_bytes: int
    num_values: int
    depth: int


def measure(value: object, limits: RequestLimits) -> Size:
    """Return the size of a JSON value. Stop counting early if the size exceeds a limit.

    Example: `{"a": ["x", 1]}` has 2 bytes of text, 4 values and the depth 2. The object has the
    level 0, the list has the level 1, and "x" and 1 have the level 2.
    """
    num_bytes = 0
    num_values = 0
    depth = -1
    # Count the values level by level instead of recursively, because deep nesting could exceed
    # Python's recursion limit.
    values_of_level: list[Any] = [value]
    while values_of_level:
        if num_values > limits.max_values or depth > limits.max_depth:
            break
        depth += 1
        num_values += len(values_of_level)
        values_of_next_level: list[Any] = []
        for node in values_of_level:
            if isinstance(node, str):
                num_bytes += num_utf8_bytes(node)
            elif isinstance(node, dict):
                num_bytes += sum(map(num_utf8_bytes, node))
                values_of_next_level += node.values()
            elif isinstance(node, list):
                values_of_next_level += node
        values_of_level = values_of_next_level
    return Size(num_bytes, num_values, depth)


def num_utf8_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def length_limit(config: EngineConfig) -> int:
    """Return an upper bound of the model's length limit, in tokens.

    The bound is the setting max_model_len. If max_model_len is not set, the bound is the largest
    limit in the checkpoint's config.json. The engine may choose a lower limit, because it also
    considers the memory.
    """
    if config.max_model_len is not None:
        return config.max_model_len
    path = Path(config.model) / "config.json"
    try:
        checkpoint = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _DEFAULT_MODEL_LEN
    return max(_lengths_in(checkpoint), default=_DEFAULT_MODEL_LEN)


def _lengths_in(config: object) -> list[int]:
    """Return all length limits in a config.json, including those of nested configs.

    YaRN (in rope_scaling or rope_parameters) extends the limit of a config by a factor.
    """
    if not isinstance(config, dict):
        return []
    own = [config[name] for name in _LENGTH_FIELDS if isinstance(config.get(name), int)]
    extended = _yarn_lengths(config, max(own, default=0))
    inner = [length for part in config.values() for length in _lengths_in(part)]
    return [length for length in (*own, *extended, *inner) if length > 0]


def _yarn_lengths(config: dict[str, Any], own_limit: int) -> list[int]:
    """Return the lengths to which YaRN extends the limit `own_limit` of a config.

    Example: `{"rope_scaling": {"type": "yarn", "factor": 4.0}}` and the limit 32768 return
    `[131072]`.
    """
    lengths = []
    for rope in _ropes(config):
        is_yarn = "yarn" in (rope.get("type"), rope.get("rope_type"))
        original = rope.get("original_max_position_embeddings", own_limit)
        factor = rope.get("factor")
        if is_yarn and isinstance(factor, int | float) and isinstance(original, int):
            lengths.append(int(factor * original))
    return lengths


def _ropes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all descriptions of rotary position embeddings in a config.

    A description either applies to all layers, or contains one inner description for each type of
    layer. The inner descriptions are yielded, too.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (part for part in rope.values() if isinstance(part, dict))


def _check_count(field: str, unit: str, count: int, limit: int, name: str) -> None:
    """Raise a RequestError if `count` exceeds `limit`. The message contains the limit's `name`."""
    if count > limit:
        raise RequestError(
            f"{field}: the field has too many {unit}; the limit is {limit} ({name})."
        )
