# SPDX-License-Identifier: Apache-2.0
"""Reads from a checkpoint's files what its task is and how its vectors or scores are computed.

There are three sources, and a later one overrides an earlier one: the architecture in config.json,
the files of sentence-transformers (modules.json and the files that it names), and the settings
`task` and `pooling`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nereid_backend.errors import ConfigError, ModelError, UnsupportedModelError
from nereid_backend.pooling.pooling_config import POOLERS, PoolingConfig

# The kind of model that is loaded. Each kind has its own auto class of transformers.
BASE, SEQUENCE, MASKED, CAUSAL, TOWERS = "base", "sequence", "masked", "causal", "towers"

_LEGACY_POOLERS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TRANSFORMERS = ("Transformer", "MLMTransformer", "CLIPModel")
_TOKENS = "token_embeddings"
_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SEQUENCE_HEAD = "ForSequenceClassification"
# The name contains the architecture, as in sentence_bert_config.json.
_SETTINGS_FILES = "sentence_*_config.json"
# Settings beside the chat template's variables that are for the tokenizer, not for the template.
_NOT_FOR_TEMPLATES = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}
_LINEAR_FILES = ("sparse_linear.pt", "colbert_linear.pt")


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module of a sentence-transformers checkpoint.

    Attributes:
        kind: the name of the module's class, such as "Pooling".
        folder: the folder with the module's weights.
        config: the content of the module's config.json.
    """

    kind: str
    folder: Path
    config: dict[str, Any]

    @property
    def maps_tokens(self) -> bool:
        """Whether the module maps token vectors, and not the pooled vector."""
        return self.config.get("module_input_name") == _TOKENS


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """The description of a checkpoint, as read from its files.

    Attributes:
        folder: the folder of the transformers model.
        config: the model's config.
        architecture: the name of the model's class in the config.
        task: "embed", "rerank" or "classify".
        kinds: the kinds of output, the default one first (see PoolingItem.kind).
        loader: the kind of model that is loaded: BASE, SEQUENCE, MASKED, CAUSAL or TOWERS.
        poolers: the methods that turn token vectors into one vector. The results of several methods
            are concatenated. Empty means the default for the model.
        include_prompt: whether the tokens of a prompt are pooled, too.
        token_modules: the modules that map token vectors, in order.
        vector_modules: the modules that map the pooled vector, in order.
        normalizes: whether the vector is scaled to length 1. None means the default for the model.
        activation: the activation of scores: "none", "sigmoid" or "softmax".
        answer_tokens: the token ids of "yes" and "no" of a generative reranker, if its files name
            them. If the second id is None, the score is the logit of "yes" alone.
        template_kwargs: the variables with which a generative reranker's chat template is rendered.
        splade: the SPLADE pooling: "max" or "sum", and how many times log1p is applied.
        skip_words: tokens without a vector in a multi-vector output.
        prompts: the texts of prompts by name.
        default_prompt_name: the name of the prompt for inputs that name none.
        max_seq_length: the length limit of inputs in tokens, if the files have one.
        lower_case: whether text is converted to lower case before it is tokenised.
        refused_prompts: the names of prompts that are not supported, with the reason.
    """

    folder: Path
    config: PretrainedConfig
    architecture: str
    task: str
    kinds: tuple[str, ...]
    loader: str
    poolers: tuple[str, ...] = ()
    include_prompt: bool = True
    token_modules: tuple[ModuleSpec, ...] = ()
    vector_modules: tuple[ModuleSpec, ...] = ()
    normalizes: bool | None = None
    activation: str = "none"
    answer_tokens: tuple[int, int | None] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    splade: tuple[str, int] = ("max", 1)
    skip_words: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    refused_prompts: dict[str, str] = field(default_factory=dict)


