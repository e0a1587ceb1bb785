# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is for and how its vectors or scores come about, read from its files.

Three sources, the later one winning: the config's architecture, the files of sentence-transformers
(modules.json and what it names), and the operator's settings ``task`` and ``pooling``.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nereid_backend.errors import ConfigError, ModelError, UnsupportedModelError
from nereid_backend.pooling.pooling_config import POOLERS, PoolingConfig

# Which of transformers' auto classes loads it, by what is wanted of it.
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
# Once named after the architecture, as in sentence_roberta_config.json.
_SETTINGS_FILES = "sentence_*_config.json"
# Said of the tokenizer beside the template's own variables.
_NOT_FOR_TEMPLATES = {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}
_LINEAR_FILES = ("sparse_linear.pt", "colbert_linear.pt")


@dataclass(frozen=True, slots=True)
class Part:
    """One module of a sentence-transformers checkpoint.

    Attributes:
        kind: its class's name.
        folder: where its weights are.
        config: its config.json.
    """

    kind: str
    folder: Path
    config: dict[str, Any]

    @property
    def on_tokens(self) -> bool:
        """Whether it works on token vectors, not on the pooled one."""
        return self.config.get("module_input_name") == _TOKENS


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything about a checkpoint that its files say.

    Attributes:
        folder: of the transformers model.
        config: its config.
        architecture: the class that the config names.
        task: "embed", "rerank" or "classify".
        kinds: what it gives.
        loader: which auto class loads it.
        poolers: how token vectors become one, several being concatenated; empty: the model's usual.
        include_prompt: whether a prompt's tokens are pooled, too.
        token_parts: modules on token vectors.
        vector_parts: modules on the pooled vector.
        normalizes: whether the vector then gets length 1; None: the model's usual.
        activation: "none", "sigmoid" or "softmax", of scores.
        judge_tokens: ids of "yes" and "no" (None: the score is the logit of "yes" alone) of a
            judge whose files name them.
        template_kwargs: what a judge's chat template is called with.
        splade: how SPLADE pools: "max" or "sum", and how often log1p is taken.
        skip_words: tokens that get no vector in a multi-vector answer.
        prompts: names and texts.
        default_prompt_name: the prompt of inputs that name none.
        max_seq_length: longest input as the files say.
        lower_case: whether text is made lower-case before the tokenizer.
        refused_prompts: prompt names that ask for what is not there, with the reason.
    """

    folder: Path
    config: PretrainedConfig
    architecture: str
    task: str
    kinds: tuple[str, ...]
    loader: str
    poolers: tuple[str, ...] = ()
    include_prompt: bool = True
    token_parts: tuple[Part, ...] = ()
    vector_parts: tuple[Part, ...] = ()
    normalizes: bool | None = None
    activation: str = "none"
    judge_tokens: tuple[int, int | None] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    splade: tuple[str, int] = ("max", 1)
    skip_words: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    refused_prompts: dict[str, str] = field(default_factory=dict)


def read_recipe(settings: PoolingConfig) -> Recipe:
    """Decide what a checkpoint is.

    Raises:
        ModelError: the files are missing or broken, or name what does not exist here.
        ConfigError: the setting ``task`` or ``pooling`` does not fit the checkpoint.
    """
    root = Path(settings.model)
    if not root.is_dir():
        raise ModelError(f"{root} is not a folder; give the path of a Hugging Face checkpoint")
    parts = _read_parts(root)
    folder = parts[0].folder if parts else root
    config = _read_config(folder)
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    saved = read_json(root / "config_sentence_transformers.json")
    task = _task(settings, architecture, parts, config, folder)
    common = _common(folder, config, architecture, task, saved)
    if task == "embed" and common.pop("is_rendered"):
        raise UnsupportedModelError(
            f"{folder} embeds texts through a chat template (modality_config), which is not "
            "supported"
        )
    common.pop("is_rendered", None)
    if task != "embed":
        return _scoring(parts, saved, common)
    if settings.pooling is not None or not _is_embedder(parts):
        parts = []
    return _embedding(settings, root, parts, common)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file.

    Raises:
        ModelError: it is not one.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is broken ({error}); download it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object; download it again")
    return found


def _read_parts(root: Path) -> list[Part]:
    """The modules that modules.json lists, in order; the first one is the transformers model."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        entries = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda e: e["idx"])
        parts = [
            Part(
                kind=entry["type"].rsplit(".", 1)[-1],
                folder=root / entry["path"],
                config=read_json(root / entry["path"] / "config.json"),
            )
            for entry in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is broken ({error!r}); download it again") from error
    if not parts or parts[0].kind not in _TRANSFORMERS:
        first = parts[0].kind if parts else "nothing"
        raise UnsupportedModelError(
            f"{path}: the first module is {first}; only a transformers model can come first"
        )
    known = {
        *("Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"),
        *("SpladePooling", "LogitScore", "MultiVectorMask"),
    }
    for part in parts[1:]:
        if part.kind not in known:
            raise UnsupportedModelError(
                f"{path}: the module {part.kind} is not supported; known are "
                f"{', '.join(sorted(known))}"
            )
        given = part.config.get("module_input_name", "sentence_embedding")
        made = part.config.get("module_output_name") or given
        if part.kind in ("Dense", "Normalize") and made != given:
            raise UnsupportedModelError(
                f"{path}: a {part.kind} that makes {made} of {given} is not supported"
            )
    return parts


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"{folder}/config.json: transformers cannot use it: {lines[0]} "
            "(code that comes with a checkpoint is not run; a newer transformers may know it)"
        ) from error


