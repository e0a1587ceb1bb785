"""The memory of processes on Linux. This module runs in the environment of each compared engine."""

import re
from pathlib import Path


def status_bytes(pid: int | str, field: str) -> int:
    """Return a value of the file /proc/PID/status in bytes.

    Args:
        pid: the id of the process, or "self".
        field: "VmRSS" for the resident memory, "RssAnon" for the part without files, or "VmHWM" for
            the peak.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
