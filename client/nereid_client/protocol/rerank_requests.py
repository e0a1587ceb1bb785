"""Request bodies of the rerank, score and classify routes.

The bodies have the formats of vLLM, Jina, Cohere, SGLang and TEI. Fields that are not declared here
are ignored, as on the servers that define these formats.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.content_parts import content_part, refuse_videos_and_audio
from nereid_client.protocol.embedding_requests import (
    ModelInputs,
    PoolingRequest,
    RequestWithParameters,
)
from nereid_client.protocol.request_body import RequestBody

Document = str | dict[str, str]
"""A document: a text, or an image as `{"image": ...}`."""


class ScoringRequest(PoolingRequest):
    """The fields that rerank and score requests have in common."""

    use_activation: bool | None = None
    """False returns scores without the activation function (vLLM)."""
    instruction: str | None = None
    """The instruction of a reranker that reads one, such as "Judge the relevance of the text"."""
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    """The number of tokens at which a text is cut. Only the model's limit and larger values are
    supported. 0 means no limit (vLLM)."""
    max_tokens_per_query: Annotated[int, Field(ge=0)] | None = None
    """The number of tokens at which a text is cut. Only the model's limit and larger values are
    supported. 0 means no limit (vLLM)."""

    @property
    def truncates(self) -> bool | None:
        """Whether the server truncates texts that are too long. None means the server's default."""
        return bool(self.max_tokens_per_doc or self.max_tokens_per_query) or super().truncates


class RerankRequest(ScoringRequest):
    """The body of a rerank request. In TEI's format, the field `texts` contains the documents."""

    query: Any = Field(...)
    """The text that the documents are compared with."""
    documents: list[Any] | None = None
    """The texts or images to rank. A vision-language model is needed for images, each of which is
    `{"image": ...}` or a content part of OpenAI's format."""
    texts: list[str] | None = None
    """TEI's name of documents."""
    top_n: Annotated[int, Field(ge=0)] | None = None
    """The number of documents to return. 0 returns all."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Voyage's name of top_n, which takes precedence. If the body has this field, even with the
    value null, the response also contains the results in the member `data`."""
    return_documents: bool | None = None
    """Whether the response repeats the documents."""
    return_text: bool | None = None
    """TEI's name of return_documents."""
    raw_scores: bool | None = None
    """Whether scores are returned without the activation function (TEI)."""
    instruct: str | None = None
    """Another name of instruction."""
    format: Literal["jina", "cohere", "sglang", "tei"] | None = None
    """The format of the response. The default depends on the route."""

    @field_validator("query")
    @classmethod
    def _check_query(cls, value: object) -> str:
        return text_of(value, "query", "query")

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: list[Any] | None) -> list[Document] | None:
        return None if value is None else _documents_of("documents", value)

    @model_validator(mode="after")
    def _check_ranked_texts(self) -> Self:
        """Check that the request has either documents or texts, and that the list is not empty."""
        given_fields = [name for name in ("documents", "texts") if getattr(self, name) is not None]
        if len(given_fields) != 1:
            given = "both of them" if given_fields else "neither of them"
            raise FieldError(
                "documents",
                f"Exactly one of documents and texts is required, but the request has {given}",
            )
        if not self.ranked_documents:
            field = given_fields[0]
            raise FieldError(field, f"{field} must not be an empty list")
        return self

    @property
    def max_results(self) -> int | None:
        """The number of documents to return. None or 0 returns all."""
        return self.top_k if self.top_n is None else self.top_n

    @property
    def ranked_documents(self) -> list[Document]:
        """The texts or images to rank, from the field `documents` or `texts`."""
        documents: list[Document] | None = self.documents
        return [*self.texts] if self.texts is not None else documents or []

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensors of the reranker: the query and the documents to rank."""
        field = "documents" if self.texts is None else "texts"
        return _pair_inputs([self.query], self.ranked_documents, "query", field)

    def options(self) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the model `rerank`."""
        is_raw = self.raw_scores or self.use_activation is False
        return {
            "activation": "none" if is_raw else None,
            "instruction": self.instruction or self.instruct,
            "truncate": self.truncates,
        }


