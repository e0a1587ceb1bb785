"""docs/request-fields.md is complete, and the tests that it names exist."""

import re
from pathlib import Path

import pytest
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer import read_sampling, unsupported_fields
from nereid_client.protocol import refused
from nereid_client.protocol.generation_requests import (
    PASSED_ON,
    ChatCompletionRequest,
    CompletionRequest,
)
from nereid_client.protocol.responses_request import (
    REFUSED_IN_RESPONSES,
    REFUSED_IN_TOOLS,
    ResponsesRequest,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "request-fields.md").read_text()


def rows():
    """(field names, whose, what it does, tests) of each row of each table."""
    for line in PAGE.splitlines():
        if not line.startswith("| `"):
            continue
        names, of, *what, tests = line.strip("| ").split(" | ")
        yield re.findall(r"`(\w+)`", names), of, " | ".join(what), re.findall(r"`([^`]+)`", tests)


ROWS = list(rows())
NAMED = {name for names, *_ in ROWS for name in names}


def backend_fields():
    """Names in the tables of the backend's modules."""
    return {
        name
        for module in (read_sampling, unsupported_fields)
        for variable, table in vars(module).items()
        if isinstance(table, dict | frozenset | tuple) and not variable.startswith("__")
        for name in table
        if isinstance(name, str)
    }


def test_every_field_that_the_frontend_knows_is_on_the_page():
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert not known - NAMED
    assert not ResponsesRequest.model_fields.keys() - NAMED
    assert not PASSED_ON - NAMED


def test_every_field_that_the_backend_knows_is_on_the_page():
    assert {"temperature", "stop"} <= backend_fields()
    assert not backend_fields() - NAMED


def test_each_row_says_whose_it_is_what_it_does_and_what_proves_it():
    for names, of, what, tests in ROWS:
        assert names
        assert re.fullmatch(r"O?V?S?L?", of), names
        assert what, names
        assert tests, names


@pytest.mark.parametrize("test", sorted({test for *_, tests in ROWS for test in tests}))
def test_a_named_test_exists(test):
    path, _, name = test.partition("::")
    source = (ROOT / path).read_text()
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE)


def told(name):
    """What the page says of a field, in each of its rows."""
    return [what for names, _, what, _ in ROWS if name in names]


@pytest.mark.parametrize(
    "table",
    [
        *(refused.REFUSED, refused.REFUSED_IN_CHAT, refused.REFUSED_IN_COMPLETIONS),
        *(REFUSED_IN_RESPONSES, REFUSED_IN_TOOLS),
    ],
)
def test_the_page_gives_the_frontends_reason_of_each_refusal(table):
    for name, refusal in table.items():
        assert any(what.startswith(f"refused: {refusal.reason}") for what in told(name)), name


def refusal_of(name):
    """The backend's words when the field asks for something."""
    with pytest.raises(RequestError) as caught:
        unsupported_fields.refuse_unsupported({name: "something"})
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(refused.REFUSED_BY_BACKEND))
def test_what_the_backend_refuses_is_refused_by_name(name):
    words = refusal_of(name)
    assert words.startswith(f"{name}: ")
    reason = words.removeprefix(f"{name}: ").partition(", got ")[0]
    assert any(what.startswith(f"refused: {reason}") for what in told(name))


def test_the_ensemble_knows_every_field_that_a_completion_passes_on():
    read_sampling.refuse_unknown(dict.fromkeys(PASSED_ON))


def test_a_completion_drops_no_field_that_the_backend_acts_on_or_refuses():
    own = {*CompletionRequest.model_fields, *refused.REFUSED_IN_COMPLETIONS}
    # A completion's text is the raw one: how reasoning is streamed means nothing in it.
    assert backend_fields() - PASSED_ON - own == {"stream_reasoning"}
