# SPDX-License-Identifier: Apache-2.0
"""Starts, supervises and stops the child process of a Triton model."""
