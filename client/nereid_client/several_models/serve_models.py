"""The models for `nereid serve --config`: their settings, test requests and model repository."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nereid_client.console import CliError
from nereid_client.locked_file import lock_until_exit
from nereid_client.settings import SettingsError
from nereid_client.several_models.model_variables import (
    PREFIXES,
    TEST_ENGINE_VARIABLES,
    default_settings,
    kind_of_variable,
    without_model_settings,
)
from nereid_client.several_models.models_file import ModelSpec, read_models_file
from nereid_client.several_models.repository import write_repository
from nereid_client.supervise import startup_checks
from nereid_client.supervise.check_checkpoint import check_checkpoint
from nereid_client.supervise.hang_detection import PROBES, Probe
from nereid_client.supervise.pooling_models import PoolingModel


class ServedModels:
    """The models that a file models.toml describes.

    Attributes:
        specs: the models.
        path: the checkpoint of the default model, which is the first language model.
        name: the name of the default model.
    """

    def __init__(self, file: Path, environment: Mapping[str, str]) -> None:
        """Read the file models.toml, and check the checkpoint of each model.

        Args:
            file: the path of the file, from the flag --config.
            environment: all environment variables. They contain the default settings of models.

        Raises: CliError if the file or a checkpoint is wrong. The message names the flag, the file
            and the table of the model.
        """
        try:
            models = read_models_file(file, default_settings(environment), source="--config")
        except SettingsError as error:
            raise CliError(str(error)) from None
        for spec in models.specs:
            table = f"--config: [{spec.name}] in {file}"
            check_checkpoint(spec.path, source=table)
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

        Raises: CliError that names the model and the setting.
        """
        # Each check includes a language model. A pooling model is therefore checked together with
        # the checkpoint of the default model.
        common = without_model_settings(environment) | {"NEREID_MODEL": str(self.path)}
        for spec in self.specs:
            try:
                startup_checks.check_model_settings(repository, common | _variables_of_model(spec))
            except CliError as error:
                raise CliError(f"--config: [{spec.name}] in {self._file}: {error}") from None
            self._check_setting_names(spec)

    def _check_setting_names(self, spec: ModelSpec) -> None:
        """Check that each setting in the table of a model is a setting of this kind of model.

        Examples: "max_model_len" is a setting of a language model. "MAX_MODEL_LEN" is refused,
        because the names are in lower case. "openai_port" is refused, because it is a setting of
        the frontend.
        """
        for name in spec.entry.settings:
            variable = f"{PREFIXES[spec.kind]}{name}".upper()
            is_setting_of_kind = kind_of_variable(variable) == spec.kind
            configures_test_engine = variable in TEST_ENGINE_VARIABLES
            is_lower_case = name == name.lower()
            if not is_lower_case or not (is_setting_of_kind or configures_test_engine):
                raise CliError(
                    f"--config: [{spec.name}] in {self._file}: {name} is not a setting of a model "
                    f"of the kind {spec.kind!r}. The page docs/reference/settings.md lists all "
                    "settings, whose names are in lower case in this file."
                )

    def replace_repository(self, folder: Path, source: Path) -> None:
        """Write a model repository with all models to a folder, and replace an existing folder.

        If the file system has locks, other servers cannot replace the folder until this process
        ends. Without the lock, two servers with the same port in different containers could use the
        same folder.

        Args:
            folder: the folder of the new model repository.
            source: Nereid's model repository, from which the models are copied.

        Raises: CliError if another server uses the folder, or if the folder cannot be deleted or
            written.
        """
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _lock_if_possible(folder)
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
            folder.mkdir()
            write_repository(folder, source, self.specs)
        except OSError as error:
            reason = error.strerror or error
            raise CliError(f"the folder {folder} cannot be written ({reason})") from None


def _lock_if_possible(folder: Path) -> None:
    """Reserve a folder for this server until this process ends, if the file system has locks.

    Raises: CliError if another server has reserved the folder.
    """
    try:
        lock_until_exit(folder.with_name(f"{folder.name}.lock"))
    except BlockingIOError:
        raise CliError(
            f"another server, possibly in another container, uses the folder {folder}. Set the "
            "environment variable XDG_STATE_HOME to another folder, or give another --openai-port."
        ) from None
    except OSError:
        return  # the file system has no locks


def _variables_of_model(spec: ModelSpec) -> dict[str, str]:
    """Return the settings of a model as environment variables.

    Example: an embedding model with the setting dtype="float32" returns {"NEREID_EMBEDDING_DTYPE":
    "float32", "NEREID_EMBEDDING_MODEL": PATH}.
    """
    prefix = PREFIXES[spec.kind]
    return {f"{prefix}{name}".upper(): value for name, value in spec.settings.items()}
