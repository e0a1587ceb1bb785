"""Fake servers, models and backends that several tests use."""
