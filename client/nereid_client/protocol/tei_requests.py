"""Request bodies of `POST /predict` and `POST /decode`, in TEI's format."""

from typing import Any, Literal, Self

from pydantic import model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.embedding_requests import ModelInputs, RequestWithParameters
from nereid_client.protocol.request_body import RequestBody, check_token_ids


class PredictRequest(RequestWithParameters):
    """The body of `POST /predict`."""

    inputs: Any = None
    """A text, or a list of lists that each contain one text."""
    raw_scores: bool | None = None
    """Whether scores are returned without the activation function."""
    aggregation_strategy: Literal["none", "simple"] | None = None
    """For classifiers of tokens: `simple`, the default, joins neighbouring tokens with the same
    label. `none` returns each labelled token."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        """Check that `inputs` is a text, or a list in which each member is a list with one text."""
        items = self.inputs if self.is_batch else [self.inputs]
        for item in items:
            text = item[0] if isinstance(item, list) and len(item) == 1 else item
            if not isinstance(text, str):
                raise FieldError(
                    "inputs",
                    "inputs must be a text, or a list of lists that each contain one text, but the "
                    f"request has {shown(item)}. Send pairs of texts to /rerank or /v1/score.",
                )
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the response contains a list of results instead of one result."""
        return isinstance(self.inputs, list) and any(isinstance(i, list) for i in self.inputs)

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensor of the classifier."""
        items = self.inputs if self.is_batch else [self.inputs]
        texts = [item[0] if isinstance(item, list) else item for item in items]
        return ModelInputs({"texts": texts}, {"texts": "inputs"})


class DecodeRequest(RequestBody):
    """The body of `POST /decode`."""

    ids: Any = None
    """A list of token ids, or a list of such lists."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. The default is true."""

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for place, ids in self._named_lists():
            check_token_ids(ids, "ids", place)
        return self

    @property
    def lists(self) -> list[list[int]]:
        """The lists of token ids."""
        return [ids for _, ids in self._named_lists()]

    def _named_lists(self) -> list[tuple[str, Any]]:
        """For each list of token ids in the body, return the path and the list.

        Example: {"ids": [[1, 2], [3]]} returns [("ids[0]", [1, 2]), ("ids[1]", [3])].
        """
        if isinstance(self.ids, list) and self.ids and isinstance(self.ids[0], list):
            return [(f"ids[{index}]", ids) for index, ids in enumerate(self.ids)]
        return [("ids", self.ids)]
