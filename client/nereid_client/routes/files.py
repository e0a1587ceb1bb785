"""/v1/files: the input files and result files of batches, as in OpenAI's API."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.responses import MalformedRangeHeader, RangeNotSatisfiable

from nereid_client.batches.lifespan import Batches, batches_of
from nereid_client.batches.receive_upload import receive_upload
from nereid_client.batches.stored_files import StoredFile
from nereid_client.errors import ApiError, shown
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.batch_requests import FilesQuery
from nereid_client.request_context import refuse_compression, validate

router = APIRouter(tags=["Batches"])

Json = dict[str, Any]


@router.post("/v1/files", summary="Upload a file")
async def upload_file(request: Request) -> Json:
    """Store a file whose lines are the requests of a batch: one JSON object in each line."""
    refuse_compression(request)
    store = batches_of(request).store.files
    upload = await asyncio.to_thread(store.start_upload, current_client.get().name)
    try:
        file = await receive_upload(request, upload)
    finally:
        await asyncio.to_thread(upload.discard)  # deletes nothing if the file has been stored
    return file.as_json()


@router.get("/v1/files", summary="List the files")
async def list_files(request: Request) -> Json:
    """Return one page of the client's files."""
    query = validate(FilesQuery, dict(request.query_params))
    return await asyncio.to_thread(_page, batches_of(request), query)


@router.get("/v1/files/{file_id}", summary="Get a file object")
async def retrieve_file(request: Request, file_id: str) -> Json:
    """Return a file object."""
    return (await find_file(request, file_id, "file_id")).as_json()


@router.get("/v1/files/{file_id}/content", summary="Get the content of a file")
async def file_content(request: Request, file_id: str) -> Response:
    """Return the bytes of a file."""
    file = await find_file(request, file_id, "file_id")
    path = batches_of(request).store.files.content(file.id)
    return _FileContent(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", summary="Delete a file")
async def delete_file(request: Request, file_id: str) -> Json:
    """Delete a file. A batch that already uses the file can still read it."""
    file = await find_file(request, file_id, "file_id")
    await asyncio.to_thread(batches_of(request).store.files.delete, file.id)
    return {"id": file.id, "object": "file", "deleted": True}


async def find_file(request: Request, file_id: str, param: str) -> StoredFile:
    """Return the file with this id, if the current client uploaded it.

    Raises: ApiError 404.
    """
    store = batches_of(request).store.files
    file = await asyncio.to_thread(store.find, file_id, current_client.get().name)
    if file is None:
        raise ApiError(
            404,
            f"The file {shown(file_id)} does not exist. It was never uploaded with this API key, "
            "or it was deleted.",
            param=param,
            code="file_not_found",
        )
    return file


class _FileContent(FileResponse):
    """A response with the bytes of a file. Its errors have the format of OpenAI's API."""

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        """Return the ranges in the header Range.

        Raises: ApiError 400 if the header is invalid, 416 if no range is inside the file.
        """
        problem = (
            f"The header Range is {shown(http_range)}, which selects no part of this file of "
            f"{file_size} bytes. Send a header such as Range: bytes=0-99, or leave Range out"
        )
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            raise ApiError(400, problem) from None
        except RangeNotSatisfiable:
            headers = {"Content-Range": f"bytes */{file_size}"}
            raise ApiError(416, problem, headers=headers) from None


def _page(batches: Batches, query: FilesQuery) -> Json:
    """Return one page of the client's files."""
    files = list(batches.store.files.all(current_client.get().name))
    if query.order == "asc":
        files.reverse()
    selected = (file for file in files if query.purpose in (None, file.purpose))
    return page([file.as_json() for file in selected], query.limit, query.after)


def page(objects: list[Json], limit: int, after: str | None) -> Json:
    """Return one page of a list, in the format of OpenAI's API.

    Args:
        objects: all objects of the list, in order.
        limit: the largest number of objects on the page.
        after: the id of the last object on the previous page. None for the first page.

    Raises: ApiError 404 if no object has the id `after`.
    """
    begin = 0
    if after is not None:
        ids = [item["id"] for item in objects]
        if after not in ids:
            raise ApiError(
                404,
                "The parameter 'after' must be the id of a listed object, but it is "
                f"{shown(after)}",
                param="after",
            )
        begin = ids.index(after) + 1
    data = objects[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(objects),
    }
