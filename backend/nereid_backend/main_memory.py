# SPDX-License-Identifier: Apache-2.0
"""The free main memory of the machine or of the container. This module does not import torch."""

import os
from pathlib import Path


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free main memory in bytes, within the limit of the container.

    Args:
        cgroup: the folder with the limits of the container (its control group).
    """
    available_bytes = _available_in_meminfo()
    if available_bytes is None:
        available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The kernel has two versions of control groups, whose files have different names.
    version_2 = _available_in_container(
        cgroup, limit_file="memory.max", used_file="memory.current", freeable="inactive_file"
    )
    version_1 = _available_in_container(
        cgroup / "memory",
        limit_file="memory.limit_in_bytes",
        used_file="memory.usage_in_bytes",
        freeable="total_inactive_file",
    )
    limits = [number for number in (version_2, version_1) if number is not None]
    return min([available_bytes, *limits])


def _available_in_container(
    folder: Path, *, limit_file: str, used_file: str, freeable: str
) -> int | None:
    """Return the free memory of a container in bytes; None if the container has no limit.

    The used memory includes the cached pages of files, such as the weight files. If such a page is
    inactive, the kernel can free it at once, so it counts as free.

    Args:
        folder: the folder of the control group.
        limit_file: the name of the file with the limit.
        used_file: the name of the file with the used bytes.
        freeable: the entry of memory.stat with the used bytes that the kernel can free at once.
    """
    try:
        # The file does not exist outside of containers, and contains "max" if there is no limit.
        limit_bytes = int((folder / limit_file).read_text())
        used_bytes = int((folder / used_file).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()  # such as "inactive_file 4096"
        freeable_bytes = int(dict(line.split() for line in lines).get(freeable, 0))
    except (OSError, ValueError):
        return None
    return max(0, limit_bytes - used_bytes + freeable_bytes)


def _available_in_meminfo() -> int | None:
    """Return the available memory that Linux reports in /proc/meminfo, in bytes.

    This number is better than the number of free pages, because it includes memory that the
    operating system can free. Return None if the file does not contain the number.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):  # such as "MemAvailable:   16384 kB"
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    return None


def format_bytes(count: int) -> str:
    """Return a readable size. Example: `format_bytes(3 * 2**29)` returns "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
