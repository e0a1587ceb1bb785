# SPDX-License-Identifier: Apache-2.0
"""The engine of embedding models and rerankers: requests in, packed steps, vectors and scores out.

prepare (tokenise, check) -> add -> step: take items up to the token budget, run, answer
"""

import sys
from collections.abc import Callable, Sequence

from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_items import PoolingInfo, PoolingItem, PoolingResult, Value
from nereid_backend.pooling.pooling_model import NOT_FINITE, PoolingModel
from nereid_backend.pooling.prepare_items import Prepared
from nereid_backend.pooling.token_queue import Ticket, TokenQueue

__all__ = [
    "PoolingConfig",
    "PoolingEngine",
    "PoolingInfo",
    "PoolingItem",
    "PoolingResult",
    "Prepared",
]


class PoolingEngine:
    """One model and the requests that wait for it. Used by one thread, save for ``prepare``.

    Attributes:
        config: the settings.
        info: facts about the model.
    """

    def __init__(
        self, config: PoolingConfig, progress: Callable[[str], None] | None = None
    ) -> None:
        """Load the model.

        Args:
            config: the settings.
            progress: gets a line for every slow step; None: they go to stderr.

        Raises:
            ConfigError: the settings do not fit the checkpoint or the machine.
            ModelError: the checkpoint is missing, broken, or does not run exactly.
        """
        self.config = config
        self._model = PoolingModel(config, progress or _to_stderr)
        self.info: PoolingInfo = self._model.info
        self._queue = TokenQueue()

    def prepare(self, item: PoolingItem) -> Prepared:
        """Tokenise and check one item.

        Raises:
            RequestError: it is wrong; the message gives the value, the limit and the remedy.
        """
        return self.prepare_many([item])[0]

    def prepare_many(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        """Tokenise and check the items of a request, all texts in one go, which is faster.

        Raises:
            RequestError: one is wrong; the message says which.
        """
        if not items:
            raise RequestError("input: is empty; give at least one text")
        return self._model.preparer.prepare(items)

    def add(self, request_id: str, items: Sequence[PoolingItem | Prepared]) -> int:
        """Let a request wait for its turn.

        Args:
            request_id: not one that is waiting.
            items: prepared or not.

        Returns:
            Its number of tokens.

        Raises:
            RequestError: an item is wrong, or the name is taken; nothing was added.
            CapacityError: too many items wait.
        """
        if request_id in self._queue:
            raise RequestError(f"request {request_id!r} is waiting already; use another name")
        limit = self.config.max_num_waiting
        if self._queue.num_items + len(items) > limit:
            raise CapacityError(
                f"{self._queue.num_items} inputs wait and {len(items)} more were asked for; the "
                f"limit is {limit} (max_num_waiting); try again later or send fewer"
            )
        if items and all(isinstance(item, Prepared) for item in items):
            prepared = [item for item in items if isinstance(item, Prepared)]
        else:
            prepared = self.prepare_many([i.item if isinstance(i, Prepared) else i for i in items])
        self._queue.add(request_id, prepared)
        return sum(one.num_tokens for one in prepared)

    def step(self) -> list[PoolingResult]:
        """Compute the next items of the waiting requests.

        Returns:
            One result for each; every item of an added request gets exactly one, unless the request
            is aborted first. Empty when nothing waits.
        """
        tickets = self._queue.take(self.info.max_batch_tokens)
        return self._answer(tickets) if tickets else []

    def abort(self, request_id: str) -> None:
        """Forget what waits of a request; unknown or ended: nothing happens."""
        self._queue.remove(request_id)

    def has_work(self) -> bool:
        """Whether anything waits."""
        return len(self._queue) > 0

    def close(self) -> None:
        """Free what the engine has registered with transformers."""
        self._model.close()

    def _answer(self, tickets: list[Ticket]) -> list[PoolingResult]:
        try:
            values = self._model.run([ticket.prepared for ticket in tickets])
        except Exception as error:  # noqa: BLE001 - here a request ends, with the error as its answer
            if len(tickets) > 1:
                # One input must not take down those it happened to be computed with.
                return [result for ticket in tickets for result in self._answer([ticket])]
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            return [_result(tickets[0], None, f"the model failed: {message}")]
        return [
            _result(ticket, value, NOT_FINITE if value is None else None)
            for ticket, value in zip(tickets, values, strict=True)
        ]


def _result(ticket: Ticket, value: Value | None, error: str | None) -> PoolingResult:
    return PoolingResult(ticket.request_id, ticket.index, value, ticket.prepared.num_tokens, error)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the operator's terminal
