# SPDX-License-Identifier: Apache-2.0
"""Child processes of a Triton model: start, messages, hang detection, end."""
