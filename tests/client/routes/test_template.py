"""Tests of `POST /template/inspect`."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[3] / "demo" / "chat" / "chat_template.jinja"


async def test_the_format_of_a_template_is_reported_as_text_and_as_json(post):
    answer = (await post("/template/inspect", template=DEMO.read_text())).json()
    assert answer["format"]["layout"]["reasoning"]["open"] == "<think>\n"
    assert "What the template supports" in answer["text"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "template is required"),
        ("", "template must be a string with at least 1 character"),
        ("{% for", "template cannot be analysed: "),
    ],
)
async def test_a_wrong_template_is_refused_with_the_reason(post, template, message):
    body = {} if template is None else {"template": template}
    response = await post("/template/inspect", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "template"
    assert error["message"].startswith(message)
