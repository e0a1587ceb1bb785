# SPDX-License-Identifier: Apache-2.0
"""The Triton models `embedding` and `rerank`, and the worker process that runs their models."""
