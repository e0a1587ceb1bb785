import subprocess
import sys

PROGRAM = """
import resource
from nereid_backend.process_limits import limit_child
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
limit_child(2**33, timeout_s=100.0)
print(*resource.getrlimit(resource.RLIMIT_AS), *resource.getrlimit(resource.RLIMIT_CPU))
"""


def test_a_lower_limit_that_is_already_set_stays():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == [str(2**31)] * 2 + ["5"] * 2
