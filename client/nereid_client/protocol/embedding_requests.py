"""Request bodies of the embedding routes, in the formats of OpenAI, vLLM, Cohere and TEI.

Fields that are not declared here are ignored, as on the servers that define these formats.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.content_parts import content_part
from nereid_client.protocol.request_body import RequestBody, check_token_ids


@dataclass(frozen=True)
class ModelInputs:
    """The input tensors for an embedding model or a reranker.

    Attributes:
        tensors: maps the name of a tensor to its values.
        fields: maps the name of a tensor or an option to the request field that contains its value.
            If an error of the model names the tensor, the error response names the field instead.
    """

    tensors: Mapping[str, Sequence[Any]]
    fields: Mapping[str, str]


class PoolingRequest(RequestBody):
    """The fields that all requests to an embedding model or reranker have in common."""

    model: str | None = None
    """The name of the model, as listed by /v1/models. It may be left out."""
    user: str | None = None
    """A label for the caller's own use. It has no effect."""
    truncate: bool | str | None = None
    """Whether the server cuts the end of texts that are too long. By default, such a text is an
    error. `END` means true, and `NONE` means false (NIM)."""
    truncation: bool | None = None
    """Voyage's name of truncate, which takes precedence."""
    truncate_prompt_tokens: int | None = None
    """-1 cuts texts at the model's limit. Other values are not supported."""
    truncation_direction: str | None = None
    """Only "right" is supported: texts are cut at their end."""

    @field_validator("truncate")
    @classmethod
    def _check_truncate(cls, value: bool | str | None) -> bool | str | None:
        if isinstance(value, str) and value not in ("NONE", "END"):
            raise FieldError(
                "truncate",
                'truncate must be true, false, "NONE" or "END", but the request has '
                f"{shown(value)}. Nereid can remove only the end of a text.",
            )
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncate_prompt_tokens(cls, value: int | None) -> int | None:
        if value not in (None, -1):
            raise FieldError(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens must be -1, which cuts texts at the model's limit, but the "
                f"request has {value}",
            )
        return value

    @field_validator("truncation_direction")
    @classmethod
    def _check_truncation_direction(cls, value: str | None) -> str | None:
        if value is not None and value.lower() != "right":
            raise FieldError(
                "truncation_direction",
                'truncation_direction must be "right", but the request has '
                f"{shown(value)}. Nereid can remove only the end of a text.",
            )
        return value

    @property
    def truncates(self) -> bool | None:
        """Whether the server truncates texts that are too long. None means the server's default."""
        if self.truncate_prompt_tokens is not None:
            return True
        if self.truncate is None:
            return self.truncation
        return self.truncate == "END" if isinstance(self.truncate, str) else self.truncate


