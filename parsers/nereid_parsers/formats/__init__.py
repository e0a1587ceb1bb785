"""Declarations of the formats that have names. registry.py finds them by name."""
