"""The limits on the size of a request to the language model.

The tokenizer model derives the limits from max_model_len and publishes the limits. The frontend
checks the size of a body before it parses the body or sends it to the Triton server, so that a
hostile body costs only a few milliseconds. The tokenizer model checks the same limits again,
because gRPC clients send requests directly to the Triton server.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_client.errors import ApiError, BackendError

_MAX_AGE_S = 30.0
_RETRY_S = 1.0
_FETCH_TIMEOUT_S = 2.0
# In the Responses API, the text and the tool calls of one chat message are separate input items, so
# the frontend allows more items than messages.
_MAX_ITEMS_PER_MESSAGE = 4


@dataclass(frozen=True)
class RequestLimits:
    """The limits that the frontend checks for each request.

    Attributes:
        max_model_len: the largest number of tokens in the prompt and the output together.
        max_prompt_bytes: the largest number of bytes of a text prompt.
        max_request_bytes: the largest number of bytes of a body with one prompt.
        max_messages: the largest number of messages in a chat.
        max_tools: the largest number of tools.
    """

    max_model_len: int
    max_prompt_bytes: int
    max_request_bytes: int
    max_messages: int
    max_tools: int

    def check_size(self, num_bytes: int, max_prompts: int = 1) -> None:
        """Check the number of bytes of a body before the body is read or parsed.

        Args:
            num_bytes: the size of the body, or the value of the header Content-Length.
            max_prompts: the largest number of prompts that the body may contain.

        Raises: ApiError 400 with the code context_length_exceeded.
        """
        limit = max_prompts * self.max_request_bytes
        if num_bytes > limit:
            raise self._error(
                f"the size of the request body is {num_bytes} bytes, but the limit is {limit} "
                "bytes (max_request_bytes)",
                param=None,
            )

    def check_size_with_references(self, num_bytes: int) -> None:
        """Check the total number of bytes of the stored items to which the field `input` refers.

        Raises: ApiError 400 with the code context_length_exceeded.
        """
        if num_bytes > self.max_request_bytes:
            raise self._error(
                f"input refers to stored items with at least {num_bytes} bytes, but the limit is "
                f"{self.max_request_bytes} bytes (max_request_bytes)",
                param="input",
            )

    def check_prompt_size(self, num_bytes: int) -> None:
        """Check the size of one prompt while the request body arrives.

        Args:
            num_bytes: the number of bytes of the prompt's JSON text that have arrived so far.

        Raises: ApiError 400 with the code context_length_exceeded.
        """
        if num_bytes > self.max_request_bytes:
            raise self._error(
                f"a prompt in the request body has at least {num_bytes} bytes, but the limit is "
                f"{self.max_request_bytes} bytes (max_request_bytes)",
                param=None,
            )

    def check_parsed_body(self, body: Mapping[str, Any]) -> None:
        """Check how many messages, items and tools a body contains, and how long its prompts are.

        Args:
            body: the JSON object of a request, in any of the frontend's APIs.

        Raises: ApiError 400. If a prompt is too long, the code is context_length_exceeded.
        """
        self._check_num_tools(body.get("tools"))
        # The chat template adds some tokens for each message. A chat with more than max_messages
        # messages therefore has more than max_model_len tokens.
        limits_of_lists = {
            "messages": self.max_messages,
            # In the Responses API, several input items can become one message of a chat.
            "input": _MAX_ITEMS_PER_MESSAGE * self.max_messages,
        }
        for name, limit in limits_of_lists.items():
            items = body.get(name)
            if isinstance(items, list) and len(items) > limit:
                raise self._error(
                    f"{name} has {len(items)} items, but at most {limit} items fit", param=name
                )
        is_truncated = body.get("truncate_prompt_tokens") is not None
        for prompt in _prompts_in(body.get("prompt")):
            self._check_prompt(prompt, is_truncated=is_truncated)

    def _check_num_tools(self, tools: object) -> None:
        """Check the number of tools in the field `tools`.

        The tokenizer model checks this number, too. The number is checked here first, because
        converting the body of a request with too many tools would take seconds.
        """
        if isinstance(tools, list) and len(tools) > self.max_tools:
            raise ApiError(
                400,
                f"tools: the request has {len(tools)} tools, but the limit is {self.max_tools} "
                "(max_tools). Send fewer tools.",
                param="tools",
            )

    def _check_prompt(self, prompt: object, *, is_truncated: bool) -> None:
        """Check the length of one prompt, which is a text or a list of token ids."""
        # This function counts characters instead of bytes, because counting the bytes would require
        # an encoded copy of the text. A text with too many characters also has too many bytes. The
        # tokenizer model checks the exact number of bytes.
        if isinstance(prompt, str) and len(prompt) > self.max_prompt_bytes:
            raise self._error(
                f"the prompt has at least {len(prompt)} bytes, but the limit is "
                f"{self.max_prompt_bytes} bytes (max_prompt_bytes)",
                param="prompt",
            )
        if isinstance(prompt, list) and len(prompt) > self.max_model_len and not is_truncated:
            raise self._error(f"prompt has {len(prompt)} tokens", param="prompt")

    def _error(self, problem: str, *, param: str | None) -> ApiError:
        """Return the error for a request that is too large. `param` names the request field."""
        return ApiError(
            400,
            f"Input tokens exceed the configured limit: {problem}. This model's maximum context "
            f"length is {self.max_model_len} tokens (max_model_len). Send a shorter prompt.",
            param=param,
            code="context_length_exceeded",
        )


def _prompts_in(value: object) -> list[object]:
    """Return the prompts in the field `prompt`, which contains one prompt or a list of prompts.

    Examples: "a" returns ["a"], [1, 2] returns [[1, 2]], and [[1], [2]] returns [[1], [2]].
    """
    if not isinstance(value, list):
        return [value]
    is_list_of_token_ids = bool(value) and isinstance(value[0], int)
    return [value] if is_list_of_token_ids else value


class PublishedLimits:
    """Fetches the limits that the tokenizer model publishes, and caches them for some seconds.

    Args:
        fetch: a function that returns the limits of the tokenizer model as a mapping from name to
            limit. An empty mapping means that the model publishes no limits.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[Mapping[str, int]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._limits: RequestLimits | None = None
        self._expires = float("-inf")

    async def get(self) -> RequestLimits | None:
        """Return the limits, or None if the tokenizer model has not published any limits.

        If the model does not answer, the previous limits stay valid. The request then fails later,
        when the frontend sends the request to the Triton server.
        """
        if self._clock() >= self._expires:
            # The new expiry time is set before the fetch. During the fetch, other requests use the
            # previous limits and do not fetch the limits again.
            self._expires = self._clock() + _MAX_AGE_S
            await self._refresh()
        return self._limits

    async def _refresh(self) -> None:
        """Fetch the limits. After a failure, keep the old limits until the next fetch."""
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                published = await self._fetch()
        except (BackendError, TimeoutError):
            self._expires = self._clock() + _RETRY_S
            return
        self._limits = _limits_of(published)


def _limits_of(published: Mapping[str, int]) -> RequestLimits | None:
    """Return the published limits as an object, or None if at least one limit is missing.

    The mapping of the tokenizer model can contain other keys, which are ignored.
    """
    names = RequestLimits.__dataclass_fields__
    if not names.keys() <= published.keys():
        return None
    return RequestLimits(**{name: published[name] for name in names})
