# SPDX-License-Identifier: Apache-2.0
"""Programs of the command line that work on checkpoints."""
