"""The Kubernetes manifests are valid, and agree with the server and with each other."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from nereid_client.app import create_app
from nereid_client.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
VARIANTS = ["base", *sorted(f"overlays/{path.name}" for path in (MANIFESTS / "overlays").iterdir())]
VERSIONS = ("1.30", "1.33", "1.35")

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the manifests, is not installed"
)


def render(variant):
    """Return the objects of a variant, by kind."""
    command = ["kubectl", "kustomize", MANIFESTS / variant]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {item["kind"]: item for item in yaml.safe_load_all(rendered)}


@pytest.fixture(scope="module", params=VARIANTS)
def objects(request):
    return render(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(objects, version):
    for item in objects.values():
        kubernetes_validate.validate(item, version, strict=True)


def test_a_misspelt_field_is_found():
    service = yaml.safe_load((MANIFESTS / "base" / "service.yaml").read_text())
    service["spec"]["port"] = 9000
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[0], strict=True)


def test_every_selector_selects_the_pods_and_nothing_else(objects):
    labels = {"app.kubernetes.io/name": "nereid"}
    deployment = objects["Deployment"]["spec"]
    assert deployment["template"]["metadata"]["labels"] == labels
    assert deployment["selector"] == {"matchLabels": labels}
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": labels}
    assert objects["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": labels}


def test_the_probes_request_routes_of_the_frontend(objects):
    routes = create_app(Settings()).openapi()["paths"]
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes


@pytest.fixture(scope="module")
def help_text():
    command = [Path(sys.executable).with_name("nereid"), "serve", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_variables_are_documented_settings(objects, help_text):
    described = (ROOT / "docs" / "reference" / "settings.md").read_text() + help_text
    for name in objects["ConfigMap"]["data"]:
        assert re.search(rf"\b{name}\b", described), name


def test_the_server_can_drain_before_it_is_killed(objects, help_text):
    drain = re.search(r"--drain-timeout S  .*?The default is\s+(\d+)", help_text, re.DOTALL)
    assert drain is not None
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > float(drain[1])


def test_the_autoscaler_uses_a_published_metric():
    autoscaler = render("overlays/autoscale")["HorizontalPodAutoscaler"]
    (metric,) = autoscaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].replace("_", ":", 1)
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "metrics.md").read_text()
