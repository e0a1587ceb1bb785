# SPDX-License-Identifier: Apache-2.0
"""Computation of token vectors, pooled vectors and scores for batches of prepared inputs."""
