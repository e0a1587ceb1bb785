# SPDX-License-Identifier: Apache-2.0
"""The Triton model `rerank`: query and documents -> scores, or texts -> probabilities of labels."""

from typing import Any

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import tensors
from nereid_backend.serving.pooling import decode_request
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_stub import PoolingStub, Tensors, is_given


class RerankModel(PoolingStub):
    """Stub of the reranker, which may also be a classifier."""

    kind = names.RERANK
    tasks = ("rerank", "classify")

    def read(self, request: Any) -> Job | None:  # noqa: ANN401 - the server's own type
        """See `PoolingStub.read`."""
        given = [
            name
            for name in (
                names.QUERY,
                names.DOCUMENTS,
                names.TEXTS,
            )
            if is_given(request, name)
        ]
        text = tensors.optional_text(request, names.OPTIONS)
        if not given and tensors.optional_bool(request, names.RETURN_INFO):
            return None
        chosen = decode_request.options(text, decode_request.RERANK_OPTIONS)
        if given == [names.TEXTS]:
            items = decode_request.texts(tensors.array(request, names.TEXTS), names.TEXTS)
            chosen["kind"] = "classify"
            return Job(names.TEXTS, [("text", item) for item in items], chosen)
        if given != [names.QUERY, names.DOCUMENTS]:
            raise RequestError(
                f"{names.QUERY}: give {names.QUERY} and {names.DOCUMENTS}, or {names.TEXTS} alone "
                f"for a classifier, got {' and '.join(given) or 'none'}"
            )
        queries, documents = (
            decode_request.texts(tensors.array(request, name), name)
            for name in (names.QUERY, names.DOCUMENTS)
        )
        inputs = [("pair", pair) for pair in decode_request.pairs(queries, documents)]
        return Job(names.DOCUMENTS, inputs, chosen)

    def write(self, outcome: Outcome) -> Tensors:
        """See `PoolingStub.write`."""
        name = names.PROBABILITIES if outcome.kind == "classify" else names.SCORES
        return {name: outcome.values, names.NUM_TOKENS: outcome.num_tokens}

    def write_nothing(self) -> Tensors:
        """See `PoolingStub.write_nothing`."""
        return {
            names.SCORES: np.zeros(0, dtype=np.float32),
            names.NUM_TOKENS: np.zeros(0, dtype=np.int32),
        }
