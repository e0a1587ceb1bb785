"""Several language models, embedding models and rerankers behind one frontend and one server.

    models_file.py       reads models.toml, which describes the models
    repository.py        writes a Triton model repository with all models
    model_control.py     loads and unloads models while the server runs
    controlled.py        backends that load their model before a request
    frontend_models.py   creates the backend of each language model

`nereid serve --config models.toml` uses this package.
"""
