"""Starts and stops the batch runner when the application starts and stops."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request

from nereid_client.batches.batch_folder import batch_folder
from nereid_client.batches.batch_runner import BatchRunner
from nereid_client.batches.line_requests import LineSender, LineSlots
from nereid_client.batches.stored_batches import BatchStore
from nereid_client.batches.stored_files import FileLimits, FileStore
from nereid_client.errors import ApiError
from nereid_client.request_context import Context, Contexts


@dataclass(frozen=True)
class Batches:
    """The objects of the Batch API: `store` stores batches on disk, and `runner` runs them."""

    store: BatchStore
    runner: BatchRunner


@asynccontextmanager
async def batches_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Set `app.state.batches`, and run batches until the application stops.

    `app.state.batches` is None if the settings turn the Batch API off.
    """
    contexts: Contexts = app.state.contexts
    batches = _start_batches(app, contexts.default)
    app.state.batches = batches
    yield
    if batches is not None:
        await batches.runner.close()


_LARGEST_SHARE_OF_BATCHES = 0.25
"""The share of max_concurrent_requests that batches may use. The rest is for other requests."""


def _start_batches(app: FastAPI, context: Context) -> Batches | None:
    """Open the folder of the batches, and start a task that runs the batches in this folder.

    Return None if the settings turn the Batch API off.
    """
    settings = context.settings
    folder = batch_folder(settings)
    if folder is None:
        return None
    limits = FileLimits(settings.max_stored_files, settings.max_stored_file_bytes)
    store = BatchStore(FileStore(folder, limits))
    gate = app.state.gate
    largest_share = max(1, int(settings.max_concurrent_requests * _LARGEST_SHARE_OF_BATCHES))
    limit = min(settings.max_batch_requests, largest_share)
    runner = BatchRunner(  # a new BatchRunner starts its task at once
        store,
        sender=LineSender(app, context.backend.is_ready),
        # The limit on batch requests is lower while other requests are running. The object `gate`
        # counts all running requests.
        slots=LineSlots(limit, gate),
        # When the application is about to stop, the object `gate` rejects new requests. All batches
        # then stop.
        gate=gate,
        # A batch is cancelled when its client is removed from the key file.
        key_file=app.state.key_file,
        max_line_bytes=settings.max_body_bytes,
    )
    return Batches(store, runner)


def batches_of(request: Request) -> Batches:
    """Return the `Batches` object of the application that received the HTTP request.

    Raises: ApiError 404 if the Batch API is turned off.
    """
    batches: Batches | None = request.app.state.batches
    if batches is None:
        raise ApiError(
            404,
            "This server has no Batch API, because batch_folder is not set or max_stored_files is "
            "0. Set NEREID_BATCH_FOLDER to a folder.",
            code="batches_disabled",
        )
    return batches
