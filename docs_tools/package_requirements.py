"""A hook of hatchling that writes the requirements of the distribution `nereid`."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PACKAGES = ("nereid-parsers", "nereid-backend", "nereid-client")
# The stub of the embedded Triton server was built for numpy 1 and misreads the arrays of numpy 2.
_EMBEDDED_SERVER = "numpy<2"


class PackageRequirements(MetadataHookInterface):
    """Require the three packages in the version of `nereid`, because they are released together."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `dependencies`, for example ["nereid-parsers==0.2.0", ..., "numpy<2"]."""
        packages = [f"{name}=={metadata['version']}" for name in _PACKAGES]
        metadata["dependencies"] = [*packages, _EMBEDDED_SERVER]
