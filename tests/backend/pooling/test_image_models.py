"""Embedding models and rerankers that are vision-language models, compared with transformers."""

import io
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from backend.vision import image_types
from nereid_backend import Embedder, RequestError, Reranker
from nereid_backend.vision.load_processor import load_processor
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

# One vision-language type of each of three families, and the sizes of its images.
TYPES = {"qwen2_vl": "small", "qwen3_vl": "small", "llava": "small"}
TEXTS = ["a page about birds", "b", "what is in this picture?"]
_TEMPLATE = """{%- for message in messages -%}
[{{ message.role }}]
{%- for part in message.content -%}
{%- if part.type == 'image' -%} IMAGE {%- else -%} {{ part.text }} {%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%} [assistant] {%- endif -%}
"""


def picture(seed, size=(60, 44)):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module", params=TYPES)
def folder(request, tmp_path_factory):
    """Return the folder of a tiny vision-language checkpoint with a chat template."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    hints = {**image_types.HINTS.get(name, {}), "_special": ["yes", "no"]}
    with mock.patch.dict(image_types.HINTS, {name: hints}):
        image_types.save(name, folder, TYPES[name])
    placeholder = load_processor(folder, AutoConfig.from_pretrained(folder)).image_token
    if name.startswith("qwen"):
        placeholder = f"<|vision_start|>{placeholder}<|vision_end|>"
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", placeholder))
    return folder


def wanted_inputs(folder: Path, messages: list[dict], **variables):
    """Return the inputs that the checkpoint's processor makes of messages."""
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", **variables
    )


def user(*parts):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


@torch.inference_mode()
def last_vectors(folder, chats):
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for messages in chats:
        inputs = wanted_inputs(folder, messages, add_generation_prompt=True)
        rows.append(model(**inputs)[0][0, -1])
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def test_vectors_of_texts_images_and_both_equal_those_of_transformers(folder):
    embedder = Embedder(str(folder), num_threads=1)
    assert embedder.info.accepts_images
    images = [picture(1), picture(2, (40, 72))]
    vectors = embedder.encode(
        [
            TEXTS[0],
            {"image": png(images[0])},
            {"text": TEXTS[1], "image": png(images[1])},
            {"text": TEXTS[2]},
        ]
    )
    chats = [
        [user(TEXTS[0])],
        [user(images[0])],
        [user(images[1], TEXTS[1])],
        [user(TEXTS[2])],
    ]
    expected = last_vectors(folder, chats)
    np.testing.assert_allclose(vectors, expected, atol=2e-4)
    # The vector depends on the pixels.
    other = embedder.encode({"text": TEXTS[1], "image": png(picture(3, (40, 72)))})
    assert np.abs(other[0] - vectors[2]).max() > 1e-3


def test_a_prompt_is_a_system_message(folder):
    embedder = Embedder(str(folder), num_threads=1)
    image = picture(4)
    vector = embedder.encode({"image": png(image)}, prompt="Represent it.")
    system = {"role": "system", "content": [{"type": "text", "text": "Represent it."}]}
    expected = last_vectors(folder, [[system, user(image)]])
    np.testing.assert_allclose(vector, expected, atol=2e-4)


@torch.inference_mode()
def test_scores_of_images_and_texts_equal_those_of_transformers(folder):
    reranker = Reranker(str(folder), num_threads=1)
    image = picture(5)
    scores = reranker.score([(TEXTS[0], png(image)), (TEXTS[0], TEXTS[1])], activation="none")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    yes, no = processor.tokenizer.convert_tokens_to_ids(["yes", "no"])
    expected = []
    for document in (image, TEXTS[1]):
        question = f"<Instruct>: {_INSTRUCTION}\n<Query>: {TEXTS[0]}\n<Document>: "
        parts = [question + document] if isinstance(document, str) else [question, document]
        messages = [{"role": "system", "content": [{"type": "text", "text": _SYSTEM}]}]
        messages.append(user(*parts))
        inputs = wanted_inputs(folder, messages, add_generation_prompt=True)
        logits = model(**inputs).logits[0, -1]
        expected.append((logits[yes] - logits[no]).item())
    assert abs(expected[0] - expected[1]) > 1e-3
    np.testing.assert_allclose(scores, expected, atol=2e-3)


_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def test_a_broken_or_large_image_is_refused_and_the_next_one_works(folder):
    embedder = Embedder(str(folder), num_threads=1)
    with pytest.raises(RequestError, match="image: the file is not an image"):
        embedder.encode({"image": b"no image"})
    with pytest.raises(RequestError, match="One side may be at most"):
        embedder.encode({"image": png(picture(1, (2000, 1)))})
    assert len(embedder.encode({"image": png(picture(1))})) == 1


def test_an_input_that_is_too_long_is_refused(folder):
    embedder = Embedder(str(folder), num_threads=1, max_model_len=16)
    with pytest.raises(RequestError, match="the limit is 16"):
        embedder.encode({"image": png(picture(1)), "text": "a long text about this picture"})


# For each model with one vector for each token of a page: its vision-language type.
RETRIEVAL = {"ColQwen2": "qwen2_vl", "ColPali": "paligemma"}


@pytest.fixture(scope="module", params=RETRIEVAL)
def retrieval(request, tmp_path_factory):
    """Return the folder, the model and the processor of a tiny checkpoint for pages."""
    name = request.param
    vlm = image_types.save(RETRIEVAL[name], tmp_path_factory.mktemp(name), "small")
    config = AutoConfig.from_pretrained(vlm)
    whole = getattr(transformers, f"{name}Config")(vlm_config=config, embedding_dim=16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForRetrieval")(whole).eval()
    parts = load_processor(vlm, config)
    processor = getattr(transformers, f"{name}Processor")(parts.image_processor, parts.tokenizer)
    folder = tmp_path_factory.mktemp(f"{name}-retrieval")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, model, processor


@torch.inference_mode()
def test_vectors_of_queries_and_pages_equal_those_of_transformers(retrieval):
    folder, model, processor = retrieval
    embedder = Embedder(str(folder), num_threads=1)
    assert embedder.info.kinds == ("multi_vector",)
    assert embedder.info.dimension == 16
    pages = [picture(1), picture(2, (40, 72))]
    vectors = embedder.encode_multi([TEXTS[0], *({"image": png(page)} for page in pages), TEXTS[1]])
    queries = [processor.process_queries(text=[text]) for text in TEXTS[:2]]
    inputs = [queries[0], *(processor.process_images(images=[page]) for page in pages), queries[1]]
    for got, one in zip(vectors, inputs, strict=True):
        np.testing.assert_allclose(got, model(**one).embeddings[0].numpy(), atol=2e-4)
    assert vectors[1].shape != vectors[2].shape or np.abs(vectors[1] - vectors[2]).max() > 1e-3


def test_a_query_with_an_image_or_a_prompt_is_refused_by_a_model_for_pages(retrieval):
    embedder = Embedder(str(retrieval[0]), num_threads=1)
    with pytest.raises(RequestError, match="either a query"):
        embedder.encode_multi([{"text": "a", "image": png(picture(1))}])
    with pytest.raises(RequestError, match="dense"):
        embedder.encode({"image": png(picture(1))})
