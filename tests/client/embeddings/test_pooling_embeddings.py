"""Tests of the routes for embeddings, such as `/v1/embeddings` and `/pooling`."""

import asyncio
import base64
import json
import time

import numpy as np
import openai
import pytest
from fakes.fake_pooling import vector
from nereid_client.embeddings import model_choice
from nereid_client.embeddings.embedding_output import WRITERS, join_json_list
from nereid_client.embeddings.pooling_backend import PoolingModels, PoolingTarget
from nereid_client.routes import embeddings

pytestmark = pytest.mark.anyio


def problem(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_a_text_becomes_a_vector_with_usage(ask):
    answer = (await ask("/v1/embeddings", model="tiny-embed", input="abc")).json()
    assert abs(answer.pop("created") - time.time()) < 100
    assert answer.pop("id").startswith("embd-")  # the library of Mistral requires an id
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector("abc")}],
        "model": "tiny-embed",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_a_list_of_texts_keeps_its_order(ask):
    data = (await ask("/v1/embeddings", input=["a", "bcd"])).json()["data"]
    assert [item["index"] for item in data] == [0, 1]
    assert [item["embedding"] for item in data] == [vector("a"), vector("bcd")]


async def test_token_ids_are_one_input_and_lists_of_them_several(ask, pooling):
    one = (await ask("/v1/embeddings", input=[97, 98])).json()["data"]
    assert [item["embedding"] for item in one] == [vector("ab")]
    two = (await ask("/v1/embeddings", input=[[97, 98], [99]])).json()["data"]
    assert [item["embedding"] for item in two] == [vector("ab"), vector("c")]
    assert pooling.calls[-1].tensors["input_lengths"] == [2, 1]


async def test_a_server_without_embedding_models_answers_404(ask, monkeypatch):
    def without_models(backend, control):
        return PoolingModels(backend, targets=[])

    monkeypatch.setattr(model_choice, "_create_pooling_models", without_models)
    error = problem(await ask("/v1/embeddings", input="abc"), status=404)
    assert error["code"] == "model_not_found"
    assert error["message"] == "The server has no model of the kind 'embedding'."


async def test_a_model_of_a_file_has_the_name_of_its_table(ask, monkeypatch):
    def with_target(backend, control):
        return PoolingModels(backend, [PoolingTarget("embedding", "embedding", ("поиск", "e"))])

    monkeypatch.setattr(model_choice, "_create_pooling_models", with_target)
    answer = await ask("/v1/embeddings", input="abc", model="e")
    assert answer.json()["model"] == "поиск"


@pytest.mark.parametrize(
    "fields",
    [
        {"encoding_format": "base64"},
        {"embedding_type": "base64"},
        {"encoding_format": "base64", "embedding_type": "base64"},
    ],
)
async def test_base64_holds_little_endian_floats(ask, fields):
    answer = await ask("/v1/embeddings", input=["abc", "d"], **fields)
    rows = [base64.b64decode(item["embedding"]) for item in answer.json()["data"]]
    assert [np.frombuffer(row, dtype="<f4").tolist() for row in rows] == [
        vector("abc"),
        vector("d"),
    ]


async def test_the_openai_client_reads_its_own_default_format(connect_pooling):
    async with connect_pooling() as client:
        made = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=client
        )
        answer = await made.embeddings.create(model="tiny-embed", input=["abc", "d"])
    assert [item.embedding for item in answer.data] == [vector("abc"), vector("d")]
    assert answer.usage.total_tokens == 4


