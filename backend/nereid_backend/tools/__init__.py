# SPDX-License-Identifier: Apache-2.0
"""Command-line programs that convert and describe checkpoints."""
