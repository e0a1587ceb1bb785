# SPDX-License-Identifier: Apache-2.0
"""The engine of embedding models and rerankers. It has no KV cache and no sampling.

`add` validates, tokenises and queues the inputs of a request. `step` removes inputs from the queue
until the token budget is used up, computes these inputs as one batch, and returns their results.
"""

import sys
from collections.abc import Callable, Sequence

from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.pooling.inputs.text_size import TextLimit, check_num_inputs
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_items import PoolingInfo, PoolingItem, PoolingResult, Value
from nereid_backend.pooling.pooling_model import NOT_FINITE, PoolingModel
from nereid_backend.pooling.token_queue import QueuedItem, TokenQueue


class PoolingEngine:
    """Queues requests, and computes results with a model. All calls must come from one thread.

    Attributes:
        config: the settings.
        info: the description of the loaded model.
    """

    def __init__(
        self, config: PoolingConfig, progress: Callable[[str], None] | None = None
    ) -> None:
        """Load the model.

        Args:
            config: the settings.
            progress: called with one line for each slow operation. None means that the lines are
                printed to stderr.

        Raises:
            ConfigError: the settings do not fit the checkpoint or the machine.
            ModelError: the checkpoint is missing, broken or not supported.
        """
        self.config = config
        self._model = PoolingModel.load(config, progress or _to_stderr)
        self.info: PoolingInfo = self._model.info
        # The default number of waiting inputs depends on the size of the largest possible input, so
        # that a full queue needs a limited amount of memory.
        text_limit = TextLimit(self.info.max_model_len, self.info.max_token_bytes)
        self._max_num_waiting = config.max_num_waiting or text_limit.default_max_num_waiting
        # The waiting inputs of all requests. Each step takes inputs from all requests in turn.
        self._queue = TokenQueue()

    def add(self, request_id: str, items: Sequence[PoolingItem]) -> None:
        """Add a request to the waiting requests. One call tokenises all texts of the request.

        Args:
            request_id: an id that no waiting request has.
            items: the inputs.

        Raises:
            RequestError: there are no items, there are more items than the queue can contain, an
                item is wrong, or a waiting request has the same id. If this error is raised,
                nothing is added. If one of several items is wrong, the error message contains the
                index of the item.
            CapacityError: too many inputs are waiting.
        """
        if request_id in self._queue:
            raise RequestError(
                f"a request with the id {request_id!r} is already waiting. Use another id."
            )
        if not items:
            raise RequestError("input: the list is empty. Send at least one input.")
        limit = self._max_num_waiting
        check_num_inputs("input", len(items), limit)
        if self._queue.num_items + len(items) > limit:
            raise CapacityError(
                f"{self._queue.num_items} inputs are waiting, and this request has {len(items)} "
                f"more, but the limit is {limit} (max_num_waiting). Try again later or send fewer "
                "inputs."
            )
        self._queue.add(request_id, self._model.preparer.prepare(items))

    def step(self) -> list[PoolingResult]:
        """Remove the next items from the queue, and compute their vectors or scores.

        Returns:
            One result for each computed item. The list is empty if no item is waiting. Every item
            of a request gets exactly one result, unless the request is aborted.
        """
        queued_items = self._queue.take(self.info.max_batch_tokens)
        results = self._compute(queued_items) if queued_items else []
        if not self.has_work():
            self._model.pause()
        return results

    def abort(self, request_id: str) -> None:
        """Remove the waiting items of a request. Do nothing if the request has no waiting items."""
        self._queue.remove(request_id)

    def has_work(self) -> bool:
        """Return whether items are waiting."""
        return len(self._queue) > 0

    def start_image_process(self) -> None:
        """Start the process that decodes images, and wait until the process is ready.

        Do nothing if the model accepts no images. Without this call, the first image waits until
        the process is ready.
        """
        self._model.preparer.start_image_process()

    def close(self) -> None:
        """Unregister the engine's attention function, so that the model can be freed.

        End the process that decodes images.
        """
        self._model.close()

    def _compute(self, queued_items: list[QueuedItem]) -> list[PoolingResult]:
        """Compute the outputs for all items in one batch, and return one result for each item.

        If the model raises an error for several items, compute each item alone. Then only the items
        that cause the error fail. The result of such an item contains the error message.
        """
        try:
            values = self._model.run([queued.prepared for queued in queued_items])
        except Exception as error:  # noqa: BLE001 - an error of the model becomes a result
            if len(queued_items) > 1:
                # Compute each item in a separate batch.
                return [self._compute([queued])[0] for queued in queued_items]
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            return [_pooling_result(queued_items[0], error=f"the model failed: {message}")]
        return [
            _pooling_result(queued, value=value)
            if value is not None
            else _pooling_result(queued, error=NOT_FINITE)
            for queued, value in zip(queued_items, values, strict=True)
        ]


def _pooling_result(
    queued: QueuedItem, *, value: Value | None = None, error: str | None = None
) -> PoolingResult:
    """Return the result of a queued item: either the output `value`, or the message `error`."""
    return PoolingResult(
        request_id=queued.request_id,
        index=queued.index,
        value=value,
        num_tokens=queued.prepared.num_tokens,
        error=error,
        offsets=queued.prepared.offsets,
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the operator's terminal
