"""The LoRA adapters of the language model.

A request selects an adapter by its name in the field `model`.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar

current_adapter: ContextVar[str] = ContextVar("current_adapter", default="")
"""The name of the adapter that the current request selects, or "" if it selects no adapter."""

ChangeAdapters = Callable[[Mapping[str, str]], Awaitable[list[str]]]
"""A function that sends parameters to the server and returns the names of all adapters.

`Backend.change_adapters` describes the parameters.
"""


class Adapters:
    """Lists, loads and unloads the adapters on the server."""

    def __init__(self, change: ChangeAdapters) -> None:
        """Store `change`, the function that lists, loads and unloads adapters on the server."""
        self._change = change
        # The names of the adapters in the server's last answer. Other clients may have loaded more
        # adapters since that answer.
        self._names: list[str] = []

    async def names(self) -> list[str]:
        """Return the names of all adapters.

        Raises: BackendError.
        """
        return await self._update({"list_loras": "true"})

    async def load(self, name: str, path: str) -> None:
        """Load an adapter. An adapter that already has this name is replaced.

        Args:
            name: the name with which requests select the adapter.
            path: the adapter's folder on the server.

        Raises: BackendError if the folder is not a suitable adapter.
        """
        await self._update({"load_lora": name, "lora_path": path})

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests that already use the adapter are not interrupted.

        Raises: BackendError if no adapter has this name.
        """
        await self._update({"unload_lora": name})

    async def reload_weights(self, path: str, running_requests: str) -> None:
        """Replace the weights of the language model, and load the adapters again.

        Args:
            path: the folder of the new checkpoint on the server. "" selects the present folder.
            running_requests: "finish" or "refuse", as described in `ReloadRequest`.

        Raises: BackendError if the checkpoint is not suitable.
        """
        await self._update({"reload_weights": path, "running_requests": running_requests})

    async def has(self, name: str) -> bool:
        """Return whether the server has the adapter `name`.

        Raises: BackendError.
        """
        # If the name is unknown, query the server, because the adapter may have been loaded since
        # the last query.
        return name in self._names or name in await self.names()

    async def _update(self, parameters: Mapping[str, str]) -> list[str]:
        self._names = await self._change(parameters)
        return self._names
