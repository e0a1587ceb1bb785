"""OpenAI-compatible frontend and command line of Nereid."""
