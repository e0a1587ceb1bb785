"""Writes each log message as a line with a JSON object, if the setting log_format is "json".

The frontend formats its log records with JsonFormatter. The Triton server and the models write
plain lines. `nereid serve` converts these lines with JsonLines, and writes them to the log.

Example of a line, wrapped here:

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "source": "frontend",
     "message": "POST /v1/chat/completions 200", "request_id": "a1", "duration_s": 1.5}
"""

import io
import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any

from nereid_client.supervise.child_processes import ERROR_PREFIX, MESSAGE_PREFIX

REQUEST_FIELDS = ("request_id", "route", "status", "duration_s", "client", "trace_id")
"""The attributes of a log record that are copied to its JSON object."""
# Each line of the Triton server's log starts with one of these letters, followed by the date.
_TRITON_LEVELS = {"I": "info", "W": "warning", "E": "error"}
_JSON_START = '{"time": "'
_TRITON_LINE = re.compile(r"([IWE])\d{4} ")


class JsonFormatter(logging.Formatter):
    """Formats the log records of the frontend."""

    def format(self, record: logging.LogRecord) -> str:
        """Convert a log record to JSON text.

        If the record has an exception, the message in the JSON object includes the traceback. The
        message never contains the body of a request.
        """
        # The parent class adds the traceback to the message.
        message = super().format(record)
        fields = {name: getattr(record, name) for name in REQUEST_FIELDS if hasattr(record, name)}
        level = record.levelname.lower()
        return _json_line(record.created, level, "frontend", message, request_fields=fields)


class JsonLines(io.TextIOBase):
    """A text stream that converts each line to a JSON object and writes the object to a log.

    A line that is already a JSON object stays unchanged.
    """

    def __init__(self, log: IO[str]) -> None:
        self._log = log

    def write(self, line: str) -> int:
        """Convert one line to a JSON object, and write the object to the log."""
        return self._log.write(to_json_line(line.rstrip("\n"), "tritonserver") + "\n")


class LinesWithoutMessages(io.TextIOBase):
    """A text stream for a log on standard output. Lines that start with "nereid:" are omitted.

    `nereid serve` itself prints these lines to standard output, so the log must not repeat the
    lines. Only lines that start with "nereid: error:" are still written to the log.

    Args:
        log: the file to which all other lines are written.
    """

    def __init__(self, log: IO[str]) -> None:
        self._log = log

    def write(self, line: str) -> int:
        """Write a line to the log. Omit lines that start with "nereid:" and are not errors."""
        if line.startswith(MESSAGE_PREFIX) and not line.startswith(ERROR_PREFIX):
            return 0
        return self._log.write(line)


def to_json_line(line: str, source: str) -> str:
    """Convert a line of the log to a JSON object.

    A line that is already a JSON object is returned unchanged.

    Examples: the line "E0131 12:00:00.1 7 x.cc:1] failed" and the line "nereid: error: ..." get the
    level "error". The line "loading" gets the level "info".
    """
    if line.startswith(_JSON_START):
        return line
    match = _TRITON_LINE.match(line)
    level = _TRITON_LEVELS[match[1]] if match else "info"
    if line.startswith(ERROR_PREFIX):
        level = "error"
    now = datetime.now(UTC).timestamp()
    return _json_line(now, level, source, message=line, request_fields={})


def uvicorn_log_config(level: str) -> dict[str, Any]:
    """Return a configuration for Python's logging that writes the frontend's log as JSON."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
    }


def _json_line(
    created: float, level: str, source: str, message: str, request_fields: Mapping[str, Any]
) -> str:
    """Return a log line in JSON format."""
    time = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    record = {
        "time": time.replace("+00:00", "Z"),
        "level": level,
        "source": source,
        "message": message,
    }
    return json.dumps({**record, **request_fields}, ensure_ascii=False)