async def test_options_reach_the_model(ask, pooling):
    answer = await ask(
        "/v1/embeddings",
        input="abc",
        dimensions=2,
        normalize=False,
        prompt_name="query",
        truncate=True,
    )
    assert answer.json()["data"][0]["embedding"] == vector("abc")[:2]
    (call,) = pooling.calls
    assert {name: value for name, value in call.options.items() if value is not None} == {
        "dimensions": 2,
        "normalize": False,
        "prompt_name": "query",
        "truncate": True,
        "kind": "dense",
    }


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("name", ["use_activation", "normalized"])
async def test_names_of_vllm_and_jina_turn_normalization_off(ask, pooling, path, name):
    await ask(path, input="abc", **{name: False})
    assert pooling.calls[0].options["normalize"] is False


async def test_an_instruction_is_a_prompt_and_minus_one_truncates(ask, pooling):
    await ask("/v1/embeddings", input="abc", instruction="Find: ", truncate_prompt_tokens=-1)
    assert pooling.calls[0].options["prompt"] == "Find: "
    assert pooling.calls[0].options["truncate"] is True


@pytest.mark.parametrize(
    "part",
    [
        {"image": "aGk="},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "text", "text": "image"},
        {"text": "image", "image": "aGk="},
    ],
)
async def test_content_parts_are_passed_on(ask, pooling, part):
    answer = await ask("/v1/embeddings", input=["image", part])
    assert [item["embedding"] for item in answer.json()["data"]] == [vector("image")] * 2
    assert "parts" in pooling.calls[0].tensors


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({}, "input is required, but the request does not contain it"),
        ({"input": []}, "input must not be an empty list"),
        (
            {"input": 7},
            "input must be a text, a content part, a list of texts or content parts, a list of",
        ),
        ({"input": ["a", 7]}, "input[1] must be a string or a content part, but the request has 7"),
        (
            {"input": [1, "a"]},
            "input must contain integers from 0 to 2147483647 as token ids, but the request",
        ),
        (
            {"input": [[1], []]},
            "input[1] must be a list of at least one token id, but the request has []",
        ),
        (
            {"input": [{"image": "a", "image_url": "b"}]},
            "input[0] must have text, or one of image and image_url, or both a text and an image",
        ),
        (
            {"input": [{"text": "a", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]},
            "input[0] has video_url, but this endpoint reads no videos; send frames as images",
        ),
        (
            {"input": {"input_audio": {"data": "AAAA", "format": "wav"}}},
            "input[0] has input_audio, but this endpoint reads no audio; send a transcript as text",
        ),
        ({"input": "a", "dimensions": 0}, "dimensions must be at least 1, but the request has 0"),
        ({"input": "a", "dimensions": 9}, "dimensions must be from 1 to 4, got 9"),
        (
            {"input": "a", "encoding_format": "hex"},
            "encoding_format must be 'float' or 'base64', but the request has \"hex\"",
        ),
        (
            {"input": "a", "embed_dtype": "float16"},
            "embed_dtype must be 'float32', but the request has \"float16\"",
        ),
        (
            {"input": "a", "endianness": "big"},
            "endianness must be 'native' or 'little', but the request has \"big\"",
        ),
        (
            {"input": "a", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens must be -1, which cuts texts at the model's limit, but the",
        ),
        ({"input": ["a", "b" * 13]}, "input: element 1: has 13 tokens; the limit is 12"),
        (
            {"input": "a", "prompt": "x", "prompt_name": "y"},
            "Only one of prompt_name, prompt and instruction is allowed, but the request has",
        ),
    ],
)
async def test_what_is_wrong_is_named(ask, fields, message_part):
    assert message_part in problem(await ask("/v1/embeddings", **fields))["message"]


async def test_half_a_surrogate_pair_is_refused(connect_pooling):
    async with connect_pooling() as client:
        answer = await client.post("/v1/embeddings", content=rb'{"input": "\ud800"}')
    assert (
        "The request body contains '\\ud800', which is half of a surrogate pair and no"
        in problem(answer)["message"]
    )


