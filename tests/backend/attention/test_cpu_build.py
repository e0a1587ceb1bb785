import shutil

import pytest
from nereid_backend.attention.cpu.cpu_build import load_library


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler")
def test_the_kernels_are_built_if_there_is_a_compiler():
    # Everything that needs them is skipped where they can't be built.
    assert load_library().nereid_has_linear() in (0, 1)
