# SPDX-License-Identifier: Apache-2.0
"""Checks whether a model can be used with tensor parallelism, before the model is loaded."""

from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK, checkpoint_folder
from nereid_backend.checkpoints.load_model import model_class
from nereid_backend.checkpoints.quantised_tensors import quantisation_settings
from nereid_backend.checkpoints.read_config import check_files, read_config
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError, UnsupportedModelError
from nereid_backend.parallel.kv_heads import numbers_of_kv_heads

# The names of linear layers that compute queries, keys and values together.
_FUSED_LAYERS = frozenset(("qkv_proj", "query_key_value"))
# The names of linear layers whose outputs are divided into heads. If such a layer is divided, each
# rank computes only some of the query heads.
_LAYERS_OF_HEADS = _FUSED_LAYERS | {"k_proj", "q_proj", "q_b_proj"}


def check_settings(config: EngineConfig, device: torch.device) -> None:
    """Check that tensor parallelism supports the settings, and that there are enough GPUs.

    With tensor parallelism, several processes (ranks) compute one model together. Each rank loads a
    part of every divided layer.

    Args:
        config: the settings. tensor_parallel_size is larger than 1.
        device: the device of rank 0.

    Raises:
        ConfigError: if a setting cannot be combined with tensor_parallel_size, or if there are too
            few GPUs.
    """
    size = config.tensor_parallel_size
    # The keys are the names of unsupported settings. A value is True if the setting is used.
    unsupported_settings = {
        "weight_dtype": config.weight_dtype != "auto",
        "compile_forward": config.compile_forward is True,  # the default "auto" compiles nothing
        "measure_attention": config.measure_attention,
        "async_scheduling": config.async_scheduling,
        "lora_adapters": bool(config.lora_adapters),
    }
    for name, is_used in unsupported_settings.items():
        if is_used:
            raise ConfigError(
                f"{name}: this setting cannot be combined with tensor_parallel_size={size}. Remove "
                f"{name}, or set tensor_parallel_size=1."
            )
    if device.type != "cpu":
        _check_gpus(config)
    elif torch.cuda.is_available():
        # With tensor parallelism, transformers would place the model on the GPUs, even though the
        # device is a CPU.
        raise ConfigError(
            f"device: the value cpu cannot be combined with tensor_parallel_size={size} on a "
            "machine with GPUs. To use the CPU, hide the GPUs with an empty environment "
            "variable CUDA_VISIBLE_DEVICES."
        )


def _check_gpus(config: EngineConfig) -> None:
    """Raise a ConfigError if the setting `device` selects one GPU, or if there are too few GPUs.

    Each of the `tensor_parallel_size` processes needs a GPU of its own.
    """
    size = config.tensor_parallel_size
    if config.device not in ("auto", "cuda"):
        raise ConfigError(
            f"device: the value must be auto or cuda if tensor_parallel_size is {size}, but it is "
            f"{config.device}. To select GPUs, set the environment variable CUDA_VISIBLE_DEVICES."
        )
    if size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size: the value is {size}, but torch finds "
            f"{torch.cuda.device_count()} GPUs."
        )


def check_checkpoint(config: EngineConfig) -> None:
    """Check that transformers can divide the model of a checkpoint among several processes.

    The processes (ranks) compute the model together. transformers has a plan for each architecture,
    which describes how to divide the weight of each layer. Every rank loads one part of each
    weight. This function reads no weights.

    Args:
        config: the settings. tensor_parallel_size is the number of ranks.

    Raises:
        ModelError: if the checkpoint is damaged.
        UnsupportedModelError: if the architecture cannot be divided, or if the weights are
            quantised.
        ConfigError: if the attention heads cannot be divided equally among the ranks.
    """
    size = config.tensor_parallel_size
    folder = Path(checkpoint_folder(config.model))
    check_files(folder)
    model_config = read_config(folder, config.trust_remote_code)
    _check_is_unquantised(folder, model_config, size)
    empty_model = model_without_weights(model_config)
    if empty_model is None or not (plan := tensor_parallel_plan(empty_model)):
        raise _unsupported_error(model_config, size, problem="no plan")
    unknown_styles = sorted(set(plan.values()) - set(ALL_PARALLEL_STYLES))
    if unknown_styles:
        problem = f"a plan with the unknown styles {unknown_styles}"
        raise _unsupported_error(model_config, size, problem)
    _check_heads(model_config.get_text_config(decoder=True), plan, size)
    _check_kv_heads(numbers_of_kv_heads(empty_model, plan), size)


