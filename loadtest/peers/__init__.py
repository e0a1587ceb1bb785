"""Programs that run the same workload on different engines."""