async def test_the_blamed_field_is_the_param(ask):
    assert problem(await ask("/v1/embeddings", input="b" * 13))["param"] == "input"
    assert problem(await ask("/v1/embeddings", input="b", dimensions=9))["param"] == "dimensions"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_the_field_of_mistral_and_voyage_shortens_the_vectors(ask, path):
    name = "embedding" if path == "/v1/embeddings" else "data"
    short = (await ask(path, input="abc", output_dimension=2)).json()["data"][0][name]
    assert short == (await ask(path, input="abc", dimensions=2)).json()["data"][0][name]
    assert len(short) == 2
    error = problem(await ask(path, input="b", output_dimension=9))
    assert error["param"] == "output_dimension"
    both = problem(await ask(path, input="b", output_dimension=2, dimensions=2))
    assert both["param"] == "output_dimension"


@pytest.mark.parametrize(
    ("model", "status", "message_part"),
    [
        (
            "echo",
            400,
            "The model 'echo' is the language model. Use 'tiny-embed' for this request, or leave",
        ),
        (
            "tiny-rerank",
            400,
            "The model 'tiny-rerank' is a reranker. Use 'tiny-embed' for this request, or leave",
        ),
        (
            "nothing",
            404,
            "The model 'nothing' does not exist. Use 'tiny-embed' for this request, or leave",
        ),
    ],
)
async def test_the_wrong_model_is_told_which_one_is_right(ask, model, status, message_part):
    error = problem(await ask("/v1/embeddings", model=model, input="a"), status)
    assert message_part in error["message"]
    assert error["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
async def test_a_request_to_generate_that_names_the_embedding_model_gets_its_route(ask, path, body):
    error = problem(await ask(path, model="tiny-embed", **body), 404)
    assert error["message"] == (
        "The model 'tiny-embed' is an embedding model. Use 'echo' for this request, or leave model "
        "out. The route of 'tiny-embed' is POST /v1/embeddings."
    )
    assert error["code"] == "model_not_found"


async def test_an_unknown_name_in_the_list_of_models_is_answered_with_all_names(connect_pooling):
    async with connect_pooling() as client:
        response = await client.get("/v1/models/nothing")
    assert problem(response, 404)["message"] == (
        "The model 'nothing' does not exist. This server serves 'echo', 'tiny-embed', "
        "'tiny-rerank'."
    )


async def test_without_an_embedding_model_it_is_a_404(ask, pooling):
    pooling.missing.add("embedding")
    error = problem(await ask("/v1/embeddings", model="tiny-embed", input="a"), 404)
    assert error["code"] == "model_not_found"


async def test_a_dead_model_is_a_503_with_retry_after(ask, pooling):
    pooling.down.add("embedding")
    answer = await ask("/v1/embeddings", model="tiny-embed", input="a")
    assert "started again" in problem(answer, 503)["message"]
    assert answer.headers["retry-after"] == "1"


async def test_every_served_model_is_listed(connect_pooling, pooling):
    async with connect_pooling() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["echo", "tiny-embed", "tiny-rerank"]
        assert (await client.get("/v1/models/tiny-embed")).json()["id"] == "tiny-embed"
        assert (await client.get("/v1/models/nothing")).status_code == 404
    assert pooling.is_closed


async def test_a_model_that_is_not_served_is_not_listed(connect_pooling, pooling):
    pooling.missing.add("rerank")
    async with connect_pooling() as client:
        listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["echo", "tiny-embed"]


async def test_a_long_answer_is_written_in_turns_with_others():
    num_turns = 0

    async def count_turns():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    other_task = asyncio.create_task(count_turns())
    try:
        encoded = await join_json_list(f'"{"a" * 20_000}"' for _ in range(200))
    finally:
        other_task.cancel()
    assert num_turns >= 9
    assert json.loads(encoded) == ["a" * 20_000] * 200


async def test_tei_gets_bare_lists(ask):
    assert (await ask("/embed", inputs=["abc", "d"])).json() == [vector("abc"), vector("d")]
    assert (await ask("/embed", inputs="abc")).json() == [vector("abc")]
    assert (await ask("/embed_all", inputs="ab")).json() == [[[1.0] * 4] * 2]
    assert (await ask("/embed_sparse", inputs=["ab", "c"])).json() == [
        [{"index": 2, "value": 0.5}],
        [{"index": 1, "value": 0.5}],
    ]


async def test_tei_errors_name_its_own_field(ask):
    assert problem(await ask("/embed", inputs="b" * 13))["param"] == "inputs"
    error = problem(await ask("/embed", inputs="b", truncation_direction="Left"))
    assert error["message"] == (
        'truncation_direction must be "right", but the request has "Left". Nereid can remove only '
        "the end of a text."
    )


async def test_what_a_model_does_not_give_is_refused_with_what_it_gives(ask, pooling):
    pooling.kinds["embedding"] = ["dense"]
    error = problem(await ask("/embed_sparse", inputs="a"))
    assert (
        error["message"] == "The model 'tiny-embed' cannot compute sparse weights. It can compute: "
        "one vector for each text."
    )


async def test_pooling_gives_a_vector_a_text_or_a_token(ask):
    answer = (await ask("/pooling", input=["abc"])).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": vector("abc")}]
    assert answer["object"] == "list"
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    answer = (await ask("/pooling", input=["ab", "c"], task="token_embed")).json()
    assert [item["data"] for item in answer["data"]] == [[[1.0] * 4] * 2, [[1.0] * 4]]


async def test_cohere_gets_a_list_for_each_type_of_embedding(ask):
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = (
        await ask("/v2/embed", model="tiny-embed", texts=["abc", ""], embedding_types=kinds)
    ).json()
    rows = [vector("abc"), vector("")]
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["abc", ""]
    assert answer["meta"]["billed_units"] == {"input_tokens": 3}
    embeddings = answer["embeddings"]
    assert embeddings["float"] == rows
    decoded = [base64.b64decode(text) for text in embeddings["base64"]]
    assert [np.frombuffer(row, "<f4").tolist() for row in decoded] == rows
    # A vector becomes one bit for each number: 1 if the number is positive. The bytes of "ubinary"
    # are unsigned, and the bytes of "binary" are signed.
    assert embeddings["ubinary"] == [[0b11110000], [0b01110000]]
    assert embeddings["binary"] == [[0b11110000 - 128], [0b01110000 - 128]]


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [
        ("search_query", "query"),
        ("search_document", "document"),
        ("clustering", "clustering"),
        ("classification", None),
        (None, None),
    ],
)
async def test_coheres_input_type_is_the_models_prompt_of_that_name(
    ask, pooling, input_type, prompt
):
    response = await ask("/v2/embed", texts=["a"], input_type=input_type)
    assert response.status_code == 200, response.text
    assert pooling.calls[0].options["prompt_name"] == prompt


