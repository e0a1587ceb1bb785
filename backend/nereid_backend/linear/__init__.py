# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs: packed weights, merged layers, 8-bit weights and C++ kernels."""
