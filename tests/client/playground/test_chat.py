"""Tests of the chat in the playground page, in a real Chromium."""

import json

import pytest

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture
def backend(frontend):
    return frontend[0]


def ask(page, text):
    """Send a message with the keyboard, and wait until the answer is complete."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false]")


def answer(page):
    return page.locator(".message.assistant").last


def sent(backend):
    return json.loads(backend.generations[-1].chat_request)


def test_an_answer_is_streamed_with_its_reasoning(page, backend):
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.select_option("#thinking", "enabled")
    page.fill("#prompt", "<think>because</think>Hello <pause 0.3>you")
    page.press("#prompt", "Enter")
    page.wait_for_selector("text=Hello")
    assert answer(page).get_attribute("aria-busy") == "true"
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    assert answer(page).locator(":scope > pre.text").inner_text() == "Hello you"
    assert not answer(page).locator(".reasoning pre").is_visible()
    answer(page).locator("summary", has_text="Reasoning").click()
    assert answer(page).locator(".reasoning pre").inner_text() == "because"
    assert "finish_reason stop · 3 tokens" in answer(page).inner_text()
    request = sent(backend)
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["temperature"] == 0.5
    assert request["thinking"] == {"type": "enabled"}


def test_markup_in_an_answer_stays_text(page):
    ask(page, "<img src=x onerror=alert(1)> <b>bold</b>")
    assert answer(page).locator("img, b").count() == 0
    assert "<b>bold</b>" in answer(page).inner_text()


def test_escape_stops_an_answer_and_the_part_stays_in_the_conversation(page, backend):
    number = len(backend.aborted)
    page.fill("#prompt", "one <pause 60>two")
    page.press("#prompt", "Enter")
    answer(page).get_by_text("one").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("text=finish_reason stopped")
    assert len(backend.aborted) == number + 1
    ask(page, "next")
    assert sent(backend)["messages"][1]["content"] == "one "


def test_the_last_answer_can_be_generated_again(page, backend):
    ask(page, "first")
    ask(page, "second")
    assert page.locator(".regenerate").count() == 1
    number = len(backend.generations)
    page.click(".regenerate")
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false]")
    assert len(backend.generations) == number + 1
    contents = [message["content"] for message in sent(backend)["messages"]]
    assert contents == ["first", "first", "second"]
    assert page.locator(".message").count() == 4


def test_an_edited_message_replaces_all_later_messages(page, backend):
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("changed")
    page.locator(".message.user form button[type=submit]").click()
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false]")
    assert [message["content"] for message in sent(backend)["messages"]] == ["changed"]
    assert page.locator(".message").count() == 2
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_a_tool_call_waits_for_its_result(page, backend):
    page.click("#example-tool")
    ask(page, f"Look. {CALL}")
    request = sent(backend)
    assert request["tools"][0]["function"]["name"] == "get_weather"
    assert request["tool_choice"] == "auto"
    assert '"city": "Paris"' in answer(page).locator(".call pre").inner_text()
    page.fill("#prompt", "Another question")
    page.press("#prompt", "Enter")
    assert page.inner_text("#status") == "Send the results of the tool calls first."
    page.get_by_label("Result of get_weather").fill("18 degrees")
    page.get_by_role("button", name="Send the results").click()
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false] >> text=18 degrees")
    call, result = sent(backend)["messages"][1:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": "call_0", "content": "18 degrees"}


def test_a_call_of_a_custom_tool_shows_its_text_and_waits_for_its_result(page, backend):
    page.evaluate("document.getElementById('options').open = true")
    page.fill("#tools", '[{"type": "custom", "custom": {"name": "shell"}}]')
    call = '{"name": "shell", "arguments": {"input": "ls\\npwd"}}'
    ask(page, f"Look. <tool_call>{call}</tool_call>")
    assert answer(page).locator(".call pre").inner_text() == "ls\npwd"
    page.get_by_label("Result of shell").fill("a.txt")
    page.get_by_role("button", name="Send the results").click()
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false] >> text=a.txt")
    function = sent(backend)["messages"][1]["tool_calls"][0]["function"]
    assert function == {"name": "shell", "arguments": '{"input": "ls\\npwd"}'}


def test_tokens_are_shaded_and_the_arrow_keys_show_the_alternatives(page, backend):
    page.check("#logprobs")
    ask(page, "one two three")
    assert sent(backend)["top_logprobs"] == 5
    tokens = answer(page).locator(".token")
    assert tokens.count() == 3
    assert tokens.first.get_attribute("aria-label") == "one␣, 90.5 %"
    shades = tokens.first.evaluate("token => getComputedStyle(token).backgroundColor")
    assert shades != "rgba(0, 0, 0, 0)"
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("token => token === document.activeElement")
    assert "two␣ has 90.5 %" in answer(page).inner_text()
    assert "o1 36.8 %" in answer(page).inner_text()


def test_a_schema_is_edited_as_fields_and_as_text(page, backend):
    page.select_option("#format", "json_schema")
    page.click("#add-field")
    page.keyboard.type("colours")
    page.keyboard.press("Tab")
    page.get_by_label("Type of colours").select_option("list of texts")
    page.locator(".schema-field", has=page.get_by_label("Remove age")).get_by_label(
        "required"
    ).uncheck()
    page.get_by_role("button", name="Remove name").click()
    ask(page, "{}")
    schema = sent(backend)["response_format"]["json_schema"]["schema"]
    assert schema == {
        "type": "object",
        "properties": {
            "age": {"type": "integer"},
            "colours": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["colours"],
        "additionalProperties": False,
    }
    page.fill("#schema", '{"properties": {"point": {"$ref": "#/$defs/p"}}}')
    assert page.get_by_label("Type of point").input_value() == "see the JSON"


def test_a_wrong_schema_is_reported_and_not_sent(page, backend):
    number = len(backend.generations)
    page.select_option("#format", "json_schema")
    page.fill("#schema", '{"type": ')
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    assert page.locator("#schema-error").inner_text()
    assert page.get_attribute("#schema", "aria-invalid") == "true"
    assert page.input_value("#prompt") == "hello"
    assert len(backend.generations) == number


def test_an_error_of_the_server_is_shown_with_its_message(page):
    page.fill("#temperature", "9")
    ask(page, "hello")
    error = "temperature must be at most 2, but the request has 9"
    assert answer(page).get_by_role("alert").inner_text().startswith(error)


def test_an_error_in_the_stream_is_shown_after_the_text(page):
    ask(page, "some text <fail UNAVAILABLE the engine has stopped>")
    assert "some text" in answer(page).inner_text()
    assert "the engine has stopped" in answer(page).get_by_role("alert").inner_text()
