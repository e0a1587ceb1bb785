"""`truncation: auto`: a conversation that is too long for the model loses its beginning.

The frontend knows no token counts: the ensemble refuses what is too long and says by how much, and
what is left is sent again. Nothing was computed for what was refused.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.errors import BackendError
from nereid_client.request_context import dump
from nereid_client.streaming.deltas import Delta
from nereid_client.triton_backend import Backend, Generation

Json = dict[str, Any]

_TOO_LONG = re.compile(r"prompt has (\d+) tokens; the limit is (\d+) \(max_model_len\)")


async def generate_fitting(backend: Backend, request_id: str, chat: Json) -> AsyncGenerator[Delta]:
    """The deltas of the longest end of this conversation that fits.

    Args:
        backend: what generates.
        request_id: for the server's logs; each attempt adds its number.
        chat: the chat completion.

    Raises: BackendError, also when the last turn alone is too long.
    """
    attempt = 0
    while True:
        generation = Generation(f"{request_id}-{attempt}", chat_request=dump(chat))
        has_begun = False
        try:
            async with aclosing(backend.generate(generation)) as deltas:
                async for delta in deltas:
                    has_begun = True
                    yield delta
            return
        except BackendError as error:
            told = _TOO_LONG.search(error.message)
            if told is None or has_begun:
                raise
            share = 1 - int(told[2]) / int(told[1])
            shorter = without_beginning(chat["messages"], share)
            if shorter is None:
                raise
            chat = chat | {"messages": shorter}
            attempt += 1


def without_beginning(messages: Sequence[Json], share: float) -> list[Json] | None:
    """Messages without the oldest turns, a turn being what follows a user's message.

    What the system says at the beginning stays, and so does the last turn.

    Args:
        messages: of a chat.
        share: of their text, about so much has to go; at least one turn goes.

    Returns: None when there is no turn to leave out.
    """
    opening = 0
    while opening < len(messages) and messages[opening]["role"] in ("system", "developer"):
        opening += 1
    turns = [at for at in range(opening + 1, len(messages)) if messages[at]["role"] == "user"]
    if not turns:
        return None
    sizes = [_size(message) for message in messages]
    too_much = share * sum(sizes)
    gone, first = 0, opening
    for turn in turns:
        gone += sum(sizes[first:turn])
        first = turn
        if gone >= too_much:
            break
    return [*messages[:opening], *messages[first:]]


def _size(message: Json) -> int:
    return len(dump(message))
