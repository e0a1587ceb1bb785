# SPDX-License-Identifier: Apache-2.0
"""Opens the on-disk prefix cache of a loaded model."""

import errno
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

from nereid_backend.config import EngineConfig
from nereid_backend.core.blocks.disk_store import DiskStore
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.engine.disk_tier import DiskTier
from nereid_backend.errors import ConfigError
from nereid_backend.paths.stored_prefixes import StoredPrefixes
from nereid_backend.step_runner import ForwardPath

# The keys and values that a model computes depend on the checkpoint files whose names match these
# patterns.
_MODEL_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.json", "*.py")


def prepare_folder(folder: str) -> None:
    """Create the folder that the setting `prefix_cache_disk` names, unless the folder exists.

    Raises:
        ConfigError: if the folder cannot be created, read or written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"prefix_cache_disk: the folder {folder} cannot be used: {error.strerror or error}. "
            "Choose a folder that can be created, read and written."
        ) from error


def open_disk_tier(
    config: EngineConfig, info: EngineInfo, cache: PrefixCache, path: ForwardPath
) -> DiskTier:
    """Open the on-disk prefix cache of a loaded model, and return the cache.

    Args:
        config: the settings. prefix_cache_disk must be set.
        info: the description of the loaded model.
        cache: the prefix cache in memory.
        path: the forward path of the model. It must store the tokens of a sequence in blocks.

    Raises:
        OSError: if the folder cannot be used.
    """
    assert config.prefix_cache_disk is not None
    prefixes = StoredPrefixes(path)
    # The cached keys and values depend on the model, the library that contains its code, the dtypes
    # and the block layout, which together form the identity. An engine reuses only files that were
    # written with the same identity.
    identity = {
        "model": f"{info.architecture} {model_digest(info.model)}",
        "code": f"transformers {version('transformers')}",
        "dtype": f"{info.dtype}, weights {config.weight_dtype}",
        "layout": f"block size {info.block_size}, {prefixes.layout}",
    }
    folder = Path(config.prefix_cache_disk)
    store = DiskStore(folder, config.prefix_cache_disk_size, identity)
    return DiskTier(store, cache, prefixes)


def model_digest(model: str) -> str:
    """Return a digest that changes if a file of a checkpoint changes.

    The names, sizes and modification times of the files are hashed, because hashing the content of
    large checkpoints would take minutes.
    """
    path = Path(model)  # a folder, or one GGUF file
    files = [path]
    if not path.is_file():
        files = [file for pattern in _MODEL_FILES for file in path.glob(pattern)]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
