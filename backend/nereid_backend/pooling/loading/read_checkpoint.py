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

from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    MASKED,
    RETRIEVAL,
    RETRIEVAL_HEAD,
    SEQUENCE,
    TOKENS,
    TOWERS,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.checkpoint_task import (
    GENERATIVE,
    SEQUENCE_HEAD,
    TOKEN_HEAD,
    choose_task,
)
from nereid_backend.pooling.loading.late_interaction_files import (
    STANFORD_ARCHITECTURE,
    is_pylate,
    read_late_interaction,
)
from nereid_backend.pooling.loading.sentence_modules import (
    MULTI_VECTOR_FILE,
    SPARSE_FILE,
    ModuleSpec,
    ends_with_normalize,
    find_config,
    is_embedder,
    read_json,
    read_modules,
)
from nereid_backend.pooling.pooling_config import POOLERS, PoolingConfig
from nereid_backend.vision.load_processor import has_chat_template, has_processor

# In an older checkpoint, the config of the module Pooling has one boolean field for each pooling
# method. This dict maps the name of each field to the pooling method.
_LEGACY_POOLERS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The files with the settings of the transformers model. Their names contain the architecture.
# Example: sentence_bert_config.json.
_SETTINGS_FILES = "sentence_*_config.json"
# The file with the settings of the whole checkpoint, such as its prompts.
_SAVED_FILE = "config_sentence_transformers.json"
# In the settings file, one object contains the variables of the chat template and some settings of
# the tokenizer. `_NOT_FOR_TEMPLATES` contains the names of the tokenizer's settings, which are not
# passed to the template.
_NOT_FOR_TEMPLATES = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}


def read_checkpoint_spec(settings: PoolingConfig) -> CheckpointSpec:
    """Return the description of the checkpoint in the folder `settings.model`.

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
    folder = modules[0].folder if modules else root
    config = _read_config(folder)
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    saved = read_json(root / _SAVED_FILE)
    task = choose_task(settings, architecture, modules, config, folder)
    # `base` contains the fields that all tasks have. The functions below add the other fields, such
    # as `kinds` and `loader`.
    base = replace(_read_base(folder, config, architecture, task, saved), has_modules=bool(modules))
    if task != "embed":
        return _describe_scoring(base, modules, saved)
    # The setting `pooling` replaces the checkpoint's modules.
    uses_modules = settings.pooling is None and is_embedder(modules)
    return _describe_embedding(base, settings, root, modules if uses_modules else [])


def _read_config(folder: Path) -> PretrainedConfig:
    """Return the config of the transformers model in a folder."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {folder}/config.json ({first_line(error)}). Python code of "
            "a checkpoint is not run. A newer version of transformers may support the architecture."
        ) from error


