"""Reads the file models.toml. Each table of this file describes one model.

    memory_budget = "12GiB"          # optional: the memory of all loaded models together

    [chat]                           # the name of the model in requests
    model = "/models/chat"           # the folder of the checkpoint
    aliases = ["gpt-4o"]             # more names
    max_model_len = 8192             # any setting of the model

    [search]
    kind = "embedding"               # llm (the default), embedding or rerank
    model = "/models/search"
    load_at_start = false            # the first request loads the model
    idle_unload_s = 600              # the model is unloaded after 600 s without requests

Requests without the field `model` use the first language model.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from nereid_client.settings import SettingsError, describe_requirement
from nereid_client.several_models.model_memory import (
    ModelMemory,
    default_kv_cache,
    estimate_memory,
    format_bytes,
    parse_size,
)

_MEMORY_BUDGET = "memory_budget"
Kind = Literal["llm", "embedding", "rerank"]
_STEPS = ("tokenizer", "executor", "postprocessor")
"""The models that the ensemble of a language model calls, in this order."""


class ModelEntry(BaseModel):
    """The keys and values of one table in models.toml.

    Each key that is not a field of this class is a setting of the model.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: Kind = "llm"
    model: Annotated[str, Field(min_length=1)]
    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    load_at_start: bool = True
    idle_unload_s: NonNegativeInt = 0

    @property
    def settings(self) -> dict[str, str]:
        """The model's settings that the table contains, by name. All values are strings."""
        return {name: _setting_text(value) for name, value in (self.model_extra or {}).items()}


class ModelSpec(BaseModel):
    """A model that models.toml describes.

    Attributes:
        name: the name of the model in requests and responses.
        triton_name: the name of the model in the model repository. For a language model, this is
            the name of the ensemble.
        path: the absolute path of the checkpoint.
        entry: the table of the file.
        settings: the settings of the model: those of the table, and the defaults for other
            settings.
        memory: the estimated memory of the model. None if the file sets no memory budget.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    triton_name: str
    path: Path
    entry: ModelEntry
    settings: Mapping[str, str] = {}
    memory: ModelMemory | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        return self.entry.kind

    @property
    def names(self) -> tuple[str, ...]:
        """All names with which requests can select the model."""
        return (self.name, *self.entry.aliases)

    @property
    def steps(self) -> dict[str, str]:
        """A dict that maps each step of the ensemble to the name of the step's model.

        Example: {"tokenizer": "chat-tokenizer", "executor": "chat-executor", ...}.
        """
        return {step: f"{self.triton_name}-{step}" for step in _STEPS}


@dataclass(frozen=True)
class ModelsFile:
    """The content of a file models.toml.

    Attributes:
        specs: the models, in the order of the file. The first language model is the default model.
        memory_budget: the largest memory of all loaded models together, in bytes. None means that
            the file sets no limit.
    """

    specs: list[ModelSpec]
    memory_budget: int | None = None

    @property
    def specs_at_start(self) -> list[ModelSpec]:
        """The models that the server loads when it starts, including the default model."""
        default = next(spec for spec in self.specs if spec.kind == "llm")
        return [spec for spec in self.specs if spec.entry.load_at_start or spec is default]


def read_models_file(
    path: Path, defaults: Mapping[str, Mapping[str, str]], source: str = "models_file"
) -> ModelsFile:
    """Read a models.toml file, and return its content.

    Args:
        path: the path of the file.
        defaults: maps a kind of model to settings, which the settings in a table override.
        source: the setting or the flag that contains the path. The error message begins with it.

    Raises: SettingsError that names the file, the table and the reason.
    """
    try:
        return _read_models_file(path, defaults)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None


def _read_models_file(path: Path, defaults: Mapping[str, Mapping[str, str]]) -> ModelsFile:
    """Read a models.toml file. It has one table for each model and optionally a memory budget."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"the file {path} cannot be read ({error}).") from None
    memory_budget = _pop_memory_budget(values, path)  # `values` then has only tables of models
    specs = [_read_model(name, table, path, defaults) for name, table in values.items()]
    _check_models(specs, path)
    if memory_budget is None:
        return ModelsFile(specs)
    estimated = [_with_memory(spec, memory_budget, path) for spec in specs]
    models = ModelsFile(estimated, memory_budget)
    _check_memory_at_start(models, memory_budget, path)
    return models


def _check_models(specs: list[ModelSpec], path: Path) -> None:
    _check_request_names(specs, path)
    _check_repository_names(specs, path)
    if not any(spec.kind == "llm" for spec in specs):
        raise SettingsError(f"the file {path} must have at least one language model.")


def _pop_memory_budget(values: dict[str, Any], path: Path) -> int | None:
    """Remove and return the memory budget in bytes. If the file has no budget, return None."""
    budget = values.get(_MEMORY_BUDGET)
    is_model = isinstance(budget, dict)  # a model can have the name memory_budget, too
    if budget is None or is_model:
        return None
    del values[_MEMORY_BUDGET]
    try:
        return parse_size(_MEMORY_BUDGET, budget)
    except SettingsError as error:
        raise SettingsError(f"the file {path} is wrong: {error}") from None


def _read_model(
    name: str, table: object, path: Path, defaults: Mapping[str, Mapping[str, str]]
) -> ModelSpec:
    """Return the model that the table with the name `name` describes."""
    entry = _read_entry(name, table, path)
    checkpoint = _checkpoint_path(name, entry, path)
    return ModelSpec(
        name=name,
        triton_name=_triton_name(name),
        path=checkpoint,
        entry=entry,
        settings={**defaults.get(entry.kind, {}), **entry.settings, "model": str(checkpoint)},
    )


