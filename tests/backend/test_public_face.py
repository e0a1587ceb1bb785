import subprocess
import sys

import nereid_backend


def test_every_public_name_exists():
    for name in nereid_backend.__all__:
        assert getattr(nereid_backend, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(nereid_backend, "Engines")


def test_importing_the_package_does_not_load_torch():
    code = "import sys, nereid_backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
