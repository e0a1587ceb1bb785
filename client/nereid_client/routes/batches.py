"""/v1/batches, as in OpenAI's API: run all requests in a file, with the lowest priority."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from nereid_client.batches.lifespan import batches_of
from nereid_client.batches.stored_batches import Batch
from nereid_client.errors import ApiError, shown
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.batch_requests import BatchesQuery, CreateBatchRequest
from nereid_client.request_context import read_body, to_json, validate
from nereid_client.routes.files import find_file, page

router = APIRouter(tags=["Batches"])

Json = dict[str, Any]


@router.post("/v1/batches", summary="Create a batch")
async def create_batch(request: Request) -> Json:
    """Create a batch. Each line of the input file becomes a request with the lowest priority."""
    batches = batches_of(request)
    body = await read_body(request)
    batch_request = validate(CreateBatchRequest, body)
    to_json(body)  # raises an ApiError if the metadata cannot be stored as JSON
    file = await find_file(request, batch_request.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise ApiError(
            400,
            'input_file_id must be a file with the purpose "batch", but this file has the purpose '
            f"{shown(file.purpose)}",
            param="input_file_id",
        )
    batch = await asyncio.to_thread(batches.store.create, batch_request, file)
    batches.runner.wake_up()
    return batch.as_json()


@router.get("/v1/batches", summary="List the batches")
async def list_batches(request: Request) -> Json:
    """Return one page of the client's batches, the newest batch first."""
    query = validate(BatchesQuery, dict(request.query_params))
    batches = await asyncio.to_thread(lambda: list(batches_of(request).store.all()))
    owner = current_client.get().name
    own = [batch.as_json() for batch in batches if batch.owner == owner]
    return page(own, query.limit, query.after)


@router.get("/v1/batches/{batch_id}", summary="Get a batch")
async def retrieve_batch(request: Request, batch_id: str) -> Json:
    """Return a batch."""
    return (await _find(request, batch_id)).as_json()


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(request: Request, batch_id: str) -> Json:
    """Cancel a batch. Its result files contain the responses that are already complete."""
    batch = await _find(request, batch_id)
    if batch.has_ended:
        raise ApiError(
            400,
            f"The batch {batch.id} cannot be cancelled, because it has the status {batch.status}",
        )
    batch = await asyncio.to_thread(batches_of(request).store.cancel, batch)
    batches_of(request).runner.wake_up()
    return batch.as_json()


async def _find(request: Request, batch_id: str) -> Batch:
    """Return the batch with this id. Clients can find only their own batches."""
    store = batches_of(request).store
    batch = await asyncio.to_thread(store.find, batch_id, current_client.get().name)
    if batch is None:
        raise ApiError(
            404,
            f"The batch {shown(batch_id)} does not exist. It was never created with this API key, "
            "or it was deleted.",
            param="batch_id",
            code="batch_not_found",
        )
    return batch