class RankingRequest(PoolingRequest):
    """The body of `POST /v1/ranking`, in the format of NVIDIA NIM."""

    query: Any = Field(...)
    """The text that the passages are compared with, as `{"text": ...}` or as a string."""
    passages: Annotated[list[Any], Field(min_length=1)]
    """The texts to rank, each as `{"text": ...}` or as a string."""

    @property
    def texts(self) -> list[str]:
        """The texts in the passages."""
        return [text_of(one, "passages", f"passages[{at}]") for at, one in enumerate(self.passages)]

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        _ = self.model_inputs  # raises a FieldError if a text is wrong
        return self

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensors of the reranker: the query and the passages."""
        query = text_of(self.query, "query", "query")
        return ModelInputs(
            {"query": [query], "documents": self.texts},
            {"query": "query", "documents": "passages"},
        )


class SimilarityInputs(RequestBody):
    """The field `inputs` of a request to `POST /similarity`."""

    source_sentence: str
    """The text that the sentences are compared with."""
    sentences: Annotated[list[str], Field(min_length=1)]
    """The texts to compare."""


class SimilarityRequest(RequestWithParameters):
    """The body of `POST /similarity`, in TEI's format."""

    inputs: SimilarityInputs
    """An object with the text `source_sentence` and the list of texts `sentences`."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint. The prompt is prepended to each text."""


class ScoreRequest(ScoringRequest):
    """The body of `POST /v1/score`.

    The field for the queries and the field for the documents have several names, because versions
    of vLLM use different names. A request has either one query for all documents, or one query for
    each document.
    """

    text_1: Any = None
    """The queries: a text or a list of texts."""
    text_2: Any = None
    """The documents: a text or a list of texts."""
    data_1: Any = None
    """Another name of text_1."""
    data_2: Any = None
    """Another name of text_2."""
    queries: Any = None
    """Another name of text_1."""
    documents: Any = None
    """Another name of text_2."""
    items: Any = None
    """Another name of text_2."""

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Check that there are documents, and either a single query or one query per document."""
        for name in (self.query_field, self.document_field):
            value = getattr(self, name)
            if value is None:
                raise FieldError(name, f"{name} is required, but the request does not contain it")
            if value == []:
                raise FieldError(name, f"{name} must not be an empty list")
        num_queries = len(self.query_texts)
        num_documents = len(self.scored_documents)
        if num_queries not in (1, num_documents):
            raise FieldError(
                self.query_field,
                f"{self.query_field} must contain one text, or one text for each text in "
                f"{self.document_field}. The request has {num_queries} texts in {self.query_field} "
                f"and {num_documents} texts in {self.document_field}.",
            )
        return self

    @property
    def query_field(self) -> str:
        """The name of the field that contains the queries: "queries", "data_1" or "text_1"."""
        if any(value is not None for value in (self.queries, self.documents, self.items)):
            return "queries"
        return "text_1" if self.data_1 is None and self.data_2 is None else "data_1"

    @property
    def document_field(self) -> str:
        """The name of the field that contains the documents, such as "documents" or "text_2"."""
        if self.query_field == "queries":
            has_only_items = self.documents is None and self.items is not None
            return "items" if has_only_items else "documents"
        return self.query_field.replace("1", "2")

    @property
    def query_texts(self) -> list[str]:
        """The texts of the queries."""
        return _texts_of(self.query_field, getattr(self, self.query_field))

    @property
    def scored_documents(self) -> list[Document]:
        """The texts or images of the documents."""
        return _documents_of(self.document_field, getattr(self, self.document_field))

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensors of the reranker: the queries and the documents."""
        return _pair_inputs(
            self.query_texts, self.scored_documents, self.query_field, self.document_field
        )

    @property
    def embedding_inputs(self) -> ModelInputs:
        """The input tensor of an embedding model: the queries, followed by the documents."""
        inputs: list[Document] = [*self.query_texts, *self.scored_documents]
        name, values = document_tensor(inputs, "texts")
        return ModelInputs({name: values}, {name: self.document_field})


