# SPDX-License-Identifier: Apache-2.0
"""Measures and plans the memory for weights, for a forward pass and for the KV cache."""
