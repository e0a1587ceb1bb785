"""Tests that the engine and transformers answer chats with images with equal tokens."""

import base64
import dataclasses
import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from backend.vision import image_archs
from backend.vision.image_archs import MAX_TOKENS, PARAMS, chat, open_engine, picture
from nereid_backend import RequestError, UnsupportedModelError
from nereid_backend.vision.chat_processor import ChatProcessor
from nereid_backend.vision.forward.image_tensors import place_images
from nereid_backend.vision.messages import FoundImage, split_messages
from nereid_backend.vision.read_image import ImageLimits
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

# The forward path of each type. The first type has three-dimensional positions, the second type has
# a plain image encoder, and in the third type, image tokens also attend to later image tokens.
TYPES = {"qwen2_vl": "packed", "idefics2": "packed", "gemma3": "single"}


@pytest.fixture(scope="module", params=TYPES)
def model(request, tmp_path_factory):
    """The type, the folder of its tiny checkpoint, chats, and the answers from transformers."""
    folder, chats, answers, depends = image_archs.build(
        request.param, tmp_path_factory.mktemp("images")
    )
    assert depends
    return request.param, folder, chats, answers


@pytest.fixture
def engine(model):
    engine = open_engine(model[1], block_size=4, max_num_batched_tokens=32)
    yield engine
    engine.close()


def test_tokens_equal_those_of_generate_in_every_situation(model, engine):
    name, _, chats, answers = model
    assert engine._parts.images.name == TYPES[name], engine._parts.images.reason
    assert image_archs._mixed(engine, chats) == answers
    engine.check()
    assert image_archs._cached(engine, chats) == answers
    engine.check()


def test_another_image_with_the_same_text_is_not_answered_from_the_prefix_cache(model, engine):
    chats = [chat([picture(seed, 60, 40)], "the same text") for seed in (1, 9)]
    prompts = [engine.image_prompt(each) for each in chats]
    assert prompts[0].token_ids == prompts[1].token_ids
    engine.chat(chats[0], PARAMS)
    output = engine.chat(chats[1], PARAMS)
    assert output.num_cached_tokens <= prompts[1].images.first_token
    again = engine.chat(chats[1], PARAMS)
    assert again.num_cached_tokens > prompts[1].images.first_token
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_the_second_use_of_an_image_runs_no_encoder(model, engine):
    name, _, chats, _ = model
    if TYPES[name] != "packed":
        pytest.skip("the model's own code runs the encoder")
    engine.chat(chats[0], PARAMS)
    num_encoded = engine._parts.images.features.num_encoded
    engine.chat(chats[0], PARAMS)
    assert engine._parts.images.features.num_encoded == num_encoded


@pytest.mark.usefixtures("cheap_drafts")
def test_draft_tokens_do_not_change_answers_about_images(model, engine):
    _, folder, chats, _ = model
    # With only four allowed tokens, the last tokens of an answer nearly always occur earlier in the
    # answer, so the engine can draft tokens from n-grams.
    params = dataclasses.replace(
        PARAMS, max_tokens=40, allowed_token_ids=[60, 61, 62, 63], frequency_penalty=0.3
    )
    plain = open_engine(folder, num_speculative_tokens=0)
    expected = [plain.chat(each, params).outputs[0].token_ids for each in chats]
    plain.close()
    assert [engine.chat(each, params).outputs[0].token_ids for each in chats] == expected
    is_packed = engine._parts.images.name == "packed"
    assert (engine.stats().num_drafts > 0) == is_packed


def test_a_further_question_about_an_image_uses_the_cached_prompt_and_image(model, engine):
    name, folder, chats, _ = model
    engine.chat(chats[0], PARAMS)
    features = engine._parts.images.features
    num_encoded = features.num_encoded
    question = [{"role": "user", "content": "And what else is in the picture?"}]
    prompt = engine.image_prompt(chats[0] + question)
    output = engine.chat(chats[0] + question, PARAMS)
    assert output.num_cached_tokens > prompt.images.first_token
    if TYPES[name] == "packed":
        assert features.num_encoded == num_encoded
    other = open_engine(folder, enable_prefix_caching=False)
    expected = other.chat(chats[0] + question, PARAMS)
    other.close()
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_step_with_text_frees_the_memory_of_ended_sequences_with_images(model, engine):
    name, _, chats, _ = model
    if TYPES[name] != "single":
        pytest.skip("keys and values of prompts with images are in blocks")
    image_archs._mixed(engine, chats)
    engine.generate([[60, 61, 62]], PARAMS)
    assert engine._parts.runner._path._images._states == {}


def test_several_answers_share_the_prompt(model, engine):
    _, _, chats, answers = model
    params = image_archs.SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, n=3
    )
    outputs = engine.chat(chats[0], params).outputs
    assert [output.token_ids for output in outputs] == [answers[0]] * 3


def test_log_probabilities_of_a_prompt_with_images_are_those_of_transformers(model, engine):
    _, folder, chats, answers = model
    reference, processor = image_archs._load_reference(folder)
    params = dataclasses.replace(PARAMS, prompt_logprobs=0)
    for messages, answer in zip(chats, answers, strict=True):
        prompt = processor.prepare(messages)
        images = place_images(prompt.images, reference.device, torch.float32)
        ids = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            logits = reference(input_ids=ids, attention_mask=mask, **images.arguments).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        output = engine.chat(messages, params)
        _, *reported = output.prompt_logprobs
        found = torch.tensor([entry.logprobs[0] for entry in reported])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert output.outputs[0].token_ids == answer


