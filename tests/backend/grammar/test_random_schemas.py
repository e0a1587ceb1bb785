"""Tests that each text which the guide of a random schema allows is valid for the schema."""

import json
import os
import random

import pytest
from backend.grammar.random_schemas import schema, walk
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.grammar.request_spec import schema_spec
from nereid_backend.grammar.validate_answer import describe_violation

NUM_BATCHES = int(os.environ.get("NEREID_RANDOM_SCHEMAS", "100")) // 25


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_finished_texts_of_a_random_schema_are_valid(batch, guide, vocabulary):
    ended = refused = 0
    for number in range(25):
        rng = random.Random(1000 * batch + number)
        asked = schema(rng)
        try:
            start = guide(schema_spec(asked, is_strict=True))
        except RequestError:
            refused += 1
            continue
        for jump in (False, True):
            text = walk(start.fork(), vocabulary, rng, jump=jump)
            if text is not None:
                ended += 1
                assert describe_violation(text, asked) is None, (asked, text)
    assert ended >= 25
    assert refused <= 2


@pytest.mark.parametrize("seed", range(12))
def test_finished_texts_of_a_tool_tag_contain_valid_arguments(seed, guide, vocabulary):
    rng = random.Random(seed)
    asked = schema(rng)
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "json_schema", "json_schema": asked, "max_whitespace_cnt": 1},
        "end": "\n</tool_call>",
    }
    source = json.dumps({"type": "structural_tag", "format": tag})
    start = guide(GrammarSpec("structural_tag", source))
    texts = [walk(start.fork(), vocabulary, rng, jump=jump) for jump in (False, True) * 3]
    found = [text for text in texts if text is not None]
    assert found
    for text in found:
        inner = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert describe_violation(inner, asked) is None, (asked, text)
