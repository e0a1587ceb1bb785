"""Load a checkpoint once for each line on stdin, in a process with limited memory.

    python load_checkpoints.py FOLDER MEMORY_LIMIT_BYTES

The test changes the weights before each line. The program prints one line of JSON for each load:
the refusal (the text of a ModelError), the defect (any other error), the duration, and the peak
memory of the process so far.
"""

import json
import resource
import sys
import time

import torch
from nereid_backend.errors import ModelError
from nereid_backend.load_checkpoint import load_checkpoint


def main():
    folder, memory_limit = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    for _ in sys.stdin:
        started, refusal, defect = time.monotonic(), None, None
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
        except BaseException as error:  # noqa: BLE001 - each error is reported to the test
            defect = f"{type(error).__name__}: {error}"
        outcome = {
            "refusal": refusal,
            "defect": defect,
            "seconds": time.monotonic() - started,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(outcome), flush=True)  # noqa: T201 - the test reads this line


if __name__ == "__main__":
    main()
