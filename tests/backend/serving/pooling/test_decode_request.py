import base64
import tracemalloc

import numpy as np
import pytest
from nereid_backend.errors import RequestError
from nereid_backend.serving.pooling import decode_request


def test_options_are_a_json_object_and_null_is_the_default():
    known = decode_request.EMBEDDING_OPTIONS
    assert decode_request.parse_options(None, known) == {}
    assert decode_request.parse_options('{"dimensions": 3, "prompt": null}', known) == {
        "dimensions": 3
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "options: the text must be a JSON object"),
        ("{", "options: the text is not valid JSON"),
        ("[" * 100_000, "options: the text is not valid JSON"),
        (
            '{"dims": 1}',
            "options: the option 'dims' is not known. The known options are",
        ),
        ('{"dimensions": true}', "dimensions: the value must be an integer, but it is true."),
        ('{"normalize": 1}', "normalize: the value must be true or false, but it is 1."),
    ],
)
def test_wrong_options_are_refused_by_name(text, message):
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        decode_request.parse_options(text, decode_request.EMBEDDING_OPTIONS)


def test_text_that_is_not_utf8_is_refused_with_its_index():
    assert decode_request.decode_texts([b"a", "b"], "texts") == ["a", "b"]
    with pytest.raises(RequestError, match="texts: element 1 is not valid UTF-8"):
        decode_request.decode_texts([b"a", b"\xff"], "texts")


def ints(*values):
    return np.array(values, dtype=np.int32)


def test_ids_are_one_input_or_are_split_by_their_lengths():
    assert decode_request.split_token_ids(ints(1, 2, 3), None, 3) == [[1, 2, 3]]
    assert decode_request.split_token_ids(ints(1, 2, 3), ints(1, 2), 3) == [[1], [2, 3]]
    assert decode_request.split_token_ids(ints(), ints(), 3) == []
    assert decode_request.split_token_ids(ints(), None, 3) == [[]]


def test_token_ids_that_are_too_long_are_refused_or_cut_before_they_become_lists():
    ids = np.zeros(1_000_000, dtype=np.int32)
    tracemalloc.start()
    try:
        message = r"input_ids: the input has 1000000 tokens, but the limit is 128 \(max_model_len\)"
        with pytest.raises(RequestError, match=message):
            decode_request.split_token_ids(ids, None, 128)
        with pytest.raises(RequestError, match="input_ids: element 1: the input has 999999 tokens"):
            decode_request.split_token_ids(ids, ints(1, 999_999), 128)
        cut = decode_request.split_token_ids(ids, ints(1, 999_999), 128, truncate=True)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert [len(one) for one in cut] == [1, 128]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [(ints(1, 1), "sum of the lengths is 2"), (ints(3, 0), "at least 1, but one is 0")],
)
def test_wrong_lengths_are_refused(lengths, message):
    with pytest.raises(RequestError, match=message):
        decode_request.split_token_ids(ints(1, 2, 3), lengths, 3)


def test_options_that_are_too_long_are_refused_before_they_are_parsed():
    with pytest.raises(RequestError, match=r"options: the text has 30000002 characters, but the"):
        decode_request.parse_options("[" + "[]," * 10_000_000 + "]", {})


def test_a_part_is_a_text_or_an_image():
    encoded = base64.b64encode(b"picture").decode()
    assert decode_request.parse_part('{"text": "x"}', 0) == {"text": "x"}
    assert decode_request.parse_part(f'{{"image": "{encoded}"}}', 0) == {"image": b"picture"}
    url = f"data:image/png;base64,{encoded}"
    assert decode_request.parse_part(f'{{"image": "{url}"}}', 0) == {"image": b"picture"}
    upper_case_url = f"DATA:image/png;BASE64,{encoded}"
    assert decode_request.parse_part(f'{{"image": "{upper_case_url}"}}', 0) == {"image": b"picture"}
    both = {"text": "x", "image": b"picture"}
    assert decode_request.parse_part(f'{{"text": "x", "image": "{url}"}}', 0) == both


def test_a_document_is_a_text_or_an_image_but_not_both():
    assert decode_request.parse_document('{"text": "x"}', 0) == "x"
    assert decode_request.parse_document('{"image": "aGk="}', 0) == b"hi"
    with pytest.raises(RequestError, match="element 1 has both a text and an image"):
        decode_request.parse_document('{"text": "x", "image": "aGk="}', 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "parts: element 2 is not valid JSON"),
        ('{"text": [' + "[]," * 2**17, "parts: element 2 has more than 131072 opening brackets"),
        ('{"video": "b"}', "parts: element 2 must be"),
        ("{}", "parts: element 2 must be"),
        ('{"text": 3}', "text must be a string"),
        ('{"image": "https://x.y/z.png"}', "does not fetch URLs"),
        ('{"image": "data:image/png,xyz"}', "a data: URL must have the form"),
        ('{"image": "%"}', "not valid base64"),
    ],
)
def test_an_invalid_part_is_refused_with_its_index(text, message):
    with pytest.raises(RequestError, match=message):
        decode_request.parse_part(text, 2)


def test_each_of_several_queries_is_paired_with_its_own_document():
    assert decode_request.pair_queries(["q", "r"], ["a", "b"]) == [("q", "a"), ("r", "b")]
    with pytest.raises(
        RequestError, match="query: a request must have one query, or one query for each of the 3"
    ):
        decode_request.pair_queries(["q", "r"], ["a", "b", "c"])
