"""`truncation: auto`: remove the oldest turns of a conversation that is too long for the model.

The frontend cannot count tokens. It sends the conversation to the ensemble. If the prompt is too
long, the error message of the ensemble contains the number of tokens. The frontend then removes
turns and sends the shorter conversation. A rejected prompt costs little, because the model does not
run.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.errors import BackendError, tokens_and_limit
from nereid_client.language_model.backend import Backend, Generation
from nereid_client.request_context import to_json
from nereid_client.responses.chat_translation import count_opening_messages
from nereid_client.streaming.deltas import Delta

Json = dict[str, Any]

# If 10 % of a chat's tokens exceed the limit, 10 % of its text is removed. This applies to the
# attempts 0 to 3. After each later attempt, a growing multiple of this share is removed: 20 %, then
# 40 %, and so on.
_LAST_EXACT_ATTEMPT = 3


async def generate_truncated(
    backend: Backend, request_id: str, chat: Json
) -> AsyncGenerator[Delta]:
    """Generate the answer to a conversation. Shorten the conversation if it is too long.

    The backend rejects a conversation that is too long with an error that names the number of
    tokens. In this case, the oldest messages are removed, and the next attempt starts.

    Args:
        backend: generates the deltas.
        request_id: the id of the request. The number of the attempt is appended to the id.
        chat: the body of a chat completion.

    Raises: BackendError, also if the last turn alone is too long.
    """
    for attempt in itertools.count():
        generation = Generation(f"{request_id}-{attempt}", chat_request=to_json(chat))
        has_deltas = False
        try:
            async with aclosing(backend.generate(generation)) as deltas:
                async for delta in deltas:
                    has_deltas = True
                    yield delta
            return
        except BackendError as error:
            # If the oldest texts have few tokens per character, too few tokens are removed after
            # each attempt. Without a growing factor, hundreds of attempts could be necessary.
            growth = 2.0 ** max(attempt - _LAST_EXACT_ATTEMPT, 0)
            shorter_chat = None if has_deltas else _shortened(chat, error, growth)
            if shorter_chat is None:
                raise
            chat = shorter_chat


def _shortened(chat: Json, error: BackendError, growth: float) -> Json | None:
    """Remove the oldest turns of a chat, so that the backend will probably accept the chat.

    The share of the text that is removed is the share of tokens above the limit, times `growth`.

    Args:
        chat: the body of a chat completion.
        error: the error with which the backend rejected the chat.
        growth: the factor, at least 1.

    Returns: the shorter chat. None if the backend rejected the chat for another reason than its
        length, or if no turn can be removed.
    """
    counts = tokens_and_limit(error.message)
    if counts is None:
        return None
    num_tokens, limit = counts
    share = min(growth * (1 - limit / num_tokens), 1.0)
    messages = without_oldest_turns(chat["messages"], share=share)
    return None if messages is None else chat | {"messages": messages}


def without_oldest_turns(messages: Sequence[Json], share: float) -> list[Json] | None:
    """Remove the oldest turns of a chat, and return the remaining messages.

    A turn consists of a user's message and all messages before the next message of a user. The last
    turn is never removed. The system messages at the start are never removed either.

    Example: with a share of 0.1, the messages [system, user, assistant, user] become
    [system, user].

    Args:
        messages: the messages of a chat.
        share: the share of the text that must be removed, between 0 and 1. At least one turn is
            removed.

    Returns: the shorter chat, or None if there is only one turn.
    """
    num_opening = count_opening_messages(messages)  # the system messages at the start
    # The first turn, which starts at the index `num_opening`, is always removed. The shorter chat
    # therefore continues with one of the later turns.
    later_turn_starts = [
        at for at in range(num_opening + 1, len(messages)) if messages[at]["role"] == "user"
    ]
    if not later_turn_starts:
        return None
    # `chars_before[i]` is the number of characters before message i. The last entry is the number
    # of characters in all messages.
    sizes = [len(to_json(message)) for message in messages]
    chars_before = list(itertools.accumulate(sizes, initial=0))
    excess_chars = share * chars_before[-1]
    sufficient_starts = [
        start
        for start in later_turn_starts
        if chars_before[start] - chars_before[num_opening] >= excess_chars
    ]
    first_kept = sufficient_starts[0] if sufficient_starts else later_turn_starts[-1]
    return [*messages[:num_opening], *messages[first_kept:]]
