"""Runs one batch: sends the request in each line of the input file, and stores the results."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from nereid_client.batches.batch_lines import (
    MAX_LINES,
    InputLine,
    LineError,
    LineParser,
    LineRequest,
    ResultFile,
    count_lines,
    custom_id_in,
    read_lines,
    result_line,
)
from nereid_client.batches.line_requests import LineSender, LineSlots
from nereid_client.batches.stored_batches import Batch, BatchStore, RequestCounts
from nereid_client.batches.stored_files import new_id
from nereid_client.middleware.client_keys import Client

_RETRY_STORAGE_S = 10.0
_SAVE_EVERY_S = 1.0
_UNSENT = {
    "expired": ("batch_expired", "The batch expired before this request was finished."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was finished."),
}
"""Maps the final status of a batch to the error for each line without a response.

An error consists of a code and a message."""

_log = logging.getLogger(__name__)


class BatchRun:
    """Runs one batch."""

    def __init__(
        self,
        batch: Batch,
        store: BatchStore,
        *,
        sender: LineSender,
        slots: LineSlots,
        client: Client,
        max_line_bytes: int,
    ) -> None:
        """Prepare to run a batch.

        Args:
            batch: the batch, which must not have ended.
            store: the store that contains the batch.
            sender: sends the requests of lines.
            slots: limits the number of lines that run at the same time.
            client: the client that created the batch, as returned by `batch_client`.
            max_line_bytes: the largest size of a line.
        """
        self._batch = batch
        self._store = store
        self._sender = sender
        self._slots = slots
        self._client = client
        self._max_line_bytes = max_line_bytes
        self._folder = store.folder(batch.id)

        # When the batch expires, this timeout cancels the requests. None while no requests run.
        self._timeout: asyncio.Timeout | None = None
        self._is_cancelled = False

        # The results.
        self._recorded: set[int] = set()  # the numbers of the lines whose results are stored
        self._save_due = 0.0  # the time after which the counts are saved again

    def cancel(self) -> None:
        """Stop the running requests of the batch, and end the batch with the status "cancelled"."""
        self._is_cancelled = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run the batch until its end.

        The batch waits while its folder cannot be written, for example because the disk is full.
        If the task is cancelled, another BatchRun can continue the batch.
        """
        while not self._batch.has_ended:
            try:
                await self._run_steps()
            except OSError as error:
                _log.error("%s waits, because its folder has an error: %s", self._batch.id, error)
                await asyncio.sleep(_RETRY_STORAGE_S)
            except Exception as error:  # noqa: BLE001 - the batch ends here, instead of restarting forever
                _log.exception("%s failed because of a bug", self._batch.id)
                self._fail("internal_error", f"The server has a bug: {type(error).__name__}.")

    async def _run_steps(self) -> None:
        """Run the remaining steps: check the input file, send the requests, store the results."""
        batch = self._batch
        if batch.status == "validating":
            await self._validate()
        if batch.status == "in_progress":
            await self._send_lines()
        if batch.status == "finalizing":
            await asyncio.to_thread(self._store.publish, batch)
            self._end(batch.outcome)

    async def _validate(self) -> None:
        """Check that the input file contains at least 1 and at most MAX_LINES lines."""
        path = self._folder / "input"
        num_lines = await asyncio.to_thread(count_lines, path, self._max_line_bytes)
        if num_lines == 0:
            self._fail("empty_file", "The input file has no lines.")
        elif num_lines > MAX_LINES:
            self._fail("too_many_lines", f"The input file has more than {MAX_LINES} lines.")
        else:
            self._batch.request_counts = RequestCounts(total=num_lines)
            self._batch.set_status("in_progress")
            self._store.save(self._batch)

    async def _send_lines(self) -> None:
        """Send all lines that have no result yet. Stop if the batch expires or is cancelled.

        Lines have a result already if an earlier run was interrupted, for example by a restart. At
        the end, the status of the batch becomes "finalizing", and each result file with at least
        one line gets an id.
        """
        batch = self._batch
        with (
            ResultFile(self._folder / "output" / "content") as output,
            ResultFile(self._folder / "errors" / "content") as errors,
        ):
            self._recorded = output.answered_lines | errors.answered_lines
            # Count the lines of the result files, because the stored counts are not updated after
            # each line.
            batch.request_counts.completed = len(output.answered_lines)
            batch.request_counts.failed = len(errors.answered_lines)
            await self._send_until_expiry(output, errors)
        counts = batch.request_counts
        batch.output_file_id = new_id("file-") if counts.completed else None
        batch.error_file_id = new_id("file-") if counts.failed else None
        batch.set_status("finalizing")
        self._store.save(batch)

    async def _send_until_expiry(self, output: ResultFile, errors: ResultFile) -> None:
        """Send all lines that have no result yet.

        If the batch expires or is cancelled, store an error for each line without a result.

        Raises: OSError if a result cannot be stored.
        """
        if self._is_cancelled:  # the batch was cancelled before its lines are sent
            await self._record_unsent(errors, "cancelled")
            return
        time_to_expiry_s = max(self._batch.expires_at - time.time(), 0.0)
        try:
            async with asyncio.timeout(time_to_expiry_s) as timeout:
                self._timeout = timeout  # the method `cancel` makes this timeout expire at once
                await self._send_all(output, errors)
        except TimeoutError:
            if not timeout.expired():
                raise  # this is an OSError: the operating system could not access a file in time
            await self._record_unsent(errors, "cancelled" if self._is_cancelled else "expired")
        finally:
            self._timeout = None  # a timeout that has ended cannot be changed by `cancel`

    async def _send_all(self, output: ResultFile, errors: ResultFile) -> None:
        """Send all lines that have no result yet. Several requests run at the same time.

        Raises: OSError if a result cannot be stored. The running requests are then cancelled.
        """
        # An exception that is raised inside `except*` would become an exception group again. The
        # error is therefore stored, and raised after the `try` statement.
        storage_error: OSError | None = None
        parser = LineParser(self._batch.endpoint, self._max_line_bytes)
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._input_lines()) as lines:
                async for line in lines:
                    # The parser rejects a line if an earlier line has the same custom_id. Lines
                    # that already have a result are therefore parsed, too.
                    request = self._parse_or_record_error(parser, line, errors)
                    if request is not None and request.number not in self._recorded:
                        await self._slots.acquire()
                        task = group.create_task(self._send(request, output, errors))
                        # The callback also releases the slot of a task that is cancelled before
                        # it starts. The coroutine of such a task never runs.
                        task.add_done_callback(lambda _: self._slots.release())
        except* OSError as group_error:
            storage_error = _first_leaf(group_error)
        if storage_error is not None:
            raise storage_error

    async def _input_lines(self) -> AsyncGenerator[InputLine]:
        """Yield the lines of the input file.

        A thread reads the file, so that a slow disk does not delay the other requests of this
        process.
        """
        with (self._folder / "input").open("rb") as file:
            lines = read_lines(file, self._max_line_bytes)
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                yield line

    def _parse_or_record_error(
        self, parser: LineParser, line: InputLine, errors: ResultFile
    ) -> LineRequest | None:
        """Return the request that a line contains, or None if the line is invalid.

        For an invalid line without a result, also store the error in the file `errors`.
        """
        try:
            return parser.parse(line)
        except LineError as error:
            self._record_error(errors, line, error)
            return None

    async def _send(self, request: LineRequest, output: ResultFile, errors: ResultFile) -> None:
        """Send the request that one input line contains, and store the response."""
        response = await self._sender.send(self._batch.endpoint, request.body, self._client)
        is_success = 200 <= response.status < 300
        line = result_line(
            self._batch.id, request.number, request.custom_id, response=response.as_json()
        )
        file = output if is_success else errors
        self._record(file, request.number, line, is_success=is_success)

    async def _record_unsent(
        self, errors: ResultFile, outcome: Literal["expired", "cancelled"]
    ) -> None:
        """Set the outcome of the batch, and store an error for each line that has no result yet."""
        self._batch.outcome = outcome
        code, message = _UNSENT[outcome]
        async with aclosing(self._input_lines()) as lines:
            async for line in lines:
                self._record_error(errors, line, LineError(code, message))

    def _record_error(self, errors: ResultFile, line: InputLine, error: LineError) -> None:
        """Store an error for a line. If the line has a result already, do nothing."""
        if line.number in self._recorded:
            return
        fields = {"code": error.code, "message": str(error), "param": None, "line": line.number}
        custom_id = custom_id_in(line.content)
        result = result_line(self._batch.id, line.number, custom_id, error=fields)
        self._record(errors, line.number, result, is_success=False)

    def _record(self, file: ResultFile, number: int, line: bytes, *, is_success: bool) -> None:
        """Store a result line, and update the counts of the batch.

        The new counts are saved at most once in `_SAVE_EVERY_S` seconds.
        """
        file.append(line)
        self._recorded.add(number)
        counts = self._batch.request_counts
        if is_success:
            counts.completed += 1
        else:
            counts.failed += 1
        now = time.monotonic()
        if now >= self._save_due:
            self._save_due = now + _SAVE_EVERY_S
            self._store.save(self._batch)

    def _fail(self, code: str, message: str) -> None:
        """End the batch with an error."""
        error = {"code": code, "message": message, "line": None, "param": None}
        self._batch.errors = {"object": "list", "data": [error]}
        self._end("failed")

    def _end(self, status: Literal["completed", "expired", "cancelled", "failed"]) -> None:
        """Set the final status of the batch, and store the batch.

        Raises: OSError if the batch cannot be stored. The batch has its previous status then, so
            that it does not count as ended, and the step that ends the batch is repeated.
        """
        previous_status = self._batch.status
        self._batch.set_status(status)
        try:
            self._store.save(self._batch)
        except OSError:
            self._batch.status = previous_status
            raise


def _first_leaf(group: BaseExceptionGroup[OSError]) -> OSError:
    """Return the first OSError in an exception group. The group may contain further groups."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
