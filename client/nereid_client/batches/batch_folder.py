"""Finds the folder of the Batch API, and checks the folder when the frontend starts."""

import os
from pathlib import Path

from nereid_client.settings import Settings, SettingsError


def batch_folder(settings: Settings) -> Path | None:
    """Return the folder of the Batch API, or None if the settings turn the API off.

    The folder may not exist yet, because the first upload creates it.

    Raises: SettingsError if files cannot be stored in the folder.
    """
    if not settings.batch_folder or not settings.max_stored_files:
        return None
    try:
        folder = Path(settings.batch_folder).expanduser()
        existing = _nearest_existing(folder.absolute())
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of "~name" is unknown
        raise _unusable(settings.batch_folder, str(error)) from None
    if not existing.is_dir():
        raise _unusable(settings.batch_folder, f"{existing} is not a folder")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(settings.batch_folder, f"this user cannot write into {existing}")
    return folder


def _nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, and otherwise the nearest folder above `path` that exists.

    Example: "/srv/a/b" returns "/srv" if "/srv" exists and "/srv/a" does not.
    """
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _unusable(folder: str, reason: str) -> SettingsError:
    """Return the error for a folder in which no files can be stored."""
    return SettingsError(
        f"NEREID_BATCH_FOLDER: files cannot be stored in {folder}: {reason}. Give a folder into "
        "which this user can write, or set NEREID_MAX_STORED_FILES=0 to turn the Batch API off."
    )
