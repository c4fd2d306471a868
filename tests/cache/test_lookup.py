"""The dispatcher's look-up: the plan if there is one, and never an error, a write or a second warning."""

import shutil
import sqlite3
import warnings

import pytest
from nvfp4.cache import lookup
from nvfp4.cache.plan import make_plan
from nvfp4.cache.store import Store
from nvfp4.kernels.problem import Problem


@pytest.fixture(autouse=True)
def fresh(db, monkeypatch):
    monkeypatch.setenv("NVFP4_DB", str(db))
    monkeypatch.setattr(lookup, "_warned", False)


@pytest.fixture
def plan(fake):
    kernel = fake.Kernel("a")
    rows = [fake.measurement(kernel, 1, 1.0)]
    return make_plan(fake.device, fake.problem, rows, kernels={"a": kernel}, environment=fake.environment)


def find(fake):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return lookup.find_plan(fake.device, fake.problem)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_plan_is_found_and_nothing_is_written(db, fake, plan):
    with Store.open(db) as store:
        store.save_plan(plan)
    before = files(db.parent)
    assert find(fake) == plan
    assert lookup.find_plan(fake.device, Problem(n=16, k=16)) is None
    assert files(db.parent) == before


def test_no_database_is_no_warning_and_no_file(db, fake):
    assert find(fake) is None
    assert list(db.parent.iterdir()) == []
    db.touch()
    assert find(fake) is None
    assert files(db.parent) == {"nvfp4.db": b""}


BAD = {
    "half a JSON": lambda path: path.write_bytes(b'{"a":'),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "overwritten": lambda path: path.write_bytes(path.read_bytes()[:100] + b"\0" * (path.stat().st_size - 100)),
    "a byte of its schema": lambda path: path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE", b"CREATE TABL\x83", 1)
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_database_is_one_warning_and_no_write(db, fake, plan, spoil):
    with Store.open(db) as store:
        store.save_plan(plan)
    spoil(db)
    before = files(db.parent)
    with pytest.warns(RuntimeWarning, match=r"nvfp4\.db"):
        assert lookup.find_plan(fake.device, fake.problem) is None
    assert find(fake) is None
    assert files(db.parent) == before


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 99",
        "PRAGMA application_id = 1",
        "DROP TABLE plan_interval",
        "DELETE FROM plan_interval",
        "UPDATE environment SET torch = CAST(x'ff' AS TEXT)",
        "UPDATE problem SET n = 10, k = 10; UPDATE problem SET n = 4096, k = 2048; UPDATE plan SET layout = 'x'",
    ],
)
def test_a_database_of_another_make_is_one_warning(db, sql, fake, plan, statement):
    with Store.open(db) as store:
        store.save_plan(plan)
    sql("PRAGMA foreign_keys = OFF", *statement.split("; "))
    with pytest.warns(RuntimeWarning):
        assert lookup.find_plan(fake.device, fake.problem) is None
    assert find(fake) is None


def test_an_unreadable_database_is_one_warning(open_folder, unprivileged, fake, plan, monkeypatch):
    path = open_folder / "nvfp4.db"
    with Store.open(path) as store:
        store.save_plan(plan)
    path.chmod(0)
    monkeypatch.setenv("NVFP4_DB", str(path))
    with unprivileged():
        with pytest.warns(RuntimeWarning, match="read permission"):
            assert lookup.find_plan(fake.device, fake.problem) is None
        assert find(fake) is None


def test_a_plan_is_found_while_the_tuner_writes(db, fake, plan):
    with Store.open(db) as store:
        store.save_plan(plan)
        names = {path.name for path in db.parent.iterdir()}
        assert find(fake) == plan
        assert {path.name for path in db.parent.iterdir()} == names


def test_a_locked_database_is_one_warning(db, fake, plan, monkeypatch):
    with Store.open(db) as store:
        store.save_plan(plan)
    monkeypatch.setattr("nvfp4.cache.files.BUSY_TIMEOUT_S", 0.05)
    other = sqlite3.connect(db, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.warns(RuntimeWarning, match="locked"):
        assert lookup.find_plan(fake.device, fake.problem) is None
    other.execute("ROLLBACK")
    other.close()
    assert find(fake) == plan


@pytest.mark.parametrize("wal", [False, True], ids=["closed", "in WAL mode"])
def test_a_read_only_folder_is_as_good(open_folder, unprivileged, fake, plan, monkeypatch, sql, wal):
    path = open_folder / "nvfp4.db"
    with Store.open(path) as store:
        store.save_plan(plan)
    if wal:
        sql("PRAGMA journal_mode = WAL", path=path)
        assert path.read_bytes()[18:20] == b"\2\2"
    before = files(open_folder)
    monkeypatch.setenv("NVFP4_DB", str(path))
    open_folder.chmod(0o555)
    with unprivileged():
        assert find(fake) == plan
    assert files(open_folder) == before
    open_folder.chmod(0o777)


def test_a_killed_tuner_in_a_read_only_folder_is_read_through_its_wal(
    open_folder, unprivileged, fake, plan, monkeypatch
):
    work, copy = open_folder / "work", open_folder / "copy"
    work.mkdir()
    with Store.open(work / "nvfp4.db") as store:
        store.save_plan(plan)
        shutil.copytree(work, copy)
    monkeypatch.setenv("NVFP4_DB", str(copy / "nvfp4.db"))
    before = files(copy)
    assert {"nvfp4.db-wal", "nvfp4.db-shm"} <= before.keys()
    copy.chmod(0o555)
    with unprivileged():
        assert find(fake) == plan
    assert files(copy) == before
    # Without its index the WAL cannot be read there: a warning, not a plan from before it.
    copy.chmod(0o777)
    (copy / "nvfp4.db-shm").unlink()
    copy.chmod(0o555)
    with unprivileged(), pytest.warns(RuntimeWarning):
        assert lookup.find_plan(fake.device, fake.problem) is None
    copy.chmod(0o777)
