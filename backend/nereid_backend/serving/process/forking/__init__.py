# SPDX-License-Identifier: Apache-2.0
"""Creates child processes by forking one process that has already imported torch."""
