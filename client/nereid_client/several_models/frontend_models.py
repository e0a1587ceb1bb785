"""Creates the settings and the backend of each language model."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nereid_client.grpc_calls import TritonCalls
from nereid_client.language_model.backend import Backend
from nereid_client.language_model.client_backend import ClientBackend
from nereid_client.language_model.triton_backend import TritonBackend
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.request_context import Context, Contexts
from nereid_client.settings import Settings
from nereid_client.several_models.controlled import ControlledBackend
from nereid_client.several_models.model_control import ModelControl
from nereid_client.several_models.model_variables import default_settings
from nereid_client.several_models.models_file import ModelSpec, read_models_file


def create_contexts(
    settings: Settings, metrics: RequestMetrics, make_backend: Callable[[], Backend] | None
) -> Contexts:
    """Create the `Contexts`, which contain the settings and the backend of each language model.

    The file `settings.models_file` describes the models. Without such a file, the frontend has one
    language model. Call this function in a running event loop.

    Args:
        settings: the settings of the frontend.
        metrics: counts the tokens of each client.
        make_backend: creates the backend of the only language model, for example for a test. The
            file is then ignored. None means that the Triton server is the backend.

    Raises: SettingsError if the file of the models is wrong.
    """
    backend: Backend
    if make_backend is not None:
        backend = make_backend()
    elif settings.models_file:
        return _contexts_of_file(settings, metrics)
    else:
        backend = TritonBackend(settings.grpc_url, settings.ensemble)
    return Contexts((Context(settings, ClientBackend(backend, metrics)),))


def _contexts_of_file(settings: Settings, metrics: RequestMetrics) -> Contexts:
    """Return the contexts of the language models that the file `settings.models_file` describes."""
    models = read_models_file(Path(settings.models_file), default_settings(os.environ))
    calls = TritonCalls(settings.grpc_url)
    control = ModelControl(models.specs, calls, models.memory_budget)
    llms = [spec for spec in models.specs if spec.kind == "llm"]
    contexts = [_context(settings, metrics, spec, control) for spec in llms]
    return Contexts(tuple(contexts), control)


def _context(
    settings: Settings, metrics: RequestMetrics, spec: ModelSpec, control: ModelControl
) -> Context:
    """Return the context of one language model."""
    steps = spec.steps
    backend = TritonBackend(
        settings.grpc_url, spec.triton_name, steps["tokenizer"], steps["executor"]
    )
    controlled = ControlledBackend(backend, spec.triton_name, control)
    own_settings = replace(settings, served_model_name=spec.name, ensemble=spec.triton_name)
    return Context(own_settings, ClientBackend(controlled, metrics), spec.entry.aliases)
