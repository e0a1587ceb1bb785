"""The Triton models: the classes that the files model_repository/*/1/model.py instantiate."""
