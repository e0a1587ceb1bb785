# SPDX-License-Identifier: Apache-2.0
"""Replaces the weights of the running engine with the weights of another checkpoint."""

import gc
from dataclasses import replace

from nereid_backend.checkpoints.same_tensors import (
    check_same_layout,
    read_architecture,
    read_layout,
)
from nereid_backend.checkpoints.same_tokenizer import (
    TokenizerFiles,
    check_same_tokenizer,
    hash_tokenizer_files,
)
from nereid_backend.config import EngineConfig
from nereid_backend.engine.engine_parts import EngineParts, Report
from nereid_backend.errors import EngineError, ModelError, NereidError, RequestError
from nereid_backend.main_memory import available_memory


class ReloadableModel:
    """Owns the objects that depend on the loaded model. A reload of the weights replaces them.

    Attributes:
        parts: the objects that depend on the model. No other object may store a reference to
            `parts`, because `reload` must be able to free the memory of the old model.
    """

    def __init__(self, config: EngineConfig, report: Report) -> None:
        """Load a model; see `EngineParts` for the arguments and the errors."""
        self.parts = EngineParts(config, report)
        # `reload` compares the tokenizer of each new checkpoint with these files. The files are
        # read now, because a new checkpoint may overwrite the files in the same folder later.
        self._tokenizer_files = hash_tokenizer_files(config.model)

    def reload(self, path: str, report: Report) -> None:
        """Replace the weights of the model with the weights of the checkpoint at `path`.

        If `path` is "", the present checkpoint is read again, because its files may have changed.
        `Engine.reload` documents the arguments and the errors.

        Mutates: `parts`, which is replaced by the objects of the new model.
        """
        # After the reload, the engine must have the adapters that are loaded now. These adapters
        # may differ from the adapters with which the engine was started.
        old_config = replace(self.parts.config, lora_adapters=self.parts.adapters.paths)
        # The new model must accept prompts of the same length as the present model.
        max_model_len = self.parts.info.max_model_len
        new_config = replace(
            old_config, model=path or old_config.model, max_model_len=max_model_len
        )
        _check_can_reload(self.parts, new_config)
        _check_new_checkpoint(self.parts, new_config, self._tokenizer_files)
        has_grammar_libraries = self.parts.preparation.has_guides
        if _fits_second_model(self.parts):
            self._load_then_release(new_config, report)
        else:
            self._release_then_load(new_config, old_config, report)
        if has_grammar_libraries:
            # The grammar libraries were loaded for the old model. Load them for the new model now,
            # so that the next request with a grammar does not wait.
            self.parts.preparation.warm_up()

    def _load_then_release(self, new_config: EngineConfig, report: Report) -> None:
        """Load the new weights, and then free the old weights.

        Raises:
            RequestError: if the new weights cannot be loaded. The old weights stay in use.
        """
        try:
            new_parts = EngineParts(new_config, report)
        except Exception as error:
            # Loading can raise any exception. Each exception is sent to the client that requested
            # the reload.
            raise _load_error(error) from error
        self._release()
        self.parts = new_parts

    def _release_then_load(
        self, new_config: EngineConfig, old_config: EngineConfig, report: Report
    ) -> None:
        """Free the old weights, and then load the new weights.

        Both configs contain the paths of the adapters that are loaded now (`lora_adapters`), so the
        adapters are loaded again together with the weights.

        Raises:
            RequestError: if the new weights cannot be loaded. In this case, the old weights have
                been loaded again.
            EngineError: if neither the new weights nor the old weights can be loaded.
        """
        try:
            # Check the files of the adapters before the old weights are freed. If an adapter can no
            # longer be loaded, loading the new weights would fail, and loading the old weights
            # again would fail, too.
            self.parts.adapters.check_files()
        except ModelError as error:
            raise _load_error(error) from error
        self._release()
        try:
            self.parts = EngineParts(new_config, report)
        except Exception as error:
            # Loading can raise any exception. Each exception is sent to the client that requested
            # the reload.
            self._restore(old_config, report)
            raise _load_error(error) from error

    def _restore(self, old_config: EngineConfig, report: Report) -> None:
        """Load the old weights again. Raise an EngineError if they cannot be loaded."""
        try:
            self.parts = EngineParts(old_config, report)
        except NereidError as failure:
            raise EngineError(f"the old weights cannot be loaded again: {failure}") from failure

    def _release(self) -> None:
        """Close the objects of the engine, and free the weights and the KV cache."""
        self.parts.close()
        del self.parts
        # The modules of a model refer to each other in cycles. Only the garbage collector frees
        # such modules.
        gc.collect()


def _fits_second_model(parts: EngineParts) -> bool:
    """Return whether a second model of the same size fits into the memory."""
    if parts.info.device != "cpu":
        return False  # On a GPU, the KV cache takes most of the memory.
    return parts.info.weights_bytes + parts.info.kv_cache_bytes < available_memory()


def _load_error(error: Exception) -> RequestError:
    """Return the error that a client gets if the new weights cannot be loaded."""
    return RequestError(f"path: the new weights cannot be loaded: {error}")


def _check_new_checkpoint(
    parts: EngineParts, new_config: EngineConfig, tokenizer_files: TokenizerFiles
) -> None:
    """Check that a new checkpoint has the same tensors and tokenizer as the loaded model.

    `_check_can_reload` must be called first.

    Args:
        parts: the loaded model.
        new_config: the settings with the path of the new checkpoint.
        tokenizer_files: the tokenizer files of the first checkpoint, which the servers use.

    Raises:
        RequestError: if the new checkpoint cannot replace the loaded model.
    """
    # The layout of a checkpoint is the name, the shape and the dtype of each of its tensors.
    assert parts.layout is not None, "`_check_can_reload` has checked this"
    try:
        check_same_layout(parts.layout, read_layout(new_config.model))
        architecture = read_architecture(new_config.model)
        check_same_tokenizer(tokenizer_files, hash_tokenizer_files(new_config.model))
    except ModelError as error:
        raise RequestError(f"path: {error}") from error
    except OSError as error:
        raise RequestError(
            f"path: the checkpoint cannot be read ({error}). Name a folder that the server can "
            "read."
        ) from error
    is_unknown = architecture == ""  # The configuration of the checkpoint names no architecture.
    if not is_unknown and architecture != parts.info.architecture:
        raise RequestError(
            f"path: the new checkpoint has the architecture {architecture}, but the served "
            f"model has the architecture {parts.info.architecture}."
        )


def _check_can_reload(parts: EngineParts, new_config: EngineConfig) -> None:
    """Check that the engine can replace its weights now. Do not read the tensors of checkpoints.

    Raises:
        RequestError: if requests are running, if the engine uses tensor parallelism, or if one of
            the checkpoints has no safetensors files.
    """
    if parts.scheduler.has_work():
        raise RequestError(
            "path: the weights can be replaced only while no request runs. Wait until all "
            "requests have ended."
        )
    if parts.ranks is not None:
        raise RequestError(
            "path: the weights of a model that is divided over several processes "
            f"(tensor_parallel_size={new_config.tensor_parallel_size}) cannot be replaced. Restart "
            "the server."
        )
    # `parts.layout` contains the tensor shapes of the present checkpoint. It is None if the
    # checkpoint has no safetensors files.
    has_safetensors = parts.layout is not None
    if not has_safetensors or new_config.model.endswith(".gguf"):
        raise RequestError(
            "path: the present checkpoint and the new checkpoint must have safetensors files, "
            "but one of the checkpoints has none. Restart the server with the new checkpoint."
        )