def _check_is_unquantised(folder: Path, model_config: PretrainedConfig, size: int) -> None:
    """Raise an UnsupportedModelError if the weights of the checkpoint in `folder` are quantised.

    `size` is the number of ranks, for the message.
    """
    # The weights of a GGUF file count as quantised. Other checkpoints with quantised weights
    # contain the settings of the quantisation in config.json.
    is_gguf = (folder / GGUF_LINK).is_file()
    if is_gguf or quantisation_settings(model_config) is not None:
        raise UnsupportedModelError(
            f"quantised weights cannot be combined with tensor_parallel_size={size}. Use a "
            "checkpoint that is not quantised, or set tensor_parallel_size=1."
        )


def _unsupported_error(config: PretrainedConfig, size: int, problem: str) -> UnsupportedModelError:
    """Return the error for a model that transformers cannot divide among `size` ranks.

    `problem` completes the sentence "transformers has ... for dividing this architecture".
    """
    return UnsupportedModelError(
        f"{_architecture(config)} cannot be combined with tensor_parallel_size={size}, "
        f"because transformers {transformers.__version__} has {problem} for dividing this "
        "architecture (base_model_tp_plan). Set tensor_parallel_size=1."
    )


def _architecture(config: PretrainedConfig) -> str:
    """Return the name of a model's class. If config.json has no name, return the model type."""
    names = getattr(config, "architectures", None)
    return str(names[0] if names else config.model_type)


def model_without_weights(config: PretrainedConfig) -> PreTrainedModel | None:
    """Create a model on the device "meta". Return None if transformers has no suitable class."""
    found_class = model_class(config)
    if found_class is None:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = found_class(config)
    return model


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that transformers uses to divide a model among the ranks.

    The plan maps the names of layers and weights to styles of division. Example: the name
    "model.layers.*.self_attn.q_proj" has the style "colwise". If transformers has no plan for the
    model, the result is empty.
    """
    plan: dict[str, str] = model.tp_plan
    # The plan of every architecture contains the output layer lm_head. If the plan contains only
    # lm_head, transformers cannot divide the model.
    divided_parts = set(plan) - {"lm_head"}
    return plan if divided_parts else {}


def _check_heads(config: PretrainedConfig, plan: dict[str, str], size: int) -> None:
    """Raise a ConfigError if the query heads cannot be divided equally among the ranks.

    Example: 12 query heads can be divided among 4 ranks, but not among 8 ranks. If one layer
    computes queries, keys and values together, the number of KV heads must be a multiple of `size`,
    too.

    Args:
        config: the config of the text model, which contains the numbers of heads.
        plan: maps the names of layers to styles of division. The style determines which part of a
            layer each rank computes.
        size: the number of ranks, which compute the model together.
    """
    divided_layers = _layers_with_divided_outputs(plan)
    divides_query_heads = not divided_layers.isdisjoint(_LAYERS_OF_HEADS)
    if divides_query_heads:
        _check_number_of_heads(config, "num_attention_heads", size)
    divides_fused_layers = not divided_layers.isdisjoint(_FUSED_LAYERS)
    if divides_fused_layers:
        _check_number_of_heads(config, "num_key_value_heads", size)


def _check_number_of_heads(config: PretrainedConfig, field: str, size: int) -> None:
    """Raise a ConfigError if the number of heads in a field of `config` is no multiple of `size`.

    Nothing is checked if the field is missing, or if it has a separate value for each layer.
    """
    num_heads = number_of_heads(config, field)
    if num_heads is not None and num_heads % size != 0:
        raise ConfigError(
            f"tensor_parallel_size: the value must divide the model's {field}, which is "
            f"{num_heads}, but it is {size}. Each GPU computes an equal number of heads."
        )


def _layers_with_divided_outputs(plan: dict[str, str]) -> set[str]:
    """Return the names of the layers whose outputs a tensor parallel plan divides among the ranks.

    Example: {"layers.*.self_attn.q_proj": "colwise"} gives {"q_proj"}.
    """
    return {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}


def _check_kv_heads(numbers: list[int], size: int) -> None:
    """Raise a ConfigError if the KV heads cannot be divided equally among the ranks.

    Example: 8 KV heads can be divided among 4 ranks (two heads each) or 16 ranks (two ranks compute
    the same head), but not among 6 ranks.

    Args:
        numbers: the different numbers of KV heads that the attention layers have.
        size: the number of ranks.
    """
    for num_kv_heads in numbers:
        is_divisible = num_kv_heads % size == 0 or size % num_kv_heads == 0
        if not is_divisible:
            raise ConfigError(
                "tensor_parallel_size: the value must be a divisor or a multiple of the model's "
                f"number of KV heads, which is {num_kv_heads}, but it is {size}. Each GPU computes "
                "an equal number of KV heads, or several GPUs compute the same KV head."
            )


def number_of_heads(config: PretrainedConfig, name: str) -> int | None:
    """Return the number of attention heads in the field `name` of a config.

    Return None if the field is missing, or if it has a separate value for each layer.
    """
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers raises it if each layer has its own value
        return None
    return value if isinstance(value, int) else None
