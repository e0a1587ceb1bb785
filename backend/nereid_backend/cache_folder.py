# SPDX-License-Identifier: Apache-2.0
"""The folder in which Nereid caches the results of slow computations."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder for built kernels, compiled models and chat formats.

    The folder is $XDG_CACHE_HOME/nereid, or ~/.cache/nereid if XDG_CACHE_HOME is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "nereid"
