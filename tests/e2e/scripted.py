"""Starts a real server whose engine answers with the texts of a script instead of a model."""

import json
import shutil
from pathlib import Path

from loadtest.server.served import ALONE, Served

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo" / "chat"
TEMPLATES = Path(__file__).parent / "templates"


def checkpoint(folder, template, markers, bos, eos):
    """Create and return a checkpoint folder for a scripted engine.

    The tokenizer is the demo model's, with `bos`, `eos` and `markers` as additional special tokens.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    # The scripted engine does not read the weights, but a checkpoint must contain such a file.
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    taken = [token["id"] for token in tokenizer["added_tokens"]]
    taken += list(tokenizer["model"]["vocab"].values())
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token_id, marker in enumerate(dict.fromkeys([bos, eos, *markers]), max(taken) + 1):
        tokenizer["added_tokens"].append(
            {"id": token_id, "content": marker, "special": True, **kind}
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": bos, "eos_token": eos}
    path.write_text(json.dumps(config))
    return folder


def scripted(model, script, folder, **settings):
    """Return a server that is not started yet. The rules in `script` determine its answers."""
    path = folder / "script.json"
    # The last rule is for the prompt that `nereid serve` sends before it reports that it is ready.
    path.write_text(json.dumps([*script, {"when": "Once upon a time", "text": "there was"}]))
    environment = {
        "NEREID_ENGINE": "scripted",
        "NEREID_SCRIPT": str(path),
        **{f"NEREID_{name.upper()}": value for name, value in settings.items()},
    }
    return Served(model, environment=environment, arguments=["--log-level=warning", *ALONE])
