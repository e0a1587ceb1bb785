# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of x86-64 processors for which the CPU kernels are compiled.

A library of kernels is compiled for one instruction set. The library works on every processor that
supports this instruction set. When the kernels are loaded, the best instruction set that the
processor supports is chosen. For tests and comparisons, the environment variable
NEREID_CPU_INSTRUCTIONS selects another supported instruction set.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

# The environment variable that selects the instruction set of the kernels.
CPU_INSTRUCTIONS = "NEREID_CPU_INSTRUCTIONS"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set for which the kernels are compiled.

    Attributes:
        name: the value of the environment variable NEREID_CPU_INSTRUCTIONS that selects this
            instruction set.
        features: the features that a processor must have. The names are those in the line `flags`
            of /proc/cpuinfo. Empty means that any processor is accepted.
    """

    name: str
    features: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags. Example: the feature avx512_vnni gives the flag -mavx512vnni."""
        if not self.features:
            return ("-march=native",)
        return tuple(f"-m{_flag_name(feature)}" for feature in self.features)


# The instruction sets, from the fastest to the slowest. The last instruction set, `native`, works
# on every processor, but has no kernels for linear layers. Its library is portable C++ that the
# compiler optimises for the processor of this machine.
INSTRUCTION_SETS = (
    InstructionSet("amx", (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8")),
    InstructionSet("avx512_bf16", _AVX512_BF16),
    InstructionSet("avx512_vnni", (*_AVX512, "avx512_vnni")),
    InstructionSet("avx512", _AVX512),
    InstructionSet("avx2_vnni", (*_AVX2, "avx_vnni")),
    InstructionSet("avx2", _AVX2),
    InstructionSet("native", ()),
)


def _flag_name(feature: str) -> str:
    """Return the compiler's name of a feature.

    Examples: the feature avx512_vnni is called avx512vnni, and amx_int8 is called amx-int8.
    """
    return feature.replace("_", "-" if feature.startswith("amx") else "")


def supported_instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets that this processor supports, the fastest first."""
    features = set(re.findall(r"\S+", _cpu_flags()))
    return [
        instruction_set
        for instruction_set in INSTRUCTION_SETS
        if features.issuperset(instruction_set.features)
    ]


def usable_instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets that may be used, the fastest first.

    If the environment variable NEREID_CPU_INSTRUCTIONS is set, the list contains only the
    instruction set of this name.

    Raises:
        ValueError: if the processor does not support the instruction set of the variable.
    """
    supported = supported_instruction_sets()
    name = os.environ.get(CPU_INSTRUCTIONS, "").strip()
    if not name:
        return supported
    chosen = [instruction_set for instruction_set in supported if instruction_set.name == name]
    if not chosen:
        names = ", ".join(instruction_set.name for instruction_set in supported)
        raise ValueError(f"{CPU_INSTRUCTIONS} is {name}, but this processor supports only {names}")
    return chosen


def _cpu_flags() -> str:
    """Return the names of the processor's features; "" if the features are unknown."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    line = re.search(r"^flags\s*:(.*)$", text, re.M)
    return line[1] if line else ""
