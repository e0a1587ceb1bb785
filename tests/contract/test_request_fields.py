"""Tests that the frontend, the backend and the documentation agree on the request fields."""

import json
import re
from pathlib import Path

import pytest
from contract import request_fields_page
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer import request_fields, unsupported_fields
from nereid_client.protocol import refused
from nereid_client.protocol.generation_requests import (
    PASSED_ON,
    ChatCompletionRequest,
    CompletionRequest,
)
from nereid_client.protocol.responses_request import ResponsesRequest

ROOT = Path(__file__).resolve().parents[2]
# For each supported field, the names of the tests that show its effect.
FIELD_TESTS = json.loads((Path(__file__).parent / "data" / "field_tests.json").read_text())
FIELDS_OF_ANSWERS = {
    name
    for row in re.findall(r"^\| (`[^|]*)", request_fields_page.ANSWER, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}
SUPPORTED = {
    *ChatCompletionRequest.model_fields,
    *CompletionRequest.model_fields,
    *ResponsesRequest.model_fields,
    *FIELDS_OF_ANSWERS,
}


def backend_fields():
    """Return the names of all fields that the backend reads or rejects."""
    return {*request_fields.FIELD_NAMES, *unsupported_fields.NAMES}


def test_the_page_is_generated_from_the_declarations():
    fields_page = request_fields_page.TARGET.read_text(encoding="utf-8")
    assert fields_page == request_fields_page.text(), "run tests/contract/request_fields_page.py"
    page = request_fields_page.REFUSED_TARGET.read_text(encoding="utf-8")
    assert page == request_fields_page.refused_text(), "run tests/contract/request_fields_page.py"


def test_each_field_has_a_meaning():
    for model in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        assert not [name for name, field in model.model_fields.items() if not field.description]


def test_the_frontend_knows_every_field_of_the_backend():
    known = {
        *SUPPORTED,
        *refused.REFUSED,
        *refused.REFUSED_BY_BACKEND,
        *refused.REFUSED_IN_CHAT,
        *refused.REFUSED_IN_COMPLETIONS,
    }
    assert not backend_fields() - known


def test_each_supported_field_has_a_test():
    assert FIELD_TESTS.keys() == SUPPORTED
    assert all(FIELD_TESTS.values())


def test_the_tests_of_each_field_exist():
    pattern = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)
    files = (ROOT / "tests").glob("**/test_*.py")
    existing = {name for path in files for name in pattern.findall(path.read_text())}
    assert not {name for tests in FIELD_TESTS.values() for name in tests} - existing


@pytest.mark.parametrize("name", sorted(refused.REFUSED_BY_BACKEND))
def test_what_the_backend_refuses_is_refused_by_name(name):
    with pytest.raises(RequestError) as caught:
        unsupported_fields.refuse_unsupported({name: "something"})
    assert str(caught.value).startswith(f"{name}: ")


def test_the_ensemble_knows_every_field_that_a_completion_passes_on():
    request_fields.refuse_unknown(dict.fromkeys(PASSED_ON))


def test_a_completion_drops_no_field_that_the_backend_acts_on_or_refuses():
    read_by_the_frontend = {
        *CompletionRequest.model_fields,
        *refused.REFUSED,
        *refused.REFUSED_IN_COMPLETIONS,
    }
    # The field `stream_reasoning` has no meaning for a completion, because a completion returns the
    # raw text of the model.
    assert backend_fields() - PASSED_ON - read_by_the_frontend == {"stream_reasoning"}
