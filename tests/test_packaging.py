"""What pyproject.toml lists is what the folders hold, and the versions that were tried satisfy it."""

import os
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import nvfp4
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PARTS = (
    "cache",
    "cli",
    "dispatch",
    "integrations",
    "kernels",
    "testing",
    "tuner",
)  # top-level folders that are in the wheel


def folders():
    yield ROOT
    for part in PARTS:
        yield from (path.parent for path in sorted((ROOT / part).rglob("__init__.py")))


def module(folder):
    return ".".join(("nvfp4", *folder.relative_to(ROOT).parts))


def test_all_packages_are_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(module(folder) for folder in folders())


def test_no_other_folder_of_the_root_is_a_package():
    others = {path.parent.name for path in ROOT.glob("*/__init__.py")} - set(PARTS)
    assert not others


def test_all_data_files_are_listed():
    listed = SETUPTOOLS["package-data"]["nvfp4"]
    for part in PARTS:
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                name = path.relative_to(ROOT).as_posix()
                assert any(fnmatch(name, pattern) for pattern in listed), f"{name} would not be in the wheel"
    assert all(list(ROOT.glob(pattern)) for pattern in listed)


def constraints():
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def requirements():
    project = PROJECT["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return [found for found in map(Requirement, texts) if found.name != "nvfp4"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_version_of_every_dependency_was_tried(requirement):
    version = constraints()[canonicalize_name(requirement.name)]
    assert Version(version) in requirement.specifier


def test_torch_and_triton_fit_together():
    tried = constraints()
    assert (tried["torch"], tried["triton"]) == ("2.13.0", "3.7.1")  # a CUDA build of torch takes no other triton


def test_the_command_is_the_one_of_the_package():
    assert PROJECT["project"]["scripts"] == {"nvfp4": "nvfp4.cli:main"}
    assert Version(nvfp4.__version__)


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make --keep-going test" in script.read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("tune", "test", "lint", "wheel", "clean"))
