"""A sandbox in which chat templates run. It limits the time and the output of a template."""
