"""/v1/files: the input files and result files of batches, as in OpenAI's API."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect
from starlette.responses import MalformedRangeHeader, RangeNotSatisfiable

from nereid_client.batches.lifespan import Batches, batches_of
from nereid_client.batches.multipart import FormReader
from nereid_client.batches.stored_files import KEEP_S, StoredFile, Upload
from nereid_client.errors import ApiError, Disconnected, shown
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.batch_requests import FilesQuery, UploadForm
from nereid_client.request_context import context_of, refuse_compression, validate

router = APIRouter(tags=["Batches"])

Json = dict[str, Any]

_MIN_PART_BYTES = 64 * 1024


@router.post("/v1/files", summary="Upload a file")
async def upload_file(request: Request) -> Json:
    """Store a file whose lines are the requests of a batch: one JSON object in each line."""
    refuse_compression(request)
    store = batches_of(request).store.files
    upload = await asyncio.to_thread(store.start_upload)
    try:
        file = await _read_upload(request, upload)
    finally:
        await asyncio.to_thread(upload.discard)  # deletes nothing if the file has been stored
    return file.as_json()


async def _read_upload(request: Request, upload: Upload) -> StoredFile:
    """Read the form in a request. Store the file from the form, and return the stored file."""
    form = FormReader(request.headers.get("content-type", ""), upload.write)
    await _receive(request, form)
    fields = validate(UploadForm, _upload_fields(form.fields))
    keep_s = fields.expires_after.seconds if fields.expires_after else KEEP_S
    owner = current_client.get().name
    filename = form.filename or "file"
    return await asyncio.to_thread(upload.finish, owner, filename, fields.purpose, keep_s)


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


async def _receive(request: Request, form: FormReader) -> None:
    """Read the form in the body of a request."""
    limit_s = context_of(request).settings.receive_timeout_s
    stream = request.stream()
    try:
        while (data := await _next_part(stream, limit_s)) is not None:
            await asyncio.to_thread(form.feed, data)
    except ClientDisconnect:
        raise Disconnected from None
    except TimeoutError:
        raise ApiError(
            408,
            f"The frontend received less than {_MIN_PART_BYTES} bytes of the file within {limit_s} "
            "s (receive_timeout_s)",
            code="timeout",
            headers={"Connection": "close"},
            limit="receive_timeout_s",
        ) from None
    form.finish()


async def _next_part(stream: AsyncGenerator[bytes], limit_s: float) -> bytes | None:
    """Return the next bytes of a body, or None at the end of the body.

    The time limit applies to each part of `_MIN_PART_BYTES` bytes, so the upload of a whole file
    may take longer. If the limit applied to each received piece instead, a client could send one
    byte a minute, and its upload would count as a running request for ever. A limit of 0 means no
    limit.

    Raises: TimeoutError if the bytes do not arrive in time.
    """
    data = bytearray()
    async with asyncio.timeout(limit_s or None):
        while len(data) < _MIN_PART_BYTES and (piece := await anext(stream, None)) is not None:
            data += piece
    return bytes(data) or None


def _upload_fields(fields: dict[str, str]) -> Json:
    """Convert the text fields of a form to a JSON object.

    Example: {"expires_after[anchor]": "created_at"} returns {"expires_after": {"anchor":
    "created_at"}}.
    """
    parsed: Json = {}
    for name, text in fields.items():
        # Example: the name "expires_after[anchor]" is split into "expires_after", "[" and "anchor".
        outer, bracket, inner = name.removesuffix("]").partition("[")
        is_member = bracket == "["  # whether the field is a member of an object
        if outer in parsed and isinstance(parsed[outer], dict) != is_member:
            raise ApiError(
                400,
                f"{outer} must occur once, but the form has {outer} and fields such as "
                f"{outer}[name].",
                param=outer,
            )
        if is_member:
            parsed.setdefault(outer, {})[inner] = text
        else:
            parsed[outer] = text
    return parsed


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
