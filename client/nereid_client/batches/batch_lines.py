"""Reads the input file of a batch line by line, and writes the lines of the result files."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from nereid_client.errors import shown

MAX_LINES = 50_000
"""The largest number of requests in a batch. OpenAI's API has the same limit."""
_MAX_ID_LENGTH = 512
_BLOCK_BYTES = 2**20
_LINE_OF_ID = re.compile(rb'\{"id": "batch_req_[0-9a-f]+_(\d+)"')


class LineError(ValueError):
    """A line of an input file is not a valid request.

    Args:
        code: the machine-readable reason.
        message: a sentence that names the value and the remedy.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class LineRequest:
    """The request in one line of an input file.

    Attributes:
        number: the number of the line in the file. The first line has the number 1.
        custom_id: the id that the client gave to the request.
        body: the JSON body of the request.
    """

    number: int
    custom_id: str
    body: bytes


class InputLine(NamedTuple):
    """A line of an input file.

    Attributes:
        number: the number of the line in the file. The first line has the number 1.
        content: the bytes of the line. None if the line is larger than the limit.
    """

    number: int
    content: bytes | None


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of an input file. Skip blank lines.

    Args:
        file: the input file.
        max_bytes: the largest size of a line. A larger line is yielded without its content.
    """
    number = 0
    while content := file.readline(max_bytes + 1):
        number += 1
        is_too_long = len(content) > max_bytes and not content.endswith(b"\n")
        if is_too_long:
            is_rest_blank = _skip_line(file, max_bytes)
            if content.strip() or not is_rest_blank:
                yield InputLine(number, None)
        elif content.strip():
            yield InputLine(number, content)
        else:
            number += _skip_blank_lines(file)


def _skip_blank_lines(file: BinaryIO) -> int:
    """Skip all blank lines up to the next line with text. Return the number of skipped lines.

    The function reads blocks instead of single lines, because a file of 4 GB can contain four
    billion blank lines, and reading each of them would take too long.
    """
    num_lines = 0
    position = line_start = file.tell()
    while block := file.read(_BLOCK_BYTES):
        num_blank_bytes = len(block) - len(block.lstrip())
        num_lines += block.count(b"\n", 0, num_blank_bytes)
        # If the blank bytes contain no line end, `rfind` returns -1, so `last_line_end` is 0.
        if last_line_end := block.rfind(b"\n", 0, num_blank_bytes) + 1:
            line_start = position + last_line_end
        position += len(block)
        if num_blank_bytes < len(block):
            break
    file.seek(line_start)
    return num_lines


def _skip_line(file: BinaryIO, max_bytes: int) -> bool:
    """Skip the rest of the current line, and return whether the rest is blank.

    The rest is read in pieces of at most `max_bytes` + 1 bytes, so that a long line does not fill
    the memory.
    """
    is_blank = True
    while part := file.readline(max_bytes + 1):
        is_blank = is_blank and not part.strip()
        if part.endswith(b"\n"):
            break
    return is_blank


def count_lines(path: Path, max_bytes: int) -> int:
    """Count the non-blank lines of an input file. Stop after MAX_LINES + 1 lines."""
    count = 0
    with path.open("rb") as file:
        for _ in read_lines(file, max_bytes):
            count += 1
            if count > MAX_LINES:
                break
    return count


class LineParser:
    """Parses the lines of one input file. The caller must pass the lines in the order of the file.

    Args:
        endpoint: the endpoint of the batch. The field `url` of each line must have this value.
        max_bytes: the largest size of a line.
    """

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._custom_ids: set[str] = set()

    def parse(self, line: InputLine) -> LineRequest:
        """Return the request in a line.

        Raises: LineError if the line is wrong, or if an earlier line has the same custom_id.
        """
        if line.content is None:
            raise LineError(
                "line_too_long",
                f"The line has more than {self._max_bytes} bytes (max_body_bytes).",
            )
        fields = _parse_object(line.content)
        custom_id = self._check_and_store_custom_id(fields)
        if fields.get("method") != "POST":
            raise LineError(
                "invalid_method",
                f'method must be "POST", but the line has {shown(fields.get("method"))}.',
            )
        if fields.get("url") != self._endpoint:
            raise LineError(
                "mismatched_url",
                f"url must be {shown(self._endpoint)}, the endpoint of the batch, but the line has "
                f"{shown(fields.get('url'))}.",
            )
        return LineRequest(line.number, custom_id, _body(fields.get("body")))

    def _check_and_store_custom_id(self, fields: Mapping[str, Any]) -> str:
        """Return and store the custom_id of a line, so that duplicates in later lines are found.

        Raises: LineError if the custom_id is wrong, or if an earlier line has the same custom_id.
        """
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_LENGTH:
            raise LineError(
                "invalid_custom_id",
                f"custom_id must be a string with 1 to {_MAX_ID_LENGTH} characters, but the line "
                f"has {shown(custom_id)}.",
            )
        if custom_id in self._custom_ids:
            raise LineError(
                "duplicate_custom_id",
                f"custom_id must be unique, but an earlier line has {shown(custom_id)}, too.",
            )
        self._custom_ids.add(custom_id)
        return custom_id


