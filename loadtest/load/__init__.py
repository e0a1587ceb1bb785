"""Load tests: users, scenarios, checks and reports."""
