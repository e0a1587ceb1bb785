# SPDX-License-Identifier: Apache-2.0
"""From a folder to a model that answers with our attention."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.errors import ConfigError, ModelError, UnsupportedModelError

Progress = Callable[[str], None]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model and what its files say about it.

    Attributes:
        model: on its device, in its dtype, in eval mode.
        device: where it is.
        text_config: the part of the config that describes the decoder.
        architecture: the class that the config names.
        eos_token_ids: every token that generation_config.json or config.json calls the end, sorted.
        vocab_size: ids below this can be given to the model.
        weights_bytes: memory of parameters and buffers.
        takes_hook: whether the model's class takes attention by name; if not, it has its own.
    """

    model: PreTrainedModel
    device: torch.device
    text_config: PretrainedConfig
    architecture: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    weights_bytes: int
    takes_hook: bool = True


def choose_device(name: str) -> torch.device:
    """Resolve the setting ``device``.

    Raises:
        ConfigError: a GPU was asked for and there is none of that number.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device: {name} was asked for, but torch sees {count} GPUs; use cpu")
        device = torch.device("cuda", device.index or 0)
    return device


def load_checkpoint(
    path: str,
    *,
    dtype: str,
    device: torch.device,
    attention: str,
    progress: Progress,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a Hugging Face checkpoint's safetensors weights into transformers' own model code.

    Args:
        path: its folder.
        dtype: the setting of that name.
        device: where the weights go.
        attention: name in transformers' attention interface.
        progress: gets a line for every slow step.
        trust_remote_code: whether Python files that come with the checkpoint may be run.

    Raises:
        ModelError: the folder is no checkpoint, or a broken one.
        UnsupportedModelError: transformers has no code for it.
    """
    folder = Path(path)
    check_files(folder)
    config = _read_config(folder, trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    torch_dtype = _choose_dtype(dtype, config, text_config, device)
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    progress(f"loading {architecture} from {folder} as {_name(torch_dtype)}")
    takes_hook = _takes_attention_by_name(config, text_config)
    try:
        name = attention if takes_hook else "eager"
        model = _load_weights(folder, config, torch_dtype, name, trust_remote_code)
        if takes_hook and not model._can_set_attn_implementation() and not _model_class(config):
            raise _OwnAttentionError
    except _OwnAttentionError:
        takes_hook = False
        model = _load_weights(folder, config, torch_dtype, "eager", trust_remote_code)
    if device.type != "cpu":
        progress(f"copying the weights to {device}")
        model.to(device)  # type: ignore[arg-type]  # transformers decorates torch's signature
    model.train(False)
    tensors = [*model.parameters(), *model.buffers()]
    return Checkpoint(
        model=model,
        device=device,
        text_config=text_config,
        architecture=architecture,
        eos_token_ids=_eos_token_ids(model, config, text_config),
        vocab_size=_num_embeddings(model),
        weights_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        takes_hook=takes_hook,
    )


def check_files(folder: Path) -> None:
    """See that a folder holds a config and all its safetensors files.

    Raises:
        ModelError: something is missing; the message names it and says what to do.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give the path of a Hugging Face checkpoint")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give the path of a Hugging Face checkpoint")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is broken ({error}); download it again") from error
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, first {missing[0]}; "
                "download them"
            )
    elif not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has no .safetensors files; convert its weights with transformers' "
            "save_pretrained"
        )


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"{folder}/config.json: transformers cannot use it: {_first_line(error)} "
            "(code that comes with a checkpoint is not run unless trust_remote_code is set; a "
            "newer transformers may know it)"
        ) from error


def _load_weights(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    # Typed as returning a model, but with output_loading_info it returns a pair.
    load: Callable[..., Any] = (_model_class(config) or AutoModelForCausalLM).from_pretrained
    try:
        with _quiet():
            model, report = load(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (ValueError, KeyError, ImportError) as error:
        reason = _first_line(error)
        if attention in str(error):
            # The class has a table of attention implementations of its own.
            raise _OwnAttentionError from error
        raise UnsupportedModelError(f"{config.model_type} is not supported: {reason}") from error
    except Exception as error:
        # safetensors raises its own errors for broken files, and torch RuntimeError for shapes.
        raise ModelError(
            f"{folder}: its weights cannot be read: {_first_line(error)}; download them again"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights, first {missing[0]}; the answers would be "
            "random; download the checkpoint again"
        )
    return model  # type: ignore[no-any-return]


def _model_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' are untyped
    """The class that runs a config as a causal LM; None where transformers has none.

    Besides those that AutoModelForCausalLM knows, it is the class that the checkpoint names, if
    that generates: the decoder of a model for several media, or such a model given text alone.
    """
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        name = (getattr(config, "architectures", None) or [""])[0]
        found: Any = getattr(transformers, name, None)
        is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
        if is_model and found.can_generate() and not config.is_encoder_decoder:
            return found
        return None


def _takes_attention_by_name(config: PretrainedConfig, text_config: PretrainedConfig) -> bool:
    """Whether the decoder's class looks attention up; others ignore a name, or refuse it later."""
    classes = [_model_class(config), _model_class(text_config)]
    found = [each for each in classes if each is not None]
    # Where neither is known, from_pretrained says what is wrong.
    return not found or any(each._can_set_attn_implementation() for each in found)


class _OwnAttentionError(Exception):
    """The model's class does not take attention by name."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: progress is ours to report."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _choose_dtype(
    name: str, config: PretrainedConfig, text_config: PretrainedConfig, device: torch.device
) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    found: Any = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
    if isinstance(found, str):
        found = _DTYPES.get(found)
    if found not in _DTYPES.values() or (found == torch.float16 and device.type == "cpu"):
        return torch.float32
    return found  # type: ignore[no-any-return]


def _eos_token_ids(
    model: PreTrainedModel, config: PretrainedConfig, text_config: PretrainedConfig
) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), config, text_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return tuple(sorted(found))


def _num_embeddings(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[0])


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
