"""Tests of the playground's other views, its API key and its accessibility, in a real Chromium."""

import contextlib
import itertools

import httpx
import pytest
from client.playground.conftest import KEY
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend
from fakes.page_server import serve_page

WIDTHS = [
    pytest.param(1280, "light", marks=pytest.mark.long),
    pytest.param(768, "dark", marks=pytest.mark.long),
    pytest.param(360, "light", marks=pytest.mark.long),
    (360, "dark"),
]


def show_view(page, name):
    page.get_by_role("tab", name=name).click()


def test_texts_are_compared_in_a_grid(page):
    show_view(page, "Embeddings")
    page.fill("#texts", "a cat\n\n  a cat  \nzebra")
    page.click("#embeddings-form button")
    page.wait_for_selector("#embeddings table")
    rows = [row.inner_text().split("\t") for row in page.locator("#embeddings tbody tr").all()]
    assert [row[0] for row in rows] == ["1. a cat", "2. a cat", "3. zebra"]
    assert rows[0][1:3] == ["1.00", "1.00"]
    assert rows[0][3] == rows[2][1] != "1.00"


def test_documents_are_ranked(page):
    show_view(page, "Rerank")
    page.fill("#query", "a cat")
    page.fill("#documents", "zebra\na cat sat\na dog")
    page.press("#query", "Enter")
    page.wait_for_selector("#rerank table")
    documents = page.locator("#rerank tbody th").all_inner_texts()
    assert documents == ["a cat sat", "a dog", "zebra"]


def test_a_template_is_inspected(page):
    show_view(page, "Template")
    page.fill("#jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    page.click("#template-form button")
    page.locator("#template pre", has_text="Format").wait_for()
    page.fill("#jinja", "{% for m in")
    page.click("#template-form button")
    page.locator("#template [role=alert]", has_text="template cannot be analysed").wait_for()


def test_a_missing_model_is_an_error_in_its_view(open_page, guarded_url):
    page = open_page(guarded_url)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    show_view(page, "Embeddings")
    page.fill("#texts", "a")
    page.click("#embeddings-form button")
    page.locator("#embeddings [role=alert]", has_text=".").wait_for()


@contextlib.contextmanager
def metrics_server():
    """Serve a metrics page whose counters increase with each request, and yield its URL."""
    numbers = itertools.count(1)

    def page():
        number = next(numbers)
        lines = [
            'nereid:num_requests_running{model_name="llm"} 3',
            'nereid:num_requests_waiting{model_name="llm"} 1',
            'nereid:kv_cache_blocks_used{engine="0",model_name="llm"} 10',
            'nereid:kv_cache_blocks_used{engine="1",model_name="llm"} 40',
            'nereid:kv_cache_blocks{engine="0",model_name="llm"} 100',
            'nereid:kv_cache_blocks{engine="1",model_name="llm"} 100',
            f'nereid:generation_tokens_total{{model_name="llm"}} {1000 * number}',
            f'nereid:time_to_first_token_seconds_sum{{model_name="llm"}} {0.5 * number}',
            f'nereid:time_to_first_token_seconds_count{{model_name="llm"}} {10 * number}',
        ]
        return "\n".join([*lines, ""]).encode()

    with serve_page(page) as url:
        yield f"{url}/metrics"


def test_gauges_follow_the_metrics(open_page):
    with metrics_server() as url, live_frontend(FakeBackend(), metrics_url=url) as port:
        page = open_page(f"http://127.0.0.1:{port}/")
        show_view(page, "Server")
        gauge = page.locator(".gauge", has_text="Time to the first token").locator(".value")
        gauge.get_by_text("50 ms").wait_for()
        values = page.locator(".gauge .value").all_inner_texts()
        assert values[:3] == ["3", "1", "25 %"]
        assert 100 < float(values[3]) < 1000


def test_without_the_key_neither_the_page_nor_its_scripts_are_sent(guarded_url):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic OmEz"}):
        response = httpx.get(guarded_url, headers=headers)
        assert response.status_code == 401
        assert "API key" in response.text
        assert 'id="composer"' not in response.text
    response = httpx.get(guarded_url, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200
    assert 'id="composer"' in response.text
    assert httpx.head(guarded_url).status_code == 401


def test_the_key_opens_the_page_and_is_sent_with_each_request(open_page, guarded_url):
    page = open_page(guarded_url)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The server does not accept this key.").wait_for()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    # The script of the page focuses the prompt only after it has started all views.
    page.wait_for_selector("#prompt:focus")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false] >> text=hello")
    assert page.locator("#model option").all_inner_texts() == ["echo"]
    page.reload()
    page.wait_for_selector("#composer")


def test_the_page_loads_nothing_from_elsewhere(open_page, frontend, browser):
    _, url = frontend
    page = browser.new_page()
    requested_urls = []
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.close()

    assert requested_urls
    # The page loads no other server's files. The URL "data:," is its empty icon.
    assert all(other.startswith(url) or other == "data:," for other in requested_urls)
    policy = httpx.get(url).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "unsafe" not in policy


def test_the_whole_page_can_be_used_with_the_keyboard(page):
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Rerank").get_attribute("aria-selected") == "true"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type("a cat")
    page.keyboard.press("Tab")
    page.keyboard.type("a dog")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rerank table")


def test_the_theme_is_remembered(page):
    def brightness():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    assert brightness() > 700
    page.select_option("#theme", "dark")
    assert brightness() < 100
    page.reload()
    assert brightness() < 100


@pytest.mark.parametrize(("width", "color_scheme"), WIDTHS)
def test_each_view_meets_wcag_aa_and_fits_into_the_window(open_page, frontend, width, color_scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
    page = open_page(frontend[1], width=width, color_scheme=color_scheme)
    if not page.locator("#logprobs").is_visible():
        page.locator("#options > summary").click()
    page.check("#logprobs")
    page.select_option("#format", "json_schema")
    page.fill("#schema", "{")
    assert not violations(axe, page, rules)
    page.select_option("#format", "")
    call = '<tool_call>{"name": "f", "arguments": {"text": "a long argument"}}</tool_call>'
    page.fill("#prompt", f"<think>why</think>{'word ' * 30}{call}")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    page.locator(".token").first.focus()
    assert not violations(axe, page, rules)
    for name, fields in {
        "Embeddings": {"#texts": "a\nb\nc\nd\ne\nf\ng\nh"},
        "Rerank": {"#query": "a", "#documents": "a\nb"},
        "Template": {"#jinja": "{{ messages[0].content }}"},
        "Server": {},
    }.items():
        show_view(page, name)
        for field, text in fields.items():
            page.fill(field, text)
        if fields:
            page.locator("form:visible button[type=submit]").click()
            page.locator(".result:visible > *").wait_for()
        assert not violations(axe, page, rules), name


def violations(axe, page, rules):
    """Return the accessibility rules that the page violates.

    If the page is wider than the window, the result also contains the number of excess pixels.
    """
    messages = [
        f"{rule['id']}: {node['html']}"
        for rule in axe.run(page, options=rules).response["violations"]
        for node in rule["nodes"]
    ]
    excess = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return messages + ([f"{excess} pixels too wide"] if excess > 0 else [])
