"""Bodies of the embedding and rerank requests: the shapes of OpenAI, vLLM, Jina, Cohere and TEI.

Fields that are not listed here are ignored, as those servers do.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import shown

_MAX_TOKEN_ID = 2**31 - 1  # `input_ids` is INT32
_CONTENT_PARTS = ("text", "image", "image_url")


class PoolingRequest(BaseModel):
    """What all of them have in common."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    user: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_direction: str | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _the_models_limit_alone(cls, value: int | None) -> int | None:
        if value not in (None, -1):
            raise ValueError(f"must be -1, which cuts at the model's limit, got {value}")
        return value

    @field_validator("truncation_direction")
    @classmethod
    def _the_end_alone(cls, value: str | None) -> str | None:
        if value is not None and value.lower() != "right":
            raise ValueError(f"must be 'right': texts are cut at their end, got {shown(value)}")
        return value

    @property
    def cuts(self) -> bool | None:
        """Whether a text that is too long is cut instead of refused; None: not said."""
        return True if self.truncate_prompt_tokens is not None else self.truncate


class EmbeddingOptions(PoolingRequest):
    """How an embedding is made."""

    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in ("prompt_name", "prompt", "instruction") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: give one of prompt_name, prompt and instruction alone")
        return self

    def options(self) -> dict[str, Any]:
        """The input `options` of the model `embedding`."""
        return {
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "prompt_name": self.prompt_name,
            "prompt": self.prompt or self.instruction,
            "truncate": self.cuts,
        }


class EmbeddingRequest(EmbeddingOptions):
    """The body of `POST /v1/embeddings`."""

    input: Any = Field(...)
    encoding_format: Literal["float", "base64"] | None = "float"
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class VectorsRequest(EmbeddingOptions):
    """The body of `POST /pooling`: vLLM's words for what is wanted."""

    input: Any = Field(...)
    encoding_format: Literal["float", "base64"] | None = "float"
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    task: Literal["embed", "token_embed"] | None = None


class TeiEmbedRequest(EmbeddingOptions):
    """The body of TEI's `POST /embed`, `/embed_all` and `/embed_sparse`."""

    inputs: Any = Field(...)


class CohereEmbedRequest(BaseModel):
    """The body of Cohere's `POST /v2/embed`. Its texts are cut at the model's limit by default."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering", "image"] | None
    ) = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal["NONE", "END"] | None = None

    @model_validator(mode="after")
    def _one_kind_of_input(self) -> Self:
        given = [name for name in COHERE_INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{given[1] if given else 'texts'}: give one of texts, images, inputs")
        return self

    @property
    def field(self) -> str:
        """The name under which the input came."""
        return next(name for name in COHERE_INPUTS if getattr(self, name) is not None)

    @property
    def input(self) -> list[Any]:
        """Texts, or content parts.

        Raises: ValueError for an input that is not one part; several make no one vector here.
        """
        if self.inputs is None:
            return [{"image": image} for image in self.images] if self.images else self.texts or []
        parts = []
        for at, given in enumerate(self.inputs):
            content = given.get("content")
            if not isinstance(content, list) or len(content) != 1:
                raise ValueError(
                    f"inputs: element {at} must have a content of one part, got {shown(content)}"
                )
            parts.append(content[0])
        return parts

    def options(self, prompts: Iterable[str]) -> EmbeddingOptions:
        """The same in this server's words.

        Args:
            prompts: names of the model's prompts, of which `input_type` may be one.
        """
        names = (self.input_type or "", (self.input_type or "").removeprefix("search_"))
        return EmbeddingOptions(
            dimensions=self.output_dimension,
            prompt_name=next((name for name in names if name in prompts), None),
            truncate=self.truncate != "NONE",
        )


COHERE_INPUTS = ("texts", "images", "inputs")


class RerankRequest(PoolingRequest):
    """The body of every rerank route; `texts` instead of `documents` is TEI's shape.

    `format` says whose answer is wanted; see docs/embeddings.md.
    """

    query: Any = Field(...)
    documents: list[Any] | None = None
    texts: list[str] | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None
    instruction: str | None = None
    instruct: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_query: Annotated[int, Field(ge=1)] | None = None
    format: Literal["jina", "cohere", "sglang", "tei"] | None = None

    @field_validator("query")
    @classmethod
    def _a_text(cls, value: object) -> str:
        return text_of(value, "a query")

    @field_validator("documents")
    @classmethod
    def _texts(cls, value: list[Any] | None) -> list[str] | None:
        if value is None:
            return None
        return [text_of(item, f"document {index}") for index, item in enumerate(value)]

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("documents: is required (or, in TEI's shape, texts), one of the two")
        return self

    @property
    def items(self) -> Sequence[str]:
        """What is to be ranked."""
        return (self.documents if self.documents is not None else self.texts) or []

    def options(self) -> dict[str, Any]:
        """The input `options` of the model `rerank`."""
        is_raw = self.raw_scores or self.use_activation is False
        return {
            "activation": "none" if is_raw else None,
            "instruction": self.instruction or self.instruct,
            "truncate": bool(self.max_tokens_per_doc or self.max_tokens_per_query) or self.cuts,
        }


class ScoreRequest(PoolingRequest):
    """The body of `POST /v1/score`: vLLM's, in its three generations of names."""

    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    use_activation: bool | None = None
    instruction: str | None = None

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        left, right = self.sides
        for name, value in (left, right):
            if value is None:
                raise ValueError(f"{name}: is required")
            if value == []:
                raise ValueError(f"{name}: must not be an empty list")
        if len(self.left) not in (1, len(self.right)):
            raise ValueError(
                f"{left[0]}: must be one text, or as many as {right[0]} has "
                f"({len(self.right)}), got {len(self.left)}"
            )
        return self

    @property
    def sides(self) -> tuple[tuple[str, Any], tuple[str, Any]]:
        """The names that were used, and what they hold."""
        for names in (("queries", "documents"), ("data_1", "data_2")):
            if any(getattr(self, name) is not None for name in names):
                return tuple((name, getattr(self, name)) for name in names)  # type: ignore[return-value]
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
    inputs: Any = None
    use_activation: bool | None = None

    @model_validator(mode="after")
    def _some_texts(self) -> Self:
        if not self.texts:
            raise ValueError("input: must be a text or a list of at least one")
        return self

    @property
    def texts(self) -> list[str]:
        """What is to be classified."""
        value = self.input if self.input is not None else self.inputs
        return [] if value is None else _texts_of("input", value)


