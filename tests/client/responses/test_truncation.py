"""Tests of conversations that are shortened until they fit into the model."""

import json

import pytest
from nereid_client.errors import BackendError
from nereid_client.responses.truncation import generate_truncated

pytestmark = pytest.mark.anyio

LIMIT = 4096


class CountingBackend:
    """A fake backend that rejects chats with more than LIMIT tokens.

    Each word is a token, and each message has four additional tokens.
    """

    def __init__(self):
        self.token_counts = []

    async def generate(self, generation):
        messages = json.loads(generation.chat_request)["messages"]
        num_tokens = sum(4 + len(message["content"].split()) for message in messages)
        self.token_counts.append(num_tokens)
        if num_tokens > LIMIT:
            raise BackendError(
                "INVALID_ARGUMENT",
                f"prompt has {num_tokens} tokens; the limit is {LIMIT} (max_model_len)",
            )
        yield {"content": "a"}


async def test_old_turns_with_few_tokens_per_character_need_few_attempts():
    long_words = [{"role": "user", "content": "a" * 300}] * 2000
    short_words = [{"role": "user", "content": "a"}] * 817
    backend = CountingBackend()
    chat = {"messages": long_words + short_words}
    deltas = [delta async for delta in generate_truncated(backend, "id", chat)]
    assert deltas == [{"content": "a"}]
    assert len(backend.token_counts) <= 10
    assert backend.token_counts[-1] > 0.9 * LIMIT
