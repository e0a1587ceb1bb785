# SPDX-License-Identifier: Apache-2.0
"""The Triton model `rerank`: it scores documents for a query, or classifies texts."""

from typing import Any

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import tensors
from nereid_backend.serving.pooling import decode_request
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_stub import PoolingStub, has_tensor
from nereid_backend.serving.tensors import Tensors


class RerankModel(PoolingStub):
    """The stub of the model `rerank`. Its checkpoint is a reranker or a classifier."""

    kind = names.RERANK
    tasks = ("rerank", "classify")

    def read_job(self, request: Any) -> Job | None:  # noqa: ANN401 - the server's own type
        """Return the job in `request`, or None (see PoolingStub.read_job)."""
        candidates = (names.QUERY, names.DOCUMENTS, names.TEXTS)
        given = [name for name in candidates if has_tensor(request, name)]
        text = tensors.optional_text(request, names.OPTIONS)
        if not given and tensors.optional_bool(request, names.RETURN_INFO):
            return None
        options = decode_request.parse_options(text, decode_request.RERANK_OPTIONS)
        if given == [names.TEXTS]:
            items = decode_request.decode_texts(tensors.array(request, names.TEXTS), names.TEXTS)
            options["kind"] = "classify"
            return Job(names.TEXTS, [("text", item) for item in items], options)
        if given != [names.QUERY, names.DOCUMENTS]:
            raise RequestError(
                f"{names.QUERY}: a request must have {names.QUERY} and {names.DOCUMENTS}, or only "
                f"{names.TEXTS} for a classifier, but it has {' and '.join(given) or 'none'}."
            )
        queries = decode_request.decode_texts(tensors.array(request, names.QUERY), names.QUERY)
        documents = decode_request.decode_texts(
            tensors.array(request, names.DOCUMENTS), names.DOCUMENTS
        )
        inputs = [("pair", pair) for pair in decode_request.pair_queries(queries, documents)]
        return Job(names.DOCUMENTS, inputs, options)

    def build_outputs(self, outcome: Outcome) -> Tensors:
        """Return the output tensors of a finished job."""
        name = names.PROBABILITIES if outcome.kind == "classify" else names.SCORES
        return {name: outcome.values, names.NUM_TOKENS: outcome.num_tokens}

    def empty_outputs(self) -> Tensors:
        """Return the output tensors of a request with an empty list of inputs."""
        return {
            names.SCORES: np.zeros(0, dtype=np.float32),
            names.NUM_TOKENS: np.zeros(0, dtype=np.int32),
        }
