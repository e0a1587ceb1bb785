"""Benchmarks, load tests and fault tests of Nereid."""
