"""For all tests."""

import os
import signal
import time

import pytest


def pytest_configure():
    """Background jobs of a shell ignore Ctrl-C, and so would the processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
def gone(alive):
    def gone(pids):
        """Whether none of them runs, at the latest after a while."""
        until = time.monotonic() + 60
        while any(alive(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.02)
        return not any(alive(pid) for pid in pids)

    return gone


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
