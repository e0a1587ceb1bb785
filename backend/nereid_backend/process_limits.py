# SPDX-License-Identifier: Apache-2.0
"""Limits the memory and the CPU time of a child process that handles untrusted input."""

import os
import resource

# The nice value of child processes. It gives them a low priority, so that they do not slow down the
# steps of the engine.
_NICENESS = 5


def limit_child(max_bytes: int, timeout_s: float) -> None:
    """Limit the memory and the CPU time of this forked child process.

    The process cannot raise the limits again.

    Args:
        max_bytes: the memory that the process can allocate in addition to its present memory.
        timeout_s: the time limit of the work. Normally, the parent process kills this child when
            the time is over. If the parent process itself was killed, the kernel kills this child
            after about this CPU time.
    """
    os.nice(_NICENESS)
    limit_memory(max_bytes)
    seconds = int(timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(max_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `max_bytes`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
