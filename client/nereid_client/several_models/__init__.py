"""One frontend and one Triton server for several language models, embedding models and rerankers.

    models_file.py       reads models.toml, which describes the models
    model_variables.py   reads the default settings of models from environment variables
    repository.py        writes a Triton model repository with all models
    model_control.py     loads and unloads models while the server runs
    model_state.py       the state of one model that is loaded and unloaded
    controlled.py        loads a model before a request is sent to the model
    frontend_models.py   creates the backend of each language model

`nereid serve --config models.toml` uses this package.
"""
