# SPDX-License-Identifier: Apache-2.0
"""Reads modules.json and the settings files of a sentence-transformers checkpoint."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend.errors import ModelError, UnsupportedModelError

# If a model has dense output, its checkpoint may also contain these two files. Each file contains
# one linear layer, which computes another kind of output from the token vectors. The layer in
# SPARSE_FILE computes sparse output. The layer in MULTI_VECTOR_FILE computes multi-vector output.
SPARSE_FILE = "sparse_linear.pt"
MULTI_VECTOR_FILE = "colbert_linear.pt"
# The file with the settings of the whole checkpoint, such as its prompts.
SENTENCE_CONFIG_FILE = "config_sentence_transformers.json"
# The files with the settings of the transformers model. Their names contain the architecture.
# Example: sentence_bert_config.json.
_SETTINGS_FILES = "sentence_*_config.json"

# The arguments of from_pretrained that have no effect on the outputs of the model: they only select
# files, or permit running Python code of the checkpoint.
_FILE_ARGUMENTS = {
    *("revision", "code_revision", "subfolder", "cache_dir", "token", "use_auth_token"),
    *("local_files_only", "trust_remote_code", "force_download"),
}
# The packages whose modules have the names below. A class of another package, such as
# "custom_st.Transformer", can compute something else.
_PACKAGES = ("sentence_transformers", "pylate")
_FIRST_MODULES = ("Transformer", "MLMTransformer", "CLIPModel")
_LATER_MODULES = (
    *("Dense", "Dropout", "LayerNorm", "LogitScore"),
    *("MultiVectorMask", "Normalize", "Pooling", "SpladePooling"),
)
# The modules that only checkpoints of embedding models have.
_EMBEDDING_MODULES = {
    *("CLIPModel", "Dense", "MultiVectorMask"),
    *("Normalize", "Pooling", "SpladePooling"),
}
# The configs of modules use these names for token vectors and for the pooled vector.
_TOKEN_VECTORS = "token_embeddings"
_POOLED_VECTOR = "sentence_embedding"
# A Dense module with this output computes the scores of a cross-encoder from the pooled vector.
_SCORES = "scores"


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
        """Whether the module converts token vectors.

        Otherwise, the module converts the pooled vector.
        """
        return self.config.get("module_input_name") == _TOKEN_VECTORS


def read_modules(root: Path) -> list[ModuleSpec]:
    """Return the modules in modules.json in order. The first module is the transformers model.

    The list is empty if the checkpoint in the folder `root` has no modules.json.

    Raises:
        ModelError: the file is broken.
        UnsupportedModelError: a module is not supported.
    """
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        ordered_entries = sorted(entries, key=lambda entry: entry["idx"])
        modules = [_module_of(entry, root) for entry in ordered_entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read as a list of modules ({error!r}). Download the file again."
        ) from error
    _check_modules(path, modules)
    return modules


def _module_of(entry: dict[str, Any], root: Path) -> ModuleSpec:
    """Convert an entry of modules.json in the folder `root` to a ModuleSpec.

    Example: {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"} has the
    kind "Pooling" and the folder root/1_Pooling.

    Raises:
        UnsupportedModelError: the class of the module is Python code of the checkpoint.
    """
    folder = root / entry["path"]
    package = entry["type"].split(".", 1)[0]
    if package not in _PACKAGES:
        raise UnsupportedModelError(
            f"{root}/modules.json: the module {entry['type']} is Python code of the checkpoint, "
            f"which is not run. Only modules of {' and '.join(_PACKAGES)} are supported. Use "
            "another checkpoint."
        )
    kind = entry["type"].rsplit(".", 1)[-1]
    return ModuleSpec(kind, folder, config=read_json(folder / "config.json"))


def is_embedder(modules: Iterable[ModuleSpec]) -> bool:
    """Return whether `modules` contains a module that only embedding models have."""
    return any(module.kind in _EMBEDDING_MODULES for module in modules)


def computes_score(modules: list[ModuleSpec]) -> bool:
    """Return whether the last module computes one score of a pair from the pooled vector."""
    if find_config(modules, "Pooling") is None:
        return False
    last = modules[-1]
    has_score = last.config.get("module_output_name") == _SCORES
    return last.kind == "Dense" and has_score and last.config.get("out_features") == 1


def find_config(modules: Iterable[ModuleSpec], kind: str) -> dict[str, Any] | None:
    """Return the config of the first module of the kind `kind`; None if there is no such module."""
    return next((module.config for module in modules if module.kind == kind), None)


def ends_with_normalize(modules: list[ModuleSpec]) -> bool:
    """Return whether the last module scales the pooled vector to length 1."""
    return bool(modules) and modules[-1].kind == "Normalize" and not modules[-1].maps_tokens


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or {} if the file does not exist.

    Raises:
        ModelError: the file does not contain a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Download the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not contain a JSON object. Download the file again.")
    return value


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the transformers model, as stored in sentence_*_config.json.

    If several such files exist, return the content of the first file that is not empty. If there is
    no such file, return {}.
    """
    for path in sorted(folder.glob(_SETTINGS_FILES)):
        content = read_json(path)
        if content:
            return content
    return {}


def read_loading_arguments(folder: Path, *names: str) -> dict[str, Any]:
    """Return arguments with which sentence-transformers calls transformers' from_pretrained.

    Arguments that only select files are left out. Example: the settings {"config_args":
    {"is_decoder": true, "revision": "main"}} and the name "config_args" return
    {"is_decoder": True}.

    Args:
        folder: the folder of the transformers model.
        names: the names under which different versions of sentence-transformers store the
            arguments, such as "config_kwargs" and "config_args". The first name that the settings
            contain is used.
    """
    settings = read_settings(folder)
    arguments: dict[str, Any] = next((settings[name] for name in names if settings.get(name)), {})
    return {name: value for name, value in arguments.items() if name not in _FILE_ARGUMENTS}


def read_tokenizer_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments with which sentence-transformers loads the tokenizer in a folder."""
    return read_loading_arguments(folder, "processor_kwargs", "tokenizer_args")


def _check_modules(path: Path, modules: list[ModuleSpec]) -> None:
    """Raise an UnsupportedModelError if a module is not supported.

    The first module must be a transformers model. The output of a module Dense or Normalize must
    replace the input, so the names of the input and the output must be equal. Only the last module
    may have another output, which is the score of a cross-encoder.

    Args:
        path: the path of modules.json, for error messages.
        modules: the modules in the file.
    """
    if not modules or modules[0].kind not in _FIRST_MODULES:
        first = modules[0].kind if modules else "nothing"
        raise UnsupportedModelError(
            f"{path}: the first module must be a transformers model, but it is {first}. Use a "
            f"checkpoint whose first module is {' or '.join(_FIRST_MODULES)}."
        )
    for module in modules[1:]:
        if module.kind not in _LATER_MODULES:
            raise UnsupportedModelError(
                f"{path}: the module {module.kind} is not supported. The supported modules are "
                f"{', '.join(sorted(_LATER_MODULES))}. Use another checkpoint."
            )
        is_score = module is modules[-1] and computes_score(modules)
        if module.kind in ("Dense", "Normalize") and not is_score:
            _check_names(path, module)


def _check_names(path: Path, module: ModuleSpec) -> None:
    """Raise an UnsupportedModelError if a module's input and output have different names.

    The config of the module contains the names. By default, a module converts the pooled vector,
    and the output has the name of the input.
    """
    input_name = module.config.get("module_input_name", _POOLED_VECTOR)
    output_name = module.config.get("module_output_name") or input_name
    if output_name != input_name:
        raise UnsupportedModelError(
            f"{path}: the input and the output of the module {module.kind} must have the same "
            f"name, but they are {input_name} and {output_name}. Use another checkpoint."
        )
