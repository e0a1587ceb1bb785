"""Functions for the routes of embedding models and rerankers: they select and call a model."""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request

from nereid_client.embeddings.pooling_backend import (
    EMBEDDING,
    RERANK,
    PoolingBackend,
    PoolingCall,
    PoolingModels,
    PoolingOutputs,
    PoolingTarget,
    ServedModel,
    TritonPooling,
)
from nereid_client.errors import ApiError, BackendError
from nereid_client.language_model.adapters import current_adapter
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.embedding_requests import ModelInputs
from nereid_client.protocol.rerank_requests import ScoringRequest
from nereid_client.request_context import (
    Context,
    Contexts,
    check_unicode,
    contexts_of,
    find_context,
    unique_request_id,
)
from nereid_client.several_models.controlled import ControlledPooling
from nereid_client.several_models.model_control import ModelControl
from nereid_client.streaming import sse

_DESCRIPTIONS = {EMBEDDING: "an embedding model", RERANK: "a reranker"}
_ROUTES = {EMBEDDING: "POST /v1/embeddings", RERANK: "POST /v1/rerank"}
_OUTPUTS = {
    "dense": "one vector for each text",
    "multi_vector": "one vector for each token",
    "sparse": "sparse weights",
    "score": "scores of pairs of texts",
    "classify": "the probabilities of labels",
    "token_classify": "the probabilities of labels for each token",
}
"""Maps each kind of output to a description for error messages."""
_CHAT_ROUTE = "POST /v1/chat/completions"


@asynccontextmanager
async def pooling_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """When the application starts, set `app.state.pooling`. When it ends, close the backend.

    Tests can set `app.state.make_pooling` to a function that returns another backend.
    """
    make: Callable[[], PoolingBackend] | None = getattr(app.state, "make_pooling", None)
    contexts: Contexts = app.state.contexts
    backend = make() if make else TritonPooling(contexts.default.settings.grpc_url)
    app.state.pooling = _create_pooling_models(backend, contexts.control)
    yield
    await backend.close()


def _create_pooling_models(backend: PoolingBackend, control: ModelControl | None) -> PoolingModels:
    """Return the object that finds and calls the pooling models of a backend."""
    if control is None:
        return PoolingModels(backend)
    return PoolingModels(ControlledPooling(backend, control), control.pooling_targets, control)


def pooling_models_of(request: Request) -> PoolingModels:
    """Return the application's `PoolingModels`, which finds and calls pooling models."""
    models: PoolingModels = request.app.state.pooling
    return models


async def choose_model(request: Request, name: str | None, kinds: Sequence[str]) -> ServedModel:
    """Return the first served model that has the requested name and can answer the request.

    Args:
        request: the HTTP request.
        name: the field `model` of the body. Any model is suitable if the body has no such field
            (None), or if the field is empty, as in vLLM.
        kinds: the kinds of model that can answer the request, in order of preference. A kind is
            "embedding" or "rerank".

    Raises:
        ApiError: 404 if no such model is served, 400 if the name belongs to another kind of model,
            503 if the model does not answer.
    """
    other_names: list[str] = []  # the suitable models with other names, for the error message
    problems: list[ApiError] = []  # the reasons why models do not answer
    models = pooling_models_of(request)
    for target in _targets_of(models, kinds):
        # Without a file that describes several models, `target.names` is empty, and the model
        # itself reports its name.
        if target.names and name and name not in target.names:
            other_names.append(target.names[0])
            continue
        try:
            model = await models.find(target)  # loads the model if necessary
        except (BackendError, TimeoutError) as error:
            problems.append(_problem(error))
            continue
        if not name or name in (model.name, *target.names):
            return model
        other_names.append(model.name)
    if other_names:
        raise await _wrong_model_error(request, name or "", other_names)
    raise _first_temporary(problems)  # no model has answered, so each model has a problem


def _targets_of(models: PoolingModels, kinds: Sequence[str]) -> list[PoolingTarget]:
    """Return the models of the given kinds, in the order of the kinds.

    Raises: ApiError 404 if the file of `--config` describes no such model.
    """
    targets = [target for kind in kinds for target in models.targets if target.kind == kind]
    if not targets:
        message = f"The server has no model of the kind {' or '.join(map(repr, kinds))}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return targets


def _first_temporary(problems: Sequence[ApiError]) -> ApiError:
    """Return the first error that is temporary, such as a 503.

    If all errors are permanent (404), return the first error.
    """
    return next((problem for problem in problems if problem.status != 404), problems[0])


