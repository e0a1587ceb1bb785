# SPDX-License-Identifier: Apache-2.0
"""Reads the description of a checkpoint from its files.

The sources are, in ascending order of precedence: the architecture in config.json, the files of
sentence-transformers (modules.json and the files that modules.json names), and the settings `task`
and `pooling`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nereid_backend.checkpoints.read_config import (
    check_architectures,
    check_dtype_name,
    check_files,
)
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    SEQUENCE,
    TOKENS,
    AnswerTokens,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.checkpoint_task import (
    GENERATIVE,
    SEQUENCE_HEAD,
    TOKEN_HEAD,
    choose_task,
)
from nereid_backend.pooling.loading.describe_embedding import describe_embedding
from nereid_backend.pooling.loading.sentence_modules import (
    SENTENCE_CONFIG_FILE,
    ModuleSpec,
    computes_score,
    find_config,
    is_embedder,
    read_json,
    read_loading_arguments,
    read_modules,
    read_settings,
    read_tokenizer_arguments,
)
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.vision.load_processor import has_chat_template, has_processor

# Maps values of problem_type in config.json to the activation of a classifier with several labels.
# For every other value, the activation is softmax. transformers' pipeline for text classification
# has the same rules.
_ACTIVATIONS_OF_PROBLEMS = {"multi_label_classification": "sigmoid", "regression": "none"}
# The supported arguments of a tokenizer. Except for the limit of the number of tokens, these
# arguments have no effect on the token ids of a text.
_SUPPORTED_TOKENIZER_ARGUMENTS = {
    *("padding", "padding_side", "pad_to_multiple_of", "truncation", "max_length"),
    *("return_tensors", "return_attention_mask", "return_token_type_ids"),
    # sentence-transformers passes this argument to the model. Only the last token's logits count.
    "logits_to_keep",
}
# The settings file contains an object with the variables of the chat template and some settings of
# the tokenizer. These are the names of the tokenizer's settings, which are not passed to the
# template.
_NOT_FOR_TEMPLATES = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}


def read_checkpoint_spec(settings: PoolingConfig) -> CheckpointSpec:
    """Return the description of the checkpoint in the folder `settings.model`.

    The description contains, for example, the task, the kinds of output, and the layers that follow
    the transformers model. A checkpoint of sentence-transformers lists its layers (modules) in
    modules.json.

    Raises:
        ModelError: a file is missing or broken, or requires something that is not supported.
        ConfigError: the setting `task` or `pooling` does not fit the checkpoint.
    """
    root = Path(settings.model)
    if not root.is_dir():
        raise ModelError(
            f"{root} is not a folder. Set model to the folder of a Hugging Face checkpoint."
        )
    modules = read_modules(root)
    base = _read_architecture_and_task(root, settings, modules)
    sentence_config = read_json(root / SENTENCE_CONFIG_FILE)  # {} if the file is missing
    try:
        spec = _add_input_rules(base, sentence_config)
        _check_default_prompt(root, spec)
        if spec.task == "embed":
            spec = describe_embedding(spec, settings, root, _embedding_modules(settings, modules))
        elif computes_score(modules):
            # The modules are those of an embedding model. The last module computes the score.
            embedding = describe_embedding(spec, settings, root, modules)
            activation = _activation(spec.config, sentence_config) or "sigmoid"
            spec = replace(embedding, kinds=("score",), activation=activation)
        else:
            spec = _describe_scoring(spec, modules, sentence_config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # The functions above do not check the type of each value in the JSON files.
        raise ModelError(
            f"a JSON file in {root}, such as {SENTENCE_CONFIG_FILE}, has a value of a wrong type, "
            f"or lacks a value ({type(error).__name__}: {error}). Download the JSON files again."
        ) from error
    _check_messages(spec)
    return spec


def _check_messages(spec: CheckpointSpec) -> None:
    """Raise an UnsupportedModelError if the tokenizer cannot render the chat messages of a model.

    The tokenizer cannot render messages with images. The rules of models with multi-vector output,
    such as the expansion of queries, are for texts that are not rendered.
    """
    has_images = getattr(spec.config, "vision_config", None) is not None
    has_own_rules = spec.kinds == ("multi_vector",) or spec.loader == TOKENS
    if spec.renders_messages and (has_images or has_own_rules):
        raise UnsupportedModelError(
            f"{spec.folder}: the settings file of sentence-transformers has an entry 'message' in "
            "modality_config, so inputs are rendered with the chat template. This is not supported "
            "for models with one vector or label for each token, and for models of images without "
            "a processor. If the model was trained without a chat template, remove the entry. "
            "Otherwise, use another checkpoint."
        )


def _read_architecture_and_task(
    root: Path, settings: PoolingConfig, modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint, with its architecture and its task.

    The other fields, such as the prompts, still have their default values. The caller replaces
    these values.

    `root` is the folder of the checkpoint. The first of its `modules` is the transformers model.
    """
    folder = modules[0].folder if modules else root  # the folder of the transformers model
    check_files(folder)
    config = _read_config(folder)
    architectures = getattr(config, "architectures", None) or [config.model_type]
    return CheckpointSpec(
        folder=folder,
        config=config,
        architecture=architectures[0],
        task=choose_task(settings, architectures[0], modules, config, folder),
        has_modules=bool(modules),
    )


