# SPDX-License-Identifier: Apache-2.0
"""Computes vectors and scores without a server."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereid_backend.errors import EngineError, RequestError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingInfo, PoolingItem, Value

Floats = NDArray[np.float32]
Input = str | list[int] | dict[str, Any]


class _OfflineModel:
    """The base class of Embedder and Reranker. It computes one request at a time."""

    _task: str
    """The value of the setting `task`, if the caller does not set `task`."""

    def __init__(self, model: str, **settings: Any) -> None:  # noqa: ANN401 - fields of PoolingConfig
        """Load the checkpoint.

        Args:
            model: the folder of the checkpoint.
            settings: fields of PoolingConfig.

        Raises:
            ConfigError: a setting is wrong, or the checkpoint is not for this class's task.
            ModelError: the checkpoint is missing, broken or not supported.
        """
        settings.setdefault("task", self._task)
        config = PoolingConfig(str(model), **settings)
        # The offline classes print no messages about their progress.
        self._engine = PoolingEngine(config, progress=lambda _: None)
        # The id of each request is the next number of this counter.
        self._request_numbers = itertools.count()

    @property
    def info(self) -> PoolingInfo:
        """The description of the loaded model."""
        return self._engine.info

    def _run(self, items: list[PoolingItem]) -> list[Value]:
        """Compute the output for each item, and return the outputs in the order of the items.

        The items are one request to the engine. The engine computes the request in several steps,
        and may return the results in another order. `PoolingResult.index` is the index of the item.

        Raises:
            EngineError: an item failed. The other items are then not computed.
        """
        request_id = str(next(self._request_numbers))
        self._engine.add(request_id, items)
        values: dict[int, Value] = {}
        try:
            while self._engine.has_work():
                for result in self._engine.step():
                    if result.value is None:
                        raise EngineError(f"input {result.index}: {result.error}")
                    values[result.index] = result.value
        finally:
            # After an error, remove the items that the engine has not computed yet.
            self._engine.abort(request_id)
        return [values[index] for index in range(len(items))]


class Embedder(_OfflineModel):
    """A model that converts texts to vectors."""

    _task = "embed"

    def encode(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> Floats:
        """Return the dense vectors of inputs.

        Args:
            inputs: a list of inputs. Each input is a text, a list of token ids, `{"text": str}` or
                `{"image": bytes}`. A vision-language model also accepts an input with both keys. A
                single input need not be in a list.
            dimensions: the size of the returned vectors. If a vector is longer, only its first
                elements are returned. None means that all elements are returned.
            normalize: whether each vector is scaled to length 1. None means the checkpoint's
                default.
            prompt_name: the name of a prompt of the checkpoint. The prompt precedes each text.
            prompt: a text that precedes each text. For a vision-language model, the prompt is a
                system message instead.
            truncate: whether an input that is too long is truncated. If False, such an input is
                refused.

        Returns:
            The vectors, float32 [num_inputs, dimension].

        Raises:
            RequestError: an input is wrong. The error message contains the index of the input.
        """
        options: dict[str, Any] = {
            "kind": "dense",
            "dimensions": dimensions,
            "normalize": normalize,
            "prompt_name": prompt_name,
            "prompt": prompt,
            "truncate": truncate,
        }
        listed: list[Any] = [inputs] if isinstance(inputs, str | dict) else list(inputs)
        if listed and all(isinstance(value, int) for value in listed):
            listed = [listed]  # a list of integers is one input: the token ids of a text
        if not listed:
            return np.zeros((0, dimensions or self.info.dimension), dtype=np.float32)
        vectors = self._run([_item(value, options) for value in listed])
        return np.stack([np.asarray(vector) for vector in vectors])

    def encode_sparse(
        self, inputs: Sequence[str], *, prompt_name: str | None = None, truncate: bool = False
    ) -> list[dict[int, float]]:
        """Return the sparse vector of each text, as a dict from token ids to nonzero weights."""
        options = {"kind": "sparse", "prompt_name": prompt_name, "truncate": truncate}
        values = self._run([_item(text, options) for text in inputs])
        return [value for value in values if isinstance(value, dict)]

    def encode_multi(
        self, inputs: Sequence[Input], *, prompt_name: str | None = None, truncate: bool = False
    ) -> list[Floats]:
        """Return one array of token vectors for each input, float32 [num_tokens, dimension].

        The inputs have the same forms as in `encode`.
        """
        options = {"kind": "multi_vector", "prompt_name": prompt_name, "truncate": truncate}
        items = [_item(value, options) for value in inputs]
        return [np.asarray(vectors) for vectors in self._run(items)]


class Reranker(_OfflineModel):
    """A model that scores how relevant documents are for a query."""

    _task = "rerank"

    def score(
        self,
        pairs: Sequence[tuple[str, str | bytes]],
        *,
        activation: str | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> Floats:
        """Return one score for each pair of a query and a document.

        Args:
            pairs: the pairs. Each pair consists of a query and a document. For a vision-language
                model, a document can be the content of an image file.
            activation: "none", "sigmoid" or "softmax". None means the checkpoint's default.
            instruction: a sentence that describes which documents are relevant. Only
                rerankers whose prompts contain an instruction accept one.
            truncate: whether a pair that is too long is truncated. If False, such a pair is
                refused.

        Returns:
            The scores, float32 [num_pairs]. A higher score means a more relevant document.

        Raises:
            RequestError: a pair is wrong. The error message contains the index of the pair.
        """
        items = [
            PoolingItem(
                "score",
                pair=(query, document),
                activation=activation,
                instruction=instruction,
                truncate=truncate,
            )
            for query, document in pairs
        ]
        if not items:
            return np.zeros(0, dtype=np.float32)
        return np.array(self._run(items), dtype=np.float32)


def _item(value: Input, options: dict[str, Any]) -> PoolingItem:
    """Convert one input of `Embedder.encode` to a PoolingItem.

    Args:
        value: a text, a list of token ids, or a dict with a text, an image or both. Example:
            {"text": "a red car", "image": b"..."}.
        options: the other fields of the item.

    Raises:
        RequestError: the dict has an unknown key.
    """
    if isinstance(value, str):
        return PoolingItem(text=value, **options)
    if isinstance(value, dict):
        unknown_keys = sorted(set(value) - {"text", "image"})
        if unknown_keys:
            raise RequestError(
                f"input: the key {unknown_keys[0]!r} is not known. Use text or image."
            )
        return PoolingItem(text=value.get("text"), image=value.get("image"), **options)
    return PoolingItem(token_ids=list(value), **options)
