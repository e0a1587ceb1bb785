"""The records of a response store: responses that have ended, and responses that are running."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereid_client.middleware.client_keys import current_client

Json = dict[str, Any]

_OVERHEAD_BYTES = 64  # the approximate size of a Python object without its content


def current_client_name() -> str:
    """Return the name of the client that sent the current request."""
    return current_client.get().name


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        id: the id of the response.
        response: the response object as JSON.
        input_items: the JSON list of all items that the model read, including the items of earlier
            responses.
        output_ids: the ids of the output items.
        events: the events of the stream in order. None if the stream cannot be read again.
        is_background: whether the response was generated in the background.
        owner: the name of the client that created the response.
        num_bytes: the number of bytes that the response needs in the store.
    """

    id: str
    response: bytes
    input_items: bytes
    output_ids: tuple[str, ...]
    events: Sequence[bytes] | None = None
    is_background: bool = False
    owner: str = field(default_factory=current_client_name)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.response) + len(self.input_items) + size_of(self.events or ())
        size += _OVERHEAD_BYTES * (4 + len(self.output_ids))
        object.__setattr__(self, "num_bytes", size)

    @property
    def output(self) -> list[Json]:
        """The output items of the response."""
        items: list[Json] = json.loads(self.response)["output"]
        return items

    @property
    def conversation(self) -> list[Json]:
        """The items of the whole conversation: all input items, followed by the output items."""
        input_items: list[Json] = json.loads(self.input_items)
        return input_items + self.output


class Running(Protocol):
    """A response that is being generated in the background."""

    @property
    def owner(self) -> str:
        """The name of the client that created the response."""
        ...

    @property
    def id(self) -> str:
        """The id of the response."""
        ...

    @property
    def status(self) -> str:
        """The status of the response, such as "in_progress"."""
        ...


@dataclass(frozen=True)
class RunningElsewhere:
    """A background response that another frontend process generates.

    Attributes:
        worker: the number of the process.
    """

    worker: int

    @property
    def status(self) -> str:
        """The status of the response. Only the other process knows if the response is queued."""
        return "in_progress"


def size_of(events: Sequence[bytes]) -> int:
    """Return the approximate size of events in memory, in bytes."""
    return sum(map(len, events)) + _OVERHEAD_BYTES * len(events)
