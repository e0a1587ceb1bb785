"""The declarations of all formats that have names. registry.py finds a declaration by its name."""
