# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`, and the engine process that runs the model.

`executor` sends requests to the engine process.
"""
