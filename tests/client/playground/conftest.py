"""Fixtures that open the playground of a frontend with the echo model in a real Chromium."""

import pytest
from fakes.chromium import chromium
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import live_frontend

KEY = "s3cret"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def frontend():
    """A pair: the backend with the echo model, and the URL of the frontend.

    The frontend also serves a fake embedding model and a fake reranker.
    """
    backend = FakeBackend()
    with live_frontend(backend, FakePooling()) as port:
        yield backend, f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def guarded_url():
    """The URL of a frontend that requires the API key `KEY`."""
    with live_frontend(FakeBackend(), api_key=KEY) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def open_page(browser):
    """A function that opens a page.

    The test fails if a script of the page raises an error, or if the browser reports a violation of
    the page's content security policy (CSP).
    """
    problems = []
    contexts = []

    def open_url(url, width=1280, height=800, color_scheme="light"):
        viewport = {"width": width, "height": height}
        context = browser.new_context(viewport=viewport, color_scheme=color_scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if "CSP" in line.text else None)
        page.goto(url)
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def page(open_page, frontend):
    return open_page(frontend[1])
