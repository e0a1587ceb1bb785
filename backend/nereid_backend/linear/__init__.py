# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs: packed weights, merged layers, int8 weights and a kernel in C++."""
