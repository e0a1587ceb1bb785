# SPDX-License-Identifier: Apache-2.0
"""The folder in which Nereid caches the results of slow computations."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder for built kernels, compiled models and chat formats.

    The folder is $XDG_CACHE_HOME/nereid, or ~/.cache/nereid if XDG_CACHE_HOME is not set.

    Raises:
        RuntimeError: if XDG_CACHE_HOME is not set and the home folder is unknown. This happens if
            the variable HOME is not set and the user is not listed in /etc/passwd.
    """
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    if base:
        return Path(base) / "nereid"
    try:
        return Path.home() / ".cache" / "nereid"
    except RuntimeError as error:
        raise RuntimeError(
            "the home folder is unknown; set the environment variable XDG_CACHE_HOME to a folder"
        ) from error
