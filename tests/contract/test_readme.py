"""The README's tables name every setting, and nothing that is not one."""

import re
from dataclasses import fields
from pathlib import Path

from nereid_backend import EngineConfig
from nereid_backend.serving.serving_settings import OTHER_NAMES, ServingSettings
from nereid_client.settings import Settings

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_tables_of_settings_are_complete():
    named = set(re.findall(r"`(NEREID_[A-Z_]+)`", README))
    known = {
        f"NEREID_{field.name.upper()}"
        for config in (EngineConfig, ServingSettings)
        for field in fields(config)
    }
    known |= {field.metadata["env"] for field in fields(Settings)}
    pooling = {name for name in named if re.match("NEREID_(EMBEDDING|RERANK)_", name)}
    assert {name.removeprefix("NEREID_").lower() for name in pooling} <= OTHER_NAMES
    assert named - {"NEREID_"} - pooling == known


def test_every_file_on_the_path_of_a_request_exists():
    root = Path(__file__).resolve().parents[2]
    for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", README.split("### The path")[1]):
        assert any(root.glob(f"*/**/{name}")), name
