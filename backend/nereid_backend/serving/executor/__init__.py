# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`, and the engine process.

`executor` sends requests to this process.
"""
