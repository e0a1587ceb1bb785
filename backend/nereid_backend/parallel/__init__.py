# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a model is divided among several GPUs. Each GPU has its own process."""
