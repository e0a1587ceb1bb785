"""The OpenAPI schema of the frontend, with a description of each request field.

The routes, and not FastAPI, validate the request bodies, so that error messages have OpenAI's
format. FastAPI therefore does not know the types of the bodies. This module adds the types to the
schema.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from nereid_client.anthropic.messages_request import CountTokensRequest, MessagesRequest
from nereid_client.protocol.batch_requests import CreateBatchRequest, UploadForm
from nereid_client.protocol.embedding_requests import (
    CohereEmbedRequest,
    EmbeddingRequest,
    TeiEmbedRequest,
    VectorsRequest,
)
from nereid_client.protocol.generation_requests import ChatCompletionRequest, CompletionRequest
from nereid_client.protocol.operations.abort_request import AbortRequest
from nereid_client.protocol.operations.cache_requests import ExtendSessionRequest
from nereid_client.protocol.operations.lora_requests import LoadLoraRequest, UnloadLoraRequest
from nereid_client.protocol.operations.reload_request import ReloadRequest
from nereid_client.protocol.operations.template_request import InspectRequest
from nereid_client.protocol.operations.tokenize_request import DetokenizeRequest, TokenizeRequest
from nereid_client.protocol.rerank_requests import (
    ClassifyRequest,
    RankingRequest,
    RerankRequest,
    ScoreRequest,
    SimilarityRequest,
)
from nereid_client.protocol.responses_request import ResponsesRequest
from nereid_client.protocol.tei_requests import DecodeRequest, PredictRequest

REQUEST_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/batches": CreateBatchRequest,
    "/abort_request": AbortRequest,
    "/abort_requests": AbortRequest,
    "/v1/load_lora_adapter": LoadLoraRequest,
    "/v1/unload_lora_adapter": UnloadLoraRequest,
    "/v1/reload": ReloadRequest,
    "/v1/cache": ExtendSessionRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/embed": CohereEmbedRequest,
    "/v2/embed": CohereEmbedRequest,
    "/embed": TeiEmbedRequest,
    "/embed_all": TeiEmbedRequest,
    "/embed_sparse": TeiEmbedRequest,
    "/pooling": VectorsRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/rerank": RerankRequest,
    "/v1/ranking": RankingRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/similarity": SimilarityRequest,
    "/classify": ClassifyRequest,
    "/predict": PredictRequest,
    "/template/inspect": InspectRequest,
    "/decode": DecodeRequest,
}
"""Maps the path of a POST route to the type of its JSON body."""
FORMS: dict[str, type[BaseModel]] = {"/v1/files": UploadForm}
"""Maps the path of a POST route to the type of its form."""


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema of an application, including the types of the request bodies.

    FastAPI does not know these types, because the routes read the bodies themselves.
    """
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    bodies = REQUEST_BODIES | FORMS
    models = sorted(set(bodies.values()), key=lambda model: model.__name__)
    # Each reference is an object {"$ref": "#/components/schemas/MODEL"}. `definitions` contains the
    # schemas to which the references refer.
    references, definitions = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= definitions["$defs"]
    for path, model in bodies.items():
        reference = references[model, "validation"]
        media_type = "multipart/form-data" if path in FORMS else "application/json"
        body = {"required": True, "content": {media_type: {"schema": reference}}}
        schema["paths"][path]["post"]["requestBody"] = body
    return schema
