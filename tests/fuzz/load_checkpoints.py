"""Loads a checkpoint again and again, as its weights are changed, in a process that may die.

    python load_checkpoints.py FOLDER MEMORY_LIMIT_BYTES

For each line on stdin, one line of JSON: what it came to, how long it took, and the process's most
memory so far.
"""

import json
import resource
import sys
import time

import torch
from nereid_backend.errors import ModelError
from nereid_backend.load_checkpoint import load_checkpoint


def main():
    folder, limit = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for _ in sys.stdin:
        started, refusal, kind = time.monotonic(), None, None
        try:
            load_checkpoint(
                folder,
                dtype="auto",
                device=torch.device("cpu"),
                attention="eager",
                progress=lambda line: None,
            )
        except ModelError as error:
            refusal = str(error)
        except BaseException as error:  # noqa: BLE001 - told to the test
            kind = f"{type(error).__name__}: {error}"
        found = {
            "refusal": refusal,
            "defect": kind,
            "seconds": time.monotonic() - started,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(found), flush=True)  # noqa: T201 - to the test


if __name__ == "__main__":
    main()
