"""Writes a Triton model repository that contains all models of the file models.toml.

Each model is a copy of a model in Nereid's model repository. The copy has another name and other
settings.
"""

from collections.abc import Mapping
from pathlib import Path

from nereid_client.several_models.models_file import ModelSpec


def write_repository(folder: Path, source: Path, specs: list[ModelSpec]) -> None:
    """Write the models of `specs` to an empty folder. Their files are copied from `source`."""
    for spec in specs:
        if spec.kind == "llm":
            # A language model is an ensemble of three models, which are called steps. The ensemble
            # and the steps are copied. `spec.steps` maps the name of each step to the name of its
            # copy, for example "tokenizer" to "chat-tokenizer". Only the steps have settings.
            _copy(folder / spec.triton_name, source / "llm", settings={}, steps=spec.steps)
            for step, name in spec.steps.items():
                _copy(folder / name, source / step, settings=spec.settings, steps={})
        else:
            _copy(folder / spec.triton_name, source / spec.kind, settings=spec.settings, steps={})


def _copy(
    folder: Path, source: Path, *, settings: Mapping[str, str], steps: Mapping[str, str]
) -> None:
    """Copy one model of the repository.

    Args:
        folder: the folder of the copy. Its name is the name of the model.
        source: the folder of the original.
        settings: the settings of the copy. They replace all settings of the original. If the
            mapping is empty, the settings of the original are copied.
        steps: maps the old name of each model that the copied model calls to the new name. Only an
            ensemble calls other models.
    """
    folder.mkdir(parents=True)
    (folder / "1").symlink_to((source / "1").resolve())
    config = _changed_config(source / "config.pbtxt", folder.name, settings, steps)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def _changed_config(
    path: Path, name: str, settings: Mapping[str, str], steps: Mapping[str, str]
) -> str:
    """Return the text of a config.pbtxt after changing the name and the settings of its model."""
    # These imports take a quarter of a second. `nereid serve` without --config never runs this
    # function, so the modules are imported only here.
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig()
    text_format.Parse(path.read_text(encoding="utf-8"), config)
    config.name = name
    for step in config.ensemble_scheduling.step:
        step.model_name = steps[step.model_name]
    if settings:
        config.parameters.clear()
    for setting, value in settings.items():
        config.parameters[setting].string_value = value
    return str(text_format.MessageToString(config, as_utf8=True))
