# SPDX-License-Identifier: Apache-2.0
"""From settings to a model that is ready to run: choice of path, self-check, memory limits."""
