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
    `template` is the name of a chat template in the folder `templates`.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    # The scripted engine does not read the weights, but a checkpoint must contain such a file.
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    used_ids = [token["id"] for token in tokenizer["added_tokens"]]
    used_ids += list(tokenizer["model"]["vocab"].values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    new_tokens = dict.fromkeys([bos, eos, *markers])  # without duplicates
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": token, "special": True, **flags}
        for token_id, token in enumerate(new_tokens, start=max(used_ids) + 1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"bos_token": bos, "eos_token": eos}
    config_file.write_text(json.dumps(config))
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
