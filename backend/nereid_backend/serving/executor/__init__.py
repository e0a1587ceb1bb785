# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`, and the engine process to which it sends requests."""
