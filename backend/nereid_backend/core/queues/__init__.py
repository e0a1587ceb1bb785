# SPDX-License-Identifier: Apache-2.0
"""The queues of waiting requests, and the order in which sequences are scheduled."""
