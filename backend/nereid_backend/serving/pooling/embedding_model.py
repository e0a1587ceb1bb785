# SPDX-License-Identifier: Apache-2.0
"""The Triton model `embedding`: texts, token ids or images -> vectors. See docs/embeddings.md."""

import json
from typing import Any

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import tensors
from nereid_backend.serving.pooling import decode_request
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_stub import PoolingStub, Tensors, is_given


class EmbeddingModel(PoolingStub):
    """Stub of the embedding model."""

    kind = names.EMBEDDING
    tasks = ("embed",)

    def read(self, request: Any) -> Job | None:  # noqa: ANN401 - the server's own type
        """See `PoolingStub.read`."""
        given = [
            name
            for name in (
                names.TEXTS,
                names.INPUT_IDS,
                names.PARTS,
            )
            if is_given(request, name)
        ]
        text = tensors.optional_text(request, names.OPTIONS)
        if not given and tensors.optional_bool(request, names.RETURN_INFO):
            return None
        if len(given) != 1:
            raise RequestError(
                f"{names.TEXTS}: give exactly one of {names.TEXTS}, {names.INPUT_IDS} and "
                f"{names.PARTS}, got {' and '.join(given) or 'none'}"
            )
        values = tensors.array(request, given[0])
        inputs: list[tuple[str, Any]]
        if given[0] == names.INPUT_IDS:
            lengths = None
            if is_given(request, names.INPUT_LENGTHS):
                lengths = tensors.array(request, names.INPUT_LENGTHS)
            inputs = [("token_ids", ids) for ids in decode_request.id_lists(values, lengths)]
        elif given[0] == names.PARTS:
            parts = decode_request.texts(values, names.PARTS)
            inputs = [decode_request.part(part, index) for index, part in enumerate(parts)]
        else:
            inputs = [("text", item) for item in decode_request.texts(values, names.TEXTS)]
        return Job(given[0], inputs, decode_request.options(text, decode_request.EMBEDDING_OPTIONS))

    def write(self, outcome: Outcome) -> Tensors:
        """See `PoolingStub.write`."""
        outputs: Tensors = {names.NUM_TOKENS: outcome.num_tokens}
        if outcome.kind == "sparse":
            rows = [
                json.dumps({"indices": ids.tolist(), "values": weights.tolist()})
                for ids, weights in outcome.weights
            ]
            return outputs | {names.SPARSE: tensors.strings(*rows)}
        outputs[names.EMBEDDINGS] = outcome.values
        if outcome.kind == "multi_vector":
            outputs[names.NUM_VECTORS] = outcome.counts
        return outputs

    def write_nothing(self) -> Tensors:
        """See `PoolingStub.write_nothing`."""
        return {
            names.EMBEDDINGS: np.zeros((0, 0), dtype=np.float32),
            names.NUM_TOKENS: np.zeros(0, dtype=np.int32),
        }
