"""Tiny random checkpoints that embed or rerank images, and the results of transformers."""

import io
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from backend.pooling.tiny import VOCABULARY, save_tokenizer
from backend.vision import image_types
from nereid_backend.vision.load_processor import load_processor
from PIL import Image
from transformers import AutoConfig, CLIPConfig, CLIPImageProcessor, CLIPModel

# The models that return one vector for each token of a page, and their vision-language types.
PAGE_MODELS = {"ColQwen2": "qwen2_vl", "ColPali": "paligemma"}
# The prompt of a reranker whose chat template has no roles for the query and the document.
RERANK_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_TEMPLATE = """{%- for message in messages -%}
[{{ message.role }}]
{%- for part in message.content -%}
{%- if part.type == 'image' -%} IMAGE {%- else -%} {{ part.text }} {%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%} [assistant] {%- endif -%}
"""


def picture(seed: int, size: tuple[int, int] = (60, 44)) -> Image.Image:
    """Return an image of random pixels. `size` is the width and the height."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def save_vision_language(name: str, folder: Path) -> Path:
    """Write a checkpoint of the vision-language type `name` with a chat template."""
    hints = {**image_types.HINTS.get(name, {}), "_special": ["yes", "no"]}
    with mock.patch.dict(image_types.HINTS, {name: hints}):
        image_types.save(name, folder, "small")
    placeholder = load_processor(folder, AutoConfig.from_pretrained(folder)).image_token
    if name.startswith("qwen"):
        placeholder = f"<|vision_start|>{placeholder}<|vision_end|>"
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", placeholder))
    return folder


def save_page_model(name: str, vision_language: Path, folder: Path):
    """Write a checkpoint of a model that computes one vector for each token of a page.

    Args:
        name: a key of PAGE_MODELS.
        vision_language: an empty folder for the vision-language model on which the model is based.
        folder: an empty folder for the checkpoint.

    Returns:
        The model and the processor of transformers.
    """
    image_types.save(PAGE_MODELS[name], vision_language, "small")
    config = AutoConfig.from_pretrained(vision_language)
    retrieval_config = getattr(transformers, f"{name}Config")(vlm_config=config, embedding_dim=16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForRetrieval")(retrieval_config).eval()
    base_processor = load_processor(vision_language, config)
    processor = getattr(transformers, f"{name}Processor")(
        base_processor.image_processor, base_processor.tokenizer
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def save_towers(folder: Path) -> Path:
    """Write a CLIP checkpoint, which has a text tower and an image tower."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": len(VOCABULARY),
            "max_position_embeddings": 77,
            "eos_token_id": 2,
            "bos_token_id": 0,
            "pad_token_id": 1,
        },
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    # For transformers, the value 2 marks an old CLIP config, in which another token is the end
    # token.
    model.config.text_config.eos_token_id = 4
    model.save_pretrained(folder)
    save_tokenizer(folder, types=False, end="<mask>")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return folder


def chat_inputs(folder: Path, messages: list[dict], **variables):
    """Return the inputs that the processor of the checkpoint creates from messages."""
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", **variables
    )


def user(*parts: str | Image.Image) -> dict:
    """Return a message of a user with texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


@torch.inference_mode()
def last_vectors(folder: Path, chats: list[list[dict]]) -> np.ndarray:
    """Let transformers compute the vector of the last token of each chat, scaled to length 1."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for messages in chats:
        inputs = chat_inputs(folder, messages, add_generation_prompt=True)
        rows.append(model(**inputs)[0][0, -1])
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


@torch.inference_mode()
def answer_logits(folder: Path, query: str, documents: list[str | Image.Image]) -> list[float]:
    """Let transformers compute logit("yes") - logit("no") for each document."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = load_processor(folder, AutoConfig.from_pretrained(folder))
    yes, no = processor.tokenizer.convert_tokens_to_ids(["yes", "no"])
    differences = []
    for document in documents:
        question = f"<Instruct>: {RERANK_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        parts = [question + document] if isinstance(document, str) else [question, document]
        messages = [{"role": "system", "content": [{"type": "text", "text": RERANK_SYSTEM}]}]
        messages.append(user(*parts))
        logits = model(**chat_inputs(folder, messages, add_generation_prompt=True)).logits[0, -1]
        differences.append((logits[yes] - logits[no]).item())
    return differences