def read_checkpoint_spec(settings: PoolingConfig) -> CheckpointSpec:
    """Return the description of the checkpoint in the folder `settings.model`.

    Raises:
        ModelError: a file is missing or broken, or names something that is not supported.
        ConfigError: the setting `task` or `pooling` does not fit the checkpoint.
    """
    root = Path(settings.model)
    if not root.is_dir():
        raise ModelError(
            f"{root} is not a folder. Set model to the folder of a Hugging Face checkpoint."
        )
    modules = _read_modules(root)
    folder = modules[0].folder if modules else root
    config = _read_config(folder)
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    saved = read_json(root / "config_sentence_transformers.json")
    task = _task(settings, architecture, modules, config, folder)
    common = _common(folder, config, architecture, task, saved)
    if task == "embed" and common.pop("is_rendered"):
        raise UnsupportedModelError(
            f"{folder} embeds texts with a chat template (modality_config), which is not supported."
        )
    common.pop("is_rendered", None)
    if task != "embed":
        return _scoring(modules, saved, common)
    if settings.pooling is not None or not _is_embedder(modules):
        modules = []
    return _embedding(settings, root, modules, common)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or {} if the file does not exist.

    Raises:
        ModelError: the file does not contain a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Download the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not contain a JSON object. Download the file again.")
    return value


def _read_modules(root: Path) -> list[ModuleSpec]:
    """Return the modules in modules.json in order. The first one is the transformers model."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        entries = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda e: e["idx"])
        modules = [
            ModuleSpec(
                kind=entry["type"].rsplit(".", 1)[-1],
                folder=root / entry["path"],
                config=read_json(root / entry["path"] / "config.json"),
            )
            for entry in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read as a list of modules ({error!r}). Download the file again."
        ) from error
    if not modules or modules[0].kind not in _TRANSFORMERS:
        first = modules[0].kind if modules else "nothing"
        raise UnsupportedModelError(
            f"{path}: the first module must be a transformers model, but it is {first}."
        )
    known = {
        *("Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"),
        *("SpladePooling", "LogitScore", "MultiVectorMask"),
    }
    for module in modules[1:]:
        if module.kind not in known:
            raise UnsupportedModelError(
                f"{path}: the module {module.kind} is not supported. The supported modules are "
                f"{', '.join(sorted(known))}."
            )
        input_name = module.config.get("module_input_name", "sentence_embedding")
        output_name = module.config.get("module_output_name") or input_name
        if module.kind in ("Dense", "Normalize") and output_name != input_name:
            raise UnsupportedModelError(
                f"{path}: the input and the output of the module {module.kind} must have the same "
                f"name, but they are {input_name} and {output_name}."
            )
    return modules


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"transformers cannot load {folder}/config.json ({lines[0]}). Python code of a "
            "checkpoint is not run. A newer version of transformers may support the architecture."
        ) from error


def _is_embedder(modules: list[ModuleSpec]) -> bool:
    """Return whether the modules show that the checkpoint computes vectors."""
    kinds = {module.kind for module in modules}
    return bool(kinds & {"Pooling", "SpladePooling", "MultiVectorMask", "CLIPModel"}) or any(
        module.kind in ("Dense", "Normalize") for module in modules
    )


def _task(
    settings: PoolingConfig,
    architecture: str,
    modules: list[ModuleSpec],
    config: PretrainedConfig,
    folder: Path,
) -> str:
    """Return the task of the checkpoint: "embed", "rerank" or "classify".

    Raises:
        ConfigError: the checkpoint cannot do the task in the settings, or no supported task.
    """
    if settings.pooling is not None and settings.task in ("rerank", "classify"):
        raise ConfigError(
            f"pooling: this setting requires task=embed, but task is {settings.task}. Unset one of "
            "them."
        )
    if settings.task == "embed" or settings.pooling is not None:
        return "embed"
    if settings.task == "auto":
        return _task_from_files(architecture, modules, config, folder)
    has_head = architecture.endswith(_SEQUENCE_HEAD)
    if settings.task == "classify":
        if not has_head:
            raise ConfigError(
                f"task: classifying requires a checkpoint with a *{_SEQUENCE_HEAD} architecture, "
                f"but this one has {architecture}."
            )
        return "classify"
    if has_head and config.num_labels != 1:
        raise ConfigError(
            f"task: reranking requires a head with 1 label, but {architecture} in {folder} has "
            f"{config.num_labels}. Set task=classify."
        )
    if not (has_head or architecture.endswith(_GENERATIVE)):
        raise ConfigError(
            f"task: reranking requires a *{_SEQUENCE_HEAD} checkpoint with 1 label, or a "
            f"generative checkpoint that answers yes or no, but this one has {architecture}."
        )
    return "rerank"


def _task_from_files(
    architecture: str, modules: list[ModuleSpec], config: PretrainedConfig, folder: Path
) -> str:
    """Return the task of the checkpoint for task=auto, derived from its files.

    Raises:
        ConfigError: the files describe a generative checkpoint, whose task must be set.
    """
    if _is_embedder(modules):
        return "embed"
    if any(module.kind == "LogitScore" for module in modules):
        return "rerank"
    if architecture.endswith(_SEQUENCE_HEAD):
        return "rerank" if config.num_labels == 1 else "classify"
    if architecture.endswith(_GENERATIVE):
        raise ConfigError(
            f"task: {folder} is a generative checkpoint ({architecture}), and its files do not "
            "name a task. Set task=embed (the vector of the last token) or task=rerank (the model "
            "answers yes or no), or serve the checkpoint as the language model."
        )
    return "embed"


def _common(
    folder: Path,
    config: PretrainedConfig,
    architecture: str,
    task: str,
    saved: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields of CheckpointSpec that every task has, and the flag `is_rendered`.

    `is_rendered` is True if the checkpoint renders texts with a chat template.
    """
    settings: dict[str, Any] = {}
    for path in sorted(folder.glob(_SETTINGS_FILES)):
        settings = settings or read_json(path)
    prompts = {
        str(name): text
        for name, text in (saved.get("prompts") or {}).items()
        if isinstance(text, str)
    }
    refused = {}
    if settings.get("query_expansion"):
        refused["query"] = (
            "the checkpoint pads queries with mask tokens (query_expansion), which is not supported"
        )
    length = settings.get("max_seq_length")
    template = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
    return {
        "folder": folder,
        "config": config,
        "architecture": architecture,
        "task": task,
        "prompts": prompts,
        "default_prompt_name": saved.get("default_prompt_name"),
        "max_seq_length": length if isinstance(length, int) and length > 0 else None,
        "lower_case": bool(settings.get("do_lower_case")),
        "refused_prompts": refused,
        "is_rendered": "message" in (settings.get("modality_config") or {}),
        "template_kwargs": {k: v for k, v in template.items() if k not in _NOT_FOR_TEMPLATES},
    }


