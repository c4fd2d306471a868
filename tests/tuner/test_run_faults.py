"""`tune` with a worker that answers from a formula: crashes, no memory, Ctrl-C, full disks and damaged databases."""

import os
import signal

import pytest
from nvfp4.cache.store import Store
from nvfp4.errors import DatabaseError
from nvfp4.kernels.problem import Problem
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner import events as ev
from nvfp4.tuner.messages import Done, Started
from nvfp4.tuner.run import Interrupted
from nvfp4.tuner.worker import Died

from .model_worker import MS, PROBLEM, ModelWorker, Tile, Tiles, rows_of


def test_a_crash_costs_one_candidate(install, go, tmp_path):
    install(Tiles())

    def die(request):
        yield ModelWorker.row(request.entrant, 1, "screen")
        last = Started(pid=1, kernel=request.entrant.kernel, config=request.entrant.config, m=4096, step="check")
        raise Died("crash", "the worker died: signal SIGSEGV", last)

    ModelWorker.script[len(MS) + 1] = die
    result, _ = go()
    crashed = [row for row in rows_of(tmp_path) if row.status == "crash"]
    assert len(crashed) == 1 and crashed[0].m == 4096
    assert "SIGSEGV while it was at: check, M = 4096" in crashed[0].detail
    loser = crashed[0].config
    assert all(interval.config != loser for interval in result.plans[PROBLEM].intervals())
    assert go()[0].measured == 0  # it is not tried again


def test_a_worker_that_somebody_kills_is_no_fault_of_its_candidate(install, go, tmp_path):
    install(Tiles())

    def killed(request):
        yield from ()
        raise Died("crash", "the worker died: signal SIGKILL", Started(pid=1, m=1, step="check"), killed=True)

    ModelWorker.script[len(MS)] = killed
    race = len(MS) + 1 + 3
    ModelWorker.script[race] = killed
    result, _ = go(quick=True)
    assert result.exit_code == 0 and result.failures == {}
    finals = [row.config for row in rows_of(tmp_path) if row.protocol == "final" and row.m == 1]
    assert len(finals) == len(set(finals)) > 1


def test_a_race_that_dies_is_run_again_without_its_culprit(install, go, tmp_path):
    install(Tiles(rows=(8, 16)))
    culprit = Tile(rows=16).to_json()

    def die(request):
        yield from ()
        raise Died("crash", "the worker died: signal SIGABRT", Started(pid=1, m=request.m, step="final"))

    def alone(request):
        if request.entrants[0].config == culprit:
            yield from die(request)
        yield ModelWorker.row(request.entrants[0], request.m, "screen")
        yield Done()

    races = len(MS) + 2  # the baseline's screens and two candidates'
    ModelWorker.script.update({races: die, races + 1: alone, races + 2: alone, races + 3: alone})
    result, _ = go(quick=True)
    rows = rows_of(tmp_path)
    assert [row.config for row in rows if row.status == "crash"] == [culprit]
    assert {row.m for row in rows if row.protocol == "final" and row.config == Tile(rows=8).to_json()} == set(MS)
    assert [interval.config for interval in result.plans[PROBLEM].intervals()] == [Tile(rows=8).to_json()]


def test_inputs_that_do_not_fit_leave_the_other_problems_alone(install, go):
    install(Tiles())
    ModelWorker.script[0] = lambda request: iter([Done(unprepared="MemoryError: no")])
    other = Problem(n=128, k=512)
    result, seen = go(problems=(PROBLEM, other))
    assert result.plans[PROBLEM] is None and result.plans[other] is not None
    assert "do not fit in memory for M up to" in result.notes[0] and "MemoryError" in result.notes[0]
    assert "need at least 0.0 GiB, and the device has 8.0 GiB" in result.notes[0]
    assert PROBLEM not in result.unexplored
    (finished,) = (event for event in seen if isinstance(event, ev.ProblemFinished) and event.problem == PROBLEM)
    assert finished.unprepared == result.notes[0] and finished.unexplored == 0


def test_inputs_larger_than_the_device_are_not_even_tried(install, go):
    install(Tiles())
    result, _ = go(ms=(1, 1 << 24))
    assert result.plans[PROBLEM] is None and result.exit_code == 4
    assert ModelWorker.requests == []
    need = 2 * (1 << 24) * (PROBLEM.n + PROBLEM.k) / 2**30
    assert f"need at least {need:.1f} GiB, and the device has 8.0 GiB; tune smaller M (--m)" in result.notes[0]


def test_ctrl_c_keeps_what_was_measured(install, go, tmp_path):
    install(Tiles())

    def stop(request):
        yield ModelWorker.row(request.entrant, 1, "screen")
        signal.raise_signal(signal.SIGINT)

    ModelWorker.script[len(MS) + 1] = stop
    with pytest.raises(KeyboardInterrupt) as caught:
        go()
    assert isinstance(caught.value, Interrupted)
    result = caught.value.result
    assert result.interrupted and result.exit_code == 130
    assert result.measured == len(rows_of(tmp_path)) == len(MS) * 2 + 1
    with Store.open(tmp_path / "t.db", readonly=True) as store:  # of what there is
        assert store.load_plan(fake_device(), PROBLEM).intervals()
    resumed, _ = go()
    assert resumed.exit_code == 0
    keys = [(row.kernel, row.config, row.m) for row in rows_of(tmp_path) if row.protocol == "screen"]
    assert len(keys) == len(set(keys))


def test_a_full_disk_stops_with_advice_and_keeps_the_rows(install, go, tmp_path, monkeypatch):
    install(Tiles())
    whole = Store.add
    count = 0

    def add(self, rows):
        nonlocal count
        count += 1
        if count > 5:
            raise DatabaseError("database t.db: database or disk is full; free some space", reason="full")
        return whole(self, rows)

    monkeypatch.setattr(Store, "add", add)
    with pytest.raises(DatabaseError, match="free some space"):
        go()
    assert len(rows_of(tmp_path)) == 5
    monkeypatch.undo()


def test_a_damaged_database_is_kept_and_a_fresh_one_started(install, go, tmp_path):
    install(Tiles())
    (tmp_path / "t.db").write_bytes(b'{"a":' * 1000)
    result, seen = go()
    assert result.exit_code == 0
    kept = list(tmp_path.glob("t.db.corrupt-*"))
    assert len(kept) == 1 and kept[0].read_bytes().startswith(b'{"a":')
    assert str(kept[0]) in result.notes[0]
    assert any(isinstance(event, ev.Note) for event in seen)


def test_a_newer_database_is_left_alone(install, go, tmp_path):
    import sqlite3

    install(Tiles())
    go(ms=(1,))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (tmp_path / "t.db").read_bytes()
    with pytest.raises(DatabaseError, match="update nvfp4"):
        go()
    assert (tmp_path / "t.db").read_bytes() == before


def test_a_read_only_database_is_refused_before_anything_is_measured(install, go, tmp_path, monkeypatch):
    install(Tiles())
    go(ms=(1,))
    del ModelWorker.requests[:]
    monkeypatch.setattr("nvfp4.cache.files.os.access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(DatabaseError, match="write permission"):
        go()
    assert ModelWorker.requests == []