class RequestWithParameters(PoolingRequest):
    """A request that can contain its fields in the body or in the object `parameters`."""

    parameters: dict[str, Any] | None = None
    """An object with further fields of the request, such as `{"truncate": true}`."""

    @model_validator(mode="before")
    @classmethod
    def _add_parameters(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Add the members of `parameters` to the body.

        If the body and `parameters` contain the same field, the field of the body is used. Example:
        {"inputs": "a", "parameters": {"truncate": true}} gets the field "truncate".
        """
        parameters = body.get("parameters")
        return {**parameters, **body} if isinstance(parameters, dict) else body


class EmbeddingOptions(PoolingRequest):
    """The fields that all embedding requests have in common."""

    dimensions: Annotated[int, Field(ge=1)] | None = None
    """The number of dimensions of the returned vectors. The other dimensions are cut off."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint. The prompt is prepended to each text."""
    prompt: str | None = None
    """A text that is prepended to each text."""
    instruction: str | None = None
    """Another name of prompt."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        given = [name for name in ("prompt_name", "prompt", "instruction") if getattr(self, name)]
        if len(given) > 1:
            raise FieldError(
                given[1],
                "Only one of prompt_name, prompt and instruction is allowed, but the request has "
                f"{' and '.join(given)}",
            )
        return self

    def options(self) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the model `embedding`."""
        return {
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "prompt_name": self.prompt_name,
            "prompt": self.prompt or self.instruction,
            "truncate": self.truncates,
        }


class EmbeddingRequest(EmbeddingOptions):
    """The body of `POST /v1/embeddings`. Validation converts `input` to ModelInputs."""

    input: Any = Field(...)
    """A text, a content part, a list of texts or content parts, a list of token ids, or a list of
    such lists."""
    encoding_format: Literal["float", "base64"] | None = "float"
    """Whether vectors are lists of numbers, or base64 of little-endian float32. With another
    output_dtype, base64 contains one byte for each integer, as in Voyage's API."""
    embed_dtype: Literal["float32"] | None = None
    """Only float32 is supported."""
    endianness: Literal["native", "little"] | None = None
    """The byte order of base64 vectors. Both values mean little-endian."""
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    """The type of the numbers in the vectors (Mistral, Voyage). `int8` and `uint8` scale each
    vector, and keep only its cosine similarities. `binary` and `ubinary` have one bit for each
    number."""
    embedding_type: Literal["float", "base64", "int8", "uint8", "binary", "ubinary"] | None = None
    """Jina's name of output_dtype. `base64` has the meaning of `encoding_format: "base64"`."""
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    """Mistral's and Voyage's name of dimensions."""
    input_type: str | None = None
    """`query` or `passage` selects the checkpoint's prompt of this name, if there is one (NIM)."""
    use_activation: bool | None = None
    """vLLM's newer name of normalize."""
    normalized: bool | None = None
    """Jina's name of normalize."""

    @model_validator(mode="after")
    def _check_dimensions(self) -> Self:
        if self.dimensions is not None and self.output_dimension is not None:
            raise FieldError(
                "output_dimension",
                "Only one of dimensions and output_dimension is allowed, but the request has both "
                "of them",
            )
        return self

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensors of the model."""
        inputs: ModelInputs = self.input  # validation has converted the field
        if self.output_dimension is None:
            return inputs
        # The model reports an error about the option `dimensions`. Rename the option in the error,
        # because the client sent the field `output_dimension`.
        return ModelInputs(inputs.tensors, {**inputs.fields, "dimensions": "output_dimension"})

    def options(self) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the model `embedding`."""
        given = (self.normalize, self.use_activation, self.normalized)
        return {
            **super().options(),
            "dimensions": self.dimensions or self.output_dimension,
            "normalize": next((value for value in given if value is not None), None),
        }

    @property
    def vector_type(self) -> str:
        """The type of the returned vectors, such as "float", "base64", "int8" or "int8 base64"."""
        given = self.output_dtype or self.embedding_type or "float"
        is_base64 = "base64" in (given, self.encoding_format)
        if given in ("float", "base64"):
            return "base64" if is_base64 else "float"
        return f"{given} base64" if is_base64 else given

    def options_for(self, prompts: Iterable[str]) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the model `embedding`.

        If the request contains no prompt, the field input_type selects a prompt of the checkpoint.
        The value "passage" selects the prompt "passage", or the prompt "document" if there is no
        prompt "passage". Without input_type, or if the checkpoint has no such prompt, `prompt_name`
        is None, which selects the checkpoint's default prompt, if there is one.

        Args:
            prompts: the names of the checkpoint's prompts.
        """
        options = self.options()
        if options["prompt_name"] or options["prompt"]:
            return options
        input_type = self.input_type or ""
        names = [input_type, "document"] if input_type == "passage" else [input_type]
        options["prompt_name"] = _first_known_prompt(names, prompts)
        return options

    @field_validator("input")
    @classmethod
    def _read_input(cls, value: object) -> ModelInputs:
        return read_inputs(value, "input")


class VectorsRequest(EmbeddingRequest):
    """The body of `POST /pooling`, in vLLM's format."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    """Whether to return one vector for each text or one for each token, or the probabilities of
    labels for each text or for each token. By default, the model determines the task."""
    use_activation: bool | None = None
    """With a classifier, false returns logits instead of probabilities. With an embedding model,
    this is another name of normalize."""

    @property
    def classifier_options(self) -> dict[str, Any]:
        """The JSON object for the input `options` of a classifier."""
        activation = "none" if self.use_activation is False else None
        return {"activation": activation, "truncate": self.truncates}


class TeiEmbedRequest(EmbeddingOptions):
    """The body of `POST /embed`, `/embed_all` and `/embed_sparse`, in TEI's format.

    Validation converts `inputs` to ModelInputs.
    """

    inputs: Any = Field(...)
    """A text, a content part, a list of texts or content parts, a list of token ids, or a list of
    such lists."""

    @field_validator("inputs")
    @classmethod
    def _read_inputs(cls, value: object) -> ModelInputs:
        return read_inputs(value, "inputs")


class CohereEmbedRequest(RequestBody):
    """The body of `POST /v1/embed` and `/v2/embed`, in Cohere's format.

    By default, texts that are too long are cut.
    """

    model: str | None = None
    """The name of the model, as listed by /v1/models. It may be left out."""
    texts: list[str] | None = None
    """The texts to embed."""
    images: list[str] | None = None
    """The images to embed, as data URLs."""
    inputs: list[dict[str, Any]] | None = None
    """Inputs whose `content` is one text or one image."""
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering", "image"] | None
    ) = None
    """Selects the checkpoint's prompt of this name, if there is one."""
    embedding_types: (
        list[Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]] | None
    ) = None
    """The formats of the vectors in the response."""
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    """The number of dimensions of the returned vectors. The other dimensions are cut off."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The number of tokens at which a text is cut. Only the model's limit and larger values are
    supported."""
    truncate: Literal["NONE", "END"] | None = None
    """`END` cuts texts that are too long. With `NONE`, such a text is an error."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        """Check that exactly one of texts, images and inputs is given and has a valid value."""
        names = ("texts", "images", "inputs")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise FieldError(
                given[1] if given else "texts",
                "Exactly one of texts, images and inputs is required, but the request has "
                f"{' and '.join(given) or 'none of them'}",
            )
        _ = self.model_inputs  # raises a FieldError if an input is wrong
        return self

    @property
    def model_inputs(self) -> ModelInputs:
        """The input tensors for the texts, the images or the content parts of the request."""
        if self.texts is not None:
            inputs = read_inputs(self.texts, "texts")
        elif self.images is not None:
            inputs = read_inputs([{"image": image} for image in self.images], "images")
        else:
            inputs = read_inputs(_only_parts(self.inputs or ()), "inputs")
        return ModelInputs(inputs.tensors, {**inputs.fields, "dimensions": "output_dimension"})

    def options(self, prompts: Iterable[str]) -> dict[str, Any]:
        """Return the JSON object for the input `options` of the model `embedding`.

        The field input_type selects a prompt of the checkpoint. The value "search_query" selects
        the prompt "search_query", or the prompt "query" if there is no prompt "search_query". In
        the same way, "search_document" selects "search_document" or "document". Without input_type,
        or if the checkpoint has no such prompt, `prompt_name` is None, which selects the
        checkpoint's default prompt, if there is one.

        Args:
            prompts: the names of the checkpoint's prompts.
        """
        input_type = self.input_type or ""
        names = (input_type, input_type.removeprefix("search_"))
        return {
            "dimensions": self.output_dimension,
            "prompt_name": _first_known_prompt(names, prompts),
            "truncate": self.truncate != "NONE",
        }


def _first_known_prompt(names: Iterable[str], prompts: Iterable[str]) -> str | None:
    """Return the first name in `names` that is also in `prompts`. If there is none, return None."""
    known_names = [name for name in names if name in prompts]
    return known_names[0] if known_names else None


def _only_parts(inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the content part of each item in Cohere's field `inputs`.

    Example: [{"content": [{"type": "text", "text": "a"}]}] returns [{"type": "text", "text": "a"}].
    """
    parts = []
    for index, member in enumerate(inputs):
        content = member.get("content")
        if not isinstance(content, list) or len(content) != 1:
            raise FieldError(
                "inputs",
                f"inputs[{index}].content must be a list of exactly one part, but the request has "
                f"{shown(content)}. Add one item to the list inputs for each part.",
            )
        parts.append(content[0])
    return parts


