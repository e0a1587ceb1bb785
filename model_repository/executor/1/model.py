# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`; everything it does is in nereid_backend.serving.executor."""

from nereid_backend.serving.executor import ExecutorModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
