# SPDX-License-Identifier: Apache-2.0
"""The Triton model `embedding`. It converts texts, token ids or images to vectors."""

import json
from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import triton_api
from nereid_backend.serving.pooling import decode_request
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_stub import PoolingStub
from nereid_backend.serving.triton_api import Tensors


class EmbeddingModel(PoolingStub):
    """The stub of the Triton model `embedding`."""

    kind = names.EMBEDDING
    tasks = ("embed",)
    input_names = (names.TEXTS, names.INPUT_IDS, names.PARTS)
    option_types = decode_request.EMBEDDING_OPTIONS

    def read_job(self, request: Any, given: list[str], options: dict[str, Any]) -> Job:  # noqa: ANN401
        """Convert `request` to a job.

        Args:
            request: the server's request.
            given: the names of the input tensors that the request contains.
            options: the options of the request.

        Raises:
            RequestError: an input is missing or wrong.
        """
        if len(given) != 1:
            given_names = " and ".join(given) or "none of them"
            raise RequestError(
                f"{names.TEXTS}: a request must have exactly one of {names.TEXTS}, "
                f"{names.INPUT_IDS} and {names.PARTS}, but it has {given_names}."
            )
        (tensor_name,) = given
        if tensor_name != names.INPUT_IDS and triton_api.has_tensor(request, names.INPUT_LENGTHS):
            raise RequestError(
                f"{names.INPUT_LENGTHS}: the lengths belong to {names.INPUT_IDS}, but the request "
                f"has {tensor_name}. Leave the lengths out."
            )
        return Job(tensor_name, self._read_inputs(request, tensor_name, options), options)

    def _read_inputs(
        self,
        request: Any,  # noqa: ANN401
        tensor_name: str,
        options: Mapping[str, Any],
    ) -> list[tuple[str, Any]]:
        """Return the inputs in a tensor. Each input is a pair of a name and a value.

        Examples of an input in each of the tensors:

            texts        ("text", "Hello")
            parts        ("part", {"text": "A cat", "image": b"..."})
            input_ids    ("token_ids", [5, 6, 7])
        """
        match tensor_name:
            case names.TEXTS:
                return [("text", text) for text in self.read_texts(request, names.TEXTS, options)]
            case names.PARTS:
                return [("part", part) for part in self._read_parts(request)]
            case _:
                return [("token_ids", ids) for ids in self._read_token_ids(request, options)]

    def _read_parts(self, request: Any) -> list[dict[str, str | bytes]]:  # noqa: ANN401
        """Parse the tensor `parts`. Each element is JSON with a text, an image or both."""
        texts = decode_request.decode_texts(self.read_array(request, names.PARTS), names.PARTS)
        return [decode_request.parse_part(text, index) for index, text in enumerate(texts)]

    def _read_token_ids(self, request: Any, options: Mapping[str, Any]) -> list[list[int]]:  # noqa: ANN401
        """Return one list of token ids for each input.

        The tensor `input_ids` contains the token ids of all inputs, and the tensor `input_lengths`
        contains the number of token ids of each input. Without lengths, there is one input.
        """
        # `read_array` is not used for `input_ids`. It limits the number of elements to the largest
        # number of inputs, but `input_ids` contains several elements for each input.
        ids = triton_api.array(request, names.INPUT_IDS)
        lengths = None
        if triton_api.has_tensor(request, names.INPUT_LENGTHS):
            lengths = self.read_array(request, names.INPUT_LENGTHS)
        max_len = self.text_limit.max_model_len
        truncate = options.get("truncate", False)
        return decode_request.split_token_ids(ids, lengths, max_len, truncate=truncate)

    def build_outputs(self, outcome: Outcome) -> Tensors:
        """Return the output tensors of a finished job.

        All kinds of embeddings have the number of tokens of each input. Sparse embeddings are JSON
        texts, such as `{"indices": [7, 9], "values": [0.3, 0.5]}`. Dense and multi-vector
        embeddings are one array.
        """
        outputs: Tensors = {names.NUM_TOKENS: outcome.num_tokens}
        if outcome.kind == "sparse":
            rows = [
                json.dumps({"indices": ids.tolist(), "values": weights.tolist()})
                for ids, weights in outcome.weights
            ]
            return outputs | {names.SPARSE: triton_api.strings(*rows)}
        outputs[names.EMBEDDINGS] = outcome.values
        if outcome.kind == "multi_vector":
            # The array contains the vectors of all inputs, so clients need the number of vectors of
            # each input.
            outputs[names.NUM_VECTORS] = outcome.counts
        return outputs
