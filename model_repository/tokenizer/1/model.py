# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tokenizer`. Its code is in the package nereid_backend.serving.tokenizer."""

from nereid_backend.serving.tokenizer.tokenizer_model import TokenizerModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
