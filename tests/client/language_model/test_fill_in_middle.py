"""Tests of the field `suffix` of completions, which requires fill-in-the-middle markers."""

import pytest
from fakes.fake_backend import FakeBackend
from nereid_client.language_model.fill_in_middle import FORMATS
from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.anyio
MARKERS = FORMATS[1].markers


class TokenizerBackend(FakeBackend):
    """The echo model with a tokenizer that has one token for each letter and for each marker.

    All other texts become the token for unknown words.
    """

    def __init__(self):
        super().__init__()
        self.num_tokenized = 0
        self.set_markers(MARKERS)

    def set_markers(self, markers):
        """Replace the tokenizer by a tokenizer in which the given markers are special tokens."""
        letters = {letter: number for number, letter in enumerate(["?", *"abcdef<>_|fimprxsudl"])}
        self._tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self._tokenizer.add_special_tokens(list(markers))

    async def tokenize(self, generation):
        self.num_tokenized += 1
        return self._tokenizer.encode(generation.text_input, add_special_tokens=False).ids

    async def detokenize(self, request_id, token_ids, *, skip_special_tokens):
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture
def backend():
    return TokenizerBackend()


async def test_prompt_and_suffix_are_between_the_markers_of_the_tokenizer(connect, backend):
    begin, gap, end = MARKERS
    async with connect() as client:
        body = {"prompt": ["a = ", "b"], "suffix": " + 1", "max_tokens": 99}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        prompts = [generation.text_input for generation in backend.generations]
        assert prompts == [f"{begin}a = {gap} + 1{end}", f"{begin}b{gap} + 1{end}"]
        num_tokenized = backend.num_tokenized
        await client.post("/v1/completions", json=body)
        # The frontend has stored the format, so it does not tokenize the markers again.
        assert backend.num_tokenized == num_tokenized


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.markers[0])
async def test_each_format_has_each_marker_and_each_text_once(form):
    prompt = form.prompt("BEFORE", "AFTER")
    for part in (*form.markers, "BEFORE", "AFTER"):
        assert prompt.count(part) == 1
    assert prompt.replace("BEFORE", "").replace("AFTER", "") == "".join(
        part for part in form.template if part in form.markers
    )


@pytest.mark.parametrize(
    ("markers", "fields", "words"),
    [
        ((), {}, "no known markers"),
        (MARKERS[:2], {}, "no known markers"),
        (MARKERS, {"echo": True}, "echo=false"),
        (MARKERS, {"prompt": [1, 2]}, "prompt of text"),
        (MARKERS, {"suffix": 5}, "suffix must be a string"),
    ],
)
async def test_a_suffix_that_cannot_be_used_is_refused(connect, backend, markers, fields, words):
    backend.set_markers(markers)
    async with connect() as client:
        body = {"prompt": "a", "suffix": "b", **fields}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_an_empty_suffix_has_no_effect(connect, backend):
    async with connect() as client:
        await client.post("/v1/completions", json={"prompt": "a", "suffix": ""})
    assert backend.generations[0].text_input == "a"
