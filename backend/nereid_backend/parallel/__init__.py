# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: one model is divided over several GPUs, with one process for each GPU."""
