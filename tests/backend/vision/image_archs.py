# ruff: noqa: E402 - torchvision is prepared before transformers is imported
"""Compares the greedy tokens of the engine with those of transformers for types that read media.

    python tests/backend/vision/image_archs.py              run the types without a result
    python tests/backend/vision/image_archs.py llava gemma3   run these types again
    python tests/backend/vision/image_archs.py --videos       send videos instead of images
    python tests/backend/vision/image_archs.py --audio        send audio instead of images

A type is a value of `model_type` in a config.json, and media are images, videos and audio. Each
type runs in its own process with a limit on time and memory. The file `--results` contains one line
of JSON for each result.
"""

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from nereid_backend.vision.torchvision_operators import declare_operators

# transformers imports torchvision. Without CUDA, this import requires these operators.
declare_operators()

import numpy as np
import torch
import transformers
from backend.child_results import append_result, load_results, run_in_child
from backend.exactness import equal_tokens
from backend.vision import image_types
from nereid_backend import Engine, EngineConfig, SamplingParams, UnsupportedModelError
from nereid_backend.vision.chat_processor import ChatProcessor
from nereid_backend.vision.forward.image_tensors import place_images
from PIL import Image
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging

# The limits on the wall time and the address space of the process of one type.
_MAX_SECONDS = 600
_MAX_BYTES = 10 * 2**30
MAX_TOKENS = 9
# The sampling rate of the audio in Hz.
RATE = 16_000
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

Answers = list[list[int]]
Chat = list[dict[str, Any]]


@dataclass
class Result:
    """The result of one type of model.

    Attributes:
        status: "exact", "wrong", "refused" or "not built".
        path: the forward path that the engine uses for prompts with media.
        text_path: the forward path that the engine uses for texts.
        cells: for each situation, the number of equal tokens and of all tokens, such as "27/27".
        reason: why the type was refused or not built.
        num_distinct: the number of different tokens among the expected tokens.
        depends: whether the expected tokens or logits depend on the media.
        seconds: the wall time of the type's process.
    """

    type: str
    status: str = "not built"
    path: str = ""
    text_path: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    num_distinct: int = 0
    depends: bool = False
    seconds: float = 0.0


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of random pixels."""
    return Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(3 * width * height)
    )


def chat(images: list[Image.Image], text: str) -> Chat:
    """Return a chat with images and a text."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def video_chat(videos: list[list[Image.Image]], text: str) -> Chat:
    """Return a chat with videos and a text. Each video is a list of frames."""
    parts = [{"type": "video", "video": frames} for frames in videos]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def noise(seed: int, seconds: float) -> dict[str, Any]:
    """Return a content part with audio that consists of random samples."""
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, int(seconds * RATE))
    return {"type": "audio", "audio": samples.astype(np.float32), "sampling_rate": RATE}


