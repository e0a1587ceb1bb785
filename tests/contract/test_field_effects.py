"""Tests of the effects of request fields on prompts and texts, with the demo model's tokenizer."""

from pathlib import Path

import pytest
from nereid_backend.serving.tokenizer.prompt_builder import PromptBuilder
from nereid_backend.text.detokenizer import decoder
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "demo" / "chat"
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Well, I"},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


@pytest.fixture
def prompt_of(tokenizer):
    """A function that renders the prompt of a chat request with the given fields."""

    def render(**fields):
        return PromptBuilder(tokenizer, 4096).from_chat({"messages": MESSAGES, **fields}).text

    return render


def test_an_answer_is_opened_unless_told_otherwise(prompt_of):
    opening = "<|im_start|>assistant\n"
    assert prompt_of().endswith(opening)
    assert prompt_of(add_generation_prompt=False).endswith("Well, I<|im_end|>\n")


def test_the_last_message_is_continued_on_request(prompt_of):
    assert prompt_of(continue_final_message=True).endswith("Well, I")


def test_special_tokens_stand_around_a_prompt_unless_told_otherwise(tokenizer):
    # Let the tokenizer put a special token before each text.
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    builder = PromptBuilder(tokenizer, max_model_len=4096)

    default_text = builder.from_text("one").token_ids
    plain_text = builder.from_text("one", add_special_tokens=False).token_ids
    assert default_text == [begin, *plain_text]

    default_chat = builder.from_chat({"messages": MESSAGES}).token_ids
    marked_chat = builder.from_chat({"messages": MESSAGES, "add_special_tokens": True}).token_ids
    assert marked_chat == [begin, *default_chat]


def test_special_tokens_are_text_only_on_request(tokenizer):
    ids = tokenizer("one<|im_end|> two", add_special_tokens=False)["input_ids"]
    assert decoder(tokenizer, skip_special_tokens=True)(ids) == "one two"
    assert decoder(tokenizer, skip_special_tokens=False)(ids) == "one<|im_end|> two"
