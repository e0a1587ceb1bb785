# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`; all of it is in nereid_backend.serving.postprocessor."""

from nereid_backend.serving.postprocessor import PostprocessorModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
