# SPDX-License-Identifier: Apache-2.0
"""Describes the checkpoint of an embedding model: its kinds of output and its layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.loading.checkpoint_spec import (
    MASKED,
    RETRIEVAL,
    RETRIEVAL_HEAD,
    TOWERS,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.late_interaction_files import (
    STANFORD_ARCHITECTURE,
    has_pylate_model_type,
    read_late_interaction,
)
from nereid_backend.pooling.loading.sentence_modules import (
    MULTI_VECTOR_FILE,
    SENTENCE_CONFIG_FILE,
    SPARSE_FILE,
    ModuleSpec,
    ends_with_normalize,
    find_config,
    read_json,
    read_settings,
)
from nereid_backend.pooling.pooling_config import PoolingConfig

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
# The name that transformers and sentence-transformers use for the token vectors of a model.
_TOKEN_OUTPUT = "last_hidden_state"
_TOKEN_MODULE_KINDS = ("Dense", "Normalize", "LayerNorm")
_DENSE_POOLERS = tuple(_LEGACY_POOLERS.values())


def describe_embedding(
    base: CheckpointSpec, settings: PoolingConfig, root: Path, modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of an embedding checkpoint.

    The type of the model determines the fields `kinds` and `loader`. The types are checked in this
    order:
    - SPLADE models, which have sparse output. The setting `pooling` or the module SpladePooling
      identifies these models,
    - vision-language models for retrieval, such as ColPali,
    - models with a text tower and an image tower, such as CLIP,
    - models that return or pool token vectors.

    Args:
        base: the fields that every task has.
        settings: the settings.
        root: the folder of the checkpoint.
        modules: the modules of the checkpoint; empty if the setting `pooling` replaces them.
    """
    if settings.pooling == "splade":
        return replace(base, kinds=("sparse",), loader=MASKED)
    # The modules that follow the transformers model. A Dropout changes vectors only in training.
    later_modules = [module for module in modules[1:] if module.kind != "Dropout"]
    splade = find_config(later_modules, "SpladePooling")
    if splade is not None:
        return _describe_splade(base, splade)
    if base.architecture.endswith(RETRIEVAL_HEAD):
        return replace(base, kinds=("multi_vector",), loader=RETRIEVAL)
    if _has_towers(base.config) and not base.takes_messages:
        _check_tower_modules(root, later_modules)
        normalizes = ends_with_normalize(later_modules)
        return replace(base, kinds=("dense",), loader=TOWERS, normalizes=normalizes)
    return _describe_token_vectors(base, settings, root, later_modules)


def _check_tower_modules(root: Path, later_modules: list[ModuleSpec]) -> None:
    """Raise an UnsupportedModelError if a module converts the vectors of a model with two towers.

    Args:
        root: the folder of the checkpoint.
        later_modules: the modules that follow the transformers model.
    """
    for module in later_modules:
        if module.kind in ("Dense", "LayerNorm"):
            raise UnsupportedModelError(
                f"{root}/modules.json: the module {module.kind} is not supported after a model "
                "with one encoder for texts and one for images. Remove the module, or use another "
                "checkpoint."
            )


def _describe_splade(base: CheckpointSpec, splade: dict[str, Any]) -> CheckpointSpec:
    """Return the description of a checkpoint with sparse output.

    `splade` is the config of the module SpladePooling.

    Raises:
        UnsupportedModelError: the pooling strategy or the activation is unknown.
    """
    strategy = str(splade.get("pooling_strategy") or "max")
    activation = str(splade.get("activation_function") or "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise UnsupportedModelError(
            f"{base.folder}: the module SpladePooling has the pooling_strategy {strategy} and the "
            f"activation_function {activation}. Only the strategies max and sum, and the "
            "activations relu and log1p_relu are supported. Use another checkpoint."
        )
    # The pooling always applies log1p once. The activation log1p_relu applies log1p a second time.
    num_log1p = 2 if activation == "log1p_relu" else 1
    return replace(base, kinds=("sparse",), loader=MASKED, splade=(strategy, num_log1p))


