# SPDX-License-Identifier: Apache-2.0
"""Paged attention in C++ kernels for CPUs."""
