# SPDX-License-Identifier: Apache-2.0
"""Reports the progress of slow loops while a model is loaded."""

import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

Item = TypeVar("Item")
# The smallest number of seconds between two reports. Nothing is reported if all items are processed
# within this time.
_INTERVAL_S = 5.0


def report_items(
    items: Collection[Item], what: str, progress: Callable[[str], None]
) -> Iterator[Item]:
    """Yield each of `items`. Every few seconds, call `progress` with the number of yielded items.

    Example: if `what` is "reading weights", `progress` is called with the text
    "reading weights: 120 of 310".

    Args:
        items: the items.
        what: the beginning of each text.
        progress: called with each text.
    """
    last_report_s = time.monotonic()
    for num_yielded, item in enumerate(items):
        now_s = time.monotonic()
        if now_s - last_report_s >= _INTERVAL_S:
            last_report_s = now_s
            progress(f"{what}: {num_yielded} of {len(items)}")
        yield item


def no_progress(line: str) -> None:
    """Ignore a report about the progress of loading."""
    del line
