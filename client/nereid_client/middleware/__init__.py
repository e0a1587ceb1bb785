"""What happens to every HTTP request before its route."""
