# SPDX-License-Identifier: Apache-2.0
"""The Triton models `embedding` and `rerank`: a stub each, and a worker process that has torch."""
