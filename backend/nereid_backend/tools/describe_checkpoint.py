# SPDX-License-Identifier: Apache-2.0
"""Describes a checkpoint without reading its weights, for `nereid doctor CHECKPOINT`.

    python -m nereid_backend.tools.describe_checkpoint PATH [--load]

The program prints a JSON list of findings, each with the keys check, ok and finding. With `--load`,
the checkpoint is loaded, too, so that the findings include its forward path.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar

import torch

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK, checkpoint_folder
from nereid_backend.checkpoints.quantised_tensors import quantisation_settings
from nereid_backend.checkpoints.read_config import check_files, read_config
from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.checkpoints.same_tokenizer import VOCABULARIES
from nereid_backend.checkpoints.weight_counts import count_weights
from nereid_backend.config import EngineConfig
from nereid_backend.engine.engine import Engine
from nereid_backend.errors import NereidError
from nereid_backend.loading_progress import no_progress
from nereid_backend.main_memory import available_memory, format_bytes
from nereid_backend.model.forward_path.length_limits import model_limit
from nereid_backend.model.memory.weight_memory import memory_by_setting
from nereid_backend.pooling.loading.sentence_modules import read_modules
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.text.load_decoder import load_decoder

_Path = TypeVar("_Path", str, Path)


class Finding(TypedDict):
    """The result of one check of a checkpoint.

    Attributes:
        check: the name of the check, such as "tokenizer".
        ok: whether no error was found.
        finding: the description of the checked part, or the error message.
    """

    check: str
    ok: bool
    finding: str


def describe(path: str, *, loads: bool = False) -> list[Finding]:
    """Check a checkpoint, and return one finding for each check.

    A finding is a dictionary such as {"check": "tokenizer", "ok": True, "finding":
    "tokenizer.json"}. If the files are missing or damaged, only this finding is returned.

    Args:
        path: the folder of a checkpoint, or a GGUF file.
        loads: whether the checkpoint is loaded to find its forward path, which is the method by
            which the engine runs the model. The engine chooses this method while it loads a model.
    """
    files = _run_check("files", _describe_files, path)
    if not files["ok"]:
        return [files]
    folder = _model_folder(path)
    weights = _run_check("weights", _describe_weights, folder)
    findings = [files, _run_check("architecture", _describe_architecture, folder), weights]
    if weights["ok"]:
        findings += _memory_findings(folder)
    findings.append(_run_check("tokenizer", _describe_tokenizer, folder))
    findings.append(_run_check("chat template", _describe_template, folder))
    if loads:
        findings.append(_run_check("forward path", _describe_path, path))
    return findings


def _run_check(check: str, describe_part: Callable[[_Path], str], path: _Path) -> Finding:
    """Describe one part of a checkpoint, and return the result as a finding.

    If the description fails with an error, the field `ok` of the finding is False, and the finding
    contains the error message.

    `check` is the name of the check, such as "tokenizer".
    """
    try:
        return {"check": check, "ok": True, "finding": describe_part(path)}
    except NereidError as error:
        return {"check": check, "ok": False, "finding": str(error)}


def _model_folder(path: str) -> Path:
    """Return the folder with the config and the weights of a checkpoint or a GGUF file.

    In some checkpoints of sentence-transformers, it is a subfolder, which modules.json names.
    """
    folder = Path(checkpoint_folder(path))
    modules = [] if (folder / "config.json").is_file() else read_modules(folder)
    return modules[0].folder if modules else folder


def _describe_files(path: str) -> str:
    folder = _model_folder(path)
    check_files(folder)
    if (folder / GGUF_LINK).is_file():
        return f"a GGUF file. Its config and tokenizer are in {folder}"
    num_files = len({tensor.file for tensor in open_tensors(folder, for_reading=False).values()})
    return f"a Hugging Face checkpoint. Number of safetensors files: {num_files}"


def _describe_architecture(folder: Path) -> str:
    config = read_config(folder, trust_remote_code=False)
    names = getattr(config, "architectures", None) or [config.model_type]
    limit = model_limit(config.get_text_config(decoder=True)).num_tokens
    return f"{names[0]} (model type {config.model_type}), up to {limit} tokens"


def _describe_weights(folder: Path) -> str:
    counts = count_weights(folder)
    text = f"{counts.num_weights:,} weights"
    if (folder / GGUF_LINK).is_file():
        return text
    settings = quantisation_settings(read_config(folder, trust_remote_code=False))
    if settings is not None:
        keeps = "stay integers on a CPU" if counts.num_quantised_linear else "are dequantised"
        return f"{text}, quantised with {settings.get('quant_method')}; they {keeps}"
    kinds = Counter(tensor.dtype for tensor in open_tensors(folder, for_reading=False).values())
    return f"{text} as {', '.join(kind for kind, _ in kinds.most_common())}"


def _memory_findings(folder: Path) -> list[Finding]:
    """Return a finding for each possible data type: how much memory the weights would need.

    Example of a finding: {"check": "memory with dtype=bfloat16", "ok": True, "finding": "2.0 GiB
    for the weights"}. The headers of the weight files must be readable.

    `ok` is always True, because a checkpoint is not faulty if its weights do not fit into the free
    memory. Another data type or another machine can be chosen.
    """
    free_bytes = available_memory()
    findings: list[Finding] = []
    for setting, weight_bytes in memory_by_setting(count_weights(folder)).items():
        text = f"{format_bytes(weight_bytes)} for the weights"
        if weight_bytes > free_bytes:
            text += f"; only {format_bytes(free_bytes)} are free"
        findings.append({"check": f"memory with {setting}", "ok": True, "finding": text})
    return findings


def _describe_tokenizer(folder: Path) -> str:
    load_decoder(str(folder))  # raises a ModelError if the tokenizer cannot be loaded
    found = [name for name in VOCABULARIES if (folder / name).is_file()]
    return found[0] if found else "none, so the server cannot read text"


def _describe_template(folder: Path) -> str:
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return name
    for name in ("processor_config.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file() and '"chat_template":' in file.read_text(encoding="utf-8"):
            return f"in {name}"
    return "none, so the server answers completions but no chats"


def _describe_path(path: str) -> str:
    """Load the checkpoint, and describe how Nereid computes the model's forward pass.

    Raises: NereidError if the checkpoint is neither a language model nor a pooling model.
    """
    try:
        return _describe_language_model(path)
    except NereidError as error:
        language_model_error = error
    try:
        return _describe_pooling_model(path)
    except NereidError:
        # Only embedding models and rerankers have modules.
        if (Path(path) / "modules.json").is_file():
            raise
        raise language_model_error from None


def _describe_language_model(path: str) -> str:
    """Load a language model, and describe its forward path and its data type in one text.

    The engine reports its progress in lines. The line "path: padded (packed: <reason>)." also names
    the faster forward paths that the model does not support, unlike `engine.info`.
    """
    lines: list[str] = []
    engine = Engine(EngineConfig(path, max_num_seqs=4), lines.append)
    engine.close()
    path_lines = [line for line in lines if line.startswith("path: ")]
    path_line = path_lines[0] if path_lines else engine.info.path
    return f"{path_line.removeprefix('path: ')} Data type: {engine.info.dtype}"


def _describe_pooling_model(path: str) -> str:
    """Load an embedding model or a reranker, and return its forward path, task and data type."""
    info = PoolingEngine(PoolingConfig(path), no_progress).info
    return f"{info.path} Task: {info.task}. Data type: {info.dtype}"


def main(arguments: list[str]) -> None:
    """Print the findings as JSON. Exit with code 1 if an argument is unknown."""
    if unknown := [argument for argument in arguments[1:] if argument != "--load"]:
        sys.exit(f"the argument {unknown[0]} is unknown. After the path, only --load is allowed.")
    torch.set_num_threads(1)
    findings = describe(arguments[0], loads="--load" in arguments[1:])
    sys.stdout.write(json.dumps(findings))


if __name__ == "__main__":
    main(sys.argv[1:])
