# SPDX-License-Identifier: Apache-2.0
"""Limits the memory and the CPU time of a child process that handles untrusted input."""

import os
import resource

# The nice value of child processes. It gives them a low priority, so that they do not slow down the
# steps of the engine.
_NICENESS = 5
# Normally, the parent process kills a child that reaches its time limit. If the parent process was
# killed, the kernel kills the child instead, this number of seconds after the time limit.
_EXTRA_SECONDS = 2


def limit_child(max_bytes: int, timeout_s: float) -> None:
    """Limit the memory and the CPU time of this forked child process.

    The process cannot raise the limits again.

    Args:
        max_bytes: the memory that the process can allocate in addition to its present memory.
        timeout_s: the time limit of the work in seconds. Normally, the parent process kills this
            child at the time limit. If the parent process was killed, the kernel kills this child
            after slightly more CPU time than `timeout_s`.
    """
    os.nice(_NICENESS)  # a low priority, so that the engine is not slowed down
    limit_memory(max_bytes)
    cpu_seconds = int(timeout_s) + _EXTRA_SECONDS
    _set_limit(resource.RLIMIT_CPU, cpu_seconds)
    # Do not write a core file (a copy of the child's memory) when the kernel kills the child.
    _set_limit(resource.RLIMIT_CORE, 0)


def limit_memory(max_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `max_bytes`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        num_pages = int(file.read().split()[0])
    _set_limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + max_bytes)


def _set_limit(kind: int, limit: int) -> None:
    """Set a limit of this process, unless a lower limit is already set, for example by `ulimit`.

    Only the superuser could raise a limit.
    """
    _, present_limit = resource.getrlimit(kind)
    if present_limit != resource.RLIM_INFINITY:
        limit = min(limit, present_limit)
    resource.setrlimit(kind, (limit, limit))