def test_a_data_url_and_bytes_give_the_tokens_of_the_image(model, engine):
    image = picture(1, 60, 40)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    forms = [
        {"type": "image", "image": image},
        {"type": "image", "image": file.getvalue()},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]
    prompts = [
        engine.image_prompt([{"role": "user", "content": [form, {"type": "text", "text": "x"}]}])
        for form in forms
    ]
    assert len({prompt.images.digest for prompt in prompts}) == 1
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1


def test_texts_are_answered_as_before_beside_images(model, engine):
    _, _, chats, _ = model
    rng = random.Random(3)
    prompt = [rng.randrange(60, 150) for _ in range(30)]
    expected = engine.generate([prompt], PARAMS)[0].outputs[0].token_ids
    image = engine.image_prompt(chats[0])
    engine.add_request("image", image.token_ids, PARAMS, image.images)
    engine.add_request("text", prompt, PARAMS)
    tokens = []
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "text":
                tokens += update.new_token_ids
    assert tokens == expected


def test_a_request_with_too_many_images_is_refused():
    message = chat([picture(1, 4, 4)] * 3, "many")
    with pytest.raises(RequestError, match="3 images, but the limit is 2"):
        split_messages(message, ImageLimits(max_images=2))


def test_a_model_without_images_answers_texts_and_refuses_images():
    engine = open_engine(Path(__file__).parents[3] / "demo" / "chat", max_model_len=512)
    try:
        hello = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
        assert engine.chat(hello, PARAMS).outputs[0].text
        with pytest.raises(RequestError, match="images, videos and audio are refused, because"):
            engine.chat(chat([picture(1, 8, 8)], "hello"), PARAMS)
    finally:
        engine.close()


@pytest.mark.parametrize("model_type", ["idefics", "t5gemma2"])
def test_models_that_need_images_and_encoder_decoder_models_give_the_tokens_of_generate(
    model_type, tmp_path
):
    folder, chats, answers, _ = image_archs.build(model_type, tmp_path)
    engine = open_engine(folder, block_size=4, max_num_batched_tokens=32)
    try:
        assert engine._parts.images.name == "single"
        assert image_archs._mixed(engine, chats) == answers
        engine.check()
        if model_type == "idefics":
            with pytest.raises(RequestError, match=r"has no images, .* accepts only prompts with"):
                engine.generate([[60, 61]], PARAMS)
        else:
            params = image_archs.SamplingParams(max_tokens=1, prompt_logprobs=1)
            with pytest.raises(RequestError, match=r"prompt_logprobs: .* encoder-decoder model"):
                engine.generate([[60, 61]], params)
    finally:
        engine.close()


def test_an_encoder_decoder_model_reads_the_text_of_each_question_about_an_image(tmp_path):
    folder, *_ = image_archs.build("t5gemma2", tmp_path)
    answers = []
    for texts in (["qZ!xy"], ["hello", "qZ!xy"]):
        engine = open_engine(folder)
        chats = [chat([picture(1, 60, 40)], text) for text in texts]
        answers.append([engine.chat(each, PARAMS).outputs[0].token_ids for each in chats])
        engine.close()
    assert answers[1][-1] == answers[0][-1]
    assert answers[1][0] != answers[1][1]


def test_a_question_with_too_many_image_tokens_does_not_end_other_requests(tmp_path):
    folder, *_ = image_archs.build("t5gemma2", tmp_path)
    engine = open_engine(folder)
    try:
        engine.add_request("other", [60, 61, 62], PARAMS)
        prompt = engine.image_prompt(chat([picture(1, 60, 40)], "a <image_token> b"))
        with pytest.raises(RequestError, match="cannot process the images of this prompt"):
            engine.add_request("hostile", prompt.token_ids, PARAMS, prompt.images)
        updates = [update for _ in range(MAX_TOKENS) for update in engine.step()]
        assert updates[-1].finish_reason == "length"
    finally:
        engine.close()


def test_a_request_chooses_whether_special_tokens_are_added_to_a_prompt_with_images(tmp_path):
    folder = image_archs.image_types.save("llava", tmp_path, "small")
    processor = ChatProcessor(folder, AutoConfig.from_pretrained(folder))
    tokenizer = processor.processor.tokenizer
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )

    def num_bos(text: str, **arguments: bool) -> int:
        image = FoundImage("image", picture(1, 60, 40))
        text = f"{text}{processor.processor.image_token}hello"
        prompt = processor.prepare_rendered(text, [image], **arguments)
        return prompt.token_ids.count(tokenizer.bos_token_id)

    assert [num_bos(text) for text in ("", "<s>")] == [1, 1]
    assert [num_bos(text, add_special_tokens=True) for text in ("", "<s>")] == [1, 2]
    assert [num_bos(text, add_special_tokens=False) for text in ("", "<s>")] == [0, 1]


def test_images_are_accepted_if_the_chat_template_is_in_the_config_of_the_tokenizer(tmp_path):
    folder = shutil.copytree(Path(__file__).parents[3] / "demo" / "see", tmp_path / "see")
    file = folder / "tokenizer_config.json"
    template = (folder / "chat_template.jinja").read_text()
    question = chat([picture(1, 60, 40)], "What is this?")

    def token_ids():
        processor = ChatProcessor(folder, AutoConfig.from_pretrained(folder))
        return processor.prepare(question).token_ids

    expected = token_ids()
    (folder / "chat_template.jinja").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert token_ids() == expected


def test_a_model_that_neither_texts_nor_images_fit_is_refused_with_both_reasons(tmp_path):
    folder = image_archs.image_types.save("blip", tmp_path, "small")
    with pytest.raises(UnsupportedModelError, match=r"BlipFor.* packed: .* Images are refused, "):
        open_engine(folder)
