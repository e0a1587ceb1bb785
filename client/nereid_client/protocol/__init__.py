"""Wire types of the OpenAI API, and nothing else."""