async def test_cohere_cuts_what_is_too_long_unless_told_otherwise(ask, pooling):
    assert (await ask("/v2/embed", texts=["b" * 13])).status_code == 200
    assert pooling.calls[0].options["truncate"] is True
    refused = problem(await ask("/v2/embed", texts=["b" * 13], truncate="NONE"))
    assert refused["message"] == "texts: element 0: has 13 tokens; the limit is 12"


async def test_coheres_inputs_and_images_are_content_parts(ask, pooling):
    inputs = [{"content": [{"type": "text", "text": "abc"}]}]
    answer = (await ask("/v2/embed", inputs=inputs, output_dimension=2)).json()
    assert answer["embeddings"] == {"float": [vector("abc")[:2]]}
    assert (await ask("/v2/embed", images=["data:image/png;base64,AAAA"])).status_code == 200
    assert [json.loads(part) for part in pooling.calls[-1].tensors["parts"]] == [
        {"image": "data:image/png;base64,AAAA"}
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "images": ["b"]}, "images"),
        ({"texts": []}, "texts"),
        ({"inputs": [{"content": []}]}, "inputs"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
        ({"texts": ["a"], "truncate": "START"}, "truncate"),
        ({"texts": ["a"], "output_dimension": 9}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": 3}, "max_tokens"),
    ],
)
async def test_what_cohere_offers_and_this_does_not_is_refused_by_name(ask, body, param):
    assert problem(await ask("/v2/embed", **body))["param"] == param


