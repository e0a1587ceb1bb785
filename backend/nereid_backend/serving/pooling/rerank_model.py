# SPDX-License-Identifier: Apache-2.0
"""The Triton model `rerank`. It scores documents, classifies texts, or classifies tokens."""

from collections.abc import Sequence
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving.pooling import decode_request
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_stub import PoolingStub
from nereid_backend.serving.triton_api import Tensors


class RerankModel(PoolingStub):
    """The stub of the model `rerank`. Its checkpoint is a reranker or a classifier."""

    kind = names.RERANK
    tasks = ("rerank", "classify")
    input_names = (names.QUERY, names.DOCUMENTS, names.PARTS, names.TEXTS)
    option_types = decode_request.RERANK_OPTIONS

    def read_job(self, request: Any, given: list[str], options: dict[str, Any]) -> Job:  # noqa: ANN401
        """Convert `request` to a job. The job classifies texts or scores documents.

        Args:
            request: the server's request.
            given: the names of the input tensors that the request contains, in the order of
                `input_names`.
            options: the options of the request.

        Raises:
            RequestError: a tensor is missing or wrong.
        """
        match given:
            case [names.TEXTS]:
                return self._classify_job(request, options)
            case [names.QUERY, (names.DOCUMENTS | names.PARTS) as document_tensor]:
                return self._score_job(request, document_tensor, options)
        raise RequestError(
            f"{names.QUERY}: a request to a reranker must have {names.QUERY}, and either "
            f"{names.DOCUMENTS} or {names.PARTS}. A request to a classifier must have only "
            f"{names.TEXTS}. This request has {' and '.join(given) or 'none of these tensors'}."
        )

    def _score_job(
        self,
        request: Any,  # noqa: ANN401
        document_tensor: str,
        options: dict[str, Any],
    ) -> Job:
        """Convert a request to a job that scores documents for queries.

        The request has one query for all documents, or one query for each document. In the second
        case, each input of the job is a pair of a query and a document.
        """
        queries = self.read_texts(request, names.QUERY, options)
        documents = self._read_documents(request, document_tensor, options)
        if len(queries) == 1:
            inputs: list[tuple[str, Any]] = [("document", document) for document in documents]
            return Job(document_tensor, inputs, options, query=queries[0])
        pairs = decode_request.pair_queries(queries, documents)
        return Job(document_tensor, [("pair", pair) for pair in pairs], options)

    def _read_documents(
        self,
        request: Any,  # noqa: ANN401
        tensor_name: str,
        options: dict[str, Any],
    ) -> Sequence[str | bytes]:
        """Return the documents of a request. A text is a str, and an image is bytes.

        The tensor `documents` contains texts. Each element of the tensor `parts` is JSON with a
        text or an image.
        """
        if tensor_name == names.DOCUMENTS:
            return self.read_texts(request, names.DOCUMENTS, options)
        parts = decode_request.decode_texts(self.read_array(request, names.PARTS), names.PARTS)
        return [decode_request.parse_document(part, index) for index, part in enumerate(parts)]

    def _classify_job(self, request: Any, options: dict[str, Any]) -> Job:  # noqa: ANN401
        """Convert a request to a job that classifies texts or their tokens.

        The key `kind` of the job's options is set here. A client cannot set this key.
        """
        assert self.child is not None
        kinds = self.child.info["kinds"]
        kind = "token_classify" if "token_classify" in kinds else "classify"
        inputs = [("text", text) for text in self.read_texts(request, names.TEXTS, options)]
        return Job(names.TEXTS, inputs, options | {"kind": kind})

    def build_outputs(self, outcome: Outcome) -> Tensors:
        """Return the output tensors of a finished job."""
        outputs: Tensors = {names.NUM_TOKENS: outcome.num_tokens}
        if outcome.kind == "score":
            return outputs | {names.SCORES: outcome.values}
        outputs[names.PROBABILITIES] = outcome.values
        if outcome.kind == "token_classify":
            outputs[names.OFFSETS] = outcome.offsets
        return outputs
