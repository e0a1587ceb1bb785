"""Tests that the dashboard, the alert rules and the compose file are valid.

The dashboard and the rules must use only metrics that Nereid publishes.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from loadtest.server.served import Served, free_ports

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboards" / "nereid.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
COMPOSE = ROOT / "deploy" / "compose.yaml"
VARIABLES = {"NEREID_API_KEY": "a", "CHECKPOINT": "/model", "GRAFANA_PASSWORD": "b"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is missing"
)


def dashboard_queries():
    """Return the PromQL queries of all panels, with values in place of dashboard variables."""
    targets = itertools.chain.from_iterable(panel["targets"] for panel in DASHBOARD["panels"])
    texts = [target["expr"] for target in targets]
    return [text.replace("$instance", ".*").replace("$__rate_interval", "10s") for text in texts]


def promtool(*arguments):
    """Run promtool in the folder of the monitoring files, and check that it succeeds."""
    command = ["promtool", *arguments]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_alert_rules_pass_their_tests_and_the_configuration_is_valid():
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test():
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    checks = itertools.chain.from_iterable(test["alert_rule_test"] for test in tests)
    tested_alerts = {check["alertname"] for check in checks if "exp_alerts" in check}
    assert tested_alerts == {rule["alert"] for rule in RULES}


@needs_promtool
def test_every_query_of_the_dashboard_is_valid(tmp_path):
    rules = [{"record": f"query{n}", "expr": text} for n, text in enumerate(dashboard_queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", file)


def test_queries_and_rules_ask_for_published_metrics():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    published = set(re.findall(r"`(nereid[:_]\w+)`", page))
    for text in [*dashboard_queries(), *(rule["expr"] for rule in RULES)]:
        for name in re.findall(r"\bnereid[:_]\w+", text):
            assert {name, re.sub("_(bucket|sum|count)$", "", name)} & published, name


def test_the_dashboard_is_valid_for_the_schema_of_grafana():
    plugins.register_default_plugins()
    written = JSONEncoder().encode(Dashboard.from_json(DASHBOARD))
    assert contains(json.loads(written), DASHBOARD)


def contains(whole, part):
    """Return whether the JSON value `whole` contains all members of `part`, at every level.

    `whole` may have more members, because Grafana's schema adds default values.
    """
    if isinstance(part, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def test_the_compose_file_mounts_files_that_exist():
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE.parent / source).exists(), volume


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is missing")
def test_the_compose_file_is_valid_for_docker_compose():
    command = ["docker-compose", "-f", str(COMPOSE), "config", "--quiet"]
    done = subprocess.run(
        command, env=os.environ | VARIABLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def prometheus(folder, target):
    """Run Prometheus with the configuration of this repository, and yield its URL."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "alerts.yml", folder)
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(60)


def query(url, text):
    """Send an instant query to Prometheus, and return the samples."""
    address = f"{url}/query?{urllib.parse.urlencode({'query': text})}"
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            return json.load(response)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []  # Prometheus has not started yet


def queries_without_samples(url, queries):
    """Wait until all queries have samples. Return the queries without samples after a minute."""
    missing, deadline = list(queries), time.monotonic() + 60
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        missing = [text for text in missing if not query(url, text)]
    return missing


@pytest.mark.long
@pytest.mark.triton
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing")
def test_a_real_prometheus_has_samples_for_every_query_of_the_dashboard(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[team-a]\nkey = "a"\nmax_concurrent_requests = 1000\n')
    with (
        Served(environment={"NEREID_API_KEY_FILE": str(keys)}) as served,
        prometheus(tmp_path, f"127.0.0.1:{served.openai_port}") as url,
    ):
        assert queries_without_samples(url, ['up{job="nereid"} == 1']) == []

        bodies = {
            "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
            "embeddings": {"input": "Hello"},
            "rerank": {"query": "a", "documents": ["b", "c"]},
            "completions": {"prompt": ["a"] * 200},  # refused, because it exceeds max_prompts
        }
        for _ in range(5):  # a rate needs two samples of a time series
            for route, body in bodies.items():
                post(f"{served.openai_url}/{route}", body)
            time.sleep(1)
        assert queries_without_samples(url, dashboard_queries()) == []

        with urllib.request.urlopen(f"{url}/rules", timeout=30) as response:
            (group,) = json.load(response)["data"]["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        assert {rule["state"] for rule in group["rules"]} <= {"inactive", "pending"}


def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer a"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as response:
        response.read()
