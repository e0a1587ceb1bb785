"""The models for `nereid serve --config`: their settings, test requests and model repository."""

import functools
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nereid_client.console import CliError
from nereid_client.settings import SettingsError
from nereid_client.several_models.models_file import ModelSpec, read_models_file
from nereid_client.several_models.repository import write_repository
from nereid_client.supervise import startup_checks
from nereid_client.supervise.hang_detection import PROBES, Probe
from nereid_client.supervise.pooling_models import PoolingModel

_ENGINE_SETTINGS = Path(__file__).parents[1] / "cli" / "engine_settings.json"
_PREFIXES = {"llm": "NEREID_", "embedding": "NEREID_EMBEDDING_", "rerank": "NEREID_RERANK_"}
# These environment variables configure the test engine, not a model.
_OF_TEST_ENGINE = {"NEREID_ENGINE", "NEREID_SCRIPT"}
# These environment variables do not set default values for the models in models.toml,
# because every model needs its own values for these settings.
_NEVER_DEFAULTS = ("NEREID_MODEL", "NEREID_SERVED_MODEL_NAME", "NEREID_LORA_ADAPTERS")


class ServedModels:
    """The models that a file models.toml describes.

    Attributes:
        specs: the models.
        path: the checkpoint of the default model, which is the first language model.
        name: the name of the default model.
    """

    def __init__(self, file: Path) -> None:
        """Read the file models.toml, and check the checkpoint of each model.

        Args:
            file: the path of the file, from the flag --config.

        Raises: CliError if the file or a checkpoint is wrong. The message names the flag, the file
            and the table of the model.
        """
        try:
            models = read_models_file(file, source="--config")
        except SettingsError as error:
            raise CliError(str(error)) from None
        for spec in models.specs:
            table = f"--config: [{spec.name}] in {file}"
            startup_checks.check_checkpoint(spec.path, source=table)
        language_models = [spec for spec in models.specs if spec.kind == "llm"]
        default = language_models[0]  # `read_models_file` requires at least one language model
        self.specs = models.specs
        self.path = default.path  # the checkpoint of the default model
        self.name = default.name  # the name of the default model
        self._file = file
        # The models that are loaded when the server starts. Each other model is loaded when a
        # request uses it.
        self._specs_at_start = models.specs_at_start

    @property
    def pooling_models(self) -> list[PoolingModel]:
        """The embedding models and rerankers that the server loads when it starts."""
        return [
            PoolingModel(spec.kind, spec.path, spec.name)
            for spec in self._specs_at_start
            if spec.kind != "llm"
        ]

    @property
    def probes(self) -> list[Probe]:
        """The test requests that show whether the models still answer.

        If a model is not loaded, the server answers its test request with an error. An error is an
        answer, so it shows that the model does not hang.
        """
        probes = []
        for spec in self.specs:
            probe = PROBES[spec.kind]
            path = probe.path.replace(f"/{probe.model}/", f"/{spec.triton_name}/")
            probes.append(replace(probe, model=spec.triton_name, path=path))
        return probes

    @property
    def server_arguments(self) -> list[str]:
        """The command-line arguments that make the Triton server load models when it starts.

        Other models are loaded by their first request.
        """
        names = [f"--load-model={spec.triton_name}" for spec in self._specs_at_start]
        return ["--model-control-mode=explicit", *names]

    def check_settings(self, repository: Path, environment: Mapping[str, str]) -> None:
        """Check the settings of each model.

        Args:
            repository: Nereid's model repository.
            environment: all environment variables. They contain the default settings of models.

        Raises: CliError that names the model and the setting.
        """
        defaults = _default_settings(environment)
        for spec in self.specs:
            variables = _variables_of_model(spec, defaults[spec.kind])
            # The check always includes the settings of a language model, even if `spec` is a
            # pooling model. The check therefore needs the checkpoint of a language model.
            variables.setdefault("NEREID_MODEL", str(self.path))
            try:
                startup_checks.check_model_settings(
                    repository, without_model_settings(environment) | variables
                )
            except CliError as error:
                raise CliError(f"--config: [{spec.name}] in {self._file}: {error}") from None

    def write_repository(
        self, folder: Path, repository: Path, environment: Mapping[str, str]
    ) -> None:
        """Write a model repository with all models into a folder. Delete the old content first.

        Args:
            folder: the folder.
            repository: Nereid's model repository.
            environment: all environment variables. They contain the default settings of models.

        Raises: CliError if the folder cannot be written.
        """
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_repository(folder, repository, self.specs, _default_settings(environment))
        except OSError as error:
            raise CliError(f"the folder {folder} cannot be written ({error.strerror})") from None


def _variables_of_model(spec: ModelSpec, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a model as environment variables.

    Example: an embedding model with the setting dtype="float32" returns {"NEREID_EMBEDDING_DTYPE":
    "float32", "NEREID_EMBEDDING_MODEL": PATH}.
    """
    settings = {**defaults, **spec.entry.settings, "model": str(spec.path)}
    prefix = _PREFIXES[spec.kind]
    return {f"{prefix}{name}".upper(): value for name, value in settings.items()}


def without_model_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return all environment variables except the settings of models.

    The Triton server must not receive the settings, because a model prefers an environment variable
    to the setting in models.toml.
    """
    return {
        variable: value
        for variable, value in environment.items()
        if _kind_of_variable(variable) is None and variable not in _NEVER_DEFAULTS
    }


def _default_settings(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the default settings for each kind of model, from environment variables.

    Variables without a value are omitted. The settings in `_NEVER_DEFAULTS`, such as the
    checkpoint, are omitted, too, because each model has its own value.

    Example: NEREID_DTYPE=bfloat16 and NEREID_EMBEDDING_DTYPE=float32 return
    {"llm": {"dtype": "bfloat16"}, "embedding": {"dtype": "float32"}, "rerank": {}}.
    """
    defaults: dict[str, dict[str, str]] = {kind: {} for kind in _PREFIXES}
    for variable, value in environment.items():
        kind = _kind_of_variable(variable)
        if kind is None or not value.strip():
            continue
        setting = variable.removeprefix(_PREFIXES[kind])
        if f"NEREID_{setting}" not in _NEVER_DEFAULTS:
            defaults[kind][setting.lower()] = value
    return defaults


def _kind_of_variable(variable: str) -> str | None:
    """Return the kind of model that `variable` configures, or None if it configures no model.

    Examples: "NEREID_DTYPE" returns "llm", "NEREID_RERANK_DTYPE" returns "rerank", and
    "NEREID_OPENAI_PORT" returns None.
    """
    for kind in ("embedding", "rerank"):
        if variable.startswith(_PREFIXES[kind]):
            return kind
    # The prefix "NEREID_" does not identify the variables of the language model, because all
    # variables of Nereid have this prefix.
    return "llm" if variable in _engine_variables() else None


@functools.cache
def _engine_variables() -> frozenset[str]:
    """Return the names of the environment variables that configure the language model."""
    return frozenset(json.loads(_ENGINE_SETTINGS.read_text(encoding="utf-8"))) - _OF_TEST_ENGINE
