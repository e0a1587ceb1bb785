"""Tests of images that the user drops, pastes or chooses in the playground's chat."""

import base64
import json

import pytest

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUl"
    "EQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{PIXEL}"
# A script that sends the event which a browser sends when the user drops or pastes files.
_SEND_FILES = """
([selector, type, field, name, mime, content]) => {
  const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type: mime }));
  const Kind = type === "paste" ? ClipboardEvent : DragEvent;
  const event = new Kind(type, { [field]: files, bubbles: true, cancelable: true });
  document.querySelector(selector).dispatchEvent(event);
}
"""


def drop(page, name="pixel.png", mime="image/png"):
    page.evaluate(_SEND_FILES, ["#log", "drop", "dataTransfer", name, mime, PIXEL])


def attached(page):
    return page.locator("#attached img")


@pytest.fixture
def sent(frontend):
    """A function that returns the messages of the last request."""
    return lambda: json.loads(frontend[0].generations[-1].chat_request)["messages"]


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false]")


def test_dropped_pasted_and_chosen_images_are_sent_with_the_text(page, sent):
    drop(page, "first.png")
    attached(page).nth(0).wait_for()

    arguments = ["#prompt", "paste", "clipboardData", "second.png", "image/png", PIXEL]
    page.evaluate(_SEND_FILES, arguments)
    attached(page).nth(1).wait_for()
    file = {"name": "third.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
    page.set_input_files("#image-files", file)
    attached(page).nth(2).wait_for()
    assert [image.get_attribute("alt") for image in attached(page).all()] == [
        *("first.png", "second.png", "third.png")
    ]
    page.get_by_role("button", name="Remove second.png").click()
    ask(page, "What are these?")
    image = {"type": "image_url", "image_url": {"url": URL}}
    text = {"type": "text", "text": "What are these?"}
    assert sent()[-1]["content"] == [image, image, text]
    assert attached(page).count() == 0
    sent_images = page.locator(".message.user img")
    assert sent_images.count() == 2
    assert sent_images.first.evaluate("image => image.complete && image.naturalWidth") == 1


def test_an_edited_message_keeps_its_image(page, sent):
    drop(page)
    attached(page).wait_for()
    ask(page, "first")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("changed")
    page.locator(".message.user form button[type=submit]").click()
    page.wait_for_selector(".message.assistant:last-of-type[aria-busy=false]")
    [message] = sent()
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][1]["text"] == "changed"


def test_other_files_are_refused(page):
    drop(page, "notes.pdf", "application/pdf")
    refusal = "notes.pdf is not a PNG, JPEG, WebP, GIF or BMP image."
    page.locator("#status", has_text=refusal).wait_for()
    assert attached(page).count() == 0
