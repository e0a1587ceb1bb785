"""POST /v1/models/{model_id}/load and /unload, as in the Triton server's own OpenAI frontend."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.errors import ApiError, BackendError
from nereid_client.middleware.client_keys import current_client
from nereid_client.request_context import contexts_of
from nereid_client.several_models.model_control import ModelControl
from nereid_client.several_models.models_file import ModelSpec

router = APIRouter(tags=["Operation"])


@router.post("/v1/models/{model_id:path}/load", summary="Load a model")
async def load_model(request: Request, model_id: str) -> dict[str, Any]:
    """Load a model that the file in `--config` describes, and wait until it accepts requests."""
    control = _check_permission(request)
    spec = _find_model(control, model_id)
    try:
        await control.load(spec)
    except BackendError as error:
        raise _failure(spec, "loaded", error) from None
    return {"id": spec.name, "object": "model", "loaded": True}


@router.post("/v1/models/{model_id:path}/unload", summary="Unload a model")
async def unload_model(request: Request, model_id: str) -> dict[str, Any]:
    """Wait for the running requests of a model, and then unload the model.

    Further requests are rejected until a client loads the model again.
    """
    control = _check_permission(request)
    spec = _find_model(control, model_id)
    try:
        await control.unload(spec)
    except BackendError as error:
        raise _failure(spec, "unloaded", error) from None
    return {"id": spec.name, "object": "model", "loaded": False}


def _find_model(control: ModelControl, model_id: str) -> ModelSpec:
    """Return the `ModelSpec` of the model with the name or alias `model_id`."""
    for spec in control.specs:
        if model_id in spec.names:
            return spec
    names = ", ".join(repr(spec.name) for spec in control.specs)
    raise ApiError(
        404,
        f"The model {model_id!r} does not exist. The models are {names}.",
        param="model",
        code="model_not_found",
    )


def _check_permission(request: Request) -> ModelControl:
    """Check that the client may load and unload models. Return the control object.

    Raises: ApiError 403 if the server has a single model, or if the key file has the client's key.
    """
    control = contexts_of(request).control
    if control is None:
        raise ApiError(
            403,
            "The server cannot load or unload models, because it serves one language model. "
            "`nereid serve --config FILE` serves the models of a file.",
            code="model_updates_disabled",
        )
    # A client has a name only if its API key is in the key file. A client that uses the key in
    # NEREID_API_KEY has no name.
    if current_client.get().name:
        raise ApiError(
            403,
            "The API keys in the key file do not allow clients to load or unload models. Use the "
            "key in NEREID_API_KEY.",
            code="model_updates_disabled",
        )
    return control


def _failure(spec: ModelSpec, action: str, error: BackendError) -> ApiError:
    return ApiError(
        503, f"The model {spec.name!r} cannot be {action}: {error.message}", code="model_not_loaded"
    )