async def select_language_model(request: Request, name: str | None) -> None:
    """Find and store the language model and the LoRA adapter that a request selects by name.

    The name belongs to a language model, or to an adapter of a language model.

    Mutates: `request.state.context`, which becomes the context of the language model, and the
        context variable `current_adapter`, which becomes the name of the adapter, or "" if the
        request selects no adapter.

    Raises: ApiError 404 that names the language model. If the request names an embedding model or
        a reranker, the message also gives the route of that model.
    """
    adapter = ""
    # As in vLLM, a request with an empty name selects the default model.
    context = find_context(request, name or None)
    if context is None:
        assert name is not None  # a request without a name selects the default model
        adapter = name
        context = await _find_context_with_adapter(request, adapter)
        if context is None:
            raise await _no_language_model_error(request, name)
    request.state.context = context
    current_adapter.set(adapter)


async def _no_language_model_error(request: Request, name: str) -> ApiError:
    """Return the error for a request whose field `model` names no language model and no adapter."""
    language_models = [context.settings.model_name for context in contexts_of(request).all]
    suitable = " or ".join(map(repr, language_models))
    message = _wrong_model_message(name, suitable, await _served_models(request))
    return ApiError(404, message, param="model", code="model_not_found")


async def _find_context_with_adapter(request: Request, adapter: str) -> Context | None:
    """Return the `Context` of the language model that has this LoRA adapter, or None.

    The adapters of a model that is not loaded are unknown, unless they have been listed before.

    Raises: BackendError if a loaded model or the server does not answer.
    """
    pooling_names = {name for target in pooling_models_of(request).targets for name in target.names}
    if adapter in pooling_names:
        return None  # no adapter has the name of a pooling model, so the server is not queried
    contexts = contexts_of(request)
    for context in contexts.all:
        try:
            if await context.adapters.has(adapter):
                return context
        except BackendError:
            # A model that is not loaded cannot list its adapters, so the next model is queried.
            if not await _is_unloaded_on_live_server(context, contexts.control):
                raise
    return None


async def _is_unloaded_on_live_server(context: Context, control: ModelControl | None) -> bool:
    """Return True if the server answers, but a language model is not loaded."""
    if control is None or await control.is_loaded(context.settings.ensemble):
        return False
    return await context.backend.is_live()


async def _wrong_model_error(
    request: Request, name: str, suitable_names: Sequence[str]
) -> ApiError:
    """Return the error for a request that names an unknown or unsuitable model.

    The status is 400 if the name belongs to a model of another kind, and 404 if the name is
    unknown.
    """
    served_models = await _served_models(request)
    suitable = " or ".join(map(repr, suitable_names))
    message = _wrong_model_message(name, suitable, served_models)
    if name in served_models:
        return ApiError(400, message, param="model")
    return ApiError(404, message, param="model", code="model_not_found")


async def _served_models(request: Request) -> dict[str, tuple[str, str]]:
    """Return a dict that maps the name of each served model to its description and main route."""
    pooling_models = await pooling_models_of(request).all()
    models = {m.name: (_DESCRIPTIONS[m.kind], _ROUTES[m.kind]) for m in pooling_models}
    for target in pooling_models_of(request).targets:
        models |= dict.fromkeys(target.names, (_DESCRIPTIONS[target.kind], _ROUTES[target.kind]))
    contexts = contexts_of(request)
    description = "the language model" if len(contexts.all) == 1 else "a language model"
    return models | dict.fromkeys(contexts.by_name, (description, _CHAT_ROUTE))


def _wrong_model_message(name: str, suitable: str, served: Mapping[str, tuple[str, str]]) -> str:
    """Return the error message for a request that names an unknown or unsuitable model."""
    remedy = f"Use {suitable} for this request, or leave model out."
    if name not in served:
        return f"The model {name!r} does not exist. {remedy}"
    description, route = served[name]
    return f"The model {name!r} is {description}. {remedy} The route of {name!r} is {route}."


def require_kind(served: ServedModel, kind: str) -> None:
    """Check that a model can compute the requested kind of output, such as "sparse".

    Args:
        served: the model.
        kind: "dense", "sparse", "multi_vector", "score", "classify" or "token_classify".

    Raises: ApiError 400 that names the kinds of output that the model can compute.
    """
    kinds = served.info.get("kinds", ())
    if kind not in kinds:
        raise ApiError(
            400,
            f"The model {served.name!r} cannot compute {_OUTPUTS[kind]}. It can compute: "
            f"{', '.join(_OUTPUTS[other] for other in kinds)}.",
            param="model",
        )


