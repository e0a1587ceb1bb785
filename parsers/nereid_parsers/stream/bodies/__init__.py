"""Readers of the bodies of tool calls: JSON, calls in Python syntax, and tags."""
