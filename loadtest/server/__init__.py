"""A server for tests, its processes and its metrics."""
