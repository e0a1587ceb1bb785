# SPDX-License-Identifier: Apache-2.0
"""The Triton model `embedding`. Its code is in the package nereid_backend.serving.pooling."""

from nereid_backend.serving.pooling.embedding_model import EmbeddingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
