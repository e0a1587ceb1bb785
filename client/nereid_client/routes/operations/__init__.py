"""The routes for operators: health, metrics, aborted requests, caches, and loaded models."""
