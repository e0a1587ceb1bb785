# SPDX-License-Identifier: Apache-2.0
"""Paged attention on NVIDIA GPUs with kernels in the Triton language."""
