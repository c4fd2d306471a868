"""A killed writer loses no committed row; two writers with different rows both keep theirs."""

import signal
import subprocess
import sys
import time

import pytest

from nvfp4.cache.store import Store

WRITER = """
import sys
from pathlib import Path
from nvfp4.cache.records import Environment, Measurement
from nvfp4.cache.store import Store
from nvfp4.kernels.problem import Device, Problem

path, name, count, wait_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
with Store.open(path, wait_s=wait_s) as store:
    for m in range(1, count + 1):
        store.add([Measurement(device=Device(kind="cuda", name="Fake 9000"), environment=Environment(nvfp4="0", torch="2"),
            problem=Problem(n=64, k=64), kernel=name, config="{}", layout="checkpoint", implementation="", m=m,
            status="ok", p50_us=1.0, detail="x" * 500)])
        print(m, flush=True)
"""


def start(path, name, count, wait_s=0.0):
    command = [sys.executable, "-c", WRITER, str(path), name, str(count), str(wait_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def rows(path):
    with Store.open(path, wait_s=5) as store:
        return [(row.kernel, row.m) for row in store.all_measurements()]


def test_killing_a_writer_again_and_again_loses_nothing_that_was_committed(db):
    committed = 0
    for attempt, delay_s in enumerate((0.0, 0.003, 0.011, 0.03, 0.07)):
        writer = start(db, f"k{attempt}", 1_000_000)
        writer.stdout.readline()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split()
        assert writer.wait() == -signal.SIGKILL
        # The last line may be cut; a row is printed after its commit, so one more than was said may be there.
        reported = max([1, *(int(line) for line in said[:-1])])
        found = [m for kernel, m in rows(db) if kernel == f"k{attempt}"]
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= reported
        committed += len(found)
        assert len(rows(db)) == committed


def test_killing_a_process_while_it_makes_the_database_leaves_a_usable_file(tmp_path):
    for delay_s in (0.25, 0.4, 0.5):
        path = tmp_path / f"{delay_s}.db"
        writer = start(path, "a", 1)
        time.sleep(delay_s)
        writer.kill()
        writer.communicate()
        assert len(rows(path)) <= 1


@pytest.mark.parametrize("count", [40])
def test_two_writers_with_different_rows_both_keep_theirs(db, count):
    writers = [start(db, name, count, wait_s=60) for name in ("a", "b")]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert sorted(rows(db)) == sorted((name, m) for name in ("a", "b") for m in range(1, count + 1))
