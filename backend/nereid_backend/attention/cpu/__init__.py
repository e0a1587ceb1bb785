# SPDX-License-Identifier: Apache-2.0
"""Paged attention on CPUs with native kernels."""
