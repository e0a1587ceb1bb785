# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`. Its code is in nereid_backend.serving.postprocessor."""

from nereid_backend.serving.postprocessor.postprocessor_model import (
    PostprocessorModel as TritonPythonModel,
)

__all__ = ["TritonPythonModel"]
