# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tokenizer`; everything it does is in nereid_backend.serving.tokenizer."""

from nereid_backend.serving.tokenizer import TokenizerModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
