"""`nereid doctor` and `nereid config show`: check the configuration, and show the settings."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

import typer

from nereid_client.cli.flag_commands import parse_arguments
from nereid_client.cli.libpython import find_libpython
from nereid_client.cli.output import JsonOption, print_json, print_table
from nereid_client.cli.serve_command import make_plan
from nereid_client.console import CliError
from nereid_client.settings import SCHEMA, VARIABLES
from nereid_client.supervise import startup_checks
from nereid_client.supervise.memory_watch import read_memory

_SECRET_SETTINGS = ("api_key",)
_GIB = 2**30


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check the machine, the settings and the checkpoint for `nereid serve`. Start no server.

    The command accepts the flags of `nereid serve`. If the first argument is the path of a
    checkpoint, the command describes this checkpoint instead. It then accepts the flag --load,
    which loads the checkpoint. The exit code is 1 if a check failed.
    """
    has_checkpoint_path = bool(context.args) and not context.args[0].startswith("-")
    if has_checkpoint_path:
        results = describe_checkpoint(context.args)
    else:
        results = _check_machine_and_flags(context.args)
    _print_results_and_exit(results, as_json=as_json)


def _check_machine_and_flags(flags: list[str]) -> list[dict[str, object]]:
    """Check the machine, and whether `nereid serve` could start with these flags."""
    checks: dict[str, Callable[[], str]] = {
        "Python": _check_python,
        "numpy": _check_numpy,
        "libpython": lambda: str(find_libpython()),
        "C++ compiler": _check_compiler,
        "memory": _check_memory,
        "nereid serve": lambda: _check_serve_flags(flags),
    }
    return [_run_check(name, check) for name, check in checks.items()]


def describe_checkpoint(arguments: list[str]) -> list[dict[str, object]]:
    """Run the backend's program that checks a checkpoint, and return the results.

    The backend runs in a separate process, because the client package must not import the backend.

    Raises: CliError if the process fails.
    """
    startup_checks.check_backend_is_installed()
    command = [sys.executable, "-m", "nereid_backend.tools.describe_checkpoint", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or ["no reason is known"]
        raise CliError(f"the checkpoint cannot be described: {lines[-1]}")
    results: list[dict[str, object]] = json.loads(ended.stdout)
    return results


def _print_results_and_exit(results: list[dict[str, object]], *, as_json: bool) -> NoReturn:
    """Print the results of checks. Exit with code 1 if a check failed, otherwise with code 0."""
    if as_json:
        print_json(results)
    else:
        rows = [
            ["ok" if result["ok"] else "failed", result["check"], result["finding"]]
            for result in results
        ]
        print_table(["", "check", "finding"], rows)
    raise typer.Exit(0 if all(result["ok"] for result in results) else 1)


def show_config(as_json: JsonOption = False) -> None:
    """Show the settings of the frontend, and all other variables NEREID_* of the environment."""
    rows = config_rows(os.environ)
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def config_rows(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return one row for each setting, with the keys variable, value and source.

    The rows of the frontend's settings come first. The value of a secret setting is replaced by
    "***".

    Raises: CliError if a setting of the frontend is wrong.
    """
    settings = startup_checks.check_frontend_settings(environment)
    rows = []
    for name in SCHEMA:
        variable = VARIABLES[name]
        value = str(getattr(settings, name))
        if value and name in _SECRET_SETTINGS:
            value = "***"
        rows.append(_row(variable, value, is_set=bool(environment.get(variable))))
    return rows + _model_rows(environment)


def _model_rows(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return one row for each environment variable NEREID_* that is not a frontend setting.

    These variables configure the models. Unset variables of models have no row, because the
    frontend does not know their default values.
    """
    frontend_variables = set(VARIABLES.values())
    return [
        _row(variable, environment[variable], is_set=True)
        for variable in sorted(environment)
        if variable.startswith("NEREID_") and variable not in frontend_variables
    ]


def _row(variable: str, value: str, *, is_set: bool) -> dict[str, str]:
    source = "environment" if is_set else "default"
    return {"variable": variable, "value": value, "source": source}


def _run_check(name: str, check: Callable[[], str]) -> dict[str, object]:
    """Run a check, and return its result with the keys "check", "ok" and "finding".

    If the check raises CliError, `ok` is False and `finding` is the message of the error.
    """
    try:
        return {"check": name, "ok": True, "finding": check()}
    except CliError as problem:
        return {"check": name, "ok": False, "finding": str(problem)}


def _check_python() -> str:
    startup_checks.check_python_version()
    return sys.version.split()[0]


def _check_numpy() -> str:
    startup_checks.check_embedded_numpy()
    return "older than version 2, as the embedded Triton server requires"


def _check_compiler() -> str:
    compiler = shutil.which("g++")
    return compiler or "g++ is not installed, so attention on this CPU is several times slower"


def _check_memory() -> str:
    memory = read_memory()
    return f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB are available"


def _check_serve_flags(flags: list[str]) -> str:
    """Return a description of the servers that `nereid serve` would start with these flags."""
    plan = make_plan(parse_arguments(["serve", *flags]))
    addresses = ", ".join(f"{name} at {address}" for name, address in plan.endpoints)
    pooling = "".join(f", {model.kind} {model.path}" for model in plan.pooling_models)
    return f"would serve {plan.model}{pooling}. {addresses}. Log: {plan.log_path}"
