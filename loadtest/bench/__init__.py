"""Benchmarks of the engine, the parsers and the server."""
