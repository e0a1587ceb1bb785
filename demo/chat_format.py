"""The chat model's tokenizer, and dialogues as token ids and training targets."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from lessons import Dialogue
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE_FILE = Path(__file__).parent / "chat" / "chat_template.jinja"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# The markers are not special tokens, because decoding must keep them: the server finds reasoning
# and tool calls by their markers.
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# Each digit is a separate token, because the lessons add numbers column by column. The tokens of
# capitalised words and addresses do not include the space before the word. The words then have the
# same tokens in a sentence and in a JSON string, so the model can copy them.
_PIECES = (
    r"[ _]?\p{Ll}+(?![\p{Ll}@])|\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|\s"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and attach the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in MARKERS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE_FILE.read_text()
    return fast


def reply_text(message: dict[str, Any], thinking: bool) -> str:
    """Return the text that the model must write for an assistant message, with the end of turn."""
    reasoning = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if thinking else ""
    calls = "\n".join(_call_text(call) for call in message.get("tool_calls", ()))
    return reasoning + message["content"] + calls + TURN_END


def prompt_text(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> str:
    """Return the prompt of a dialogue, which ends where the last assistant message begins."""
    text = tokenizer.apply_chat_template(
        list(dialogue.messages[:-1]),
        tools=list(dialogue.tools) or None,
        add_generation_prompt=True,
        enable_thinking=dialogue.thinking,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text


def _call_text(call: dict[str, Any]) -> str:
    """Return a tool call with its markers, as the chat template renders it."""
    function = {key: call["function"][key] for key in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class Sample:
    """A training sequence: a prefix, and the branches that continue it.

    No token of a branch attends to another branch, so each branch is trained as if it followed the
    prefix directly.

    Attributes:
        token_ids: The token ids of the prefix and of the branches.
        is_target: For each token, whether the model must predict it.
        branch: For each token, the number of its branch; 0 for a token of the prefix.
    """

    token_ids: list[int]
    is_target: list[bool]
    branch: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        """The position of each token. Every branch begins at the position after the prefix."""
        prefix_length = self.branch.count(0)
        next_position = defaultdict(lambda: prefix_length, {0: 0})
        positions = []
        for branch in self.branch:
            positions.append(next_position[branch])
            next_position[branch] += 1
        return positions


def join(samples: list[Sample]) -> Sample:
    """Join sequences with a common beginning into one sequence, which contains the beginning once.

    Example: the sequences `S a b` and `S c` become `S a b c` with the branches `0 1 1 2`.
    """
    tokens_at_position = zip(*(sample.token_ids for sample in samples), strict=False)
    common = takewhile(lambda token_ids: len(set(token_ids)) == 1, tokens_at_position)
    prefix_length = sum(1 for _ in common)
    token_ids = samples[0].token_ids[:prefix_length]
    is_target = samples[0].is_target[:prefix_length]
    branches = [0] * prefix_length
    for branch, sample in enumerate(samples, start=1):
        token_ids += sample.token_ids[prefix_length:]
        is_target += sample.is_target[prefix_length:]
        branches += [branch] * (len(sample) - prefix_length)
    return Sample(token_ids, is_target, branches)


def _reply_targets(dialogue: Dialogue, reply: str, offsets: list[tuple[int, int]]) -> list[bool]:
    """Mark the tokens of the last reply that the model must predict.

    The spans in the message's field `given` are not marked, because a grammar prescribes their
    text. Example: with the given text `{"name":`, the first marked token of `{"name": "Ann"}` is
    the one after the colon.

    Args:
        dialogue: The dialogue.
        reply: The text of the last reply.
        offsets: The start and end of each token in the reply.
    """
    message = dialogue.messages[-1]
    reasoning_end = reply.index("</think>") if dialogue.thinking else 0
    content_start = reply.index(message["content"], reasoning_end)
    given = [
        range(content_start + start, content_start + end) for start, end in message.get("given", ())
    ]
    return [all(token_start not in part for part in given) for token_start, _ in offsets]


class Encoder:
    """The conversion of dialogues into samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
        opening = f"{TURN_START}assistant\n<think>\n\n</think>\n\n"
        self._opening: list[int] = self._backend.encode(opening, add_special_tokens=False).ids

    def encode(self, dialogues: list[Dialogue]) -> list[Sample]:
        """Return a sample for each dialogue."""
        prompts = [prompt_text(self._tokenizer, dialogue) for dialogue in dialogues]
        replies = [reply_text(d.messages[-1], d.thinking) for d in dialogues]
        encoded_prompts = self._backend.encode_batch_fast(prompts, add_special_tokens=False)
        # Unlike encode_batch_fast, encode_batch returns the offsets.
        encoded_replies = self._backend.encode_batch(replies, add_special_tokens=False)
        samples = []
        for dialogue, reply, encoded_prompt, encoded_reply in zip(
            dialogues, replies, encoded_prompts, encoded_replies, strict=True
        ):
            token_ids = encoded_prompt.ids + encoded_reply.ids
            is_target = self._prompt_targets(encoded_prompt.ids)
            is_target += _reply_targets(dialogue, reply, encoded_reply.offsets)
            samples.append(Sample(token_ids, is_target, branch=[0] * len(token_ids)))
        return samples

    def _prompt_targets(self, token_ids: list[int]) -> list[bool]:
        """Mark the tokens of the assistant's earlier replies, without their empty `<think>` blocks.

        An earlier reply has the same form as a last reply without reasoning. The model is therefore
        trained on earlier replies, too.
        """
        is_target = []
        is_reply = False
        for end, token_id in enumerate(token_ids, start=1):
            is_target.append(is_reply)
            if token_id == self._turn_end:
                is_reply = False
            elif token_ids[max(0, end - len(self._opening)) : end] == self._opening:
                is_reply = True
        return is_target
