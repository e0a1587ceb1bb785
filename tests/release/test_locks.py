"""Tests of the lock files (all requirements, with hashes) and of the bills of materials."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
VARIANTS = ("cpu", "cuda")


def pins(variant):
    """Return the requirements of a lock file: name -> (requirement, number of hashes)."""
    text = (LOCKS / f"{variant}.txt").read_text().replace("\\\n", " ")
    lines = [line.split(" --hash=") for line in text.splitlines() if line]
    requirements = [(Requirement(words[0].strip()), len(words) - 1) for words in lines]
    return {canonicalize_name(pin.name): (pin, num_hashes) for pin, num_hashes in requirements}


def requirements():
    """Return the requirements of the three packages, including the extras that are locked."""
    requirements_of_packages = [Requirement("numpy<2")]
    for package, extra in re.findall(r"^\./(\w+)(.*)$", (LOCKS / "packages.in").read_text(), re.M):
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        lists = [project["dependencies"], *(extras[name] for name in re.findall(r"\w+", extra))]
        requirements_of_packages += [Requirement(text) for names in lists for text in names]
    return [item for item in requirements_of_packages if not item.name.startswith("nereid-")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_requirement_is_locked_in_an_allowed_version(variant):
    locked = pins(variant)
    assert len(locked) > len(requirements())
    for requirement in requirements():
        (pin,) = locked[canonicalize_name(requirement.name)][0].specifier
        assert requirement.specifier.contains(pin.version), requirement


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_locked_package_has_a_hash_and_no_address(variant):
    for pin, num_hashes in pins(variant).values():
        assert num_hashes > 0, pin
        assert pin.url is None
    assert "://" not in (LOCKS / f"{variant}.txt").read_text()


def test_only_the_lock_file_for_cuda_contains_the_libraries_of_cuda():
    assert "nvidia-cudnn-cu13" in pins("cuda")
    assert not [name for name in pins("cpu") if name.startswith("nvidia")]


def test_constraints_and_lock_files_agree():
    locked = pins("cuda")
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        constraint = Requirement(line) if not line.startswith("#") else None
        if constraint is not None and constraint.name in locked:
            assert locked[constraint.name][0].specifier == constraint.specifier


@pytest.mark.long
def test_the_bills_of_materials_list_every_locked_package():
    subprocess.run(["make", "-o", "setup", "sbom"], cwd=ROOT, check=True)
    for variant in VARIANTS:
        bill = json.loads((ROOT / "dist" / f"sbom-{variant}.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert {part["name"] for part in bill["components"]} == set(pins(variant))
        assert all(part["externalReferences"][0]["hashes"] for part in bill["components"])


@pytest.mark.long
def test_pip_accepts_the_hashes_of_the_lock_file_for_cpus():
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--require-hashes", "-r", LOCKS / "cpu.txt"]
    subprocess.run(command, check=True)
