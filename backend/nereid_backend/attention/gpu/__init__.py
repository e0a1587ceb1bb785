# SPDX-License-Identifier: Apache-2.0
"""Paged attention on NVIDIA GPUs, in kernels that are written in the Triton language."""
