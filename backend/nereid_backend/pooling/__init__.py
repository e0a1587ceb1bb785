# SPDX-License-Identifier: Apache-2.0
"""Embedding models, rerankers and classifiers, which need no KV cache and no sampling."""
