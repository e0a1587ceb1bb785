# SPDX-License-Identifier: Apache-2.0
"""Lets a build of torchvision for CUDA work together with a build of torch without CUDA.

The build of torchvision contains operators that are linked with CUDA libraries. Without these
libraries the operators are missing, and `import torchvision` fails, because two of them get a
second implementation at import. Image processors use none of these operators.
"""

from importlib.util import find_spec
from typing import Any

# The operators with a second implementation. Both take the same arguments and return the same type.
_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# torch removes the declared operators when the Library object is deleted, so the object is kept in
# this list.
_libraries: list[object] = []


def declare_operators() -> None:
    """Declare the operators without which `import torchvision` fails.

    The declared operators have no implementation, so calls of these operators fail. Do nothing if
    torchvision is not installed, if torch has CUDA, or if an earlier call has declared the
    operators. Call this function before the first import of torchvision.
    """
    if _libraries or find_spec("torchvision") is None:
        return
    # This import is slow, and is not needed without torchvision.
    import torch

    if torch.version.cuda is not None:
        return  # torch has the CUDA libraries, so torchvision can load its own operators.
    # torch has no type annotations for the constructor.
    library_class: Any = torch.library.Library
    # A fragment adds operators to the namespace `torchvision`, which torchvision itself creates.
    library = library_class("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}{_SIGNATURE}")
    _libraries.append(library)