def _read_base(
    folder: Path,
    config: PretrainedConfig,
    architecture: str,
    task: str,
    saved: dict[str, Any],
) -> CheckpointSpec:
    """Return a description that contains only the fields that are needed for every task.

    `saved` is the content of config_sentence_transformers.json. The other arguments are fields of
    the description.

    Raises:
        UnsupportedModelError: the checkpoint renders inputs as chat messages, but is not a
            supported vision-language model.
    """
    settings = _read_settings(folder)
    takes_messages = _takes_messages(folder, config, architecture, settings)
    has_message = "message" in (settings.get("modality_config") or {})
    if task == "embed" and has_message and not takes_messages:
        raise UnsupportedModelError(
            f"{folder} embeds texts with a chat template (modality_config), but it is no "
            "vision-language model. This is not supported."
        )
    prompts = saved.get("prompts") or {}
    length = settings.get("max_seq_length")
    return CheckpointSpec(
        folder=folder,
        config=config,
        architecture=architecture,
        task=task,
        takes_messages=takes_messages,
        prompts={str(name): text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt_name=saved.get("default_prompt_name"),
        max_seq_length=length if isinstance(length, int) and length > 0 else None,
        lower_case=bool(settings.get("do_lower_case")),
        template_kwargs=_template_kwargs(settings),
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the transformers model, as stored in sentence_*_config.json.

    If several such files exist, return the content of the first file that is not empty. If there is
    no such file, return {}.
    """
    contents = (read_json(path) for path in sorted(folder.glob(_SETTINGS_FILES)))
    return next((content for content in contents if content), {})


def _template_kwargs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that are passed to the chat template.

    Example: {"processing_kwargs": {"chat_template": {"add_generation_prompt": true}}} returns
    {"add_generation_prompt": True}.
    """
    arguments = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
    return {name: value for name, value in arguments.items() if name not in _NOT_FOR_TEMPLATES}


def _describe_scoring(
    base: CheckpointSpec, modules: list[ModuleSpec], saved: dict[str, Any]
) -> CheckpointSpec:
    """Return the description of a reranker or classifier."""
    activation = _activation(base.config, saved)
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
        return replace(
            base, kinds=("classify",), loader=SEQUENCE, activation=activation or "softmax"
        )
    # The first kind is the default.
    kinds = ("classify", "score") if base.task == "classify" else ("score", "classify")
    return replace(base, kinds=kinds, loader=SEQUENCE, activation=activation or "sigmoid")


def _describe_generative_reranker(
    base: CheckpointSpec, modules: list[ModuleSpec], activation: str | None
) -> CheckpointSpec:
    """Return the description of a generative reranker.

    `activation` is the activation that the checkpoint's files name, or None.
    """
    answer_tokens = None
    logit_score = find_config(modules, "LogitScore")
    if logit_score is not None:
        answer_tokens = (int(logit_score["true_token_id"]), logit_score.get("false_token_id"))
    return replace(
        base,
        kinds=("score",),
        loader=IMAGE_CAUSAL if base.takes_messages else CAUSAL,
        activation=activation or "sigmoid",
        answer_tokens=answer_tokens,
    )


def _activation(config: PretrainedConfig, saved: dict[str, Any]) -> str | None:
    """Return the activation in the checkpoint's files: "none", "sigmoid" or "softmax".

    Return None if the files name no activation.

    Raises:
        UnsupportedModelError: the files name another activation.
    """
    nested = getattr(config, "sentence_transformers", None) or {}
    path = (
        nested.get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or saved.get("activation_fn")
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


def _describe_embedding(
    base: CheckpointSpec, settings: PoolingConfig, root: Path, modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of an embedding checkpoint.

    There are four kinds of embedding models: a model with sparse output (SPLADE), a model with a
    text and an image tower, a model with only multi-vector output, and a model with dense output.

    Args:
        base: the fields that every task has.
        settings: the settings.
        root: the folder of the checkpoint.
        modules: the modules of the checkpoint; empty if the setting `pooling` replaces them.
    """
    if settings.pooling == "splade":
        return replace(base, kinds=("sparse",), loader=MASKED)
    # The modules that follow the transformers model.
    later = [module for module in modules[1:] if module.kind != "Dropout"]
    splade = find_config(later, "SpladePooling")
    if splade is not None:
        num_log1p = 2 if splade.get("activation_function") == "log1p_relu" else 1
        strategy = str(splade.get("pooling_strategy", "max"))
        return replace(base, kinds=("sparse",), loader=MASKED, splade=(strategy, num_log1p))
    if base.architecture.endswith(RETRIEVAL_HEAD):
        return replace(base, kinds=("multi_vector",), loader=RETRIEVAL, takes_messages=False)
    if _has_towers(base.config) and not base.takes_messages:
        normalizes = ends_with_normalize(later)
        return replace(base, kinds=("dense",), loader=TOWERS, normalizes=normalizes)
    token_modules = tuple(
        module
        for module in later
        if module.maps_tokens and module.kind in ("Dense", "Normalize", "LayerNorm")
    )
    base = replace(base, token_modules=token_modules)
    is_stanford = base.architecture == STANFORD_ARCHITECTURE
    if is_stanford or (later and find_config(later, "Pooling") is None):
        return _describe_multi_vector(base, root, later)
    if _read_settings(base.folder).get("query_expansion"):
        raise UnsupportedModelError(
            f"{base.folder}: query_expansion requires a checkpoint with one vector for each token, "
            "but this checkpoint pools its token vectors."
        )
    return _describe_dense(base, settings, root, later)


def _describe_multi_vector(
    base: CheckpointSpec, root: Path, later: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint with only multi-vector output, such as ColBERT.

    `later` contains the modules that follow the transformers model, and no Pooling module. The list
    is empty for a checkpoint in the format of Stanford's ColBERT.
    """
    is_stanford = base.architecture == STANFORD_ARCHITECTURE
    saved = read_json(root / _SAVED_FILE)
    mask = find_config(later, "MultiVectorMask")
    names_format = is_stanford or is_pylate(saved)
    has_token_modules = mask is not None or any(module.maps_tokens for module in later)
    if not names_format and not has_token_modules:
        raise UnsupportedModelError(
            f"{root}/modules.json: the file has no Pooling module and no module that maps "
            "token vectors, so the pooling method is not known. Set pooling."
        )
    if mask is not None and mask.get("keep_only_token_ids"):
        raise UnsupportedModelError(
            f"{root}/modules.json: a MultiVectorMask with keep_only_token_ids is not supported."
        )
    settings = _read_settings(base.folder)
    late = read_late_interaction(root, base.architecture, settings, saved, later)
    if names_format:
        # The files of these two formats do not name the module Normalize.
        dense = tuple(module for module in later if module.kind == "Dense")
        normalize = ModuleSpec("Normalize", root, {})
        base = replace(base, token_modules=(*dense, normalize))
    return replace(
        base,
        kinds=("multi_vector",),
        late_interaction=late,
        prompts=late.mark(base.prompts),
        max_seq_length=late.longest(base.max_seq_length),
    )


def _describe_dense(
    base: CheckpointSpec, settings: PoolingConfig, root: Path, later: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint with dense output.

    The checkpoint may have sparse and multi-vector output, too. `later` contains the modules that
    follow the transformers model. The list may be empty.
    """
    pooling = next((module for module in later if module.kind == "Pooling"), None)
    includes_prompt = pooling is None or bool(pooling.config.get("include_prompt", True))
    vector_modules = tuple(
        module for module in later if not module.maps_tokens and module.kind != "Pooling"
    )
    # None means that the files do not determine whether vectors are scaled to length 1.
    normalizes = ends_with_normalize(later) if pooling is not None else None
    if normalizes:
        # `dense_outputs` first truncates the vectors to `dimensions`, and then scales them. The
        # module Normalize must not scale the vectors before the truncation, so this module is left
        # out of the layers.
        vector_modules = vector_modules[:-1]
    kinds = ["dense"]
    if (root / SPARSE_FILE).is_file():
        kinds.append("sparse")
    if (root / MULTI_VECTOR_FILE).is_file():
        kinds.append("multi_vector")
    return replace(
        base,
        kinds=tuple(kinds),
        poolers=(settings.pooling,) if settings.pooling else _poolers_of(pooling),
        include_prompt=includes_prompt,
        vector_modules=vector_modules,
        normalizes=normalizes,
    )


def _poolers_of(pooling: ModuleSpec | None) -> tuple[str, ...]:
    """Return the pooling methods that are set in the config of the module `pooling`.

    If `pooling` is None, the result is empty, and the model determines the method. If the config of
    the module names no method, the result is ("mean",).

    Example: {"pooling_mode": "cls"} returns ("cls",). In an older checkpoint,
    {"pooling_mode_cls_token": true} returns ("cls",).

    Raises:
        UnsupportedModelError: a method is not supported.
    """
    if pooling is None:
        return ()
    modes = pooling.config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _LEGACY_POOLERS.items() if pooling.config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    names = tuple(modes) or ("mean",)
    for name in names:
        # The setting `pooling` may be "splade", but the config of a pooling module must not contain
        # "splade", because such a module computes dense vectors.
        if name not in POOLERS or name == "splade":
            raise UnsupportedModelError(
                f"{pooling.folder}/config.json: the pooling mode {name} is not supported. The "
                f"supported modes are {', '.join(_LEGACY_POOLERS.values())}."
            )
    return names


def _has_towers(config: PretrainedConfig) -> bool:
    """Return whether the model has separate encoders for texts and for images, like CLIP."""
    modules = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    return all(modules) and hasattr(config, "projection_dim")


def _takes_messages(
    folder: Path, config: PretrainedConfig, architecture: str, settings: dict[str, Any]
) -> bool:
    """Return whether a checkpoint is a vision-language model whose inputs are chat messages.

    In the settings of sentence-transformers, `modality_config` names the kinds of inputs. If this
    entry is missing, the rule of sentence-transformers applies: inputs are chat messages if the
    checkpoint has an image processor and a chat template.
    """
    modalities = settings.get("modality_config")
    if modalities is not None and "message" not in modalities:
        return False
    has_images = getattr(config, "vision_config", None) is not None
    # A model with separate towers has the class name of a base model, such as CLIPModel.
    is_generative = architecture.endswith(GENERATIVE)
    return has_images and is_generative and has_processor(folder) and has_chat_template(folder)
