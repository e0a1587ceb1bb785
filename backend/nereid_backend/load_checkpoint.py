# SPDX-License-Identifier: Apache-2.0
"""Loads the config and the weights of a Hugging Face checkpoint into a model of transformers."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)

from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.checkpoints.load_model import (
    load_model,
    load_with_attention,
    model_class,
    takes_attention_by_name,
)
from nereid_backend.checkpoints.read_config import check_files, read_config
from nereid_backend.checkpoints.tokenizer_eos import read_tokenizer_eos_id
from nereid_backend.errors import ConfigError, UnsupportedModelError
from nereid_backend.linear.lora_layers import LoraLayers
from nereid_backend.linear.prepack import has_fast_bfloat16
from nereid_backend.linear.quantise_weights import model_bytes

if TYPE_CHECKING:
    from transformers.distributed.configuration_utils import DistributedConfig

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_SLOW_BFLOAT16 = (
    "dtype: this CPU has no fast kernel for bfloat16, so a step takes about four times as long as "
    "with float32. Set dtype=float32, or install g++ if it is missing."
)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model, and facts about the model from the files of the checkpoint.

    Attributes:
        model: the model on `device`, in eval mode.
        device: the device of the weights.
        text_config: the part of the config that describes the decoder.
        architecture: the name of the model's class in the config.
        eos_token_ids: the end-of-sequence tokens in generation_config.json and config.json, and the
            end-of-sequence token of the tokenizer, sorted.
        vocab_size: the number of valid token ids.
        weights_bytes: the memory of the parameters and buffers, in bytes.
        adapters: the LoRA adapters that change the model's linear layers.
        takes_hook: whether transformers' attention interface can replace the model's attention. If
            False, the model always uses its own attention.
    """

    model: PreTrainedModel
    device: torch.device
    text_config: PretrainedConfig
    architecture: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    weights_bytes: int
    adapters: LoraLayers
    takes_hook: bool = True