def custom_id_in(content: bytes | None) -> str | None:
    """Return the custom_id of an input line, or None if the line has no valid custom_id.

    The other fields of the line may be invalid.
    """
    try:
        custom_id = _parse_object(content or b"").get("custom_id")
    except LineError:
        return None
    is_valid = isinstance(custom_id, str) and len(custom_id) <= _MAX_ID_LENGTH
    return custom_id if is_valid else None


def result_line(
    batch_id: str,
    number: int,
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a line of a result file.

    The id of the result line contains the number of the input line. After a restart, `ResultFile`
    reads these numbers to find the input lines that already have a result. The id must be the first
    member of the JSON object, because the regular expression `_LINE_OF_ID` requires this position.

    Args:
        batch_id: the id of the batch.
        number: the number of the input line.
        custom_id: the id that the client gave to the request. None if the input line has no valid
            id.
        response: the status, the request id and the body of the response.
        error: the reason why the line has no response.
    """
    line_id = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    fields = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields).encode() + b"\n"


class ResultFile:
    """Appends lines to a batch's result file.

    If an existing file ends with an incomplete line, this line is removed. An interrupted process
    or a full disk can leave such a line.

    Args:
        path: the path of the file. The folder of the file is created before the first line is
            written.

    Attributes:
        answered_lines: the numbers of the input lines whose results were in the file when it was
            opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the file if it exists, and find out which input lines already have results."""
        self._path = path
        self._file: BinaryIO | None = None  # opened for the first line
        self._num_bytes = 0  # the size of the complete lines
        self.answered_lines: set[int] = set()
        if path.exists():
            self._read_lines()
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()

    def append(self, line: bytes) -> None:
        """Append a line.

        Raises: OSError. The file then does not contain any part of the line.
        """
        file = self._file or self._open()  # `_open` stores the file in `self._file`
        try:
            num_written = file.write(line)
            if num_written < len(line):
                # The disk is full. The first `write` wrote only the beginning of the line, and
                # raised no error. The second `write` cannot write anything, and raises the OSError.
                file.write(line[num_written:])
        except OSError:
            file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(line)

    def _read_lines(self) -> None:
        """Read the complete lines of the file, and set `answered_lines` and `_num_bytes`."""
        with self._path.open("rb") as file:
            for line in file:
                match = _LINE_OF_ID.match(line)
                if match is None or not line.endswith(b"\n"):
                    return  # this line is incomplete
                self.answered_lines.add(int(match[1]))
                self._num_bytes += len(line)

    def _open(self) -> BinaryIO:
        """Open the file for appending, and remove an incomplete line at its end."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._file = file = self._path.open("ab", buffering=0)
        file.truncate(self._num_bytes)
        return file


def _parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Ignore a byte order mark, which some editors write."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise LineError(
            "invalid_json_line", f"The line is not valid UTF-8 at byte {error.start}."
        ) from None
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", _describe_json_error(error)) from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "The line must be a JSON object.")
    return value


def _describe_json_error(error: ValueError | RecursionError) -> str:
    """Return the error message for a line that is not valid JSON.

    Example: for the line {"a": }, the result is "The line is not valid JSON at column 7: Expecting
    value."
    """
    if isinstance(error, RecursionError):
        return "The JSON of the line is nested too deeply. Write a request with less nesting."
    if isinstance(error, json.JSONDecodeError):
        return f"The line is not valid JSON at column {error.colno}: {error.msg}."
    # Any other error means that the line contains a longer integer than Python accepts. Python's
    # message is not returned, because it names a Python function.
    limit = sys.get_int_max_str_digits()
    return f"The line has an integer with more than {limit} digits. Write a shorter number."


def _body(body: object) -> bytes:
    """Return the JSON text of a request's body."""
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body must be an object, but the line has {shown(body)}.")
    for name in ("stream", "background"):
        if body.get(name) is True:
            raise LineError(
                "invalid_body", f"{name} must not be true in a batch. Leave {name} out."
            )
    return json.dumps(body).encode()
