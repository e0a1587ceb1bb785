# SPDX-License-Identifier: Apache-2.0
"""Makes torchvision usable if it was built with CUDA, but torch was built without CUDA.

The build of torchvision contains operators that are linked with CUDA libraries. Without these
libraries, the operators are missing. `import torchvision` adds a second implementation to two of
the operators, and therefore fails if the operators are missing. Image processors use none of these
operators.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

# The two operators to which `import torchvision` adds a second implementation. Both operators have
# the signature `_SIGNATURE`.
_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_operators() -> object:
    """Declare the operators `nms` and `qnms`, so that `import torchvision` succeeds without CUDA.

    The usual build of torchvision is linked with CUDA libraries. If they are missing, torchvision
    cannot load its own operators, and its import fails at these two operators. The declared
    operators have no implementation, so a call of such an operator fails.

    Do nothing if torchvision is not installed, if torch has CUDA, or if this function was called
    before. Call this function before the first import of torchvision.

    Callers ignore the result, the Library object of torch. torch removes the operators when this
    object is deleted, so `cache` stores the object.
    """
    if find_spec("torchvision") is None:
        return None
    # Import torch only if torchvision is installed, because the import is slow.
    import torch

    if torch.version.cuda is not None:
        return None  # torch has the CUDA libraries, so torchvision can load its own operators.
    # torchvision itself creates the namespace `torchvision`. A library of the type FRAGMENT adds
    # operators to a namespace that another library creates.
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}{_SIGNATURE}")
    return library
