"""A killed writer loses no committed row; two writers both keep theirs; readers beside a writer see whole plans."""

import multiprocessing
import os
import signal
import time
from contextlib import closing

import pytest
from nvfp4.cache.plan import TRAFFIC, make_plan
from nvfp4.cache.store import Store, open_or_set_aside

# A forked child starts in milliseconds, so that signals arrive while it writes and not while it imports.
FORK = multiprocessing.get_context("fork")


def write(path, fake, name, count, wait_s, pipe):
    with Store.open(path, wait_s=wait_s) as store:
        for m in range(1, count + 1):
            store.add([fake.measurement(name, m, 1.0, detail="x" * 500)])
            os.write(pipe, b".")


def start(path, fake, name, count, wait_s=0.0):
    """The process, and a file in which it puts a dot after every commit."""
    reader, writer = os.pipe()
    process = FORK.Process(target=write, args=(path, fake, name, count, wait_s, writer), daemon=True)
    process.start()
    os.close(writer)
    return process, open(reader, "rb", buffering=0)


def rows(path):
    with Store.open(path, wait_s=5) as store:
        return [(row.kernel, row.m) for row in store.all_measurements()]


def test_killing_a_writer_again_and_again_loses_nothing_that_was_committed(db, fake):
    total = 0
    for attempt, delay_s in enumerate((0.0, 0.001, 0.005, 0.013, 0.03, 0.07)):
        process, dots = start(db, fake, f"k{attempt}", 1_000_000)
        with closing(dots):
            dots.read(1)
            time.sleep(delay_s)
            process.kill()
            process.join()
            reported = 1 + len(dots.read(1_000_000))
        assert process.exitcode == -signal.SIGKILL
        found = [m for kernel, m in rows(db) if kernel == f"k{attempt}"]
        # A dot follows its commit, so one row more than there are dots may be there.
        assert found in (list(range(1, reported + 1)), list(range(1, reported + 2)))
        total += len(found)
        assert len(rows(db)) == total


def test_killing_a_process_while_it_makes_the_database_leaves_a_usable_file(tmp_path, fake):
    unfinished = 0
    for delay_ms in (0, 2, 4, 6, 8, 12, 16, 24):
        path = tmp_path / f"{delay_ms}.db"
        process, dots = start(path, fake, "a", 1)
        with closing(dots):
            time.sleep(delay_ms / 1000)
            process.kill()
            process.join()
            unfinished += dots.read(1) == b""
        store, kept = open_or_set_aside(path)
        with store:
            assert kept is None
            assert len(store.measurements(fake.device, fake.problem)) <= 1
            assert store.add([fake.measurement("b", 2, 1.0)]) == 1
    assert unfinished > 0


def test_a_killed_writer_leaves_what_it_committed_to_readers_who_write_nothing(db, fake):
    process, dots = start(db, fake, "a", 1_000_000)
    with closing(dots):
        dots.read(1)
        process.kill()
        process.join()
    before = {path.name: path.stat().st_size for path in db.parent.iterdir()}
    assert "nvfp4.db-wal" in before
    with Store.open(db, readonly=True) as store:
        assert len(store.measurements(fake.device, fake.problem)) >= 1
    assert {path.name: path.stat().st_size for path in db.parent.iterdir()} == before


@pytest.mark.parametrize("count", [40])
def test_two_writers_with_different_rows_both_keep_theirs(db, fake, count):
    started = [start(db, fake, name, count, wait_s=60) for name in ("a", "b")]
    for process, dots in started:
        with closing(dots):
            process.join()
        assert process.exitcode == 0
    assert sorted(rows(db)) == sorted((name, m) for name in ("a", "b") for m in range(1, count + 1))


def replace_plans(path, plans, pipe):
    while True:
        with Store.open(path, wait_s=5) as store:
            for plan in plans * 3:
                store.save_plan(plan)
                os.write(pipe, b".")


def test_a_reader_beside_a_writer_always_sees_a_whole_plan(db, fake):
    kernel = fake.Kernel("a")
    rows = [fake.measurement(kernel, m, 1.0, tile=tile) for m, tile in ((1, 16), (2, 32), (4, 16), (8, 32))]
    plans = [
        make_plan(fake.device, fake.problem, rows, kernels={"a": kernel}, environment=fake.environment, traffic=traffic)
        for traffic in TRAFFIC
    ]
    with Store.open(db) as store:
        store.save_plan(plans[0])
    reader, writer = os.pipe()
    process = FORK.Process(target=replace_plans, args=(db, plans, writer), daemon=True)
    process.start()
    os.close(writer)
    with closing(open(reader, "rb", buffering=0)) as dots:
        seen = set()
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            with Store.open(db, readonly=True) as store:
                seen.add(store.load_plan(fake.device, fake.problem).id)
        process.kill()
        process.join()
        assert dots.read(1) == b"."
    assert seen <= {plan.id for plan in plans}
