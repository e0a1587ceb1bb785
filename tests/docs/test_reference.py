"""Tests that the reference pages name exactly what the code declares, with the same defaults."""

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from backend.serving import fake_server  # noqa: F401 - replaces the server's Python API
from nereid_backend.serving import published_metrics
from nereid_backend.serving.executor.engine_metrics import EngineMetrics
from nereid_backend.serving.pooling.pooling_metrics import PoolingMetrics
from nereid_client.app import create_app
from nereid_client.cli.application import app
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
CODE = re.compile(r"`([^`]+)`")


def page(name):
    return (REFERENCE / name).read_text(encoding="utf-8")


def section(text, heading):
    """Return the text below a heading, up to the next heading of the same or a higher level."""
    level = heading.split()[0]
    after = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """Yield the cells of each table row whose first cell begins with code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def names(text):
    """Return the code in the first cell of each table row."""
    return [name for cells in rows(text) for name in CODE.findall(cells[0])]


def assert_no_name_twice(found):
    assert len(found) == len(set(found))


# ---- settings


@pytest.mark.parametrize("name", ["write_settings.py", "write_command_line.py"])
def test_everything_that_is_derived_from_the_settings_and_the_commands_is_up_to_date(name):
    tool = ROOT / "docs_tools" / name
    result = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_variable_on_any_page_exists():
    rows = {name for name in names(page("settings.md")) if name.startswith("NEREID_")}
    known = {"NEREID_", "NEREID_X_"} | {
        row.replace("_X_", f"_{kind}_") for row in rows for kind in ("X", "EMBEDDING", "RERANK")
    }
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        if "history" in path.parts:
            continue
        found = set(re.findall(r"\bNEREID_[A-Z_]*", path.read_text(encoding="utf-8")))
        assert found <= known, path


# ---- endpoints


def test_the_endpoints_page_lists_every_route():
    paths = create_app(Settings()).openapi()["paths"]
    known = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    found = [name for name in names(page("endpoints.md")) if re.match("[A-Z]+ /", name)]
    assert_no_name_twice(found)
    assert set(found) == known


# ---- tensors


def declared(model, side):
    """Return the name, type and shape of a model's inputs or outputs, from its config.pbtxt."""
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
    body = re.search(rf"^{side} \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[ ([-\d, ]+?) \]', body)
    assert len(found) == body.count("name:")
    return [(name, kind, f"[{shape}]") for name, kind, shape in found]


@pytest.mark.parametrize("model", ["llm", "embedding", "rerank"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_the_tensors_page_gives_name_type_and_shape_of_every_tensor(model, side):
    text = section(page("tensors.md"), f"### {side.capitalize()}s of {model}")
    found = [(name, *cells[1:3]) for cells in rows(text) for name in CODE.findall(cells[0])]
    assert found == declared(model, side)


# ---- metrics


class FakeMetricFamily:
    """A fake of `MetricFamily` of Triton's Python backend. The fake records the created metrics.

    Attributes:
        kinds: a dict from the name of each created metric to its kind. A test sets its own dict.
    """

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
    kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, *, name, description, kind):
        assert description
        self.kinds[name] = kind

    def Metric(self, labels, buckets=None):
        assert labels["model_name"] in ("llm", "embedding")


@pytest.fixture
def model_metrics(monkeypatch):
    """A dict from the name of each metric that the Triton models create to its kind."""
    kinds = {}
    monkeypatch.setattr(FakeMetricFamily, "kinds", kinds)
    pb_utils = types.SimpleNamespace(MetricFamily=FakeMetricFamily)
    monkeypatch.setattr(published_metrics, "pb_utils", pb_utils)
    EngineMetrics()
    PoolingMetrics("embedding")
    # For a histogram NAME, the models create the counters NAME_bucket, NAME_sum and NAME_count.
    # Replace these counters by the histogram.
    histograms = [name.removesuffix("_bucket") for name in kinds if name.endswith("_bucket")]
    for name in histograms:
        for suffix in ("bucket", "sum", "count"):
            del kinds[f"{name}_{suffix}"]
        kinds[name] = "histogram"
    return kinds


def test_the_metrics_page_lists_every_metric_of_the_models(model_metrics):
    found = [name for name in names(page("metrics.md")) if name.startswith("nereid:")]
    assert_no_name_twice(found)
    assert set(found) == set(model_metrics)


def test_the_metrics_page_gives_the_kind_of_each_metric(model_metrics):
    text = page("metrics.md")
    for heading, kind in (
        ("## State", "gauge"),
        ("## Requests and tokens", "counter"),
        ("## Sizes and durations", "histogram"),
    ):
        assert {model_metrics[name] for name in names(section(text, heading))} == {kind}


def test_the_metrics_page_lists_every_metric_of_the_frontend():
    text = RequestMetrics(lambda: 0).as_text().decode()
    known = {
        f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
        if not name.endswith("_created")
    }
    found = [name for name in names(page("metrics.md")) if name.startswith("nereid_frontend_")]
    assert_no_name_twice(found)
    assert set(found) == known


# ---- command line


def test_the_command_line_page_shows_the_help_of_every_command():
    titles = set(re.findall(r'title="nereid ([a-z-]*[a-z]) .*--help"', page("command-line.md")))
    assert titles == set(typer.main.get_command(app).commands)