def _describe_token_vectors(
    base: CheckpointSpec, settings: PoolingConfig, root: Path, later_modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint that computes its output from token vectors.

    The output of a text consists of its token vectors (multi-vector output), or of one vector that
    combines the token vectors (dense output).

    `later_modules` contains the modules that follow the transformers model.
    """
    if settings.pooling is None:
        _check_output(base.folder)
    base = replace(base, token_modules=_token_modules(later_modules))
    # Checkpoints of Stanford's ColBERT library list no modules, but have multi-vector output.
    is_stanford_colbert = base.architecture == STANFORD_ARCHITECTURE
    lists_no_pooling = bool(later_modules) and find_config(later_modules, "Pooling") is None
    if is_stanford_colbert or lists_no_pooling:
        return _describe_multi_vector(base, root, later_modules)
    return _describe_dense(base, settings, root, later_modules)


def _token_modules(later_modules: list[ModuleSpec]) -> tuple[ModuleSpec, ...]:
    """Return the modules that convert token vectors.

    Modules after a Pooling module are left out, because a Pooling module combines the token vectors
    of a text into one vector.

    `later_modules` contains the modules that follow the transformers model.
    """
    kinds = [module.kind for module in later_modules]
    num_before_pooling = kinds.index("Pooling") if "Pooling" in kinds else len(kinds)
    return tuple(
        module
        for module in later_modules[:num_before_pooling]
        if module.maps_tokens and module.kind in _TOKEN_MODULE_KINDS
    )


def _check_output(folder: Path) -> None:
    """Raise an UnsupportedModelError if the settings select an output other than token vectors.

    `folder` is the folder of the transformers model. Example: with "pooler_output", the library
    sentence-transformers would return the vector of the model's pooler.
    """
    modalities = read_settings(folder).get("modality_config") or {}
    text_settings = modalities.get("text") or {}
    output = text_settings.get("method_output_name", _TOKEN_OUTPUT)
    if output != _TOKEN_OUTPUT:
        raise UnsupportedModelError(
            f"{folder}: modality_config selects the output {output!r} of the transformers model, "
            f"but only {_TOKEN_OUTPUT!r} is supported. Set pooling, or use another checkpoint."
        )


def _describe_multi_vector(
    base: CheckpointSpec, root: Path, later_modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint with only multi-vector output, such as ColBERT.

    Args:
        base: the fields that every task has.
        root: the folder of the checkpoint. In some checkpoints, the folder of the transformers
            model (`base.folder`) is a subfolder of `root`.
        later_modules: the modules that follow the transformers model, without a Pooling module. The
            list is empty for a checkpoint in the format of Stanford's ColBERT.
    """
    sentence_config = read_json(root / SENTENCE_CONFIG_FILE)
    is_stanford_colbert = base.architecture == STANFORD_ARCHITECTURE
    is_colbert = is_stanford_colbert or has_pylate_model_type(sentence_config)
    _check_multi_vector_modules(root, later_modules, is_colbert=is_colbert)
    token_modules = _colbert_modules(root, later_modules) if is_colbert else base.token_modules
    # The rules for queries and documents, such as their length limits.
    rules = read_late_interaction(
        root, base.architecture, read_settings(base.folder), sentence_config, later_modules
    )
    return replace(
        base,
        kinds=("multi_vector",),
        token_modules=token_modules,
        late_interaction=rules,
        prompts=rules.with_markers(base.prompts),
        max_seq_length=rules.longest_limit(base.max_seq_length),
    )


def _colbert_modules(root: Path, later_modules: list[ModuleSpec]) -> tuple[ModuleSpec, ...]:
    """Return the modules that ColBERT applies to the token vectors.

    ColBERT applies the linear layers among `later_modules`, and then scales the results to unit
    length. The files of a checkpoint do not name the scaling.
    """
    dense = tuple(module for module in later_modules if module.kind == "Dense")
    return (*dense, ModuleSpec("Normalize", root, {}))


def _check_multi_vector_modules(
    root: Path, later_modules: list[ModuleSpec], *, is_colbert: bool
) -> None:
    """Raise an UnsupportedModelError if the module list of a multi-vector model is not supported.

    A ColBERT checkpoint always returns one vector for each token. In any other checkpoint, a module
    must convert or remove token vectors. Without such a module, the pooling method is unknown.

    Args:
        root: the folder of the checkpoint.
        later_modules: the modules that follow the transformers model, without a Pooling module.
        is_colbert: whether the checkpoint has the format of PyLate or of Stanford's ColBERT.
    """
    # The module MultiVectorMask removes the vectors of some tokens, such as punctuation.
    mask = find_config(later_modules, "MultiVectorMask")
    if mask is not None:
        _refuse_token_list(root, mask)
        return
    if not is_colbert and not any(module.maps_tokens for module in later_modules):
        raise UnsupportedModelError(
            f"{root}/modules.json: the file has no Pooling module and no module that maps "
            "token vectors, so the pooling method is not known. Set pooling."
        )


def _refuse_token_list(root: Path, mask: dict[str, Any]) -> None:
    """Raise an UnsupportedModelError if the config of a MultiVectorMask lists the tokens to keep.

    `root` is the folder of the checkpoint.
    """
    if mask.get("keep_only_token_ids"):
        raise UnsupportedModelError(
            f"{root}/modules.json: a MultiVectorMask with keep_only_token_ids is not supported. "
            "Use another checkpoint."
        )


def _describe_dense(
    base: CheckpointSpec, settings: PoolingConfig, root: Path, later_modules: list[ModuleSpec]
) -> CheckpointSpec:
    """Return the description of a checkpoint with dense output: one vector for each text.

    The checkpoint may have sparse and multi-vector output, too. The pooling method comes from the
    first of these sources that exists:

    1. The Pooling module of the checkpoint. The modules then also determine whether the vectors are
       normalised.
    2. The setting `pooling`.
    3. The kind of the model. `poolers` stays empty, and the method is chosen after loading.

    `later_modules` contains the modules that follow the transformers model. The list is empty if
    the checkpoint lists no modules, or if the setting `pooling` replaces the pooling method of the
    checkpoint.

    Raises:
        UnsupportedModelError: the checkpoint expands queries, or its pooling is not supported.
    """
    _refuse_query_expansion(base.folder)
    dense = replace(
        base, kinds=_kinds_of_files(root), vector_modules=_vector_modules(later_modules)
    )
    for module in later_modules:
        if module.kind == "Pooling":
            return replace(
                dense,
                poolers=_poolers_of(module),
                include_prompt=bool(module.config.get("include_prompt", True)),
                normalizes=ends_with_normalize(later_modules),
            )
    if settings.pooling is not None:
        return replace(dense, poolers=(settings.pooling,))
    return dense


def _refuse_query_expansion(folder: Path) -> None:
    """Raise an UnsupportedModelError if the settings of a dense model require query expansion.

    `folder` is the folder of the transformers model.
    """
    if read_settings(folder).get("query_expansion"):
        raise UnsupportedModelError(
            f"{folder}: query_expansion requires a checkpoint with one vector for each token, "
            "but this checkpoint pools its token vectors. Remove query_expansion from the settings "
            "file of sentence-transformers, or use another checkpoint."
        )


def _vector_modules(later_modules: list[ModuleSpec]) -> tuple[ModuleSpec, ...]:
    """Return the modules that convert pooled vectors.

    `later_modules` contains the modules that follow the transformers model. If the last module only
    scales the vectors to length 1, it is left out. Requests may truncate vectors, and vectors must
    be scaled after the truncation. Therefore `dense_outputs` scales them.
    """
    modules = later_modules[:-1] if ends_with_normalize(later_modules) else later_modules
    return tuple(
        module for module in modules if not module.maps_tokens and module.kind != "Pooling"
    )


def _kinds_of_files(root: Path) -> tuple[str, ...]:
    """Return the kinds of output of a dense model.

    The checkpoint of a model with sparse or multi-vector output contains a file with the layer that
    computes this output.
    """
    kinds = ["dense"]
    if (root / SPARSE_FILE).is_file():
        kinds.append("sparse")
    if (root / MULTI_VECTOR_FILE).is_file():
        kinds.append("multi_vector")
    return tuple(kinds)


def _poolers_of(pooling: ModuleSpec) -> tuple[str, ...]:
    """Return the pooling methods that are set in the config of the module `pooling`.

    If the config contains other fields, but no method, the result is ("mean",).

    Example: {"pooling_mode": "cls"} returns ("cls",). In an older checkpoint,
    {"pooling_mode_cls_token": true} returns ("cls",).

    Raises:
        ModelError: the config of the module is missing.
        UnsupportedModelError: a method is not supported.
    """
    if not pooling.config:
        raise ModelError(
            f"{pooling.folder}/config.json is missing or empty, so the pooling method is not "
            "known. Download the file again, or set pooling."
        )
    modes = pooling.config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _LEGACY_POOLERS.items() if pooling.config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    names = tuple(modes) or ("mean",)
    for name in names:
        if name not in _DENSE_POOLERS:
            raise UnsupportedModelError(
                f"{pooling.folder}/config.json: the pooling mode {name} is not supported. The "
                f"supported modes are {', '.join(_DENSE_POOLERS)}. Use another checkpoint, or set "
                "pooling."
            )
    return names


def _has_towers(config: PretrainedConfig) -> bool:
    """Return whether the model has separate encoders for texts and for images, like CLIP."""
    modules = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    return all(modules) and hasattr(config, "projection_dim")
