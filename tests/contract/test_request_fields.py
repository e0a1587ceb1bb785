"""The page about request fields is complete, and each supported field has a test."""

import json
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
PAGE = (ROOT / "docs" / "reference" / "request-fields.md").read_text(encoding="utf-8")
# For each supported field, the names of the tests that show its effect.
FIELD_TESTS = json.loads((Path(__file__).parent / "data" / "field_tests.json").read_text())
ORIGINS = {"OpenAI", "vLLM", "SGLang", "llama.cpp", "Anthropic", "Nereid"}


def rows_after(start):
    """Yield the cells of the rows of the first table after a line that starts with `start`."""
    table = re.split(rf"^{re.escape(start)}.*$", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
    for line in table.split("\n|", 1)[1].split("\n\n")[0].splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def fields_after(start):
    """Return the fields in the first cells of that table."""
    names = [name for cells in rows_after(start) for name in re.findall(r"`(\w+)`", cells[0])]
    assert len(names) == len(set(names))
    return set(names)


SUPPORTED_TABLES = (
    "## Chat and completions",
    "## Chat only",
    "## Completions only",
    "## Responses only",
    "## Fields of the answer",
)
SUPPORTED = set().union(*map(fields_after, SUPPORTED_TABLES))
REFUSED_EVERYWHERE = fields_after("### Rejected by chat, completions and responses")
REFUSED_IN_CHAT = fields_after("### Rejected by chat and responses")
NAMED = SUPPORTED.union(
    REFUSED_EVERYWHERE,
    REFUSED_IN_CHAT,
    fields_after("### Rejected by completions"),
    fields_after("### Rejected by responses"),
)


def backend_fields():
    """Return the names of all fields that the backend reads or rejects."""
    return {*read_sampling.FIELD_NAMES, *unsupported_fields.NAMES}


def test_every_field_that_the_frontend_knows_is_on_the_page():
    common = fields_after("## Chat and completions")
    chat = common | fields_after("## Chat only")
    assert not ChatCompletionRequest.model_fields.keys() - chat
    completions = common | fields_after("## Completions only")
    assert not CompletionRequest.model_fields.keys() - completions
    assert not ResponsesRequest.model_fields.keys() - common - fields_after("## Responses only")
    assert not PASSED_ON - NAMED


def test_every_field_that_the_backend_knows_is_on_the_page():
    assert {"temperature", "stop"} <= backend_fields()
    assert not backend_fields() - NAMED


def test_the_page_lists_every_rejected_field_where_it_is_rejected():
    in_responses = REFUSED_IN_RESPONSES.keys() | REFUSED_IN_TOOLS.keys()
    assert refused.REFUSED.keys() | refused.REFUSED_BY_BACKEND == REFUSED_EVERYWHERE
    assert refused.REFUSED_IN_CHAT.keys() == REFUSED_IN_CHAT
    assert fields_after("### Rejected by completions") == refused.REFUSED_IN_COMPLETIONS.keys()
    assert fields_after("### Rejected by responses") == in_responses - REFUSED_IN_CHAT


def test_each_row_gives_the_origin_of_each_field_and_its_meaning():
    for start in SUPPORTED_TABLES:
        for names, origins, *meaning in rows_after(start):
            assert set(origins.split(", ")) <= ORIGINS, names
            assert meaning, names


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
    read_sampling.refuse_unknown(dict.fromkeys(PASSED_ON))


def test_a_completion_drops_no_field_that_the_backend_acts_on_or_refuses():
    own = {*CompletionRequest.model_fields, *refused.REFUSED_IN_COMPLETIONS}
    # A completion returns the raw text, so how reasoning is streamed has no meaning for it.
    assert backend_fields() - PASSED_ON - own == {"stream_reasoning"}
