"""The declarations of all named formats. The module registry.py finds a format by its name."""