def _embedding_modules(settings: PoolingConfig, modules: list[ModuleSpec]) -> list[ModuleSpec]:
    """Read the descriptions of an embedding model's modules from the checkpoint's files.

    The result is empty if the setting `pooling` replaces the modules, or if the modules are for
    another task.
    """
    return modules if settings.pooling is None and is_embedder(modules) else []


def _read_config(folder: Path) -> PretrainedConfig:
    """Return the config of the transformers model in a folder."""
    check_dtype_name(folder)
    try:
        arguments = read_loading_arguments(folder, "config_kwargs", "config_args")
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **arguments
        )
    except ModelError:
        raise
    except Exception as error:
        # A config with values of wrong types can cause any exception in transformers.
        raise UnsupportedModelError(
            f"transformers cannot load {folder}/config.json ({first_line(error)}). Python code of "
            "a checkpoint is not run. A newer version of transformers may support the architecture."
        ) from error
    check_architectures(folder, config)
    return config


def _add_input_rules(spec: CheckpointSpec, sentence_config: dict[str, Any]) -> CheckpointSpec:
    """Return a copy of `spec` that also describes how inputs are converted to tokens.

    Examples of the fields that this function sets are the prompts, the length limit and the
    variables of the chat template. `sentence_config` is the content of the file
    config_sentence_transformers.json.
    """
    settings = read_settings(spec.folder)  # saved by sentence-transformers
    # Vision-language models take chat messages, which the processor renders. The settings may
    # require chat messages for other models, too. The tokenizer renders these messages.
    takes_messages = _takes_messages(spec, settings)
    message_settings = (settings.get("modality_config") or {}).get("message")
    if not takes_messages:
        _check_tokenizer_arguments(spec.folder, _tokenizer_arguments(settings))
    return replace(
        spec,
        takes_messages=takes_messages,
        renders_messages=message_settings is not None and not takes_messages,
        message_format=(message_settings or {}).get("format"),
        prompts=_named_prompts(sentence_config),
        default_prompt_name=sentence_config.get("default_prompt_name"),
        max_seq_length=_max_seq_length(spec.folder, settings),
        truncate_dim=_positive_integer(sentence_config, "truncate_dim"),
        max_active_dims=_positive_integer(sentence_config, "max_active_dims"),
        lower_case=bool(settings.get("do_lower_case")),
        template_kwargs=_chat_template_variables(settings),
    )


def _max_seq_length(folder: Path, settings: dict[str, Any]) -> int | None:
    """Return the length limit of inputs in tokens.

    Three settings can contain the limit. The first of these settings that has a value determines
    the limit. Return None if no setting has a value, or if the value is not a positive integer.
    `settings` is the content of the settings file of sentence-transformers in `folder`.
    """
    lengths = (
        _tokenizer_arguments(settings).get("max_length"),
        read_tokenizer_arguments(folder).get("model_max_length"),
        settings.get("max_seq_length"),
    )
    length = next((value for value in lengths if value is not None), None)
    return length if isinstance(length, int) and length > 0 else None


def _tokenizer_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which sentence-transformers calls the tokenizer for texts.

    Example: {"processing_kwargs": {"text": {"max_length": 256}}} returns {"max_length": 256}.
    """
    processing = settings.get("processing_kwargs") or {}
    return {**(processing.get("common") or {}), **(processing.get("text") or {})}


def _check_tokenizer_arguments(folder: Path, arguments: dict[str, Any]) -> None:
    """Raise an UnsupportedModelError if an argument other than the limit changes the token ids.

    `folder` is the folder of the transformers model.
    """
    unknown = sorted(arguments.keys() - _SUPPORTED_TOKENIZER_ARGUMENTS)
    if unknown:
        raise UnsupportedModelError(
            f"{folder}: the argument {unknown[0]} of the tokenizer (processing_kwargs in the "
            "settings file of sentence-transformers) is not supported. The supported arguments are "
            f"{', '.join(sorted(_SUPPORTED_TOKENIZER_ARGUMENTS))}. Use another checkpoint."
        )


def _positive_integer(sentence_config: dict[str, Any], name: str) -> int | None:
    """Return a number in config_sentence_transformers.json; None if the file does not contain it.

    Raises:
        ValueError: the value is not a positive integer.
    """
    value = sentence_config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a positive integer, but it is {value!r}")
    return value


def _check_default_prompt(root: Path, spec: CheckpointSpec) -> None:
    """Raise a ModelError if no prompt of the checkpoint has the name of the default prompt.

    The library sentence-transformers also refuses such a checkpoint.
    """
    name = spec.default_prompt_name
    if name is not None and name not in spec.prompts:
        known = ", ".join(spec.prompts) or "none"
        raise ModelError(
            f"{root / SENTENCE_CONFIG_FILE}: default_prompt_name is {name!r}, but the prompts are: "
            f"{known}. Correct or remove default_prompt_name."
        )


def _named_prompts(sentence_config: dict[str, Any]) -> dict[str, str]:
    """Return the prompts in config_sentence_transformers.json. Leave out prompts without a text.

    Example: {"prompts": {"query": "query: ", "document": null}} returns {"query": "query: "}.
    """
    prompts = sentence_config.get("prompts") or {}
    return {str(name): text for name, text in prompts.items() if isinstance(text, str)}


def _chat_template_variables(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that are passed to the chat template.

    Example: {"processing_kwargs": {"chat_template": {"add_generation_prompt": true}}} returns
    {"add_generation_prompt": True}.
    """
    arguments = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
    return {name: value for name, value in arguments.items() if name not in _NOT_FOR_TEMPLATES}


