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
from nereid_backend import RequestError, SamplingParams, UnsupportedModelError
from nereid_backend.vision.chat_processor import ChatProcessor
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.forward.image_tensors import place_images
from nereid_backend.vision.messages import FoundImage, split_messages
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

# The forward path of each type. The first type has three-dimensional positions, the second type has
# a plain image encoder, and in the third type, image tokens also attend to later image tokens.
TYPES = {"qwen2_vl": "packed", "idefics2": "packed", "gemma3": "single"}


@pytest.fixture(scope="module", params=TYPES)
def model(request, tmp_path_factory):
    """The type, the folder of its tiny checkpoint, chats, and the answers from transformers."""
    parent = tmp_path_factory.mktemp("images")
    folder, chats, answers, depends_on_images = image_archs.build(request.param, parent)
    assert depends_on_images
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
    first_chat, second_chat = (chat([picture(seed, 60, 40)], "the same text") for seed in (1, 9))
    first_prompt, second_prompt = map(engine.image_prompt, (first_chat, second_chat))
    assert first_prompt.token_ids == second_prompt.token_ids
    index_of_image = second_prompt.images.first_token

    engine.chat(first_chat, PARAMS)
    output = engine.chat(second_chat, PARAMS)
    repeated_output = engine.chat(second_chat, PARAMS)

    # The first request with another image can use only the cached tokens before the image. When the
    # request is repeated, the tokens of the image are cached, too.
    assert output.num_cached_tokens <= index_of_image
    assert repeated_output.num_cached_tokens > index_of_image
    assert repeated_output.outputs[0].token_ids == output.outputs[0].token_ids


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
    plain_engine = open_engine(folder, num_speculative_tokens=0)
    expected = [plain_engine.chat(messages, params).outputs[0].token_ids for messages in chats]
    plain_engine.close()

    answers = [engine.chat(messages, params).outputs[0].token_ids for messages in chats]

    assert answers == expected
    is_packed = engine._parts.images.name == "packed"
    assert (engine.stats().num_drafts > 0) == is_packed


def test_a_further_question_about_an_image_uses_the_cached_prompt_and_image(model, engine):
    name, folder, chats, _ = model
    further_question = {"role": "user", "content": "And what else is in the picture?"}
    messages = [*chats[0], further_question]
    engine.chat(chats[0], PARAMS)
    features = engine._parts.images.features
    num_encoded = features.num_encoded

    output = engine.chat(messages, PARAMS)

    assert output.num_cached_tokens > engine.image_prompt(messages).images.first_token
    if TYPES[name] == "packed":
        assert features.num_encoded == num_encoded
    plain_engine = open_engine(folder, enable_prefix_caching=False)
    expected = plain_engine.chat(messages, PARAMS)
    plain_engine.close()
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
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, n=3)
    outputs = engine.chat(chats[0], params).outputs
    assert [output.token_ids for output in outputs] == [answers[0]] * 3


def test_log_probabilities_of_a_prompt_with_images_are_those_of_transformers(model, engine):
    _, folder, chats, answers = model
    reference, processor = image_archs._load_reference(folder)
    params = dataclasses.replace(PARAMS, prompt_logprobs=0)
    for messages, answer in zip(chats, answers, strict=True):
        expected = reference_logprobs(reference, processor.prepare(messages))

        output = engine.chat(messages, params)

        # The first token of a prompt has no log-probability.
        _, *entries = output.prompt_logprobs
        logprobs = torch.tensor([entry.logprobs[0] for entry in entries])
        torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=1e-3)
        assert output.outputs[0].token_ids == answer


@torch.inference_mode()
def reference_logprobs(reference, prompt):
    """Return the log-probabilities of all tokens of the prompt except the first one."""
    images = place_images(prompt.images, reference.device, torch.float32)
    ids = torch.tensor([prompt.token_ids])
    mask = torch.ones_like(ids)
    logits = reference(input_ids=ids, attention_mask=mask, **images.arguments).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_a_data_url_and_bytes_give_the_tokens_of_the_image(model, engine):
    image = picture(1, 60, 40)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    image_parts = [
        {"type": "image", "image": image},
        {"type": "image", "image": file.getvalue()},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]
    text_part = {"type": "text", "text": "x"}
    prompts = [
        engine.image_prompt([{"role": "user", "content": [image_part, text_part]}])
        for image_part in image_parts
    ]
    assert len({prompt.images.digest for prompt in prompts}) == 1
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1


