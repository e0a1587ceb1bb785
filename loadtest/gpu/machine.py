"""Print the facts about the machine that explain the other results."""

import shutil
import subprocess

import torch

from loadtest.gpu.environment import ROOT, all_versions
from loadtest.gpu.lines import Rank, emit

_SHOWN = ("torch", "triton", "numpy", "transformers")


def main() -> None:
    """Print the GPU, its driver, the free disk and the versions of all packages."""
    versions = all_versions()
    shown = ", ".join(f"{name} {versions.get(name, 'missing')}" for name in _SHOWN)
    emit(Rank.DETAIL, shown, versions=versions)
    disk = shutil.disk_usage(ROOT)
    emit(Rank.DETAIL, f"{disk.free / 1e9:.0f} GB of disk are free", disk_free=disk.free)
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        emit(
            Rank.DETAIL,
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{facts.multi_processor_count} multiprocessors, {facts.total_memory / 1e9:.0f} GB, "
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        )
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,clocks.sm,clocks.max.sm,memory.used"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        emit(Rank.DETAIL, f"{fields}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
