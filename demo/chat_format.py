"""The chat model's tokenizer, and dialogues as token ids and training targets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from lessons import Dialogue
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
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
    text = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if thinking else ""
    text += message["content"]
    calls = []
    for call in message.get("tool_calls", ()):
        function = {key: call["function"][key] for key in ("name", "arguments")}
        calls.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    return text + "\n".join(calls) + TURN_END


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

    @property
    def positions(self) -> list[int]:
        """The position of each token. Every branch begins at the position after the prefix."""
        following = {**dict.fromkeys(self.branch, self.branch.count(0)), 0: 0}
        positions = []
        for branch in self.branch:
            positions.append(following[branch])
            following[branch] += 1
        return positions


def join(samples: list[Sample]) -> Sample:
    """Join sequences with a common beginning into one sequence, which contains the beginning once.

    Example: the sequences `S a b` and `S c` become `S a b c` with the branches `0 1 1 2`.
    """
    columns = zip(*(sample.token_ids for sample in samples), strict=False)
    prefix = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    token_ids, is_target = samples[0].token_ids[:prefix], samples[0].is_target[:prefix]
    branches = [0] * prefix
    for number, sample in enumerate(samples, start=1):
        token_ids += sample.token_ids[prefix:]
        is_target += sample.is_target[prefix:]
        branches += [number] * (len(sample.token_ids) - prefix)
    return Sample(token_ids, is_target, branches)


def _targets(dialogue: Dialogue, reply: str, offsets: list[tuple[int, int]]) -> list[bool]:
    """Mark the tokens of the last reply that the model must predict.

    The spans in the message's field `given` are not marked, because a grammar prescribes their
    text.
    """
    message = dialogue.messages[-1]
    start = reply.index(message["content"])
    if dialogue.thinking:
        start = reply.index(message["content"], reply.index("</think>"))
    given = [(start + first, start + end) for first, end in message.get("given", ())]
    return [not any(first <= at < end for first, end in given) for at, _ in offsets]


class Encoder:
    """The conversion of dialogues into samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)
        opening = f"{TURN_START}assistant\n<think>\n\n</think>\n\n"
        self._opening: list[int] = self._backend.encode(opening, add_special_tokens=False).ids

    def encode(self, dialogues: list[Dialogue]) -> list[Sample]:
        """Return a sample for each dialogue."""
        prompts = [prompt_text(self._tokenizer, dialogue) for dialogue in dialogues]
        replies = [reply_text(d.messages[-1], d.thinking) for d in dialogues]
        prompt_ids = [
            encoding.ids
            for encoding in self._backend.encode_batch_fast(prompts, add_special_tokens=False)
        ]
        # Unlike encode_batch_fast, encode_batch returns the offsets.
        encodings = self._backend.encode_batch(replies, add_special_tokens=False)
        samples = []
        for ids, encoding, dialogue, reply in zip(
            prompt_ids, encodings, dialogues, replies, strict=True
        ):
            targets = self._earlier_targets(ids) + _targets(dialogue, reply, encoding.offsets)
            samples.append(Sample(ids + encoding.ids, targets, [0] * len(targets)))
        return samples

    def _earlier_targets(self, token_ids: list[int]) -> list[bool]:
        """Mark the tokens of the assistant's earlier replies, without their empty `<think>` blocks.

        An earlier reply has the same form as a last reply without reasoning. The model is therefore
        trained on earlier replies, too.
        """
        targets = [False] * len(token_ids)
        is_reply = False
        for position, token_id in enumerate(token_ids):
            targets[position] = is_reply
            if token_id == self._end:
                is_reply = False
            before = token_ids[max(0, position + 1 - len(self._opening)) : position + 1]
            if before == self._opening:
                is_reply = True
        return targets
