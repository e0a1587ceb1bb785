"""Tests that the page on refused requests names every limit in an error message or a metric."""

import ast
import re
from dataclasses import fields

import pytest
from docs.blocks import ROOT
from nereid_backend import EngineConfig
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.serving_settings import ServingSettings
from nereid_client.settings import VARIABLES, Settings

PAGE = (ROOT / "docs" / "how-to" / "refused-requests.md").read_text(encoding="utf-8")
SOURCES = [
    path
    for folder in ("backend/nereid_backend", "client/nereid_client")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# `chat_template_kwargs` is the name of a request field and of a setting. Refusals mean the field.
FIELDS = {"chat_template_kwargs"}
# The names of settings that contain an underscore. Other names are ordinary words.
SETTINGS = {
    field.name
    for config in (EngineConfig, ServingSettings, Settings, PoolingConfig)
    for field in fields(config)
    if "_" in field.name and field.name not in FIELDS
}
REQUEST_ERRORS = {"ApiError", "CapacityError", "DeadlineError", "RequestError"}


def test_every_setting_in_a_refusal_is_in_the_table():
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for text in texts_of_errors(path)
        for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)
        if name in SETTINGS and f"NEREID_{name.upper()}`" not in PAGE and f"_{name}" not in PAGE
    }
    assert not missing


def limits_in(path):
    """Yield each string in a keyword argument `limit=...` of a Python file."""
    for keyword in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(keyword, ast.keyword) and keyword.arg == "limit":
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_table_names_the_limits_that_the_frontend_counts():
    frontend_sources = [path for path in SOURCES if "nereid_client" in path.as_posix()]
    counted_limits = {limit for path in frontend_sources for limit in limits_in(path)}

    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    last_columns = " ".join(row.split("|")[-2] for row in rows)
    # Example: the cell "refused `max_prompts` or `max_body_bytes`" contains two names.
    named_limits = {
        name
        for cell in re.findall(r"refused (`.*?`(?: or `.*?`)*)", last_columns)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert named_limits == counted_limits


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(NEREID_[A-Z_]+)`", PAGE))))
def test_a_setting_in_the_table_exists(name):
    name = name.removeprefix("NEREID_")
    if name.startswith(("EMBEDDING_", "RERANK_")):
        name = name.partition("_")[2]
        known = {"MAX_MODEL_LEN", "MAX_NUM_WAITING", "MAX_REQUESTS", "MAX_RESTARTS"}
        assert name in known | {"SERVED_MODEL_NAME"}
    else:
        assert f"NEREID_{name}" in VARIABLES.values() or name.lower() in SETTINGS


def texts_of_errors(path):
    """Yield the strings in the arguments of each error that a request can get."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REQUEST_ERRORS:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