def test_texts_are_answered_as_before_beside_images(model, engine):
    _, _, chats, _ = model
    rng = random.Random(3)
    text_prompt = [rng.randrange(60, 150) for _ in range(30)]
    expected = engine.generate([text_prompt], PARAMS)[0].outputs[0].token_ids
    image_prompt = engine.image_prompt(chats[0])

    engine.add_request("image", image_prompt.token_ids, PARAMS, image_prompt.images)
    engine.add_request("text", text_prompt, PARAMS)
    text_answer = []
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "text":
                text_answer += update.new_token_ids

    assert text_answer == expected


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


@pytest.mark.parametrize(
    ("model_type", "params", "refusal"),
    [
        ("idefics", PARAMS, r"has no images, .* accepts only prompts with"),
        (
            "t5gemma2",
            SamplingParams(max_tokens=1, prompt_logprobs=1),
            r"prompt_logprobs: .* encoder-decoder model",
        ),
    ],
    ids=["idefics", "t5gemma2"],
)
def test_models_that_need_images_and_encoder_decoder_models_give_the_tokens_of_generate(
    model_type, params, refusal, tmp_path
):
    folder, chats, expected, _ = image_archs.build(model_type, tmp_path)
    engine = open_engine(folder, block_size=4, max_num_batched_tokens=32)
    try:
        assert engine._parts.images.name == "single"
        assert image_archs._mixed(engine, chats) == expected
        engine.check()
        with pytest.raises(RequestError, match=refusal):
            engine.generate([[60, 61]], params)
    finally:
        engine.close()


def test_an_encoder_decoder_model_reads_the_text_of_each_question_about_an_image(tmp_path):
    folder, *_ = image_archs.build("t5gemma2", tmp_path)

    def answers_to(*questions):
        engine = open_engine(folder)
        chats = [chat([picture(1, 60, 40)], question) for question in questions]
        answers = [engine.chat(messages, PARAMS).outputs[0].token_ids for messages in chats]
        engine.close()
        return answers

    (expected_answer,) = answers_to("qZ!xy")
    first_answer, second_answer = answers_to("hello", "qZ!xy")
    assert second_answer == expected_answer
    assert first_answer != second_answer


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
    # This tokenizer adds the special token <s> before each text.
    tokenizer = processor.processor.tokenizer
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )

    def num_special_tokens(start: str, **arguments: bool) -> int:
        """Return how many tokens <s> a prompt has. The prompt is `start`, an image and a text."""
        image = FoundImage("image", picture(1, 60, 40))
        text = f"{start}{processor.processor.image_token}hello"
        prompt = processor.prepare_rendered(text, [image], **arguments)
        return prompt.token_ids.count(tokenizer.bos_token_id)

    # By default, <s> is added only if the text does not begin with <s>.
    assert num_special_tokens("") == num_special_tokens("<s>") == 1
    assert num_special_tokens("", add_special_tokens=True) == 1
    assert num_special_tokens("<s>", add_special_tokens=True) == 2
    assert num_special_tokens("", add_special_tokens=False) == 0
    assert num_special_tokens("<s>", add_special_tokens=False) == 1


def test_images_are_accepted_if_the_chat_template_is_in_the_config_of_the_tokenizer(tmp_path):
    folder = shutil.copytree(Path(__file__).parents[3] / "demo" / "see", tmp_path / "see")
    template_file = folder / "chat_template.jinja"
    config_file = folder / "tokenizer_config.json"
    question = chat([picture(1, 60, 40)], "What is this?")

    def token_ids():
        processor = ChatProcessor(folder, AutoConfig.from_pretrained(folder))
        return processor.prepare(question).token_ids

    expected = token_ids()
    config = json.loads(config_file.read_text()) | {"chat_template": template_file.read_text()}
    config_file.write_text(json.dumps(config))
    template_file.unlink()
    assert token_ids() == expected


def test_a_model_that_neither_texts_nor_images_fit_is_refused_with_both_reasons(tmp_path):
    folder = image_archs.image_types.save("blip", tmp_path, "small")
    with pytest.raises(UnsupportedModelError, match=r"BlipFor.* packed: .* Images are refused, "):
        open_engine(folder)