def text_of(value: object, what: str) -> str:
    """A text, or the text of a content part: `{"text": ...}`, alone or in a list of one.

    Raises: ValueError.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        if isinstance(value.get("content"), list):  # vLLM's ScoreMultiModalParam
            return text_of(value["content"], what)
        value = value.get("text")
    if not isinstance(value, str):
        raise ValueError(f'{what} must be a text or {{"text": ...}}, got {shown(value)}')
    return value


def read_inputs(value: object, field: str) -> dict[str, list[Any]]:
    """The tensors for what a body holds as input: a text, token ids, a content part, or several.

    Returns:
        `texts`, `input_ids` with `input_lengths`, or `parts`, and the values.

    Raises: ValueError when it is none of the kinds the API knows; the message begins with `field`.
    """
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(
            f"{field}: must be a string, token ids, a content part or a list of those, "
            f"got {shown(value)}"
        )
    if not value:
        raise ValueError(f"{field}: must not be an empty list")
    if all(isinstance(item, str) for item in value):
        return {"texts": value}
    if _is_token_id(value[0]):
        value = [value]
    if isinstance(value[0], list):
        lists = [_token_ids(item, f"{field}: element {at}") for at, item in enumerate(value)]
        flat = [token for ids in lists for token in ids]
        return {"input_ids": flat, "input_lengths": [len(ids) for ids in lists]}
    return {"parts": [_part(item, f"{field}: element {at}") for at, item in enumerate(value)]}


def _part(value: object, where: str) -> dict[str, str]:
    """`{"text": ...}` or `{"image": ...}`, from those, a string or OpenAI's content parts."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a text or a content part, got {shown(value)}")
    given = [name for name in _CONTENT_PARTS if value.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"{where} must have exactly one of text and image, got {shown(value)}")
    content = value[given[0]]
    if given[0] == "image_url" and isinstance(content, dict):
        content = content.get("url")
    if not isinstance(content, str):
        raise ValueError(f"{where}: {given[0]} must be a string, got {shown(content)}")
    return {"text" if given[0] == "text" else "image": content}


def _token_ids(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list of at least one token id, got {shown(value)}")
    for token in value:
        if not _is_token_id(token):
            raise ValueError(
                f"{where}: a token id is an integer from 0 to {_MAX_TOKEN_ID}, got {shown(token)}"
            )
    return value


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _texts_of(name: str, value: object) -> list[str]:
    if isinstance(value, list):
        return [text_of(item, f"{name}: element {at}") for at, item in enumerate(value)]
    return [text_of(value, f"{name}: it")]