class ClassifyRequest(PoolingRequest):
    """The body of `POST /classify`."""

    input: Any = None
    """The texts to classify: a text or a list of texts."""
    inputs: Any = None
    """Another name of input."""
    use_activation: bool | None = None
    """False returns logits instead of probabilities."""

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Check that the request contains at least one text."""
        if not self.model_inputs.tensors["texts"]:
            raise FieldError("input", "input must be a text or a list of at least one text")
        return self

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensor of the classifier: the texts of the field `input` or `inputs`."""
        field = "inputs" if self.input is None else "input"
        value = getattr(self, field)
        texts = [] if value is None else _texts_of(field, value)
        return ModelInputs({"texts": texts}, {"texts": field})


def text_of(value: object, field: str, place: str) -> str:
    """Return the text that `value` contains. `value` is a string or a content part.

    Examples: "a", {"text": "a"}, [{"text": "a"}] and vLLM's {"content": [{"text": "a"}]} all
    return "a".

    Args:
        value: the value in the request.
        field: the name of the request field that contains the value, such as "documents".
        place: the path of the value for the error message, such as "documents[2]".

    Raises: FieldError if the value has another form.
    """
    content = _unwrap_content(value)
    part = _unwrap_list_of_one(content)
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise FieldError(
            field,
            f'{place} must be a string or {{"text": ...}}, but the request has {shown(content)}',
        )
    return text


def _unwrap_content(value: object) -> object:
    """If `value` has vLLM's format {"content": [...]}, return the list. Otherwise, return `value`.

    Example: {"content": [{"text": "a"}]} returns [{"text": "a"}].
    """
    # A client can nest thousands of objects. A loop unwraps them, because recursion would exceed
    # Python's recursion limit.
    part = _unwrap_list_of_one(value)
    while isinstance(part, dict) and isinstance(part.get("content"), list):
        value = part["content"]
        part = _unwrap_list_of_one(value)
    return value


def _unwrap_list_of_one(value: object) -> object:
    """If `value` is a list with one item, return this item. Otherwise, return `value`."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _texts_of(field: str, value: object) -> list[str]:
    """Convert the value of a field to a list of texts. The value is one text or a list of texts."""
    if isinstance(value, list):
        return [text_of(item, field, f"{field}[{at}]") for at, item in enumerate(value)]
    return [text_of(value, field, field)]


def document_tensor(documents: Sequence[Document], name: str) -> tuple[str, list[str]]:
    """Return the name and the values of the input tensor that contains the documents.

    Examples: ["a"] and the name "texts" return ("texts", ["a"]). ["a", {"image": "data:"}] returns
    ("parts", ['{"text": "a"}', '{"image": "data:"}']).
    """
    texts = [document for document in documents if isinstance(document, str)]
    if len(texts) == len(documents):
        return name, texts
    parts = [{"text": one} if isinstance(one, str) else one for one in documents]
    return "parts", [json.dumps(part, ensure_ascii=False) for part in parts]


def _pair_inputs(
    queries: list[str], documents: Sequence[Document], query_field: str, document_field: str
) -> ModelInputs:
    """Convert queries and documents to the input tensors of a reranker."""
    name, values = document_tensor(documents, "documents")
    return ModelInputs(
        {"query": queries, name: values}, {"query": query_field, name: document_field}
    )


def _documents_of(field: str, value: object) -> list[Document]:
    """Convert the value of a field to a list of documents. The value is one document or a list."""
    if isinstance(value, list):
        return [_document_of(item, field, f"{field}[{at}]") for at, item in enumerate(value)]
    return [_document_of(value, field, field)]


def _document_of(value: object, field: str, place: str) -> Document:
    """Convert a value to a document: a text, or an image as `{"image": ...}`.

    The value is a string or a content part. An error names the request's `field`, and the `place`
    of the value in this field, such as "documents[2]".

    Examples: {"type": "text", "text": "a"} returns "a". {"type": "image_url", "image_url": {"url":
    "data:"}} returns {"image": "data:"}.
    """
    part = _unwrap_list_of_one(_unwrap_content(value))
    if not isinstance(part, dict):
        return text_of(value, field, place)
    refuse_videos_and_audio(part, field, place)
    has_image = "image" in part or "image_url" in part
    if not has_image:
        return text_of(value, field, place)
    content = content_part(part, field, place)  # {"image": ...}, and the key "text" if given
    if "text" in content:
        raise FieldError(
            field, f"{place} has both a text and an image, but a document must be one of them"
        )
    return content
