"""Simulations of the scheduler and the prefix cache. They need neither a model nor a server."""
