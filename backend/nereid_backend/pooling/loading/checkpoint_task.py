# SPDX-License-Identifier: Apache-2.0
"""Chooses the task of a pooling checkpoint from the settings and the checkpoint's files."""

from pathlib import Path

from transformers import PretrainedConfig

from nereid_backend.errors import ConfigError
from nereid_backend.pooling.loading.sentence_modules import ModuleSpec, computes_score, is_embedder
from nereid_backend.pooling.pooling_config import PoolingConfig

# The names of generative architectures end with one of these texts.
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# The class name of a model with a classification head ends with this text.
SEQUENCE_HEAD = "ForSequenceClassification"
# The class name of a model that classifies single tokens ends with this text.
TOKEN_HEAD = "ForTokenClassification"


def choose_task(
    settings: PoolingConfig,
    architecture: str,
    modules: list[ModuleSpec],
    config: PretrainedConfig,
    folder: Path,
) -> str:
    """Return the task of the checkpoint: "embed", "rerank" or "classify".

    Args:
        settings: the settings. Only `task` and `pooling` are read.
        architecture: the name of the model's class in the config.
        modules: the modules in modules.json. The list is empty if the checkpoint has no such file.
        config: the config of the transformers model.
        folder: the folder of the transformers model, for error messages.

    Raises:
        ConfigError: the checkpoint supports no task, or does not support the task in the settings.
    """
    if settings.pooling is not None and settings.task in ("rerank", "classify"):
        raise ConfigError(
            f"pooling: this setting requires task=embed, but task is {settings.task}. Unset "
            "pooling or task."
        )
    if settings.task == "embed" or settings.pooling is not None:
        return "embed"
    if settings.task in ("auto", "rerank") and computes_score(modules):
        return "rerank"
    if settings.task == "auto":
        return _task_from_files(architecture, modules, config, folder)
    if settings.task == "classify":
        _check_classifies(architecture)
    else:
        _check_reranks(architecture, config, folder)
    return settings.task


def _check_classifies(architecture: str) -> None:
    """Raise a ConfigError if an architecture's name shows that the model is not a classifier."""
    if not architecture.endswith((SEQUENCE_HEAD, TOKEN_HEAD)):
        raise ConfigError(
            f"task: classifying requires a checkpoint with a *{SEQUENCE_HEAD} or *{TOKEN_HEAD} "
            f"architecture, but this one has {architecture}."
        )


def _check_reranks(architecture: str, config: PretrainedConfig, folder: Path) -> None:
    """Raise a ConfigError if a checkpoint cannot be used as a reranker.

    A reranker has a head with one label, or is a generative model that answers "yes" or "no". The
    docstring of `choose_task` describes the arguments.
    """
    has_head = architecture.endswith(SEQUENCE_HEAD)
    if has_head and config.num_labels != 1:
        raise ConfigError(
            f"task: reranking requires a head with 1 label, but {architecture} in {folder} has "
            f"{config.num_labels}. Set task=classify."
        )
    if not has_head and not architecture.endswith(GENERATIVE):
        raise ConfigError(
            f"task: reranking requires a *{SEQUENCE_HEAD} checkpoint with 1 label, or a "
            f"generative checkpoint that answers yes or no, but this one has {architecture}."
        )


def _task_from_files(
    architecture: str, modules: list[ModuleSpec], config: PretrainedConfig, folder: Path
) -> str:
    """Derive the task of a checkpoint from its files, for the setting `task=auto`.

    The modules in modules.json have precedence over the architecture. Examples:
    BertForSequenceClassification with one label is a reranker, and the same class with three labels
    is a classifier. BertModel is an embedding model.

    Raises:
        ConfigError: the files describe a generative checkpoint, so the settings must contain the
            task.
    """
    if is_embedder(modules):
        return "embed"
    if any(module.kind == "LogitScore" for module in modules):
        return "rerank"
    if architecture.endswith(SEQUENCE_HEAD):
        return "rerank" if config.num_labels == 1 else "classify"
    if architecture.endswith(GENERATIVE):
        raise ConfigError(
            f"task: {folder} is a generative checkpoint ({architecture}), and its files do not "
            "name a task. Set task=embed (the vector of the last token) or task=rerank (the model "
            "answers yes or no), or serve the checkpoint as the language model."
        )
    return "classify" if architecture.endswith(TOKEN_HEAD) else "embed"