def audio_chat(parts: list[dict[str, Any]], text: str) -> Chat:
    """Return a chat with audio and a text. Each part is a return value of `noise`."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def make_chats() -> list[Chat]:
    """Return chats with one or two images."""
    return [
        chat([picture(1, 60, 40)], "hello"),
        chat([picture(2, 30, 44)], "a longer question?"),
        chat([picture(1, 60, 40), picture(3, 36, 36)], "two"),
    ]


def film(seed: int, num_frames: int) -> list[Image.Image]:
    """Return a video with frames of random pixels."""
    return [picture(100 * seed + number, 60, 40) for number in range(num_frames)]


def make_video_chats() -> list[Chat]:
    """Return chats with one or two videos."""
    return [
        video_chat([film(1, 4)], "hello"),
        video_chat([film(2, 6)], "a longer question?"),
        video_chat([film(1, 4), film(3, 2)], "two"),
    ]


def make_audio_chats() -> list[Chat]:
    """Return chats with one or two audio files."""
    return [
        audio_chat([noise(1, 0.6)], "hello"),
        audio_chat([noise(2, 1.1)], "a longer question?"),
        audio_chat([noise(1, 0.6), noise(3, 0.8)], "two"),
        audio_chat([{"type": "image", "image": picture(1, 60, 40)}, noise(3, 0.8)], "and"),
    ]


def similar_chats(kind: str) -> list[Chat]:
    """Return two chats whose media have the same size and different contents."""
    make: dict[str, Callable[[int], Chat]] = {
        "image": lambda seed: chat([picture(seed, 60, 40)], "hello"),
        "video": lambda seed: video_chat([film(seed, 4)], "hello"),
        "audio": lambda seed: audio_chat([noise(seed, 0.6)], "hello"),
    }
    return [make[kind](seed) for seed in (1, 9)]


_CHATS = {"image": make_chats, "video": make_video_chats, "audio": make_audio_chats}
_KINDS = {"image": "images", "video": "videos", "audio": "audio"}


def _load_reference(folder: Path) -> tuple[Any, ChatProcessor]:
    """Load the transformers model of a checkpoint in float32, and the processor for its chats."""
    config = AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), ChatProcessor(folder, model.config)


def reference(folder: Path, kind: str) -> tuple[list[Chat], Answers, bool]:
    """Return chats with media, and the tokens with which transformers answers the chats.

    Chats that transformers cannot answer are left out. The third result is true if other media with
    the same text change the logits.
    """
    model, processor = _load_reference(folder)
    chats, answers = [], []
    for messages in _CHATS[kind]():
        try:
            tokens, _ = _generate(model, processor, messages)
        except Exception:
            # Some types accept only one image, or do not accept images together with audio. For
            # these types, two chats are enough.
            if len(chats) < 2:
                raise
        else:
            chats.append(messages)
            answers.append(tokens)
    (_, logits), (_, other_logits) = (
        _generate(model, processor, messages) for messages in similar_chats(kind)
    )
    return chats, answers, bool((logits - other_logits).abs().max() > 1e-4)


def _generate(model: Any, processor: ChatProcessor, messages: Chat) -> tuple[list[int], Any]:
    """Return the tokens that transformers generates, and the logits for the first of them."""
    prompt = processor.prepare(messages)
    images = place_images(prompt.images, model.device, torch.float32)
    ids = torch.tensor([prompt.token_ids])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        **images.arguments,
    )
    return output.sequences[0, -MAX_TOKENS:].tolist(), output.logits[0]


def open_engine(folder: Path, **settings: Any) -> Engine:
    """Return an engine in float32 with a small KV cache."""
    settings = {
        "max_num_seqs": 8,
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_memory": "64MiB",
        "max_model_len": 4000,
        **settings,
    }
    return Engine(EngineConfig(str(folder), **settings))


def _alone(engine: Engine, chats: list[Chat]) -> Answers:
    return [engine.chat(messages, PARAMS).outputs[0].token_ids for messages in chats]


def _mixed(engine: Engine, chats: list[Chat]) -> Answers:
    """Answer all chats at the same time, together with texts if the model accepts texts."""
    prompts = [engine.image_prompt(messages) for messages in chats]
    rng = random.Random(5)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt.token_ids, PARAMS, prompt.images)
        if not engine._parts.images.needs_images:
            text = [rng.randrange(60, 150) for _ in range(20)]
            engine.add_request(f"text-{number}", text, PARAMS)

    answers: dict[str, list[int]] = {}
    while engine.has_work():
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.new_token_ids)
    return [answers[str(number)] for number in range(len(chats))]


def _preempted(engine: Engine, chats: list[Chat]) -> Answers:
    """Answer all chats with so few free blocks that the engine has to preempt sequences."""
    pool, block_size = engine._parts.pool, engine.info.block_size
    prompt_lengths = [len(engine.image_prompt(messages).token_ids) for messages in chats]
    # The free blocks are enough for all prompts, but not for all prompts with their answers. They
    # are also enough for the longest sequence with its answer.
    num_blocks_of_prompts = sum(-(-length // block_size) for length in prompt_lengths)
    num_blocks_of_longest = -(-(max(prompt_lengths) + MAX_TOKENS) // block_size)
    num_free = max(num_blocks_of_prompts, num_blocks_of_longest + 1)
    withheld_blocks = pool.allocate(pool.num_free - num_free)
    answers = _mixed(engine, chats)
    pool.release(withheld_blocks)
    return answers


def _cached(engine: Engine, chats: list[Chat]) -> Answers:
    """Answer all chats two times, and return the second answers."""
    _alone(engine, chats)
    return _alone(engine, chats)


SITUATIONS: dict[str, tuple[dict[str, Any], Callable[[Engine, list[Chat]], Answers]]] = {
    "alone": ({}, _alone),
    "chunked": ({"max_num_batched_tokens": 48, "block_size": 4}, _mixed),
    "preempted": ({"block_size": 4}, _preempted),
    "prefix-cached": ({}, _cached),
}


def build(
    model_type: str, parent: Path, kind: str = "image"
) -> tuple[Path, list[Chat], Answers, bool]:
    """Write a checkpoint that transformers can run.

    Returns:
        The folder of the checkpoint, and the results of `reference`.
    """
    errors = []
    for sizes in image_types.SIZES:
        try:
            folder = image_types.save(model_type, parent / sizes, sizes)
            return folder, *reference(folder, kind)
        except Exception as error:  # noqa: BLE001 - the sizes of images do not fit the type
            errors.append(f"{sizes}: {type(error).__name__}: {str(error).strip()[-150:]}")
    raise ValueError("; ".join(dict.fromkeys(errors)))


def examine(kind: str, result: Result) -> None:
    """Test a tiny model of the type `result.type` in all situations, and fill in `result`."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder, chats, expected, result.depends = build(result.type, Path(temporary_folder), kind)
        result.num_distinct = len({token for answer in expected for token in answer})
        result.status = "wrong"
        for situation, (settings, run) in SITUATIONS.items():
            try:
                engine = open_engine(folder, **settings)
            except UnsupportedModelError as error:
                result.status, result.reason = "refused", str(error)
                return
            try:
                images = engine._parts.images
                result.path, result.text_path = images.name, engine.info.path
                if reason := images.reason or images.refused.get(_KINDS[kind]):
                    result.status, result.reason = "refused", reason
                    return
                result.cells[situation] = _cell(expected, run(engine, chats))
            finally:
                engine.close()
        num_tokens = len(expected) * MAX_TOKENS
        if all(cell == f"{num_tokens}/{num_tokens}" for cell in result.cells.values()):
            result.status = "exact"


