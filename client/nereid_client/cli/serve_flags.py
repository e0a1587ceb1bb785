"""The flags of `nereid serve`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from nereid_client.settings import SCHEMA, VARIABLES, NumBytes
from nereid_client.supervise import pooling_models

_Number = TypeVar("_Number", int, float)

# A JSON file that maps each environment variable of the language model to its description. `make
# settings` writes this file, because this package must not import the backend, which declares the
# settings.
_ENGINE_SETTINGS = Path(__file__).with_name("engine_settings.json")
# Maps each flag of the language model to the placeholder that --help shows for its value. The
# backend checks the values of these flags.
ENGINE_FLAGS = {
    "--max-model-len": "N",
    "--kv-cache-memory": "SIZE",
    "--dtype": "NAME",
    "--reasoning-parser": "NAME",
    "--tool-parser": "NAME",
    "--max-num-seqs": "N",
    "--max-num-batched-tokens": "N",
    "--tensor-parallel-size": "N",
    "--data-parallel-size": "N",
    "--draft-model": "PATH",
}
# Maps each flag of the frontend to its setting, and to the placeholder for its value in the text of
# --help. The flag --host is not in this table, because it also sets the address of the Triton
# server.
FRONTEND_FLAGS = {
    "--openai-port": ("port", "N"),
    "--frontend-workers": ("frontend_workers", "N"),
    "--max-concurrent-requests": ("max_concurrent_requests", "N"),
    "--request-timeout": ("request_timeout_s", "S"),
    "--unread-timeout": ("unread_timeout_s", "S"),
    "--log-level": ("log_level", "LEVEL"),
}
# A smaller --max-process-memory would let every process be killed again and again.
_SMALLEST_PROCESS_MEMORY = 64 * 2**20
# The largest number that a flag accepts. If a timeout exceeds about 9.2 * 10**9 seconds, Python
# raises an OverflowError.
_LARGEST_NUMBER = 10**9
PORT_FLAGS = {
    "--http-port": (8000, "The port of the Triton server's HTTP endpoint."),
    "--grpc-port": (8001, "The port of the Triton server's gRPC endpoint."),
    "--metrics-port": (8002, "The port of the Triton server's metrics."),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `nereid serve` to an argument parser."""
    _add_model_flags(parser.add_argument_group("language model"))
    pooling_models.add_flags(parser.add_argument_group("embedding model and reranker"))
    _add_endpoint_flags(parser.add_argument_group("endpoints"))
    _add_process_flags(parser.add_argument_group("processes and logs"))


def _add_model_flags(model: "argparse._ArgumentGroup") -> None:
    """Add the flags that describe the language model, such as --model and --max-model-len.

    The descriptions of the engine's flags come from the schema of the backend's settings.
    """
    model.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="The folder of a Hugging Face checkpoint, or a GGUF file. The default is the "
        "demo model beside the model repository. [NEREID_MODEL]",
    )
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="A TOML file that describes several models, instead of --model. [NEREID_MODELS_FILE]",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="The name of the model in the API. The default is the name of the folder. "
        "[NEREID_SERVED_MODEL_NAME]",
    )
    model.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="A LoRA adapter, which requests select with the model NAME. The flag can be repeated. "
        "[NEREID_LORA_ADAPTERS]",
    )
    engine_settings = json.loads(_ENGINE_SETTINGS.read_text(encoding="utf-8"))
    for flag, metavar in ENGINE_FLAGS.items():
        variable = engine_variable(flag)
        model.add_argument(flag, metavar=metavar, help=f"{engine_settings[variable]} [{variable}]")


def _add_endpoint_flags(endpoints: "argparse._ArgumentGroup") -> None:
    """Add the flags for the addresses, the ports and the frontend's settings."""
    endpoints.add_argument(
        "--host",
        help="The address on which all servers listen. The default is 127.0.0.1. The variable "
        "changes the address of the OpenAI frontend only. [NEREID_OPENAI_HOST]",
    )
    for flag, (port, text) in PORT_FLAGS.items():
        endpoints.add_argument(
            flag, type=int, default=port, metavar="N", help=f"{text} The default is {port}."
        )
    for flag, (name, metavar) in FRONTEND_FLAGS.items():
        setting = SCHEMA[name]
        endpoints.add_argument(
            flag,
            metavar=metavar,
            help=f"{setting['description']} The default is {setting['default']}. "
            f"[{VARIABLES[name]}]",
        )


