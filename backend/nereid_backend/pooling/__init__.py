# SPDX-License-Identifier: Apache-2.0
"""Embedding models and rerankers: prefill only, packed by tokens, no KV cache and no sampling."""
