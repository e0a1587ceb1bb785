"""Tests the playground page in a real Chromium, with the demo models on a real server."""

import pytest
from fakes.chromium import chromium

pytestmark = pytest.mark.triton


def test_all_models_of_the_server_answer_in_the_playground(served):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{served.openai_port}/")

        # The language model calls the tool of the example, and the page shows its tokens.
        page.check("#logprobs")
        page.click("#example-tool")
        page.fill("#prompt", "What is the weather in Paris?")
        page.press("#prompt", "Enter")
        page.get_by_label("Result of get_weather").fill('{"weather": "sunny", "degrees": 21}')
        page.get_by_role("button", name="Send the results").click()
        page.get_by_text("It is 21 degrees and sunny in Paris.").first.wait_for()
        assert page.locator(".token").count() > 20

        page.click("#tab-embeddings")
        page.fill("#texts", "Elin has a hedgehog.\nBram has a parrot.\nWho keeps a hedgehog?")
        page.click("#embeddings-form button")
        row = page.locator("#embeddings tbody tr").first.locator("td")
        row.first.wait_for()
        with_elin, with_bram, with_question = map(float, row.all_inner_texts())
        assert with_elin == 1
        assert with_question > with_bram

        page.click("#tab-rerank")
        page.fill("#query", "Who keeps a hedgehog?")
        page.fill("#documents", "Bram has a parrot.\nElin has a hedgehog.")
        page.click("#rerank-form button")
        page.locator("#rerank tbody th").first.get_by_text("Elin").wait_for()

        page.click("#tab-server")
        gauge = page.locator(".gauge", has_text="KV cache in use").locator(".value")
        gauge.get_by_text("%").wait_for()
