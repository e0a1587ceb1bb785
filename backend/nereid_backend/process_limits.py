# SPDX-License-Identifier: Apache-2.0
"""Limits the memory and the CPU time of a child process that handles untrusted input."""

import os
import resource

# The nice value of child processes, so that they do not slow down the steps of the engine.
_NICENESS = 5


def limit_child(max_bytes: int, timeout_s: float) -> None:
    """Limit the memory and the CPU time of this forked child process.

    The process cannot raise the limits again.

    Args:
        max_bytes: the memory that the process can allocate beyond its present memory.
        timeout_s: the limit on the duration of the work. If the parent process is killed, it can no
            longer kill this child. The kernel then kills the child after this CPU time.
    """
    os.nice(_NICENESS)
    limit_memory(max_bytes)
    seconds = int(timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(max_bytes: int) -> None:
    """Limit the address space of this process to `max_bytes` more than it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
