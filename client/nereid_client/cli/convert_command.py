"""`nereid convert`: copy a checkpoint with its weights in another data type."""

import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nereid_client.supervise.startup_checks import check_backend_is_installed


class _Dtype(StrEnum):
    """The data types of the new weights."""

    INT4 = "int4"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def convert(
    source: Annotated[Path, typer.Argument(help="The folder of a checkpoint, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="The new folder.")],
    dtype: Annotated[_Dtype, typer.Argument(help="The data type of the new weights.")],
) -> None:
    """Copy a checkpoint, and convert its weights to int4, int8, bfloat16 or float32."""
    # The conversion runs in a separate process, because the client package must not import the
    # backend package.
    check_backend_is_installed()
    module = "nereid_backend.tools.convert_checkpoint"
    command = [sys.executable, "-m", module, str(source), str(target), dtype.value]
    process = subprocess.run(command, check=False, preexec_fn=_ignore_ctrl_c)
    raise typer.Exit(process.returncode)


def _ignore_ctrl_c() -> None:
    """Ignore SIGINT in the process that converts, so that Ctrl-C prints no traceback.

    The terminal also sends SIGINT to the process of `nereid convert`, in which `subprocess.run`
    then kills the process of the conversion.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
