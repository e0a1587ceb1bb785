"""The environment for chat templates. It prevents access to the system, and limits the work."""
