# SPDX-License-Identifier: Apache-2.0
"""Vectors and scores without a server."""

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


class _Offline:
    def __init__(self, config: PoolingConfig) -> None:
        self._engine = PoolingEngine(config, progress=lambda _: None)
        self._numbers = itertools.count()

    @property
    def info(self) -> PoolingInfo:
        """Facts about the model."""
        return self._engine.info

    def _run(self, items: list[PoolingItem]) -> list[Value]:
        name = str(next(self._numbers))
        self._engine.add(name, items)
        found: dict[int, Value] = {}
        try:
            while self._engine.has_work():
                for result in self._engine.step():
                    if result.value is None:
                        raise EngineError(f"input {result.index}: {result.error}")
                    found[result.index] = result.value
        finally:
            self._engine.abort(name)
        return [found[i] for i in range(len(items))]


class Embedder(_Offline):
    """A model that turns texts into vectors."""

    def __init__(self, model: str, **settings: Any) -> None:  # noqa: ANN401 - fields of PoolingConfig
        """Load it.

        Args:
            model: folder of the checkpoint.
            settings: fields of PoolingConfig.

        Raises:
            ConfigError: a setting is wrong or does not fit.
            ModelError: the checkpoint is missing, broken, or is no embedder.
        """
        super().__init__(PoolingConfig(str(model), **{"task": "embed", **settings}))

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
        """Dense vectors of inputs.

        Args:
            inputs: each a text, token ids, or ``{"text": str}`` or ``{"image": bytes}``; a single
                text, or list of ids, counts as a list of one.
            dimensions: keep so many numbers of each vector.
            normalize: to length 1; None: as the checkpoint says.
            prompt_name: one of the checkpoint's prompts, put before each text.
            prompt: text that is put before each text.
            truncate: cut what is too long instead of refusing it.

        Returns:
            [num_inputs, dimension] float32.

        Raises:
            RequestError: an input is wrong; the message says which.
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
        if listed and all(isinstance(one, int) for one in listed):
            listed = [listed]
        if not listed:
            return np.zeros((0, dimensions or self.info.dimension), dtype=np.float32)
        return np.stack([np.asarray(v) for v in self._run([_item(one, options) for one in listed])])

    def encode_sparse(
        self, inputs: Sequence[str], *, prompt_name: str | None = None, truncate: bool = False
    ) -> list[dict[int, float]]:
        """Weights of the vocabulary's tokens, those that are not 0."""
        options = {"kind": "sparse", "prompt_name": prompt_name, "truncate": truncate}
        values = self._run([_item(one, options) for one in inputs])
        return [value for value in values if isinstance(value, dict)]

    def encode_multi(
        self, inputs: Sequence[str], *, prompt_name: str | None = None, truncate: bool = False
    ) -> list[Floats]:
        """One vector a token: [num_tokens, dimension] float32 each."""
        options = {"kind": "multi_vector", "prompt_name": prompt_name, "truncate": truncate}
        return [np.asarray(value) for value in self._run([_item(one, options) for one in inputs])]


class Reranker(_Offline):
    """A model that scores how well documents answer a query."""

    def __init__(self, model: str, **settings: Any) -> None:  # noqa: ANN401 - fields of PoolingConfig
        """Load it.

        Args:
            model: folder of the checkpoint.
            settings: fields of PoolingConfig.

        Raises:
            ConfigError: a setting is wrong, or the checkpoint has no head that scores.
            ModelError: the checkpoint is missing or broken.
        """
        super().__init__(PoolingConfig(str(model), **{"task": "rerank", **settings}))

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        activation: str | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> Floats:
        """Scores of pairs of a query and a document.

        Args:
            pairs: queries and documents.
            activation: "none", "sigmoid" or "softmax"; None: as the checkpoint says.
            instruction: what makes a document relevant, for models that read instructions.
            truncate: cut what is too long instead of refusing it.

        Returns:
            [num_pairs] float32, larger is better.

        Raises:
            RequestError: a pair is wrong; the message says which.
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


def _item(one: Input, options: dict[str, Any]) -> PoolingItem:
    if isinstance(one, str):
        return PoolingItem(text=one, **options)
    if isinstance(one, dict):
        unknown = set(one) - {"text", "image"}
        if unknown:
            raise RequestError(f"input: unknown part {sorted(unknown)[0]!r}; known: text, image")
        return PoolingItem(text=one.get("text"), image=one.get("image"), **options)
    return PoolingItem(token_ids=list(one), **options)
