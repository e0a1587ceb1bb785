# SPDX-License-Identifier: Apache-2.0
"""Loads a Hugging Face checkpoint into the model code of transformers."""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK, checkpoint_folder
from nereid_backend.checkpoints.integer_panels import (
    fill_placeholders,
    round_weights,
    use_placeholders,
)
from nereid_backend.checkpoints.safetensors_files import check_permission, open_tensors
from nereid_backend.checkpoints.weight_arguments import (
    restore_generation_config,
    weight_arguments,
)
from nereid_backend.errors import ConfigError, ModelError, UnsupportedModelError, first_line
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
    """A loaded model and the description in its files.

    Attributes:
        model: the model on `device`, in eval mode.
        device: the device of the weights.
        text_config: the part of the config that describes the decoder.
        architecture: the name of the model's class in the config.
        eos_token_ids: the end-of-sequence tokens in generation_config.json and config.json, sorted.
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
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device: the value is {name}, but torch finds {count} GPUs. Set device=cpu, or "
                "install a torch build that supports the GPU."
            )
        device = torch.device("cuda", device.index or 0)
    return device


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
    """Load the weights of a checkpoint into the model code of transformers.

    Args:
        path: the folder of the checkpoint, or a GGUF file.
        dtype: the setting `dtype`.
        device: the device for the weights.
        attention: the name of Nereid's attention in transformers' attention interface.
        progress: called with one line for each slow operation.
        trust_remote_code: whether Python files of the checkpoint may be executed.
        use_panels: whether quantised integers are stored in panels of the CPU kernels. Otherwise
            they are dequantised.
        rounded_bits: if 4 or 8, the weights of linear layers are rounded to integers of this size
            while they are read, so that the unrounded weights need no memory together.
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
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    progress(f"loading {architecture} from {folder} as {_name(torch_dtype)}")
    model = None
    load = functools.partial(
        _load_weights,
        folder,
        config,
        torch_dtype,
        trust_remote_code,
        use_panels,
        rounded_bits if model_class(config) else None,
        distributed,
    )
    if _takes_attention_by_name(config, text_config):
        model = _load_with_attention(load, config, attention)
    takes_hook = model is not None
    if model is None:
        model = load("eager")
    if device.type != "cpu" and distributed is None:
        progress(f"copying the weights to {device}")
        model.to(device)  # type: ignore[arg-type]  # transformers decorates torch's signature
    model.train(False)
    return Checkpoint(
        model=model,
        device=device,
        text_config=text_config,
        architecture=architecture,
        eos_token_ids=_eos_token_ids(model, config, text_config),
        vocab_size=_num_embeddings(model),
        weights_bytes=model_bytes(model),
        adapters=LoraLayers(model),
        takes_hook=takes_hook,
    )


def check_files(folder: Path) -> None:
    """Check that a folder has a config.json and all its weights, without reading the weights.

    Raises:
        ModelError: a file is missing, incomplete or damaged.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder. Set model to the folder of a Hugging Face checkpoint."
        )
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder} is a LoRA adapter. Set model to the adapter's base model, and set "
                f"lora_adapters to name={folder}."
            )
        raise ModelError(
            f"{folder} has no config.json. Set model to the folder of a Hugging Face checkpoint."
        )
    check_permission(folder / "config.json")
    if not (folder / GGUF_LINK).is_file():
        open_tensors(folder, for_reading=False)


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """Return the config of a checkpoint.

    Raises:
        UnsupportedModelError: transformers does not know the model, or the config is damaged.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {folder}/config.json ({first_line(error)}). Python code of "
            "a checkpoint is only run if trust_remote_code is true."
            f"{_describe_newer_version(folder)}"
        ) from error