def refuse_truncation_below_model_limit(served: ServedModel, name: str, value: int | None) -> None:
    """Check that a request does not truncate texts to fewer tokens than the model's limit.

    The server can truncate texts only to the model's limit.

    Args:
        served: the model.
        name: the name of the field with the number of tokens to which texts are truncated.
        value: the value of this field. None if the request does not have the field.

    Raises: ApiError 400 that names the limit.
    """
    limit = served.info.get("max_model_len")
    if value is not None and limit is not None and value < limit:
        raise ApiError(
            400,
            f"{name} must be at least {limit}, but the request has {value}. The server cuts texts "
            f"only to the model's limit of {limit} tokens. Shorten the texts, or leave {name} "
            "out.",
            param=name,
        )


def refuse_token_limits_below_model_limit(served: ServedModel, body: ScoringRequest) -> None:
    """Check that `max_tokens_per_doc` and `max_tokens_per_query` are not below the model's limit.

    The reason is described in `refuse_truncation_below_model_limit`.

    Raises: ApiError 400 that names the limit.
    """
    for name in ("max_tokens_per_doc", "max_tokens_per_query"):
        # The value 0 means no limit. In vLLM, 0 is the default of both fields.
        refuse_truncation_below_model_limit(served, name, getattr(body, name) or None)


def refuse_instruction_for_embedding_model(served: ServedModel, body: ScoringRequest) -> None:
    """Check that a request has no instruction if an embedding model computes the scores.

    Only generative rerankers read an instruction. Other rerankers refuse an instruction themselves,
    so this function checks only requests to embedding models.

    Raises: ApiError 400 that names the field.
    """
    for name in ("instruction", "instruct"):
        if served.kind == EMBEDDING and getattr(body, name, None):
            raise ApiError(
                400,
                f"{name} requires a generative reranker, but the model {served.name!r} is an "
                "embedding model. Leave the field out.",
                param=name,
            )


async def call_model(
    request: Request, served: ServedModel, inputs: ModelInputs, options: Mapping[str, Any]
) -> PoolingOutputs:
    """Call a pooling model, and count the tokens. If the client disconnects, cancel the call.

    Args:
        request: the HTTP request, whose body has been read.
        served: the model.
        inputs: the input tensors.
        options: the JSON object for the input `options`.

    Raises: ApiError, BackendError. The error names a request field instead of a tensor.
    """
    _check_texts_are_unicode(inputs, options)  # a gRPC request cannot contain half a surrogate pair
    call = PoolingCall(served.model, unique_request_id(request), inputs.tensors, options)
    try:
        outputs = await sse.unless_disconnected(
            request.receive, pooling_models_of(request).backend.infer(call)
        )
    except BackendError as error:
        raise _with_field_name(error, inputs.fields) from None
    if "num_tokens" in outputs.arrays:
        num_tokens = int(outputs.arrays["num_tokens"].sum())
        client = current_client.get()
        client.count_tokens(num_tokens)
        request.app.state.metrics.count_client_tokens(client.name, num_tokens, 0)
    return outputs


def _check_texts_are_unicode(inputs: ModelInputs, options: Mapping[str, Any]) -> None:
    r"""Check that all texts are valid Unicode, both in the input tensors and in the options.

    A JSON text such as "\ud800" contains half of a surrogate pair, which UTF-8 cannot encode.
    """
    for values in inputs.tensors.values():
        if values and isinstance(values[0], str):  # then all values are texts
            check_unicode("".join(values))
    for option in options.values():
        if isinstance(option, str):
            check_unicode(option)


def _with_field_name(error: BackendError, fields: Mapping[str, str]) -> BackendError:
    """Return the error with the name of the tensor replaced by the name of the request field.

    Example: "texts: element 1: has 13 tokens" becomes "input: element 1: has 13 tokens".
    """
    first_word = re.split(r"\W", error.message, maxsplit=1)[0]
    if first_word not in fields:
        return error
    rest = error.message.removeprefix(first_word)
    return BackendError(error.code, fields[first_word] + rest)


def _problem(error: BackendError | TimeoutError) -> ApiError:
    """Return the ApiError for a model that is not served or does not answer."""
    if isinstance(error, TimeoutError):
        error = BackendError("UNAVAILABLE", "The model does not answer. Try again.")
    if error.code == "NOT_FOUND":
        return ApiError(404, error.message, param="model", code="model_not_found")
    return ApiError(503, error.message, code="unavailable", headers={"Retry-After": "1"})
