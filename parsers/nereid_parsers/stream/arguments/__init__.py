"""Readers of the bodies of tool calls: JSON, Python literals, tags, and their argument types."""
