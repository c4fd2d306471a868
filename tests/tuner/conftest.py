import os

import pytest
from nvfp4.kernels import registry
from nvfp4.tuner.messages import Pace


@pytest.fixture
def fakes(monkeypatch):
    """The fake kernels are in the registry of this process and of its children."""
    monkeypatch.setenv("NVFP4_KERNELS", "nvfp4.testing.fakes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()


@pytest.fixture(scope="session")
def pace():
    return Pace(screen_us=200.0, rounds=9, sustain_us=200.0, idle_us=100.0)


@pytest.fixture(scope="session")
def alive():
    def alive(pid):
        """Whether a process runs: a zombie, which nobody has waited for yet, does not."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
        except FileNotFoundError:
            return False

    return alive


@pytest.fixture(scope="session")
def descendants():
    def descendants(pid):
        """All processes that pid started, and theirs."""
        parents = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        found = {pid}
        while True:
            more = {child for child, parent in parents.items() if parent in found} - found
            if not more:
                return found - {pid}
            found |= more

    return descendants
