"""`tune` from end to end on the CPU, with real processes: bad candidates, and a parent that is killed."""

import os
import random
import signal
import subprocess
import sys

import nvfp4.tuner.run as run_module
import pytest
from nvfp4.cache.records import BASELINE
from nvfp4.cache.store import Store
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.run import tune

PROBLEM = Problem(n=40, k=64)
MS = (1, 2, 8, 64)

# One trouble for every status, and one that damages memory; test_measure.py has all of them.
EXPECTED = {
    "zeros": "wrong",
    "nan": "nan",
    "out_of_memory": "oom",
    "launch_error": "launch_error",
    "build_error": "build_error",
    "changes_weights": "wrong",
    "abort": "crash",
    "hang": "timeout",
}


def all_rows(path):
    with Store.open(path, readonly=True) as store:
        return list(store.all_measurements())


def no_repeats(rows):
    """Nobody was screened twice at one M. (A race in flight is run again as a whole.)"""
    keys = [(row.kernel, row.config, row.m) for row in rows if row.protocol == "screen"]
    return len(keys) == len(set(keys))


@pytest.mark.slow
def test_every_kind_of_trouble_is_a_row_and_the_right_kernel_wins(fakes, pace, tmp_path, patient_worker, monkeypatch):
    monkeypatch.setenv("NVFP4_FAKE_TROUBLES", ",".join(EXPECTED))
    monkeypatch.setattr(run_module, "Worker", patient_worker)
    path = tmp_path / "t.db"
    result = tune((PROBLEM,), MS, device="cpu", store_path=path, kernels=("fake_good", "fake_trouble"), pace=pace)
    rows = all_rows(path)
    found = {row.config.split('"')[3]: row.status for row in rows if row.kernel == "fake_trouble"}
    assert found == EXPECTED
    assert all(row.detail for row in rows if row.status != "ok")
    assert result.exit_code == 0
    assert {interval.kernel for interval in result.plans[PROBLEM].intervals()} == {"fake_good"}
    assert {row.m for row in rows if row.kernel == BASELINE and row.protocol == "final"} >= set(MS)
    assert no_repeats(rows)
    again = tune((PROBLEM,), MS, device="cpu", store_path=path, kernels=("fake_good", "fake_trouble"), pace=pace)
    assert again.measured == 0 and again.plans == result.plans


SCRIPT = """
import os, sys, time
from pathlib import Path
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.messages import Pace
from nvfp4.tuner.run import tune

measured, hold_at = 0, int(sys.argv[2])

def say(event):
    global measured
    print(type(event).__name__, flush=True)
    if type(event).__name__ == "Measured":
        measured += 1
        if measured == hold_at:
            time.sleep(3600)  # for the signal: it must not come when all is done

if __name__ == "__main__":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # one compiling process
    result = tune(
        [Problem(n=40, k=64)], (1, 2, 8, 64), device="cpu", store_path=Path(sys.argv[1]), quick=True,
        kernels=("fake_good", "fake_trouble"), pace=Pace(screen_us=200.0, rounds=9, sustain_us=200.0), hang_s=240.0,
        events=say,
    )
    print("measured", result.measured, flush=True)
"""


def start(tmp_path, hold_at=0):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "NVFP4_KERNELS": "nvfp4.testing.fakes",
        "NVFP4_FAKE_TROUBLES": "zeros,build_error",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(tmp_path / "t.db"), str(hold_at)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_a_killed_parent_leaves_no_process_and_loses_nothing(tmp_path, gone, descendants):
    rows_before = random.randrange(1, 20)
    process = start(tmp_path, hold_at=rows_before + 3)
    lines = 0
    for line in process.stdout:
        lines += line.strip() == "Measured"
        if lines == rows_before:
            break
    children = descendants(process.pid)
    assert children
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(children)
    before = {row.uuid for row in all_rows(tmp_path / "t.db")}
    assert len(before) >= rows_before, rows_before  # all that was announced

    process = start(tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    rows = all_rows(tmp_path / "t.db")
    assert before <= {row.uuid for row in rows}  # on a busy machine all was measured before the signal came
    assert no_repeats(rows)
    assert int(output.split()[-1]) == len(rows) - len(before)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path, gone, descendants):
    process = start(tmp_path, hold_at=3)
    for line in process.stdout:
        if line.strip() == "Measured":
            break
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert output.strip().splitlines()[-1] == "TuningFinished"
    assert gone(children)
    assert all_rows(tmp_path / "t.db")
