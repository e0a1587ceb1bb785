# SPDX-License-Identifier: Apache-2.0
"""The class `Adapter`, which identifies a LoRA adapter by its name, folder and content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter that was loaded from disk.

    If the files of an adapter change and a client loads the adapter again, a new object is created.

    Attributes:
        name: the name with which requests select the adapter.
        path: the absolute path of the adapter's folder.
        digest: a hash of the adapter's files. Two requests share cached blocks only if the digests
            of their adapters are equal.
    """

    name: str
    path: str
    digest: bytes
