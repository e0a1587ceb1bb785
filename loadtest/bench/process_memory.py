"""The memory of processes on Linux. The programs of all compared engines import this module."""

import re
from pathlib import Path


def status_bytes(pid: int | str, field: str) -> int:
    """Return a value of the file /proc/PID/status in bytes.

    Args:
        pid: the id of the process, or "self".
        field: "VmRSS" for the resident memory, "RssAnon" for the resident memory without mapped
            files, or "VmHWM" for the peak of the resident memory.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
