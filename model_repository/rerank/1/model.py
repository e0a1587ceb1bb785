# SPDX-License-Identifier: Apache-2.0
"""The Triton model `rerank`. Its code is in the package nereid_backend.serving.pooling."""

from nereid_backend.serving.pooling.rerank_model import RerankModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
