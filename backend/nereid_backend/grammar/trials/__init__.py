# SPDX-License-Identifier: Apache-2.0
"""Trial compilations of grammars that may be slow. They run in a process that can be killed."""
