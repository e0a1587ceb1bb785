# SPDX-License-Identifier: Apache-2.0
"""Lets a build of torchvision for CUDA work together with a build of torch without CUDA.

The build of torchvision contains operators that are linked with CUDA libraries. Without these
libraries the operators are missing, and `import torchvision` fails, because two of them get a
second implementation at import. Image processors use none of these operators.
"""

from importlib.util import find_spec
from typing import Any

_OPERATORS = ("nms", "qnms")
# torch removes the declared operators when the Library object is deleted, so the object is kept in
# this list.
_libraries: list[object] = []


def declare_operators() -> None:
    """Declare the operators without which `import torchvision` fails, if torchvision lacks them."""
    if _libraries or find_spec("torchvision") is None:
        return
    import torch

    if torch.version.cuda is not None:
        return
    make_library: Any = torch.library.Library
    library = make_library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
