"""Models that the benchmarks create from the demo models."""
