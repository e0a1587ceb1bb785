"""Creates a server whose engine returns scripted tokens instead of running a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.server.served import ALONE, Served


def scripted_server(
    folder: Path,
    script: Sequence[Mapping[str, Any]],
    *,
    model: Path | None = None,
    settings: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Served:
    """Create a server with the scripted engine, but do not start it.

    Args:
        folder: the folder for the script.
        script: the rules of the engine (see scripted_engine.py).
        model: the checkpoint with the tokenizer, or None for the demo.
        settings: further NEREID_* settings.
        flags: further flags of `nereid serve`.
    """
    path = folder / "script.json"
    path.write_text(json.dumps(script), encoding="utf-8")
    environment = {"NEREID_ENGINE": "scripted", "NEREID_SCRIPT": str(path), **(settings or {})}
    return Served(model, environment, ["--log-level=warning", *ALONE, *flags])
