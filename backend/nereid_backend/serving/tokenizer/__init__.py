# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tokenizer`. It converts a request to token ids and sampling parameters."""
