"""Tests of the frontend's metrics page, `GET /metrics`."""

import asyncio
from pathlib import Path

import pytest
from fakes.app_client import client_of
from fakes.fake_backend import FakeBackend
from fakes.page_server import serve_page
from nereid_client.app import create_app
from nereid_client.middleware.request_metrics import SUPERVISOR_USER_AGENT
from nereid_client.settings import Settings
from nereid_client.vllm_metric_names import VLLM_METRICS
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
# The echo model waits five seconds before it answers "a".
LATE = {"messages": [{"role": "user", "content": "<pause 5> a"}]}

SERVER_PAGE = b"""\
# TYPE nereid:num_requests gauge
nereid:num_requests 5
# TYPE nereid:num_requests_running gauge
nereid:num_requests_running{model_name="llm"} 3
# TYPE nereid:request_success_total counter
nereid:request_success_total{finished_reason="stop",model_name="llm"} 7
# TYPE nereid:request_prompt_tokens histogram
nereid:request_prompt_tokens_bucket{model_name="llm",le="1"} 0
nereid:request_prompt_tokens_bucket{model_name="llm",le="+Inf"} 2
nereid:request_prompt_tokens_sum{model_name="llm"} 9
nereid:request_prompt_tokens_count{model_name="llm"} 2
"""