def _scoring(
    modules: list[ModuleSpec], saved: dict[str, Any], common: dict[str, Any]
) -> CheckpointSpec:
    """Return the description of a reranker or classifier."""
    config: PretrainedConfig = common["config"]
    logit_score = next((module.config for module in modules if module.kind == "LogitScore"), None)
    if common["architecture"].endswith(_SEQUENCE_HEAD):
        single = config.num_labels == 1
        fallback = "sigmoid" if single else "softmax"
        kinds = ("score", "classify") if single else ("classify",)
        if common["task"] == "classify":
            kinds = ("classify", "score") if single else ("classify",)
        return CheckpointSpec(
            kinds=kinds,
            loader=SEQUENCE,
            activation=_activation(config, saved) or fallback,
            **common,
        )
    tokens = None
    if logit_score is not None:
        tokens = (int(logit_score["true_token_id"]), logit_score.get("false_token_id"))
    return CheckpointSpec(
        kinds=("score",),
        loader=CAUSAL,
        activation=_activation(config, saved) or "sigmoid",
        answer_tokens=tokens,
        **common,
    )


def _activation(config: PretrainedConfig, saved: dict[str, Any]) -> str | None:
    """Return the activation in the files ("none", "sigmoid" or "softmax"), or None without one.

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
    name = str(path).rsplit(".", 1)[-1]
    if name not in known:
        raise UnsupportedModelError(
            f"the checkpoint's activation {path} is not supported. The supported activations are "
            f"{', '.join(known)}."
        )
    return known[name]


def _embedding(
    settings: PoolingConfig, root: Path, modules: list[ModuleSpec], common: dict[str, Any]
) -> CheckpointSpec:
    """Return the description of an embedding checkpoint."""
    if settings.pooling == "splade":
        return CheckpointSpec(kinds=("sparse",), loader=MASKED, **common)
    rest = [module for module in modules[1:] if module.kind != "Dropout"]
    splade = next((module.config for module in rest if module.kind == "SpladePooling"), None)
    if splade is not None:
        times = 2 if splade.get("activation_function") == "log1p_relu" else 1
        how = (str(splade.get("pooling_strategy", "max")), times)
        return CheckpointSpec(kinds=("sparse",), loader=MASKED, splade=how, **common)
    if _has_towers(common["config"]):
        return CheckpointSpec(
            kinds=("dense",), loader=TOWERS, normalizes=_ends_with_normalize(rest), **common
        )
    tokens = tuple(
        p for p in rest if p.maps_tokens and p.kind in ("Dense", "Normalize", "LayerNorm")
    )
    pooling = next((module for module in rest if module.kind == "Pooling"), None)
    if rest and pooling is None:
        mask = next((module.config for module in rest if module.kind == "MultiVectorMask"), {})
        if not any(module.maps_tokens or module.kind == "MultiVectorMask" for module in rest):
            raise UnsupportedModelError(
                f"{root}/modules.json: the file has no Pooling module and no module that maps "
                "token vectors, so the pooling method is not known. Set pooling."
            )
        skipped = tuple(mask.get("skiplist_words") or ())
        if mask.get("keep_only_token_ids"):
            raise UnsupportedModelError(
                f"{root}/modules.json: a MultiVectorMask with keep_only_token_ids is not supported."
            )
        return CheckpointSpec(
            kinds=("multi_vector",), loader=BASE, token_modules=tokens, skip_words=skipped, **common
        )
    vector_modules = tuple(
        module for module in rest if not module.maps_tokens and module.kind != "Pooling"
    )
    normalizes = _ends_with_normalize(rest) if pooling is not None else None
    if normalizes:
        vector_modules = vector_modules[:-1]
    extra = tuple(
        kind
        for kind, name in zip(("sparse", "multi_vector"), _LINEAR_FILES, strict=True)
        if (root / name).is_file()
    )
    return CheckpointSpec(
        kinds=("dense", *extra),
        loader=BASE,
        poolers=(settings.pooling,) if settings.pooling else _poolers(pooling),
        include_prompt=bool(pooling.config.get("include_prompt", True)) if pooling else True,
        token_modules=tokens,
        vector_modules=vector_modules,
        normalizes=normalizes,
        **common,
    )


def _ends_with_normalize(rest: list[ModuleSpec]) -> bool:
    """Return whether the last module scales the pooled vector to length 1."""
    return bool(rest) and rest[-1].kind == "Normalize" and not rest[-1].maps_tokens


def _poolers(pooling: ModuleSpec | None) -> tuple[str, ...]:
    """Return the pooling methods in the config of the module `pooling`, in their order.

    Example: {"pooling_mode_cls_token": true} returns ("cls",).
    """
    if pooling is None:
        return ()
    modes = pooling.config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _LEGACY_POOLERS.items() if pooling.config.get(key)]
    names = (modes,) if isinstance(modes, str) else tuple(modes) or ("mean",)
    for name in names:
        if name not in POOLERS or name == "splade":
            raise UnsupportedModelError(
                f"{pooling.folder}/config.json: the pooling mode {name} is not supported. The "
                f"supported modes are {', '.join(_LEGACY_POOLERS.values())}."
            )
    return names


def _has_towers(config: PretrainedConfig) -> bool:
    """Return whether the model has a text encoder and an image encoder with a common space."""
    modules = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    return all(modules) and hasattr(config, "projection_dim")