def _cell(expected: Answers, answers: Answers) -> str:
    """Return the number of equal tokens and the number of all tokens as a text, such as "26/27"."""
    num_equal, num_tokens = equal_tokens(expected, answers)
    return f"{num_equal}/{num_tokens}"


def table(results: dict[str, Result]) -> str:
    """Return a Markdown table with one line for each type."""
    situations = list(SITUATIONS)
    head = ["Type", "Images", "Text", "Pixels matter", *situations]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in sorted(results.values(), key=lambda r: r.type):
        reason = result.reason.replace("|", "/").replace("\n", " ")[:220]
        cells = [result.cells.get(name, "") for name in situations]
        if result.status != "exact":
            cells[0] = f"{result.status}: {reason} {cells[0]}"
        columns = [result.type, result.path, result.text_path, str(result.depends), *cells]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the requested types, then print the table."""
    arguments = _parse_arguments()
    results = load_results(arguments.results, Result)
    if not arguments.table:
        _run_types(arguments, results)
    sys.stdout.write(f"{table(results)}\n\n{Counter(r.status for r in results.values())}\n")
    sys.exit(any(result.status == "wrong" for result in results.values()))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare chats with media with transformers.")
    parser.add_argument("types", nargs="*", help="types to run again; by default all")
    parser.add_argument(
        "--videos", dest="kind", action="store_const", const="video", help="send videos"
    )
    parser.add_argument("--audio", dest="kind", action="store_const", const="audio")
    parser.set_defaults(kind="image")
    parser.add_argument(
        "--results", type=Path, help="default: build/{image,video,audio}_archs.jsonl"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--table", action="store_true", help="print the table and exit")
    arguments = parser.parse_args()
    arguments.results = arguments.results or Path(f"build/{arguments.kind}_archs.jsonl")
    return arguments


def _run_types(arguments: argparse.Namespace, results: dict[str, Result]) -> None:
    """Test the requested types. Add each result to `results` and to the file of results."""
    warnings.filterwarnings("ignore")
    getLogger("nereid_backend").setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    reads_audio = arguments.kind == "audio"
    types = image_types.audio_types() if reads_audio else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    deadline = time.monotonic() + arguments.seconds
    for model_type in arguments.types or types:
        if (model_type in results and not arguments.types) or time.monotonic() > deadline:
            continue
        result = results[model_type] = run_in_child(
            lambda result: examine(arguments.kind, result),
            Result(model_type),
            _MAX_SECONDS,
            _MAX_BYTES,
        )
        append_result(arguments.results, result)
        sys.stderr.write(
            f"{model_type}: {result.status} images={result.path} text={result.text_path} "
            f"depends={result.depends} {result.cells} {result.reason} {result.seconds}\n"
        )


if __name__ == "__main__":
    main()