def _describe_newer_version(folder: Path) -> str:
    """Return a sentence about the version of transformers that wrote a config.json."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        written = Version(str(config["transformers_version"]))
    except (OSError, ValueError, KeyError, TypeError):
        return " A newer version of transformers may support the architecture."
    if written <= Version(transformers.__version__):
        return " A newer version of transformers may support the architecture."
    return (
        f" The file was written for transformers {written}, but the installed version is "
        f"{transformers.__version__}. Install the newer version."
    )


def _load_with_attention(
    load: Callable[[str], PreTrainedModel], config: PretrainedConfig, attention: str
) -> PreTrainedModel | None:
    """Load the model with an attention from transformers' attention interface.

    Return None if the class of the model always uses its own attention.
    """
    try:
        model = load(attention)
    except _OwnAttentionError:
        return None
    # `_takes_attention_by_name` has checked a class of transformers. If transformers has no class,
    # the class is in a Python file of the checkpoint, and is known only after loading.
    is_class_of_transformers = model_class(config) is not None
    if is_class_of_transformers or model._can_set_attn_implementation():
        return model
    return None


def _load_weights(  # noqa: PLR0913 - as `load_checkpoint`
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    use_panels: bool,
    rounded_bits: int | None,
    distributed: "DistributedConfig | None",
    attention: str,
) -> PreTrainedModel:
    """Load the weights into the class of the model.

    Raises:
        _OwnAttentionError: the class does not accept the attention implementation `attention`.
        ModelError: the weights are broken, or transformers does not support the model.
    """
    arguments = weight_arguments(folder, config, dtype, is_lazy=rounded_bits is not None)
    reads_folder = arguments["pretrained_model_name_or_path"] is not None
    if not reads_folder and model_class(config) is None:
        raise UnsupportedModelError(
            f"quantised weights of the model type {config.model_type} are not supported, because "
            "transformers has no class for this type. Use a checkpoint that is not quantised."
        )
    weights = arguments.get("state_dict", {})
    if use_panels and weights:
        with torch.device("meta"):
            empty_model = model_class(config)(arguments["config"])
        if rounded_bits is not None:
            weights = round_weights(weights, empty_model, rounded_bits)
        weights = arguments["state_dict"] = use_placeholders(weights, empty_model, dtype)
    arguments |= {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
    }
    if distributed is not None:
        arguments["distributed_config"] = distributed
    model = _from_pretrained(folder, config, arguments)
    fill_placeholders(model, weights.values())
    if not reads_folder:
        restore_generation_config(model, folder)
    return model


def _from_pretrained(
    folder: Path, config: PretrainedConfig, arguments: dict[str, Any]
) -> PreTrainedModel:
    """Call transformers' `from_pretrained` with `arguments`.

    `_load_weights` documents the errors. `folder` is the folder of the checkpoint, for messages.
    """
    try:
        # The type annotation of the function does not contain the pair that it returns for
        # output_loading_info=True.
        load: Callable[..., Any] = (model_class(config) or AutoModelForCausalLM).from_pretrained
        with _quiet():
            model, report = load(**arguments, local_files_only=True, output_loading_info=True)
    except (ValueError, KeyError, ImportError) as error:
        if arguments["attn_implementation"] in str(error):
            # The class accepts only the attention implementations in its own table.
            raise _OwnAttentionError from error
        raise UnsupportedModelError(
            f"the model type {config.model_type} is not supported: {first_line(error)}"
        ) from error
    except ModelError:
        raise
    except Exception as error:
        # Broken files cause many kinds of exceptions, such as the exceptions of safetensors, or
        # RuntimeError for wrong shapes.
        raise ModelError(
            f"the weights in {folder} cannot be read ({first_line(error)}). Download the "
            "checkpoint again."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights, such as {missing[0]}, so the model's output "
            "would be random. Download the checkpoint again."
        )
    return model  # type: ignore[no-any-return]


def model_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' are untyped
    """Return the class that runs `config` as a causal language model; None if there is none.

    If the checkpoint names the class of transformers for images and text, this class is returned.
    AutoModelForCausalLM knows the class of most models. Otherwise, the function returns the class
    that the checkpoint names in its field `architectures`, if that class can generate text. An
    example is a multimodal model, to which the engine sends only text.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if reads_images and MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__ == name:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and named.can_generate() and not config.is_encoder_decoder:
            return named
        return None


def _takes_attention_by_name(config: PretrainedConfig, text_config: PretrainedConfig) -> bool:
    """Return whether the decoder's class uses transformers' attention interface.

    Other classes ignore the name of an attention implementation, or raise an error for it.
    """
    candidates = [model_class(config), model_class(text_config)]
    classes = [candidate for candidate in candidates if candidate is not None]
    # If no class is known, from_pretrained raises an error with the reason.
    return not classes or any(one._can_set_attn_implementation() for one in classes)


class _OwnAttentionError(Exception):
    """Raised if the model's class does not use transformers' attention interface."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars of transformers."""
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
    """Return the data type of the weights for the setting `dtype`.

    On a CPU with slow bfloat16, "auto" means float32. If float32 replaces the checkpoint's
    bfloat16, or if the setting is bfloat16, log a warning.
    """
    is_slow = device.type == "cpu" and not has_fast_bfloat16()
    if name != "auto":
        if name == "bfloat16" and is_slow:
            logger.warning(_SLOW_BFLOAT16)
        return _DTYPES[name]
    dtype: Any = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype)
    if dtype not in _DTYPES.values() or (dtype == torch.float16 and device.type == "cpu"):
        return torch.float32
    if dtype == torch.bfloat16 and is_slow:
        logger.warning(
            "dtype: auto chooses float32 instead of the checkpoint's bfloat16, because this CPU "
            "has no fast kernel for bfloat16. The weights need twice the memory. Set "
            "dtype=bfloat16 if the memory does not suffice."
        )
        return torch.float32
    return dtype  # type: ignore[no-any-return]


def _eos_token_ids(
    model: PreTrainedModel, config: PretrainedConfig, text_config: PretrainedConfig
) -> tuple[int, ...]:
    """Return the end-of-sequence tokens in all configs of a model, sorted."""
    token_ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), config, text_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            token_ids.add(value)
        elif isinstance(value, list | tuple):
            token_ids.update(value)
    return tuple(sorted(token_ids))


def _num_embeddings(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[0])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
