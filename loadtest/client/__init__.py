"""Clients that load tests and benchmarks share."""
