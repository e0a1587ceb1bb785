"""The environment in which chat templates run: no access to the system, and limits of work."""
