"""Opens the log of `nereid serve`: a file, or the standard output."""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from nereid_client.console import CliError, set_line_format
from nereid_client.json_logs import JsonLines, LinesWithoutMessages, to_json_line
from nereid_client.supervise.serve_plan import STANDARD_OUTPUT


@contextmanager
def open_log(path: Path, log_format: str) -> Iterator[IO[str]]:
    """Open the log for writing, and close it when the `with` block ends.

    Args:
        path: the file. STANDARD_OUTPUT selects the standard output, which is not closed.
        log_format: the setting log_format. "json" converts each line to a JSON object.

    Raises: CliError if the file cannot be written.
    """
    is_json = log_format == "json"
    if path == STANDARD_OUTPUT:
        yield _standard_output(is_json=is_json)
        return
    log = _open_file(path)
    try:
        yield cast("IO[str]", JsonLines(log)) if is_json else log
    finally:
        with contextlib.suppress(OSError):  # the disk is full: the rest of the log is lost
            log.close()


def _open_file(path: Path) -> IO[str]:
    """Open a log file for writing. Create its folder if necessary."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_earlier_log(path)
        # `_open_in_append_mode` adds the flag O_APPEND, which the mode "w" does not include.
        return open(path, "w", buffering=1, encoding="utf-8", opener=_open_in_append_mode)
    except OSError as error:
        example = Path(tempfile.gettempdir()) / "nereid.log"
        raise CliError(
            f"--log-file: the file {path} cannot be written ({error.strerror}). Give another one, "
            f"such as {example}."
        ) from None


def _keep_earlier_log(path: Path) -> None:
    """Rename the log of the earlier server. Example: serve.log becomes serve.log.old.

    After a failure, systemd and Docker restart the server at once, and the reason for the failure
    is in the log of the earlier server. If the log cannot be renamed, it is overwritten.
    """
    if path.is_file() and not path.is_symlink():  # not a device or a pipe
        with contextlib.suppress(OSError):
            path.rename(path.with_name(f"{path.name}.old"))


def _open_in_append_mode(path: str, flags: int) -> int:
    """Open a file with `flags` and O_APPEND, and return its descriptor.

    O_APPEND lets other programs, such as logrotate, truncate the file. Without O_APPEND, the next
    write would go to the old position, and zero bytes would fill the file before this position.
    """
    return os.open(path, flags | os.O_APPEND, 0o666)


def _standard_output(*, is_json: bool) -> IO[str]:
    """Create a log that writes its lines to standard output.

    The log omits the lines that `nereid serve` itself prints to standard output; see
    `LinesWithoutMessages`.
    """
    if is_json:
        set_line_format(functools.partial(to_json_line, source="nereid"))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    output = JsonLines(sys.stdout) if is_json else sys.stdout
    return cast("IO[str]", LinesWithoutMessages(cast("IO[str]", output)))