async def test_coheres_version_1_gives_one_list_unless_types_are_asked_for(ask):
    plain = (await ask("/v1/embed", texts=["abc"])).json()
    assert (plain["response_type"], plain["embeddings"]) == ("embeddings_floats", [vector("abc")])
    typed = (await ask("/v1/embed", texts=["abc"], embedding_types=["float"])).json()
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == {"float": [vector("abc")]}
    assert typed["meta"]["api_version"] == {"version": "1"}


@pytest.mark.parametrize("name", ["output_dtype", "embedding_type"])
async def test_vectors_are_returned_in_fewer_bytes(ask, name):
    async def embed(vector_type):
        answer = await ask("/v1/embeddings", input=["abc", ""], **{name: vector_type})
        return [item["embedding"] for item in answer.json()["data"]]

    rows = [vector("abc"), vector("")]
    assert await embed("float") == rows
    for signed, unsigned, row in zip(await embed("int8"), await embed("uint8"), rows, strict=True):
        # Each vector is scaled so that its largest absolute value becomes 127.
        assert max(map(abs, signed)) == 127
        assert np.allclose(np.array(signed) / 127 * max(row), row, atol=max(row) / 254)
        assert unsigned == [number + 128 for number in signed]
    # A vector becomes one bit for each number: 1 if the number is positive. The bytes of "ubinary"
    # are unsigned, and the bytes of "binary" are signed.
    assert await embed("ubinary") == [[0b11110000], [0b01110000]]
    assert await embed("binary") == [[0b11110000 - 128], [0b01110000 - 128]]


@pytest.mark.parametrize("vector_type", [kind for kind in WRITERS if " " not in kind])
@pytest.mark.parametrize("number", [0.0, 1e-45, 1e-40], ids=["zero", "smallest", "subnormal"])
async def test_vectors_of_tiny_numbers_are_encoded(vector_type, number):
    row = np.array([number, -number, 0.0], dtype=np.float32)
    sign = int(number > 0)
    expected = {
        "float": row.tolist(),
        "base64": base64.b64encode(row.tobytes()).decode(),
        "int8": [127 * sign, -127 * sign, 0],
        "uint8": [128 + 127 * sign, 128 - 127 * sign, 128],
        "binary": [128 * sign - 128],
        "ubinary": [128 * sign],
    }
    assert json.loads(WRITERS[vector_type](row)) == expected[vector_type]


async def test_one_row_of_zeros_does_not_change_the_other_rows():
    rows = np.array([[0.0, 0.0], [0.5, -0.25]], dtype=np.float32)
    assert WRITERS["int8"](rows) == "[[0,0],[127,-64]]"


