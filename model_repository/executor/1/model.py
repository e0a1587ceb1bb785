# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`. Its code is in the package nereid_backend.serving.executor."""

from nereid_backend.serving.executor.executor_model import ExecutorModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
