# SPDX-License-Identifier: Apache-2.0
"""Loads a model for the engine, chooses its forward path, and determines its memory limits."""
