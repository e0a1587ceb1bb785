"""Programs that run the same workload on other engines."""