def _is_embedder(parts: list[Part]) -> bool:
    """Whether the modules say that vectors come out."""
    kinds = {part.kind for part in parts}
    return bool(kinds & {"Pooling", "SpladePooling", "MultiVectorMask", "CLIPModel"}) or any(
        part.kind in ("Dense", "Normalize") for part in parts
    )


def _task(
    settings: PoolingConfig,
    architecture: str,
    parts: list[Part],
    config: PretrainedConfig,
    folder: Path,
) -> str:
    """What the checkpoint is for.

    Raises:
        ConfigError: it is not made for what the setting says, or for nothing that runs here.
    """
    if settings.pooling is not None and settings.task in ("rerank", "classify"):
        raise ConfigError(f"pooling: is for task=embed, but task is {settings.task}; unset one")
    if settings.task == "embed" or settings.pooling is not None:
        return "embed"
    if settings.task == "auto":
        return _usual_task(architecture, parts, config, folder)
    has_head = architecture.endswith(_SEQUENCE_HEAD)
    if settings.task == "classify":
        if not has_head:
            raise ConfigError(
                f"task: {architecture} has no head that classifies; it takes a checkpoint of a "
                f"*{_SEQUENCE_HEAD} architecture"
            )
        return "classify"
    if has_head and config.num_labels != 1:
        raise ConfigError(
            f"task: reranking takes a head with 1 label, {architecture} in {folder} has "
            f"{config.num_labels}; set task=classify"
        )
    if not (has_head or architecture.endswith(_GENERATIVE)):
        raise ConfigError(
            f"task: {architecture} has no head that scores a pair; reranking takes a "
            f"*{_SEQUENCE_HEAD} checkpoint with 1 label or a generative one that answers yes or no"
        )
    return "rerank"


def _usual_task(
    architecture: str, parts: list[Part], config: PretrainedConfig, folder: Path
) -> str:
    """What the files alone say that a checkpoint is for.

    Raises:
        ConfigError: they say that it writes text.
    """
    if _is_embedder(parts):
        return "embed"
    if any(part.kind == "LogitScore" for part in parts):
        return "rerank"
    if architecture.endswith(_SEQUENCE_HEAD):
        return "rerank" if config.num_labels == 1 else "classify"
    if architecture.endswith(_GENERATIVE):
        raise ConfigError(
            f"task: {folder} is a generative checkpoint ({architecture}) and its files do not "
            "say that it embeds; set task=embed (vector of the last token) or task=rerank "
            "(a yes/no judge), or serve it as the LLM"
        )
    return "embed"


def _common(
    folder: Path,
    config: PretrainedConfig,
    architecture: str,
    task: str,
    saved: dict[str, Any],
) -> dict[str, Any]:
    """Fields that every recipe has."""
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
            "the checkpoint fills queries up with mask tokens (query_expansion), which is not "
            "supported"
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


