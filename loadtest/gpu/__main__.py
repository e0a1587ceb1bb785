"""Check and measure Nereid on a GPU, in four calls that need no network and no installation.

    python -m loadtest.gpu checks       # at most 6 minutes: are all kernels right, does it run?
    python -m loadtest.gpu model        # at most 8 minutes: an 8B model, and where its time goes
    python -m loadtest.gpu compiled     # at most 8 minutes: compiled forward pass, mixed arrivals
    python -m loadtest.gpu attention    # at most 6 minutes: attention alone, and its tile sizes
    python -m loadtest.gpu checks --rehearse   # the same parts on a CPU at tiny sizes

`make bench-gpu CALL=checks` runs a call from a bare checkout. PYTHON selects the interpreter, and
WHEELS names a folder of wheels with packages that the interpreter lacks. The kernels need torch,
triton and numpy. The engine also needs transformers and pydantic. If a package is missing or too
old, its name is printed before anything runs, and the parts that need the package are left out.

Each part is a process with a time limit. After every part, the results so far are written to
OUT/CALL.json and OUT/CALL.md. The exit code is 1 if a part failed or a kernel is wrong, and 2 if
nothing could run. The figures of a rehearsal mean nothing.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.command_line import Option, parse_command_line
from loadtest.gpu.calls import calls
from loadtest.gpu.environment import (
    KERNEL_PACKAGES,
    ROOT,
    engine_packages,
    problems,
    unpack_wheels,
)
from loadtest.gpu.run_parts import Results, run_call

OPTIONS = {
    "call": Option(None, "the call", choices=calls()),
    "--rehearse": Option(False, "run on a CPU at tiny sizes"),
    "--out": Option(ROOT / "loadtest" / "results", "folder for the results"),
    "--wheels": Option(
        os.environ.get("WHEELS") or None,
        "folder with wheels of packages that are missing (default: the variable WHEELS)",
    ),
}


def main() -> int:
    """Check the packages, run the parts of a call, and print the most important results first."""
    args = parse_command_line(__doc__, OPTIONS)
    with tempfile.TemporaryDirectory(prefix="nereid-gpu-") as folder:
        site = Path(folder) / "site"
        if args.wheels is not None:
            names = unpack_wheels(Path(args.wheels), site)
            print(f"Unpacked {len(names)} wheels from {args.wheels}.", flush=True)
        if kernel_problems := problems(KERNEL_PACKAGES):
            print("\n".join(kernel_problems), flush=True)
            return 2
        # If packages of the engine are missing, only the parts that test the kernels run.
        engine_problems = problems(engine_packages())
        for problem in engine_problems:
            print(f"{problem} Put its wheel into a folder, and set WHEELS to it.", flush=True)
        environment = child_environment(site, rehearse=args.rehearse)
        if not args.rehearse and not has_gpu(environment):
            print("torch found no CUDA device. Use --rehearse to run on a CPU.", flush=True)
            return 2
        results = Results(args.call, args.out, is_rehearsal=args.rehearse, left_out=engine_problems)
        run_call(calls()[args.call], results, environment, can_run_engine=not engine_problems)
    print(results.markdown(), flush=True)
    print(f"The results are in {args.out}.", flush=True)
    return 1 if results.has_failed else 0


def child_environment(site: Path, *, rehearse: bool) -> dict[str, str]:
    """Return the environment variables for the processes that run the parts of a call.

    Args:
        site: the folder of unpacked wheels.
        rehearse: whether the kernels run in the interpreter of the Triton language.
    """
    paths = [site, ROOT, ROOT / "parsers", ROOT / "backend"]
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if rehearse:
        environment |= {"TRITON_INTERPRET": "1", "NEREID_REHEARSE": "1", "OMP_NUM_THREADS": "1"}
    return environment


def has_gpu(environment: dict[str, str]) -> bool:
    """Return whether torch finds a GPU. A separate process runs torch, and then frees the GPU."""
    program = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    # SystemExit runs the code that kills the running parts. The default action would not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
