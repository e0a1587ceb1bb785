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
    num_ended = num_refused = 0
    for number in range(25):
        rng = random.Random(1000 * batch + number)
        random_schema = schema(rng)
        try:
            start = guide(schema_spec(random_schema, is_strict=True))
        except RequestError:
            num_refused += 1
            continue
        for jump in (False, True):
            text = walk(start.fork(), vocabulary, rng, jump=jump)
            if text is not None:
                num_ended += 1
                assert describe_violation(text, random_schema) is None, (random_schema, text)
    assert num_ended >= 25
    assert num_refused <= 2


@pytest.mark.parametrize("seed", range(12))
def test_finished_texts_of_a_tool_tag_contain_valid_arguments(seed, guide, vocabulary):
    rng = random.Random(seed)
    random_schema = schema(rng)
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "json_schema", "json_schema": random_schema, "max_whitespace_cnt": 1},
        "end": "\n</tool_call>",
    }
    source = json.dumps({"type": "structural_tag", "format": tag})
    start = guide(GrammarSpec("structural_tag", source))
    texts = [walk(start.fork(), vocabulary, rng, jump=jump) for jump in (False, True) * 3]
    finished_texts = [text for text in texts if text is not None]
    assert finished_texts
    for text in finished_texts:
        arguments = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert describe_violation(arguments, random_schema) is None, (random_schema, text)