def _scoring(parts: list[Part], saved: dict[str, Any], common: dict[str, Any]) -> Recipe:
    config: PretrainedConfig = common["config"]
    judge = next((part.config for part in parts if part.kind == "LogitScore"), None)
    if common["architecture"].endswith(_SEQUENCE_HEAD):
        single = config.num_labels == 1
        fallback = "sigmoid" if single else "softmax"
        kinds = ("score", "classify") if single else ("classify",)
        if common["task"] == "classify":
            kinds = ("classify", "score") if single else ("classify",)
        return Recipe(
            kinds=kinds,
            loader=SEQUENCE,
            activation=_activation(config, saved) or fallback,
            **common,
        )
    tokens = None
    if judge is not None:
        tokens = (int(judge["true_token_id"]), judge.get("false_token_id"))
    return Recipe(
        kinds=("score",),
        loader=CAUSAL,
        activation=_activation(config, saved) or "sigmoid",
        judge_tokens=tokens,
        **common,
    )


def _activation(config: PretrainedConfig, saved: dict[str, Any]) -> str | None:
    """The activation that the files name, None when they name none.

    Raises:
        UnsupportedModelError: they name another one than identity, sigmoid and softmax.
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
            f"the checkpoint's activation {path} is not supported; known are {', '.join(known)}"
        )
    return known[name]


def _embedding(
    settings: PoolingConfig, root: Path, parts: list[Part], common: dict[str, Any]
) -> Recipe:
    if settings.pooling == "splade":
        return Recipe(kinds=("sparse",), loader=MASKED, **common)
    rest = [part for part in parts[1:] if part.kind != "Dropout"]
    splade = next((part.config for part in rest if part.kind == "SpladePooling"), None)
    if splade is not None:
        times = 2 if splade.get("activation_function") == "log1p_relu" else 1
        how = (str(splade.get("pooling_strategy", "max")), times)
        return Recipe(kinds=("sparse",), loader=MASKED, splade=how, **common)
    if _has_towers(common["config"]):
        return Recipe(kinds=("dense",), loader=TOWERS, normalizes=_ends_normal(rest), **common)
    tokens = tuple(p for p in rest if p.on_tokens and p.kind in ("Dense", "Normalize", "LayerNorm"))
    pooling = next((part for part in rest if part.kind == "Pooling"), None)
    if rest and pooling is None:
        mask = next((part.config for part in rest if part.kind == "MultiVectorMask"), {})
        if not any(part.on_tokens or part.kind == "MultiVectorMask" for part in rest):
            raise UnsupportedModelError(
                f"{root}/modules.json: modules without Pooling, and none that works on token "
                "vectors; nothing says how token vectors become one"
            )
        skipped = tuple(mask.get("skiplist_words") or ())
        if mask.get("keep_only_token_ids"):
            raise UnsupportedModelError("MultiVectorMask with keep_only_token_ids is not supported")
        return Recipe(
            kinds=("multi_vector",), loader=BASE, token_parts=tokens, skip_words=skipped, **common
        )
    vector_parts = tuple(part for part in rest if not part.on_tokens and part.kind != "Pooling")
    normalizes = _ends_normal(rest) if pooling is not None else None
    if normalizes:
        vector_parts = vector_parts[:-1]
    extra = tuple(
        kind
        for kind, name in zip(("sparse", "multi_vector"), _LINEAR_FILES, strict=True)
        if (root / name).is_file()
    )
    return Recipe(
        kinds=("dense", *extra),
        loader=BASE,
        poolers=(settings.pooling,) if settings.pooling else _poolers(pooling),
        include_prompt=bool(pooling.config.get("include_prompt", True)) if pooling else True,
        token_parts=tokens,
        vector_parts=vector_parts,
        normalizes=normalizes,
        **common,
    )


def _ends_normal(rest: list[Part]) -> bool:
    return bool(rest) and rest[-1].kind == "Normalize" and not rest[-1].on_tokens


def _poolers(pooling: Part | None) -> tuple[str, ...]:
    """The poolers that 1_Pooling/config.json names, in the order in which they are concatenated."""
    if pooling is None:
        return ()
    found = pooling.config.get("pooling_mode")
    if found is None:
        found = [name for key, name in _LEGACY_POOLERS.items() if pooling.config.get(key)]
    names = (found,) if isinstance(found, str) else tuple(found) or ("mean",)
    for name in names:
        if name not in POOLERS or name == "splade":
            raise UnsupportedModelError(
                f"{pooling.folder}/config.json: the pooling mode {name} is not supported; known "
                f"are {', '.join(_LEGACY_POOLERS.values())}"
            )
    return names


def _has_towers(config: PretrainedConfig) -> bool:
    """Whether it is a text and an image encoder beside each other."""
    parts = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    return all(parts) and hasattr(config, "projection_dim")
