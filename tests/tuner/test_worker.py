"""The worker as a real process: what happens to it, and to its parent, when candidates misbehave."""

import os
import signal
import time

import pytest
from nvfp4.errors import NoDevice
from nvfp4.kernels.problem import Problem
from nvfp4.testing.fakes import FakeConfig, TroubleConfig
from nvfp4.tuner.messages import Done, Entrant, Pace, Row, Screen
from nvfp4.tuner.worker import Died, Worker

PROBLEM = Problem(n=40, k=64)
PACE = Pace(screen_us=200.0, rounds=9, sustain_us=200.0)
MS = (1, 8)


@pytest.fixture(scope="module")
def worker(patient_worker):
    """One worker for all tests here: each leaves it dead or alive, and the next must cope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNELS", "nvfp4.testing.fakes")
        patch.setenv("OMP_NUM_THREADS", "1")
        worker = patient_worker("cpu")
        yield worker
        worker.close()


def screen(worker, entrant, ms=MS):
    request = Screen(device=worker.describe(), problem=PROBLEM, entrant=entrant, ms=ms, all_ms=MS, pace=PACE)
    return list(worker.run(request))


def trouble(what):
    return Entrant(kernel="fake_trouble", config=TroubleConfig(what=what).to_json())


GOOD = Entrant(kernel="fake_good", config=FakeConfig(delay_us=0).to_json())


def assert_works(worker):
    rows = screen(worker, GOOD)
    assert [body.status for body in rows if isinstance(body, Row)] == ["ok", "ok"]
    assert rows[-1] == Done()


def test_rows_arrive_one_by_one_and_the_process_is_kept(worker):
    assert worker.describe().kind == "cpu"
    starts = worker.starts
    assert_works(worker)
    screen(worker, trouble("zeros"))
    assert_works(worker)
    assert worker.starts == starts


def test_a_crash_names_the_signal_and_the_step(worker):
    with pytest.raises(Died, match="signal SIGSEGV") as caught:
        screen(worker, trouble("segfault"))
    assert caught.value.status == "crash" and not caught.value.killed
    last = caught.value.last
    assert (last.kernel, last.config, last.m, last.step) == ("fake_trouble", trouble("segfault").config, 1, "check")


def test_a_hang_is_killed(worker, alive):
    with pytest.raises(Died, match="no sign of life for 2 s") as caught:
        screen(worker, trouble("hang"))
    pid = caught.value.last.pid
    assert caught.value.status == "timeout"
    assert not alive(pid)


def test_memory_damage_replaces_the_process(worker, alive):
    worker.describe()
    pid, starts = worker._pid, worker.starts
    rows = screen(worker, trouble("changes_weights"))
    assert [body.status for body in rows if isinstance(body, Row)] == ["wrong"]
    assert not alive(pid)
    assert_works(worker)
    assert worker.starts == starts + 1


def test_a_worker_killed_while_idle_is_started_again(worker):
    worker.describe()
    os.kill(worker._pid, signal.SIGKILL)
    assert_works(worker)
    os.kill(worker._pid, signal.SIGKILL)
    time.sleep(0.5)  # now its pool has noticed
    assert_works(worker)


# Batch systems send SIGTERM to all processes; pebble makes an exit code of it.
@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "signal SIGKILL"), (signal.SIGTERM, "exit code 15")])
def test_a_worker_killed_at_work_says_so_and_leaves_what_it_had_measured(worker, alive, number, words):
    slow = Entrant(kernel="fake_good", config=FakeConfig(delay_us=3000).to_json())
    request = Screen(device=worker.describe(), problem=PROBLEM, entrant=slow, ms=MS, all_ms=MS, pace=PACE)
    rows = []
    with pytest.raises(Died, match=words) as caught:
        for body in worker.run(request):
            rows.append(body)
            os.kill(worker._pid, number)
    assert [row.m for row in rows] in ([1], [1, 8])
    assert caught.value.killed
    pid = worker._pid
    worker.close()
    worker.close()  # twice is fine
    assert not alive(pid)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_raises_here():
    absent = Worker("cuda:0")
    with pytest.raises(NoDevice):
        absent.describe()
    absent.close()
