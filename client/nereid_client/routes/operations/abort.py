"""POST /abort_request and /abort_requests."""

from fastapi import APIRouter, Request

from nereid_client.middleware.running_requests import RunningRequests
from nereid_client.protocol.operations.abort_request import AbortRequest
from nereid_client.request_context import read_body, validate
from nereid_client.workers.forwarding import ask_other_workers

router = APIRouter(tags=["Operation"])


@router.post("/abort_request", summary="Abort a request (SGLang's path)")
@router.post("/abort_requests", summary="Abort several requests (vLLM's path)")
async def abort_request(request: Request) -> dict[str, int]:
    """Abort running requests, and return the number of aborted requests.

    If the response to an aborted request is a stream, the stream ends with an error. Otherwise, the
    response has the status 499. This route does not end background responses. The route
    `/v1/responses/{response_id}/cancel` cancels a background response.
    """
    body = validate(AbortRequest, await read_body(request))
    running: RunningRequests = request.app.state.running_requests
    num_aborted = running.abort(request.state.running_request, body.ids)
    answers = await ask_other_workers(request, body.model_dump(exclude_none=True))
    return {"num_aborted": num_aborted + sum(answer["num_aborted"] for answer in answers)}
