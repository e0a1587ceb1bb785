"""A trial server in which the source of a grammar determines the outcome of its trial.

Usage: `python scripted_trials.py FD TIMEOUT_S`. FD is the file descriptor of the connection, and
TIMEOUT_S is the time limit of a trial in seconds.
"""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from nereid_backend.errors import RequestError
from nereid_backend.grammar.trials.trial_process import TrialServer


def compile_scripted(kind, source):
    """Sleep, use memory, crash or raise an error, depending on the source of a grammar."""
    if source == "slow":
        time.sleep(60)
    elif source == "memory":
        bytearray(4 * 2**30)
    elif source == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif source == "wrong":
        raise RequestError("ebnf: the grammar is not valid")


if __name__ == "__main__":
    TrialServer(Connection(int(sys.argv[1])), compile_scripted, float(sys.argv[2])).serve()