@pytest.mark.parametrize("vector_type", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("field", ["output_dtype", "embedding_type"])
async def test_base64_of_a_small_type_holds_its_bytes_as_voyages_library_reads_them(
    ask, vector_type, field
):
    body = {"input": ["abc", ""], field: vector_type}
    listed = (await ask("/v1/embeddings", **body)).json()["data"]
    encoded = (await ask("/v1/embeddings", **body, encoding_format="base64")).json()["data"]
    number_type = np.int8 if vector_type in ("int8", "binary") else np.uint8
    for numbers, text in zip(listed, encoded, strict=True):
        decoded = np.frombuffer(base64.b64decode(text["embedding"]), number_type)
        assert decoded.tolist() == numbers["embedding"]


async def test_cohere_gets_bytes_too(ask):
    answer = (await ask("/v2/embed", texts=["abc"], embedding_types=["int8", "uint8"])).json()
    (signed,), (unsigned,) = answer["embeddings"]["int8"], answer["embeddings"]["uint8"]
    assert unsigned == [number + 128 for number in signed]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("fields", "prompt", "truncate"),
    [
        ({"input_type": "query", "truncate": "END"}, "query", True),
        ({"input_type": "passage", "truncate": "NONE"}, "document", False),
        ({"input_type": "other"}, None, None),
        ({"input_type": "query", "prompt_name": "clustering"}, "clustering", None),
    ],
)
async def test_the_fields_of_nim_select_the_prompt_and_the_truncation(
    ask, pooling, path, fields, prompt, truncate
):
    assert (await ask(path, input="abc", **fields)).status_code == 200
    options = pooling.calls[-1].options
    assert (options.get("prompt_name"), options.get("truncate")) == (prompt, truncate)


async def test_voyages_library_gets_long_texts_cut(ask, pooling):
    assert (await ask("/v1/embeddings", input="abc", truncation=True)).status_code == 200
    assert (await ask("/v1/embeddings", input="abc", truncation=True, truncate=False)).is_success
    assert [call.options["truncate"] for call in pooling.calls] == [True, False]


async def test_an_empty_name_selects_the_default_model_as_in_vllm(ask):
    for path, body in (
        ("/v1/embeddings", {"input": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = await ask(path, **body, model="")
        assert response.status_code == 200, response.text


async def test_the_start_of_a_text_is_not_cut(ask):
    answer = await ask("/v1/embeddings", input="abc", truncate="START")
    assert problem(answer)["param"] == "truncate"


async def test_similarity_has_the_format_of_tei(ask):
    inputs = {"source_sentence": "abc", "sentences": ["abc", "xyz"]}
    same, other = (await ask("/similarity", inputs=inputs)).json()
    assert same == pytest.approx(1)
    assert 0 < other < 1
    answer = await ask("/similarity", inputs={"source_sentence": "abc", "sentences": []})
    assert problem(answer)["param"] == "inputs.sentences"


async def test_the_parameters_of_a_similarity_request_reach_the_model(ask, pooling):
    inputs = {"source_sentence": "abc", "sentences": ["abc"]}
    parameters = {"truncate": True, "prompt_name": "query"}
    assert (await ask("/similarity", inputs=inputs, parameters=parameters)).status_code == 200
    assert pooling.calls[0].options["truncate"] is True
    assert pooling.calls[0].options["prompt_name"] == "query"
    wrong = {"truncation_direction": "left"}
    error = problem(await ask("/similarity", inputs=inputs, parameters=wrong))
    assert error["param"] == "truncation_direction"


async def test_a_type_that_is_repeated_many_times_is_encoded_once(ask, monkeypatch):
    encoded = []
    write_floats = embeddings.WRITERS["float"]
    writers = {"float": lambda vector: encoded.append(vector) or write_floats(vector)}
    monkeypatch.setattr(embeddings, "WRITERS", writers)
    response = await ask("/v2/embed", texts=["abc"], embedding_types=["float"] * 1000)
    assert response.status_code == 200
    assert len(encoded) == 1


async def test_each_vector_of_a_token_has_its_own_bits(ask):
    answer = await ask("/pooling", input=["ab"], task="token_embed", output_dtype="ubinary")
    (row,) = [item["data"] for item in answer.json()["data"]]
    assert row == [[0b11110000], [0b11110000]]  # each of two tokens has four positive numbers


async def test_a_model_with_only_sparse_weights_names_them_in_the_error_about_vectors(ask, pooling):
    pooling.kinds["embedding"] = ["sparse"]
    error = problem(await ask("/v1/embeddings", input="a"))
    assert error["param"] == "model"
    assert error["message"] == (
        "The model 'tiny-embed' cannot compute one vector for each text. It can compute: sparse "
        "weights."
    )
