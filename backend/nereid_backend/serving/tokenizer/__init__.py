# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tokenizer`, which turns a request into token ids and sampling parameters."""
