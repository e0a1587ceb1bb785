"""Tests of the functions that read the metrics page of a server."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fakes.live_frontend import wait_for

from loadtest.server import gauges
from loadtest.server.gauges import Sample, Sampler, rates

PAGE = """\
# TYPE nereid:num_requests gauge
nereid:num_requests{model_name="llm"} 2
nereid:num_requests_running{model_name="llm"} 1
nereid:num_requests_waiting{model_name="llm"} 0
nereid:kv_cache_blocks_used{model_name="llm"} 3
nereid:request_success_total{finished_reason="stop",model_name="llm"} 4
nereid:request_success_total{finished_reason="length",model_name="llm"} 5
nereid:inter_token_latency_seconds_bucket{le="0.1",model_name="llm"} 9
nv_inference_count{model="llm"} 7
"""
IDLE_PAGE = "".join(
    line[:-1] + "0\n" for line in PAGE.splitlines() if "llm" in line and "_total" not in line
)


@contextmanager
def metrics(page):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.page.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.page = page
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_labels_are_summed_and_buckets_left_out():
    values = gauges.parse(PAGE)
    assert values["request_success_total"] == 4 + 5
    assert values["num_requests"] == 2
    assert "inter_token_latency_seconds_bucket" not in values
    assert "nv_inference_count" not in values


def test_what_is_in_use_is_named():
    busy = "num_requests 2, num_requests_running 1, kv_cache_blocks_used 3"
    assert gauges.what_is_busy(gauges.parse(PAGE)) == busy


def test_a_page_without_the_gauges_is_no_idle_server():
    assert gauges.what_is_busy(gauges.parse(IDLE_PAGE)) is None
    assert gauges.what_is_busy({}) == "the metrics page has no num_requests"


def test_a_block_that_stays_in_use_is_reported_after_the_limit():
    used_block = 'kv_cache_blocks_used{model_name="llm"} '
    with metrics(IDLE_PAGE.replace(f"{used_block}0", f"{used_block}1")) as (_, url):
        assert gauges.wait_for_rest(url, limit_s=0.5) == "kv_cache_blocks_used 1"


def test_the_wait_ends_when_the_server_is_idle():
    with metrics(PAGE) as (server, url):
        threading.Timer(0.4, lambda: setattr(server, "page", IDLE_PAGE)).start()
        assert gauges.wait_for_rest(url, limit_s=60) is None


def test_a_server_that_cannot_be_read_is_not_idle():
    assert "cannot be read" in gauges.wait_for_rest("http://127.0.0.1:9/metrics", limit_s=0.1)


def test_gauges_are_sampled_along_a_run():
    with metrics(PAGE) as (_, url), Sampler(url, every_s=0.02) as sampler:
        wait_for(lambda: len(sampler.samples) > 2)
    assert sampler.samples[0].gauges["num_requests_running"] == 1
    assert sampler.samples[0].at < sampler.samples[-1].at


def test_counters_become_rates():
    samples = [Sample(10.0, {"n_total": 5.0}), Sample(12.0, {"n_total": 9.0})]
    assert rates(samples, "n_total") == ([12.0], [2.0])


def test_rates_over_a_window_leave_out_what_lies_between():
    samples = [Sample(at, {"n_total": at**2}) for at in (0.0, 1.0, 2.0, 3.0, 4.5)]
    assert rates(samples, "n_total", 2.0) == ([2.0, 4.5], [2.0, 6.5])
    assert rates([], "n_total") == ([], [])
