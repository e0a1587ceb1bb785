# SPDX-License-Identifier: Apache-2.0
"""Attention libraries that can replace the project's own GPU kernels in some situations."""