def _describe_scoring(
    base: CheckpointSpec, modules: list[ModuleSpec], sentence_config: dict[str, Any]
) -> CheckpointSpec:
    """Return the description of a reranker or classifier."""
    activation = _activation(base.config, sentence_config)
    if base.architecture.endswith(SEQUENCE_HEAD):
        return _describe_head(base, activation)
    if base.architecture.endswith(TOKEN_HEAD):
        kinds = ("token_classify",)
        return replace(base, kinds=kinds, loader=TOKENS, activation=activation or "softmax")
    return _describe_generative_reranker(base, modules, activation)


def _describe_head(base: CheckpointSpec, activation: str | None) -> CheckpointSpec:
    """Return the description of a model whose head computes scores.

    `activation` is the activation that the checkpoint's files name, or None.
    """
    if base.config.num_labels != 1:
        default = _ACTIVATIONS_OF_PROBLEMS.get(str(base.config.problem_type), "softmax")
        return replace(base, kinds=("classify",), loader=SEQUENCE, activation=activation or default)
    # The first kind is the default.
    kinds = ("classify", "score") if base.task == "classify" else ("score", "classify")
    return replace(base, kinds=kinds, loader=SEQUENCE, activation=activation or "sigmoid")


def _describe_generative_reranker(
    base: CheckpointSpec, modules: list[ModuleSpec], activation: str | None
) -> CheckpointSpec:
    """Return the description of a generative reranker.

    If its inputs are chat messages, it is a vision-language model (IMAGE_CAUSAL). `activation` is
    the activation that the checkpoint's files name, or None.
    """
    answer_tokens = None
    # The config of the module `LogitScore` contains the token ids of "yes" and "no". If the id of
    # "no" is missing, the score is the logit of "yes" alone.
    logit_score = find_config(modules, "LogitScore")
    if logit_score is not None:
        no_id = logit_score.get("false_token_id")
        answer_tokens = AnswerTokens(
            yes=int(logit_score["true_token_id"]), no=None if no_id is None else int(no_id)
        )
    return replace(
        base,
        kinds=("score",),
        loader=IMAGE_CAUSAL if base.takes_messages else CAUSAL,
        activation=activation or "sigmoid",
        answer_tokens=answer_tokens,
    )


def _activation(config: PretrainedConfig, sentence_config: dict[str, Any]) -> str | None:
    """Return the activation that the checkpoint's files specify: "none", "sigmoid" or "softmax".

    Return None if the files name no activation.

    Raises:
        UnsupportedModelError: the files name another activation.
    """
    # Depending on its version, sentence-transformers stores the activation in one of these three
    # entries.
    nested = getattr(config, "sentence_transformers", None) or {}
    path = (
        nested.get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or sentence_config.get("activation_fn")
    )
    if path is None:
        return None
    known = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    # Example of a path: "torch.nn.modules.activation.Sigmoid".
    name = str(path).rsplit(".", 1)[-1]
    if name not in known:
        raise UnsupportedModelError(
            f"the checkpoint's activation {path} is not supported. The supported activations are "
            f"{', '.join(known)}."
        )
    return known[name]


def _takes_messages(spec: CheckpointSpec, settings: dict[str, Any]) -> bool:
    """Return whether a checkpoint is a vision-language model whose inputs are chat messages.

    Such a checkpoint is a generative model for images with a processor and a chat template. Its
    settings for sentence-transformers must not exclude chat messages.
    """
    if _excludes_messages(settings):
        return False
    has_images = getattr(spec.config, "vision_config", None) is not None
    # A model with separate encoders for texts and images is not generative. The class name of such
    # a model is the name of a base model, such as CLIPModel.
    is_generative = spec.architecture.endswith(GENERATIVE)
    return (
        has_images
        and is_generative
        and has_processor(spec.folder)
        and has_chat_template(spec.folder)
    )


def _excludes_messages(settings: dict[str, Any]) -> bool:
    """Return whether the settings for sentence-transformers exclude chat messages.

    The entry `modality_config` names the kinds of inputs. Without this entry, nothing is excluded.
    Example: {"modality_config": {"text": {...}}} excludes chat messages.
    """
    modalities = settings.get("modality_config")
    return modalities is not None and "message" not in modalities
