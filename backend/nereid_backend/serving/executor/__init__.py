# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`, which sends requests to the engine process, and that process."""