def choose_device(name: str) -> torch.device:
    """Return the torch device for the setting `device`.

    Examples: `choose_device("cuda")` returns cuda:0. `choose_device("auto")` returns cuda:0 if
    there is a GPU, and cpu otherwise.

    Raises:
        ConfigError: there is no GPU with the requested number.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index = device.index or 0
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_gpus:
        raise ConfigError(
            f"device: the value is {name}, but torch finds {num_gpus} GPUs. Set device=cpu, or "
            "install a torch build that supports the GPU."
        )
    return torch.device("cuda", index)


def load_checkpoint(  # noqa: PLR0913 - the settings that select how weights are stored
    path: str,
    *,
    dtype: str,
    device: torch.device,
    attention: str,
    progress: Progress,
    trust_remote_code: bool = False,
    use_panels: bool = False,
    rounded_bits: int | None = None,
    distributed: "DistributedConfig | None" = None,
) -> Checkpoint:
    """Load the weights of a checkpoint into the model class of transformers.

    Args:
        path: the folder of the checkpoint, or a GGUF file.
        dtype: the setting `dtype`.
        device: the device for the weights.
        attention: the name of Nereid's attention in transformers' attention interface.
        progress: called with one line for each slow operation.
        trust_remote_code: whether Python files of the checkpoint may be executed.
        use_panels: whether quantised integers are stored in panels of the CPU kernels. Otherwise
            they are dequantised.
        rounded_bits: if 4 or 8, the weights of linear layers are rounded to integers of this number
            of bits while they are read. The memory then never contains all unrounded weights.
        distributed: divides the model over the processes of torch.distributed; None loads the whole
            model.

    Raises:
        ModelError: the folder is not a checkpoint, or the checkpoint is broken.
        UnsupportedModelError: transformers has no code for the model.
    """
    folder = Path(checkpoint_folder(path))
    check_files(folder)
    config = read_config(folder, trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    torch_dtype = _choose_dtype(dtype, config, text_config, device)
    architectures = getattr(config, "architectures", None) or [config.model_type]
    architecture = architectures[0]
    progress(f"loading {architecture} from {folder} as {_name(torch_dtype)}")
    # `load` takes one argument: the name of the attention implementation.
    load = functools.partial(
        load_model,
        folder,
        config,
        torch_dtype,
        trust_remote_code,
        use_panels,
        rounded_bits if model_class(config) else None,
        distributed,
        progress,
    )
    model = None
    if takes_attention_by_name(config, text_config):
        model = load_with_attention(load, config, attention)
    takes_hook = model is not None
    if model is None:
        model = load("eager")
    if device.type != "cpu" and distributed is None:
        progress(f"copying the weights to {device}")
        model.to(device)
    model.train(False)
    return Checkpoint(
        model=model,
        device=device,
        text_config=text_config,
        architecture=architecture,
        eos_token_ids=_eos_token_ids(model, config, text_config, folder),
        vocab_size=_num_embeddings(model),
        weights_bytes=model_bytes(model),
        adapters=LoraLayers(model),
        takes_hook=takes_hook,
    )


def _choose_dtype(
    setting: str, config: PretrainedConfig, text_config: PretrainedConfig, device: torch.device
) -> torch.dtype:
    """Return the data type that the weights have in memory for the setting `dtype`.

    "auto" selects the checkpoint's data type, or float32 if the config contains no data type or if
    the device is slow with this type; see `_automatic_dtype`. Any other setting is used as it is. A
    warning is logged if the setting is "bfloat16" on a CPU without a fast kernel for bfloat16.

    Args:
        setting: the setting `dtype`: "auto", "float32", "bfloat16" or "float16".
        config: the config of the checkpoint.
        text_config: the part of the config that describes the decoder.
        device: the device of the weights.
    """
    if setting == "auto":
        # In the config, the data type is a torch.dtype or the name of a torch.dtype.
        dtype: Any = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
        if isinstance(dtype, str):
            dtype = _DTYPES.get(dtype)
        return _automatic_dtype(dtype, device)
    if setting == "bfloat16" and _has_slow_bfloat16(device):
        logger.warning(_SLOW_BFLOAT16)
    return _DTYPES[setting]


def _automatic_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the data type that the setting dtype=auto selects.

    The result is the checkpoint's data type, or float32 in these cases:

    - The config contains no data type, or a data type that is not in `_DTYPES`.
    - The data type is float16, and the device is a CPU.
    - The data type is bfloat16, and the device is a CPU without a fast kernel for bfloat16. A
      warning is logged, because the weights need twice the memory.

    Args:
        dtype: the checkpoint's data type; None if the config contains no data type.
        device: the device of the weights.
    """
    if dtype is None or dtype not in _DTYPES.values():
        return torch.float32
    if dtype == torch.float16 and device.type == "cpu":
        return torch.float32
    if dtype == torch.bfloat16 and _has_slow_bfloat16(device):
        logger.warning(
            "dtype: auto chooses float32 instead of the checkpoint's bfloat16, because this CPU "
            "has no fast kernel for bfloat16. The weights need twice the memory. Set "
            "dtype=bfloat16 if the memory does not suffice."
        )
        return torch.float32
    return dtype


def _has_slow_bfloat16(device: torch.device) -> bool:
    """Return whether the device is a CPU without a fast kernel for bfloat16."""
    return device.type == "cpu" and not has_fast_bfloat16()


def _eos_token_ids(
    model: PreTrainedModel, config: PretrainedConfig, text_config: PretrainedConfig, folder: Path
) -> tuple[int, ...]:
    """Return the sorted ids of the end-of-sequence tokens of a model.

    The ids are collected from the generation config, the config, the text config, and the tokenizer
    in `folder`. Ids outside the vocabulary are ignored. Some checkpoints use -1 to mean that there
    is no token.
    """
    vocab_size = _num_embeddings(model)
    token_ids: set[int] = set()
    # Programs for training on chats often change the end-of-sequence token in the files of the
    # tokenizer, for example to <|im_end|>, but leave the token of the base model in config.json.
    tokenizer_eos_id = read_tokenizer_eos_id(folder)
    if tokenizer_eos_id is not None:
        token_ids.add(tokenizer_eos_id)
    for source in (getattr(model, "generation_config", None), config, text_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            token_ids.add(value)
        elif isinstance(value, list | tuple):
            token_ids.update(token_id for token_id in value if isinstance(token_id, int))
    return tuple(sorted(token_id for token_id in token_ids if 0 <= token_id < vocab_size))


def _num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of rows in the embedding table of a model.

    Raises:
        UnsupportedModelError: the model has no table with one row for each token.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because its embeddings are not one table "
            "with a row for each token."
        )
    return int(weight.shape[0])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