def _add_process_flags(server: "argparse._ArgumentGroup") -> None:
    server.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="The folder with the Triton models. The default is the folder model_repository in the "
        "current folder, else the one in Nereid's checkout or in the installed package.",
    )
    server.add_argument(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="The Triton server program. The default is the one that `nereid install-server` "
        "installed, else the one in PATH.",
    )
    server.add_argument(
        "--max-restarts",
        type=_not_negative(int),
        default=5,
        metavar="N",
        help="The maximum number of restarts in a row of a process that ended. 0 means no restart. "
        "The default is %(default)s.",
    )
    server.add_argument(
        "--restart-backoff",
        type=_not_negative(float),
        default=1.0,
        metavar="S",
        help="The number of seconds before the second restart in a row. It doubles for each "
        "further restart. The default is %(default)s.",
    )
    server.add_argument(
        "--hang-timeout",
        type=_not_negative(float),
        default=300.0,
        metavar="S",
        help="If a model does not answer a small request for this many seconds while requests are "
        "running, the Triton server is restarted. 0 means never. The default is %(default)s.",
    )
    server.add_argument(
        "--max-process-memory",
        type=_process_memory,
        default=0,
        metavar="SIZE",
        help="The largest memory of one process, such as 8GiB. A process that exceeds it for five "
        "seconds is restarted. The largest process is also restarted when the memory of the "
        "machine or the container is nearly exhausted. The default is 80 %% of the memory.",
    )
    server.add_argument(
        "--drain-timeout",
        type=_not_negative(float),
        default=30.0,
        metavar="S",
        help="The number of seconds that running requests have to finish after SIGTERM. The "
        "default is %(default)s.",
    )
    server.add_argument(
        "--log-file",
        type=Path,
        metavar="PATH",
        help="The file for the log of all servers. - is the standard output. The default is "
        "~/.local/state/nereid/serve-PORT.log. The log of the earlier server is renamed to "
        "PATH.old.",
    )
    server.add_argument("tritonserver_args", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)


def engine_variable(flag: str) -> str:
    """Return the environment variable that corresponds to a flag of the language model.

    Example: "--dtype" returns "NEREID_DTYPE".
    """
    return f"NEREID_{attribute(flag)}".upper()


def attribute(flag: str) -> str:
    """Return the name of the attribute in which argparse stores the value of a flag.

    Example: "--max-restarts" returns "max_restarts".
    """
    return flag.removeprefix("--").replace("-", "_")


def _size(text: str) -> int:
    """Convert text such as "8GiB" to a number of bytes."""
    try:
        return int(TypeAdapter(NumBytes).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes, such as 65536 or 8GiB, but it is {text!r}"
        ) from None


def _process_memory(text: str) -> int:
    """Convert the memory limit of a process to bytes. Reject a limit that every process exceeds."""
    size = _size(text)
    if 0 < size < _SMALLEST_PROCESS_MEMORY:
        raise argparse.ArgumentTypeError(
            f"must be at least 64MiB, such as 8GiB, because each process needs more, but it is "
            f"{text!r}"
        )
    return size


def _not_negative(kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """Return a function that parses the number in a flag.

    The function rejects negative numbers, and numbers that are larger than `_LARGEST_NUMBER`.
    """

    def parse(text: str) -> _Number:
        number = kind(text)
        if not 0 <= number <= _LARGEST_NUMBER:
            raise argparse.ArgumentTypeError(
                f"the number must be at least 0 and at most {_LARGEST_NUMBER}, but it is {text}"
            )
        return number

    parse.__name__ = "number"  # the error message of argparse then says "invalid number value"
    return parse