def read_inputs(value: object, field: str) -> ModelInputs:
    """Return the input tensors for the texts, content parts or token ids in a request field.

    Examples of the tensors:
        "a"                       -> {"texts": ["a"]}
        [1, 2]                    -> {"input_ids": [1, 2], "input_lengths": [2]}
        [[1, 2], [3]]             -> {"input_ids": [1, 2, 3], "input_lengths": [2, 1]}
        ["a", {"image": "data:"}] -> {"parts": ['{"text": "a"}', '{"image": "data:"}']}

    Raises: FieldError if the value has none of these forms.
    """
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        raise FieldError(
            field,
            f"{field} must be a text, a content part, a list of texts or content parts, a list of "
            f"token ids, or a list of lists of token ids, but the request has {shown(value)}",
        )
    if not value:
        raise FieldError(field, f"{field} must not be an empty list")
    tensors = _tensors_of(value, field)
    return ModelInputs(tensors, fields=dict.fromkeys(tensors, field))


def _tensors_of(items: list[Any], field: str) -> dict[str, list[Any]]:
    """Return the input tensors for a list that has at least one item. See `read_inputs`."""
    if all(isinstance(item, str) for item in items):
        return {"texts": items}
    if isinstance(items[0], list):
        lists = [check_token_ids(ids, field, f"{field}[{at}]") for at, ids in enumerate(items)]
        return _token_tensors(lists)
    if isinstance(items[0], int | float):
        return _token_tensors([check_token_ids(items, field, field)])
    parts = [content_part(item, field, f"{field}[{at}]") for at, item in enumerate(items)]
    return {"parts": [json.dumps(part, ensure_ascii=False) for part in parts]}


def _token_tensors(lists: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    token_ids = [token_id for ids in lists for token_id in ids]
    return {"input_ids": token_ids, "input_lengths": [len(ids) for ids in lists]}
