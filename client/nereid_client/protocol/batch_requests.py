"""The body of `POST /v1/batches`, and the parameters of the routes for files and batches."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from nereid_client.protocol.request_body import RequestBody

BatchEndpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
]
"""The endpoints that can process the lines of a batch."""

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_KeepSeconds = Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]


class ExpiresAfter(BaseModel):
    """The time after which a file is deleted."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    anchor: Literal["created_at"]
    """The time from which the seconds are counted."""
    seconds: _KeepSeconds
    """The number of seconds."""


class CreateBatchRequest(RequestBody):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    """The id of an uploaded file with one request in each line."""
    endpoint: BatchEndpoint
    """The endpoint of all requests in the file."""
    completion_window: Literal["24h"]
    """The time after which the rest of the batch expires."""
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    """Up to 16 texts, which the batch object repeats."""
    output_expires_after: ExpiresAfter | None = None
    """The time after which the result files are deleted."""


def _require_file(schema: dict[str, Any]) -> None:
    """Change the JSON schema of UploadForm, so that `file` is required and has no default."""
    del schema["properties"]["file"]["default"]
    schema["required"] = ["file", *schema["required"]]


class UploadForm(BaseModel):
    """The form of `POST /v1/files`."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_require_file)

    file: Annotated[None, WithJsonSchema({"type": "string", "format": "binary"})] = None
    """The file, which the route stores without validating it here."""
    purpose: Literal["batch"]
    """The purpose of the file. Only `batch` is supported."""
    expires_after: ExpiresAfter | None = None
    """The time after which the file is deleted. The default is 30 days."""


class FilesQuery(BaseModel):
    """The query parameters of `GET /v1/files`."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: str | None = None


class BatchesQuery(BaseModel):
    """The query parameters of `GET /v1/batches`."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None