async def samples_of(client):
    """Return all samples of the metrics page: (name, sorted labels) -> value."""
    page = await client.get("/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def refused(limit, status):
    """Return the key of the sample that counts the requests that a limit refused."""
    name = "nereid_frontend_refused_requests_total"
    return (name, ("limit", limit), ("status", str(status)))


def requests(route, status):
    """Return the key of the metric that counts the requests with a route and an HTTP status."""
    return ("nereid_frontend_requests_total", ("route", route), ("status", str(status)))


async def test_requests_are_counted_by_route_and_status(connect):
    async with connect() as client:
        for _ in range(2):
            await client.post(CHAT, json=HELLO)
        await client.post(CHAT, json={})
        await client.get("/v1/models/org/name")
        await client.get("/no/such/path")
        samples = await samples_of(client)

    assert samples[requests(CHAT, 200)] == 2
    assert samples[requests(CHAT, 400)] == 1
    assert samples[requests("/v1/models/{model_id}", 404)] == 1
    assert samples[requests("unknown", 404)] == 1


async def test_the_checks_of_nereid_serve_are_not_counted(connect):
    async with connect() as client:
        await client.get("/health/ready", headers={"User-Agent": SUPERVISOR_USER_AGENT})
        await client.post(CHAT, json=HELLO, headers={"User-Agent": SUPERVISOR_USER_AGENT})
        samples = await samples_of(client)
    assert not any(name == "nereid_frontend_requests_total" for name, *_ in samples)


async def test_paths_that_clients_invent_add_no_series(connect):
    async with connect() as client:
        for number in range(20):
            await client.get(f"/{number}")
            await client.get(f"/v1/responses/resp_{number}")
        samples = await samples_of(client)
    assert samples[requests("unknown", 404)] == 20
    assert samples[requests("/v1/responses/{response_id}", 404)] == 20


async def test_a_refused_request_is_counted_under_the_route_of_its_method(connect):
    async with connect(api_key="s3cret") as client:
        await client.post("/v1/models/a/load")
        await client.put("/v1/models/a")  # no route has this method
        samples = await samples_of(client)
    assert samples[requests("/v1/models/{model_id}/load", 401)] == 1
    assert samples[requests("/v1/models/{model_id}", 401)] == 1


@pytest.mark.parametrize(
    ("settings", "path", "body", "headers", "limit", "status"),
    [
        ({"max_body_bytes": 10}, CHAT, HELLO, {}, "max_body_bytes", 413),
        ({"max_prompts": 1}, "/v1/completions", {"prompt": ["a", "b"]}, {}, "max_prompts", 400),
        ({"api_key": "s3cret"}, CHAT, HELLO, {}, "api_key", 401),
        (
            {"max_stored_response_bytes": 1},
            "/v1/responses",
            {"input": "a", "background": True},
            {},
            "max_stored_response_bytes",
            400,
        ),
        ({}, CHAT, LATE, {"X-Request-Timeout": "0.05"}, "x_request_timeout", 504),
        ({"request_timeout_s": 1}, CHAT, LATE, {}, "request_timeout_s", 504),
    ],
)
async def test_a_refusal_is_counted_under_the_setting_that_caused_it(
    connect, settings, path, body, headers, limit, status
):
    async with connect(**settings) as client:
        response = await client.post(path, json=body, headers=headers)
        samples = await samples_of(client)
    assert response.status_code == status
    assert samples[refused(limit, status)] == 1
    assert samples[requests(path, status)] == 1


async def test_a_background_response_that_takes_too_long_is_counted(connect):
    async with connect(request_timeout_s=1) as client:
        body = {"input": "<pause 60> a", "background": True}
        made = (await client.post("/v1/responses", json=body)).json()
        while (await client.get(f"/v1/responses/{made['id']}")).json()["status"] != "failed":
            await asyncio.sleep(0.05)
        samples = await samples_of(client)
    assert samples[refused("request_timeout_s", 504)] == 1


async def test_a_body_that_grows_over_the_limit_is_counted_once(connect):
    async def pieces():
        for _ in range(4):
            yield b"x" * 400

    async with connect(max_body_bytes=1000) as client:
        await client.post(CHAT, content=pieces())
        samples = await samples_of(client)
    assert samples[refused("max_body_bytes", 413)] == 1


@pytest.mark.parametrize(
    ("is_draining", "limit", "status"),
    [(False, "max_concurrent_requests", 429), (True, "draining", 503)],
)
async def test_a_full_or_stopping_frontend_counts_rejected_requests(is_draining, limit, status):
    app = create_app(Settings(served_model_name="echo", max_concurrent_requests=1), FakeBackend)
    async with client_of(app) as client:
        app.state.gate.enter()  # as if one request, the maximum, were running
        app.state.gate.is_draining = is_draining
        response = await client.post("/v1/embeddings", json={"input": "a"})
        samples = await samples_of(client)

    assert response.status_code == status
    assert samples[refused(limit, status)] == 1
    assert samples[requests("/v1/embeddings", status)] == 1
    assert samples[("nereid_frontend_running_requests",)] == 1


async def test_what_an_overloaded_server_would_reject_is_counted_as_overload(connect):
    full = {"messages": [{"role": "user", "content": "<fail UNAVAILABLE 9 wait; again in 7 s>"}]}
    async with connect() as client:
        answers = [await client.post(CHAT, json=full) for _ in range(20)]
        samples = await samples_of(client)
    assert {answer.status_code for answer in answers} == {503}
    by_frontend = sum("overloaded" in answer.text for answer in answers)
    assert by_frontend > 0
    assert samples[refused("overload", 503)] == by_frontend
    assert samples[requests(CHAT, 503)] == 20


async def test_the_gauge_follows_the_requests_that_run(connect, backend, tmp_path):
    flag = tmp_path / "go on"
    async with connect() as client:
        waiting = {"messages": [{"role": "user", "content": f"<until {flag}> done"}]}
        task = asyncio.create_task(client.post(CHAT, json=waiting))
        while not backend.active:
            await asyncio.sleep(0.001)
        assert (await samples_of(client))[("nereid_frontend_running_requests",)] == 1
        Path(flag).touch()
        await task
        assert (await samples_of(client))[("nereid_frontend_running_requests",)] == 0


async def test_the_page_needs_no_key(connect):
    async with connect(api_key="s3cret") as client:
        await samples_of(client)


async def test_the_first_burst_after_a_start_is_not_limited_by_the_servers_own_checks(
    connect, backend
):
    slow = {"messages": [{"role": "user", "content": "one <pause 60>two"}]}
    running = []

    async def start(client, headers):
        running.append(asyncio.create_task(client.post(CHAT, json=slow, headers=headers)))
        while len(backend.active) < len(running):
            await asyncio.sleep(0.01)

    headers_of_check = {"User-Agent": SUPERVISOR_USER_AGENT}
    async with connect(max_concurrent_requests=2) as client:
        # `nereid serve` sends one check to the language model and one to a pooling model.
        for headers in (headers_of_check, headers_of_check, {}, {}):
            await start(client, headers)
        assert (await client.post(CHAT, json=HELLO)).status_code == 429
        # Any client can send this user agent. Therefore, a third check at the same time is treated
        # like an ordinary request.
        assert (await client.post(CHAT, json=HELLO, headers=headers_of_check)).status_code == 429
        await client.post("/abort_request", json={"abort_all": True})
        responses = await asyncio.gather(*running)
    assert [response.status_code for response in responses] == [499] * 4


@pytest.fixture
def server_metrics():
    """The URL of a page with the content `SERVER_PAGE`, which stands for Triton's metrics page."""
    with serve_page(lambda: SERVER_PAGE) as url:
        yield f"{url}/metrics"


async def test_the_page_contains_the_metrics_of_the_triton_server(connect, server_metrics):
    async with connect(metrics_url=server_metrics) as client:
        samples = await samples_of(client)
    assert samples[("nereid:num_requests",)] == 5
    assert samples[("nereid_frontend_server_metrics_up",)] == 1
    assert ("nereid_frontend_running_requests",) in samples


async def test_a_setting_gives_metrics_the_names_and_labels_of_vllm(connect, server_metrics):
    async with connect(metrics_url=server_metrics, metrics_names="vllm") as client:
        samples = await samples_of(client)
    labels = (("engine", "0"), ("model_name", "echo"))
    assert samples[("vllm:num_requests_running", *labels)] == 3
    reason = ("finished_reason", "stop")
    assert samples[("vllm:request_success_total", labels[0], reason, labels[1])] == 7
    assert samples[("vllm:request_prompt_tokens_sum", *labels)] == 9
    # vLLM has no metric with this meaning, so the metric keeps Nereid's name.
    assert samples[("nereid:num_requests",)] == 5


def test_every_metric_with_a_name_of_vllm_is_published():
    page = (Path(__file__).resolve().parents[3] / "docs/reference/metrics.md").read_text()
    for name in VLLM_METRICS:
        assert f"`nereid:{name}`" in page


async def test_requests_and_tokens_are_counted_by_client(connect, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[team-a]\nkey = "a"\n[team-b]\nkey = "b"\n')
    async with connect(api_key="own", api_key_file=str(keys)) as client:
        for key in ("a", "a", "b", "own"):
            answer = await client.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"})
        await client.post(CHAT, json={}, headers={"Authorization": "Bearer b"})  # has no messages
        samples = await samples_of(client)

    def num_requests(client_name, status):
        labels = (("client", client_name), ("status", str(status)))
        return samples[("nereid_frontend_client_requests_total", *labels)]

    def num_tokens(client_name, kind):
        labels = (("client", client_name), ("kind", kind))
        return samples[("nereid_frontend_client_tokens_total", *labels)]

    assert num_requests("team-a", 200) == 2
    assert num_requests("team-b", 200) == 1
    assert num_requests("team-b", 400) == 1
    usage_per_answer = answer.json()["usage"]
    assert num_tokens("team-a", "prompt") == 2 * usage_per_answer["prompt_tokens"]
    assert num_tokens("team-a", "generation") == 2 * usage_per_answer["completion_tokens"]
    # The requests with the key of the setting `api_key` belong to no client of the file.
    assert {dict(labels).get("client") for _, *labels in samples} == {None, "team-a", "team-b"}


async def test_durations_are_counted_by_route(connect):
    async with connect() as client:
        body = {"messages": [{"role": "user", "content": "<pause 0.2> a"}]}
        await client.post(CHAT, json=body)
        samples = await samples_of(client)
    name = "nereid_frontend_request_duration_seconds"
    assert samples[(f"{name}_count", ("route", CHAT))] == 1
    assert 0.2 <= samples[(f"{name}_sum", ("route", CHAT))] < 60


async def test_without_the_triton_server_the_page_has_the_metrics_of_the_frontend(connect):
    async with connect(metrics_url="http://127.0.0.1:9/metrics") as client:
        samples = await samples_of(client)
    assert samples[("nereid_frontend_server_metrics_up",)] == 0
    assert ("nereid_frontend_running_requests",) in samples


async def test_a_bug_is_counted_as_a_500(connect, backend):
    async def broken(generation):
        raise ZeroDivisionError
        yield {}

    backend.generate = broken
    async with connect() as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 500
        samples = await samples_of(client)
    assert samples[requests(CHAT, 500)] == 1


async def test_every_limit_is_described_on_the_page(connect):
    async with connect() as client:
        page = (await client.get("/metrics")).text
    for name in ("overload", "draining", "x_request_timeout"):
        assert name in page
