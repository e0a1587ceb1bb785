"""Tests that the Helm chart yields valid Kubernetes objects that fit the server and the image."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from nereid_client.app import create_app
from nereid_client.cli import serve_command
from nereid_client.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SELECTOR = {"app.kubernetes.io/name": "nereid", "app.kubernetes.io/instance": "test"}
VARIANTS = {
    "with a key file": ["apiKeys.file=[team]"],
    "with a secret": ["apiKeys.existingSecret=keys", "networkPolicy.collectorPort=4318"],
    "with GPUs": ["apiKeys.existingSecret=keys", "gpus=2", "image.repository=nereid"],
    "with an autoscaler": ["apiKeys.existingSecret=keys", "autoscaling.enabled=true"],
}
HELM = shutil.which("helm", path=Path(sys.executable).parent) or shutil.which("helm")

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is missing; `make setup` installs it")


def template(values):
    """Run `helm template` with the given values, and return the finished process."""
    flags = [f"--set={value}" for value in values]
    return subprocess.run(
        [HELM, "template", "test", CHART, *flags], capture_output=True, text=True, check=False
    )


def render(values):
    """Return the Kubernetes objects of the chart: kind -> object."""
    rendered = template(values)
    assert rendered.returncode == 0, rendered.stderr
    return {item["kind"]: item for item in yaml.safe_load_all(rendered.stdout)}


@pytest.fixture(scope="module", params=VARIANTS)
def objects(request):
    return render(VARIANTS[request.param])


def pod(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


def container(objects):
    (only,) = pod(objects)["containers"]
    return only


def test_the_chart_has_no_lint():
    command = [HELM, "lint", "--strict", CHART, "--set=apiKeys.existingSecret=keys"]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def test_each_object_is_valid(objects):
    for item in objects.values():
        kubernetes_validate.validate(item, "1.35", strict=True)


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_each_object_is_valid_for_older_versions(objects, version):
    for item in objects.values():
        kubernetes_validate.validate(item, version, strict=True)


def test_a_misspelt_field_of_an_object_is_found(objects):
    service = objects["Service"] | {"spec": objects["Service"]["spec"] | {"port": 9000}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, "1.35", strict=True)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "apiKeys.existingSecret or apiKeys.file is required"),
        (["apiKeys.file=a", "gpu=1"], "additional properties 'gpu' not allowed"),
        (["apiKeys.file=a", "gpus=one"], "got string, want integer"),
        (["apiKeys.file=a", "settings.MAX_MODEL_LEN=1"], "MAX_MODEL_LEN"),
        (["apiKeys.file=a", "settings.NEREID_OPENAI_PORT=9100"], "NEREID_OPENAI_PORT: the chart"),
        (
            ["apiKeys.file=a", "settings.NEREID_METRICS_NAMES=vllm", "autoscaling.enabled=true"],
            "NEREID_METRICS_NAMES: the autoscaler needs",
        ),
    ],
)
def test_wrong_values_are_rejected(values, reason):
    rendered = template(values)
    assert rendered.returncode != 0
    assert reason in rendered.stderr


def test_every_selector_selects_the_pods_and_nothing_else(objects):
    deployment = objects["Deployment"]["spec"]
    assert deployment["template"]["metadata"]["labels"] == SELECTOR
    assert deployment["selector"] == {"matchLabels": SELECTOR}
    assert objects["Service"]["spec"]["selector"] == SELECTOR
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": SELECTOR}
    assert objects["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": SELECTOR}


@pytest.fixture(scope="module")
def routes():
    return create_app(Settings()).openapi()["paths"]


def test_the_probes_request_routes_of_the_frontend(objects, routes):
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(objects)[probe]["httpGet"]["path"] in routes


def test_every_object_uses_the_port_of_the_frontend(objects):
    port = Settings().port
    assert container(objects)["ports"] == [{"name": "http", "containerPort": port}]
    (service_port,) = objects["Service"]["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (port, "http")
    (ingress,) = objects["NetworkPolicy"]["spec"]["ingress"]
    assert ingress["ports"] == [{"port": port}]
    annotations = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)


def test_the_pod_has_the_user_and_the_folders_of_the_image(objects):
    users = set(re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE))
    assert users == {str(pod(objects)["securityContext"]["runAsUser"])}
    mounts = {mount["mountPath"]: mount for mount in container(objects)["volumeMounts"]}
    for folder in re.findall(r"XDG_\w+_HOME=(\S+)", DOCKERFILE):
        assert not mounts[folder].get("readOnly")
    image = container(objects)["image"].split(":")[0]
    assert re.search(rf"docker build -t {image} ", DOCKERFILE)


def test_the_server_finds_the_model_and_the_keys(objects):
    variables = {entry["name"]: entry["value"] for entry in container(objects)["env"]}
    assert variables["NEREID_MODEL"].startswith("/models/")
    assert variables["NEREID_API_KEY_FILE"] == "/secrets/api-keys"
    mounts = {mount["mountPath"]: mount["name"] for mount in container(objects)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(objects)["volumes"]}
    assert "persistentVolumeClaim" in volumes[mounts["/models"]]
    secret = volumes[mounts["/secrets"]]["secret"]["secretName"]
    if "Secret" in objects:
        assert objects["Secret"]["metadata"]["name"] == secret
        assert list(objects["Secret"]["data"]) == ["api-keys"]
    else:
        assert secret == "keys"


def test_the_pods_of_the_gpu_variant_have_gpus_and_are_replaced_one_after_the_other():
    objects = render(VARIANTS["with GPUs"])
    assert container(objects)["resources"]["limits"]["nvidia.com/gpu"] == 2
    update = objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": 1, "maxSurge": 0}


def test_a_large_number_in_a_values_file_stays_an_integer(tmp_path):
    values = {
        "apiKeys": {"existingSecret": "keys"},
        "drainTimeout": 1000000,
        "gpus": 1,
        "resources": {"limits": None},
        "settings": {
            "NEREID_MAX_WAITING_TOKENS": 4194304,
            "NEREID_ENABLE_PREFIX_CACHING": False,
            "NEREID_GPU_MEMORY_UTILIZATION": 0.85,
            "NEREID_CHAT_TEMPLATE_KWARGS": '{"a": 1}',
        },
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [HELM, "template", "test", CHART, f"--values={file}"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    objects = {item["kind"]: item for item in yaml.safe_load_all(rendered)}
    variables = {entry["name"]: entry["value"] for entry in container(objects)["env"]}
    assert variables["NEREID_MAX_WAITING_TOKENS"] == "4194304"
    assert variables["NEREID_ENABLE_PREFIX_CACHING"] == "false"
    assert variables["NEREID_GPU_MEMORY_UTILIZATION"] == "0.85"
    assert variables["NEREID_CHAT_TEMPLATE_KWARGS"] == '{"a": 1}'
    assert container(objects)["args"] == ["--drain-timeout", "1000000"]
    assert container(objects)["resources"]["limits"] == {"nvidia.com/gpu": 1}


@pytest.fixture(scope="module")
def serve():
    """The argument parser of `nereid serve`."""
    commands = argparse.ArgumentParser().add_subparsers()
    serve_command.add_parser(commands)
    return commands.choices["serve"]


def test_the_variables_are_documented_settings(objects, serve):
    described = (ROOT / "docs" / "reference" / "settings.md").read_text() + serve.format_help()
    for entry in container(objects)["env"]:
        assert re.search(rf"\b{entry['name']}\b", described), entry["name"]


def test_the_server_can_drain_before_it_is_killed(objects, serve):
    drain_s = serve.parse_args(container(objects)["args"]).drain_timeout
    before_s = container(objects)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(objects)["terminationGracePeriodSeconds"] > before_s + drain_s


def test_the_autoscaler_uses_published_gauges():
    objects = render(VARIANTS["with an autoscaler"])
    assert "replicas" not in objects["Deployment"]["spec"]
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for metric in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"].replace("_", ":", 1)
        assert f"`{name}`" in page
