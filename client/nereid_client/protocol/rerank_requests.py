"""Request bodies of the rerank, score and classify routes.

They have the formats of vLLM, Jina, Cohere, SGLang and TEI. Fields that are not declared here are
ignored, as those servers do.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.embedding_requests import PoolingRequest


class RerankRequest(PoolingRequest):
    """The body of every rerank route. TEI's format has `texts` instead of `documents`."""

    query: Any = Field(...)
    """The text that the documents are compared with."""
    documents: list[Any] | None = None
    """The texts to rank."""
    texts: list[str] | None = None
    """TEI's name of documents."""
    top_n: Annotated[int, Field(ge=0)] | None = None
    """The number of documents to return. 0 returns all."""
    return_documents: bool | None = None
    """Whether the response repeats the documents."""
    return_text: bool | None = None
    """TEI's name of return_documents."""
    raw_scores: bool | None = None
    """Whether scores are returned without the activation function (TEI)."""
    use_activation: bool | None = None
    """False returns scores without the activation function (vLLM)."""
    instruction: str | None = None
    """What the reranker should judge, for models that read an instruction."""
    instruct: str | None = None
    """Another name of instruction."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Must be at least the model's limit, because texts are cut there and not before."""
    max_tokens_per_query: Annotated[int, Field(ge=1)] | None = None
    """Must be at least the model's limit, because texts are cut there and not before."""
    format: Literal["jina", "cohere", "sglang", "tei"] | None = None
    """The format of the response. The default depends on the route."""

    @field_validator("query")
    @classmethod
    def _check_query(cls, value: object) -> str:
        return text_of(value, "query", "query")

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, value: list[Any] | None) -> list[str] | None:
        if value is None:
            return None
        return [text_of(one, "documents", f"documents[{at}]") for at, one in enumerate(value)]

    @model_validator(mode="after")
    def _check_one_list(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            found = "neither" if self.documents is None else "both"
            raise FieldError(
                "documents",
                f"A request must have one of the fields documents and texts, but it has {found}.",
            )
        return self

    @property
    def items(self) -> Sequence[str]:
        """The texts to rank."""
        return (self.documents if self.documents is not None else self.texts) or []

    def options(self) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the Triton model `rerank`."""
        is_raw = self.raw_scores or self.use_activation is False
        return {
            "activation": "none" if is_raw else None,
            "instruction": self.instruction or self.instruct,
            "truncate": bool(self.max_tokens_per_doc or self.max_tokens_per_query) or self.cuts,
        }


class ScoreRequest(PoolingRequest):
    """The body of `POST /v1/score`, with the three pairs of names that vLLM has had.

    The left side is one query or as many queries as there are documents on the right side.
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
    use_activation: bool | None = None
    """False returns scores without the activation function."""
    instruction: str | None = None
    """What the reranker should judge, for models that read an instruction."""

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        """Check that both sides have texts, and that their numbers match."""
        for name, value in self.sides:
            if value is None:
                raise FieldError(name, f"{name} is required, but the request does not contain it")
            if value == []:
                raise FieldError(name, f"{name} must not be an empty list")
        left_name, right_name = self.sides[0][0], self.sides[1][0]
        if len(self.left) not in (1, len(self.right)):
            raise FieldError(
                left_name,
                f"{left_name} must have one text, or as many texts as {right_name}, but the "
                f"request has {len(self.left)} and {len(self.right)} texts",
            )
        return self

    @property
    def sides(self) -> tuple[tuple[str, Any], tuple[str, Any]]:
        """The two fields with the texts of the pairs as (name, value), the left one first."""
        for names in (("queries", "documents"), ("data_1", "data_2")):
            if any(getattr(self, name) is not None for name in names):
                left, right = names
                return (left, getattr(self, left)), (right, getattr(self, right))
        return ("text_1", self.text_1), ("text_2", self.text_2)

    @property
    def left(self) -> list[str]:
        """The queries."""
        return _texts_of(*self.sides[0])

    @property
    def right(self) -> list[str]:
        """The documents."""
        return _texts_of(*self.sides[1])


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
        if not self.texts:
            raise FieldError("input", "input must be a text or a list of at least one text")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts to classify."""
        value = self.input if self.input is not None else self.inputs
        return [] if value is None else _texts_of("input", value)


def text_of(value: object, field: str, place: str) -> str:
    """Return a text, or the text of a content part.

    Examples: "a", {"text": "a"}, [{"text": "a"}] and vLLM's {"content": [{"text": "a"}]} all
    return "a".

    Args:
        value: a member of the request.
        field: the name of the request field, for the error.
        place: the path of the member, such as "documents[2]", for the error message.

    Raises: FieldError if the value has another form.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        if isinstance(value.get("content"), list):
            return text_of(value["content"], field, place)
        value = value.get("text")
    if not isinstance(value, str):
        raise FieldError(
            field,
            f'{place} must be a string or {{"text": ...}}, but the request has {shown(value)}',
        )
    return value


def _texts_of(field: str, value: object) -> list[str]:
    if isinstance(value, list):
        return [text_of(item, field, f"{field}[{at}]") for at, item in enumerate(value)]
    return [text_of(value, field, field)]
