# SPDX-License-Identifier: Apache-2.0
"""Stores the LoRA adapters that requests can select. Only some adapters are in memory.

The adapters in memory need at most `lora_memory` bytes together. If a new request needs an adapter
that is not in memory, the store removes the least recently used adapters from memory, and reads the
needed adapter from disk. Adapters of unfinished requests stay in memory.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from nereid_backend.core.adapter import Adapter
from nereid_backend.errors import CapacityError, ModelError, RequestError
from nereid_backend.linear.lora_layers import LoraLayers
from nereid_backend.linear.native_adapters import AdapterWeights
from nereid_backend.lora.peft_files import LayerSizes, read_adapter


class AdapterStore:
    """Stores the LoRA adapters that requests can select by name."""

    def __init__(
        self,
        layers: LoraLayers,
        sizes: Mapping[str, LayerSizes],
        like: Tensor,
        max_bytes: int,
        in_use: Callable[[], set[Adapter]],
    ) -> None:
        """Create a store without adapters.

        Args:
            layers: the layers of the model, to which the store adds adapters.
            sizes: the sizes of the linear layers that an adapter can change, by layer name.
            like: a tensor with the dtype and the device of the model.
            max_bytes: the largest total size of the adapters in memory.
            in_use: returns the adapters of all unfinished requests.
        """
        self._layers = layers
        self._sizes = sizes
        self._max_bytes = max_bytes
        self._like = like
        self._in_use = in_use
        # Maps each name to the adapter that a new request gets if it selects this name. The adapter
        # may have been removed from memory.
        self._named: dict[str, Adapter] = {}
        # Maps each adapter in memory to its size in bytes. The most recently used adapter is last.
        self._resident: dict[Adapter, int] = {}

    @property
    def _resident_bytes(self) -> int:
        """The total size of the adapters in memory."""
        return sum(self._resident.values())

    @property
    def names(self) -> list[str]:
        """The names of all adapters, in the order in which they were loaded."""
        return list(self._named)

    @property
    def paths(self) -> dict[str, str]:
        """The folders of all adapters, by name."""
        return {name: adapter.path for name, adapter in self._named.items()}

    def load(self, name: str, path: str) -> None:
        """Read a LoRA adapter from disk, so that requests can select it with `name`.

        `path` is the folder of the adapter. If an adapter with this name exists, new requests use
        the new adapter. Unfinished requests use the old adapter until they end.

        Raises:
            ModelError: if the files are missing or broken, or if the adapter does not fit the
                model.
            CapacityError: if the adapters of unfinished requests leave too little memory.
        """
        adapter, weights = self._read(name, path)
        self._move_into_memory(adapter, weights)
        self._named[name] = adapter
        # The new adapter may have replaced an old adapter with this name. If no request uses the
        # old adapter, free its memory.
        self._remove_unselectable()

    def unload(self, name: str) -> None:
        """Remove an adapter, so that new requests can no longer select it.

        Unfinished requests can use the adapter until they end.

        Raises:
            RequestError: if no adapter has this name.
        """
        if name not in self._named:
            raise RequestError(self._unknown(name))
        del self._named[name]
        self._remove_unselectable()

    def acquire(self, name: str) -> Adapter:
        """Return the adapter that a new request selects by its name.

        If the adapter was removed from memory to make space for others, read it from disk again.

        Raises:
            RequestError: if no adapter has this name, or if the files of the adapter have changed
                or cannot be read.
            CapacityError: if the adapters of unfinished requests leave too little memory.
        """
        adapter = self._named.get(name)
        if adapter is None:
            raise RequestError(self._unknown(name))
        if adapter in self._resident:
            # Move the adapter to the end, because it is now the most recently used adapter.
            self._resident[adapter] = self._resident.pop(adapter)
        else:
            self._move_into_memory(adapter, self._read_again(adapter))
        return adapter

    def check_files(self) -> None:
        """Check that the files of all adapters can still be read, and still fit the model.

        Raises:
            ModelError: if the files of an adapter are missing or broken, or do not fit the model.
        """
        for adapter in self._named.values():
            self._read(adapter.name, adapter.path)

    def _read_again(self, adapter: Adapter) -> AdapterWeights:
        """Read the weights of an adapter again after the adapter was removed from memory.

        Raises:
            RequestError: if the files of the adapter have changed or cannot be read.
        """
        try:
            current, weights = self._read(adapter.name, adapter.path)
        except ModelError as error:
            raise RequestError(
                f"lora_name: the adapter {adapter.name} cannot be read again: {error}"
            ) from error
        if current.digest != adapter.digest:  # a hash of the adapter's files
            raise RequestError(
                f"lora_name: the files of the adapter {adapter.name} have changed since it was "
                "loaded. Load the adapter again."
            )
        return weights

    def _read(self, name: str, path: str) -> tuple[Adapter, AdapterWeights]:
        return read_adapter(name, path, self._sizes, self._max_bytes, self._like)

    def _move_into_memory(self, adapter: Adapter, weights: AdapterWeights) -> None:
        """Store the matrices of an adapter in memory, on the model's device.

        If necessary, first remove adapters that no request uses.

        Raises:
            ModelError: if the adapter is larger than the memory for all adapters.
            CapacityError: if the adapters of unfinished requests leave too little memory.
        """
        num_bytes = self._layers.num_bytes(weights)
        if num_bytes > self._max_bytes:
            raise ModelError(
                f"the adapter {adapter.name} needs {num_bytes} bytes, but all adapters together "
                f"may have {self._max_bytes} bytes (lora_memory). Raise lora_memory."
            )
        self._free_memory(num_bytes)  # never removes the adapters of unfinished requests
        free_bytes = self._max_bytes - self._resident_bytes
        if num_bytes > free_bytes:
            raise CapacityError(
                f"the adapter {adapter.name} needs {num_bytes} bytes, but the adapters of "
                f"unfinished requests leave only {free_bytes} bytes of {self._max_bytes} "
                "(lora_memory). Try again later, or raise lora_memory."
            )
        self._layers.add(adapter, weights)
        self._resident[adapter] = num_bytes

    def _free_memory(self, num_bytes: int) -> None:
        """Remove adapters from memory until `num_bytes` bytes are free.

        The least recently used adapters are removed first. Adapters of unfinished requests are
        never removed, so fewer bytes may be free afterwards.
        """
        used_adapters = self._in_use()
        removable = [adapter for adapter in self._resident if adapter not in used_adapters]
        for adapter in removable:
            if self._resident_bytes + num_bytes <= self._max_bytes:
                return
            self._remove(adapter)

    def _remove_unselectable(self) -> None:
        """Free the memory of each adapter that no request uses and no new request can select."""
        needed = self._in_use() | set(self._named.values())
        unselectable = [adapter for adapter in self._resident if adapter not in needed]
        for adapter in unselectable:
            self._remove(adapter)

    def _remove(self, adapter: Adapter) -> None:
        del self._resident[adapter]
        self._layers.remove(adapter)

    def _unknown(self, name: str) -> str:
        """Return the error message for a request whose adapter does not exist."""
        known_names = "No adapter is loaded."
        if self._named:
            known_names = f"The loaded adapters are: {', '.join(self._named)}."
        return f"lora_name: no adapter has the name {name!r}. {known_names}"