def _read_entry(name: str, table: object, path: Path) -> ModelEntry:
    """Validate the keys and values of the table `name` in the file."""
    try:
        entry = ModelEntry.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (name, *first["loc"])))
        value = "" if first["type"] == "missing" else f", but it is {first['input']!r}"
        raise SettingsError(
            f"{place} in the file {path} is wrong: {describe_requirement(first)}{value}."
        ) from None
    if "served_model_name" in entry.settings:
        raise SettingsError(
            f"{name}.served_model_name in the file {path} is wrong: the name of a model is the "
            f"name of its table, {name!r}. Add other names to the key aliases."
        )
    for key, value in (entry.model_extra or {}).items():
        if isinstance(value, list | dict):
            raise SettingsError(
                f"{name}.{key} in the file {path} is wrong: the value must be a number, true, "
                "false, or a text in quotes such as 'name=/path,other=/path' or "
                f"""'{{"enable_thinking": false}}', but it is {value!r}."""
            )
    return entry


def _checkpoint_path(name: str, entry: ModelEntry, path: Path) -> Path:
    """Return the absolute path of a checkpoint. A relative path starts at the file's folder."""
    try:
        return (path.absolute().parent / Path(entry.model).expanduser()).resolve()
    except RuntimeError:
        raise SettingsError(
            f"{name}.model in the file {path} is wrong: the path {entry.model} begins with ~, but "
            "the home folder is unknown. Give a path that does not begin with ~."
        ) from None
    except ValueError as error:  # the path contains a null character
        raise SettingsError(
            f"{name}.model in the file {path} is wrong: {entry.model!r} is not a path ({error})."
        ) from None


def _check_memory_at_start(models: ModelsFile, budget: int, path: Path) -> None:
    """Check the memory of all models with `load_at_start`: their sum must not exceed the budget."""
    memories = {spec.name: spec.memory for spec in models.specs_at_start if spec.memory}
    total = sum(memory.total for memory in memories.values())
    if total > budget:
        sizes = ", ".join(f"{name} {memory.describe()}" for name, memory in memories.items())
        raise SettingsError(
            f"the models that the file {path} loads at the start need "
            f"{format_bytes(total)} together ({sizes}), but memory_budget is "
            f"{format_bytes(budget)}. Set load_at_start = false for some of them."
        )


def _with_memory(spec: ModelSpec, budget: int, path: Path) -> ModelSpec:
    """Return a copy of `spec` that contains the estimated memory of the model.

    If the model is a language model and its settings contain no size of the KV cache, the default
    size is added to the settings. An error names the file `path`.

    Raises: SettingsError if the setting kv_cache_memory is wrong, or if the model alone needs more
        bytes of memory than `budget`.
    """
    settings = dict(spec.settings)
    if spec.kind == "llm" and not settings.get("kv_cache_memory"):
        settings["kv_cache_memory"] = str(default_kv_cache(budget))
    try:
        memory = estimate_memory(spec.path, settings)
    except SettingsError as error:
        raise SettingsError(f"[{spec.name}] in the file {path}: {error}") from None
    _check_memory_of_model(spec.name, memory, budget, path)
    return spec.model_copy(update={"settings": settings, "memory": memory})


def _check_memory_of_model(name: str, memory: ModelMemory, budget: int, path: Path) -> None:
    """Check that the model `name` alone fits into the memory budget."""
    if memory.total > budget:
        raise SettingsError(
            f"[{name}] in the file {path} needs {memory.describe()}, but memory_budget is "
            f"{format_bytes(budget)}. Raise memory_budget, or lower kv_cache_memory of the model."
        )


def _check_request_names(specs: list[ModelSpec], path: Path) -> None:
    """Check that each name in a request selects at most one model or adapter."""
    names = [
        name
        for spec in specs
        for name in (*spec.names, *adapter_names(spec.settings.get("lora_adapters", "")))
    ]
    repeated_name = _first_repeated(names)
    if repeated_name is not None:
        raise SettingsError(f"the file {path} has the name {repeated_name!r} twice.")


def _check_repository_names(specs: list[ModelSpec], path: Path) -> None:
    """Check that all models have different names in the model repository.

    In the model repository, each model has a name such as "org-chat" for "org/chat". The steps of a
    language model are also models: "org-chat-tokenizer", "org-chat-executor" and
    "org-chat-postprocessor".
    """
    names = [name for spec in specs for name in (spec.triton_name, *spec.steps.values())]
    are_names_different = len(set(names)) == len(names)
    if not are_names_different:
        raise SettingsError(
            f"the names of the models in the file {path} are too similar. Two names must differ "
            "in at least one letter, digit, '_', '-' or '.', and a name must not be the name of "
            "another model with a suffix such as '-tokenizer'."
        )


def _first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that equals an earlier name, or None if all names are different.

    Example: ["a", "b", "c", "b", "a"] returns "b".
    """
    previous: set[str] = set()
    for name in names:
        if name in previous:
            return name
        previous.add(name)
    return None


def adapter_names(lora_adapters: str) -> list[str]:
    """Return the names of the adapters in the setting lora_adapters.

    Example: "sql=/path,legal=/other" returns ["sql", "legal"].
    """
    pairs = lora_adapters.split(",")
    return [pair.partition("=")[0].strip() for pair in pairs if pair.strip()]


def _triton_name(name: str) -> str:
    """Convert the name of a model to a name that is valid in the model repository.

    Example: "org/chat" returns "org-chat".
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".") or "model"


def _setting_text(value: object) -> str:
    """Convert the value of a setting to the text that an environment variable would contain.

    Example: True -> "true".
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
