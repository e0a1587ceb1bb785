"""Receives the file that a client uploads to /v1/files."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from nereid_client.batches.multipart import FormReader
from nereid_client.batches.stored_files import KEEP_S, StoredFile, Upload
from nereid_client.errors import ApiError, Disconnected
from nereid_client.protocol.batch_requests import UploadForm
from nereid_client.request_context import context_of, validate

_MIN_PART_BYTES = 64 * 1024


async def receive_upload(request: Request, upload: Upload) -> StoredFile:
    """Read the form in a request. Store the file from the form, and return the stored file."""
    form = FormReader(request.headers.get("content-type", ""), upload.write)
    await _receive(request, form)
    fields = validate(UploadForm, _upload_fields(form.fields))
    keep_s = fields.expires_after.seconds if fields.expires_after else KEEP_S
    filename = form.filename or "file"
    return await asyncio.to_thread(upload.finish, filename, fields.purpose, keep_s)


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


def _upload_fields(fields: dict[str, str]) -> dict[str, Any]:
    """Convert the text fields of a form to a JSON object.

    Example: {"expires_after[anchor]": "created_at"} returns {"expires_after": {"anchor":
    "created_at"}}.
    """
    parsed: dict[str, Any] = {}
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
