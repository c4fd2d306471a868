"""What goes in comes out; nothing that breaks a rule goes in; databases merge in any order."""

import sqlite3
import stat
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvfp4.cache.records import Interval, LayoutPlan, Plan
from nvfp4.cache.store import Store
from nvfp4.errors import DatabaseError, InvalidInput
from nvfp4.kernels.problem import Device, Problem


def plan_of(fake, layout="checkpoint", **fields):
    first = Interval(m_lo=1, m_hi=64, kernel="a", config="{}", expected_us=5.25, runner_up="b {}", margin=0.1)
    last = Interval(m_lo=65, m_hi=None, kernel="b", config='{"tile":16}', expected_us=1 / 3)
    layouts = (
        LayoutPlan(layout="fragment1-bf16", intervals=(first, last), traffic_us=None),
        LayoutPlan(layout="checkpoint", intervals=(msgspec.structs.replace(last, m_lo=1),), traffic_us=7.5),
    )
    values = {"traffic": "decode-heavy", "device": fake.device, "problem": fake.problem} | fields
    return Plan(layout=layout, layouts=layouts, environment=fake.environment, **values)


def test_a_measurement_comes_back_as_it_was(db, fake):
    full = fake.measurement(
        "a", 3, 12.5, p20_us=12.0, p80_us=13.1, relative_error=0.001, clock_mhz=1980, detail="übel", protocol="final"
    )
    bare = fake.measurement("a", 4, status="timeout")
    with Store.open(db) as store:
        assert store.add([full, bare]) == 2
    with Store.open(db) as store:
        assert store.measurements(fake.device, fake.problem) == [full, bare]
        assert store.measurements(fake.device, Problem(n=1, k=16)) == []
        assert store.measurements(Device(kind="cpu", name="x"), fake.problem) == []


def test_names_are_stored_once(db, sql, fake):
    with Store.open(db) as store:
        store.add(fake.measurement("a", m, 1.0) for m in range(1, 9))
        store.add(fake.measurement("b", m, 1.0) for m in range(1, 9))
    counts = {
        table: sql(f"SELECT count(*) FROM {table}")[0][0]
        for table in ("device", "environment", "problem", "candidate", "measurement")
    }
    assert counts == {"device": 1, "environment": 1, "problem": 1, "candidate": 2, "measurement": 16}


def test_every_field_of_the_key_separates_problems_and_devices(db, fake):
    base = {"n": 64, "k": 128}
    problems = [
        Problem(**base),
        Problem(**base, dtype="float16"),
        Problem(**base, op="moe", experts=8, top_k=2, activation="swiglu"),
        Problem(**base, op="moe", experts=8, top_k=4, activation="swiglu"),
        Problem(**base, op="moe", experts=4, top_k=2, activation="swiglu"),
        Problem(**base, op="moe", experts=8, top_k=2, activation="relu2"),
    ]
    other = Device(kind="cuda", name="Fake 9000", capability=(9, 0), units=78)
    with Store.open(db) as store:
        store.add(fake.measurement("a", 1, 1.0, problem=problem) for problem in problems)
        store.add([fake.measurement("a", 1, 2.0, device=other)])
        assert all(len(store.measurements(fake.device, problem)) == 1 for problem in problems)
        assert len(store.problems()) == len(problems) + 1
        assert (other, fake.problem) in store.problems()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": "fine"}, "status"),
        ({"protocol": "guess"}, "protocol"),
        ({"p50_us": None, "status": "ok"}, "median"),
        ({"p50_us": float("nan"), "status": "ok"}, "median"),
        ({"p50_us": float("inf"), "status": "ok"}, "median"),
        ({"m": 0}, "m >= 1"),
    ],
)
def test_a_bad_measurement_is_refused_with_its_whole_batch(db, fake, fields, words):
    good = fake.measurement("new kernel", 1, 1.0)
    bad = msgspec.structs.replace(fake.measurement("a", 1, 1.0), **fields)
    with Store.open(db) as store:
        with pytest.raises(InvalidInput, match=words):
            store.add([good, bad])
        assert store.problems() == []
        # Ids that were handed out in the transaction are forgotten with it.
        assert store.add([good]) == 1
        assert store.measurements(fake.device, fake.problem) == [good]


def test_measurements_cannot_be_changed(db, sql, fake):
    with Store.open(db) as store:
        store.add([fake.measurement("a", 1, 1.0)])
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        sql("UPDATE measurement SET p50_us = 0.1")


def test_a_plan_comes_back_with_its_id_and_the_newest_counts(db, fake):
    old, new = plan_of(fake), plan_of(fake, traffic="uniform")
    with Store.open(db) as store:
        assert store.load_plan(fake.device, fake.problem) is None
        store.save_plan(old)
        store.save_plan(new)
        assert store.load_plan(fake.device, fake.problem) == new
        store.save_plan(old)
        loaded = store.load_plan(fake.device, fake.problem)
        assert loaded == old
        assert loaded.id == old.id
        other = plan_of(fake, problem=Problem(n=16, k=16))
        store.save_plan(other)
        assert store.plans() == [old, other]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE plan_interval SET m_lo = 60 WHERE m_lo = 65", "from 60 within another"),
        ("UPDATE plan_interval SET m_hi = NULL WHERE m_hi = 64", "from 65 within another"),
        ("DELETE FROM plan_interval", "no intervals"),
        ("UPDATE plan SET layout = 'swizzled'", "'swizzled' has no intervals"),
        ("UPDATE device SET features = '{'", "device"),
        ("UPDATE device SET features = '[1]'", "features"),
    ],
)
def test_a_plan_that_was_damaged_by_hand_is_refused(db, sql, fake, damage, words):
    with Store.open(db) as store:
        store.save_plan(plan_of(fake))
    sql(damage)
    with Store.open(db, readonly=True) as store, pytest.raises(DatabaseError, match=words) as caught:
        store.plans()
    assert caught.value.reason == "corrupt"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("p50_us = 0", "p50_us > 0"),
        ("p50_us = -1", "p50_us > 0"),
        ("p50_us = 9e999", "p50_us > 0"),
        ("p50_us = NULL", "p50_us > 0"),
        ("m = 0", "m >= 1"),
        ("status = 'fine'", "unknown status"),
        ("protocol = 'fine'", "unknown protocol"),
        ("routing = 'fine'", "unknown routing"),
    ],
)
def test_a_measurement_that_was_damaged_by_hand_is_refused(db, sql, fake, damage, words):
    with Store.open(db) as store:
        store.add([fake.measurement("a", 1, 1.0)])
    (trigger,) = sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")[0]
    sql("PRAGMA ignore_check_constraints = ON", f"DROP TRIGGER {trigger}", f"UPDATE measurement SET {damage}")
    with Store.open(db, readonly=True) as store:
        for read in (lambda: store.measurements(fake.device, fake.problem), lambda: list(store.all_measurements())):
            with pytest.raises(DatabaseError, match=f"a measurement that is not valid.*{words}") as caught:
                read()
            assert caught.value.reason == "corrupt"


def test_a_read_only_store_refuses_to_write(db, fake):
    Store.open(db).close()
    with Store.open(db, readonly=True) as store, pytest.raises(DatabaseError, match="opened for reading"):
        store.add([fake.measurement("a", 1, 1.0)])


def test_the_default_place_is_the_cache_folder_or_nvfp4_db(tmp_path, monkeypatch):
    monkeypatch.delenv("NVFP4_DB", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Store.open() as store:
        assert store.path == tmp_path / "cache" / "nvfp4" / "nvfp4.db"
    assert stat.S_IMODE((tmp_path / "cache" / "nvfp4").stat().st_mode) == 0o700
    monkeypatch.setenv("NVFP4_DB", str(tmp_path / "mine.db"))
    with Store.open() as store:
        assert store.path == tmp_path / "mine.db"


def test_the_views_join_the_names(db, sql, fake):
    with Store.open(db) as store:
        store.add([fake.measurement("a", 8, 2.5)])
        store.save_plan(plan_of(fake))
        store.save_plan(plan_of(fake, traffic="uniform"))
    assert sql("SELECT device, op, n, k, m, kernel, p50_us FROM measurements") == [
        ("Fake 9000", "gemm", 4096, 2048, 8, "a", 2.5)
    ]
    rows = sql("SELECT layout, marked, m_lo, m_hi, kernel, traffic FROM current_plans ORDER BY layout, m_lo")
    assert rows == [
        ("checkpoint", 1, 1, None, "b", "uniform"),
        ("fragment1-bf16", 0, 1, 64, "a", "uniform"),
        ("fragment1-bf16", 0, 65, None, "b", "uniform"),
    ]


def rows_of(path: Path) -> set[tuple]:
    with Store.open(path, readonly=True) as store:
        return {(row.uuid, row.kernel, row.m, row.p50_us) for row in store.all_measurements()}


def test_measurements_come_in_the_order_they_were_added_whatever_the_clock_said(db, fake):
    rows = [fake.measurement("a", 1, us, when=when) for us, when in ((1.0, 30.0), (2.0, 10.0), (3.0, 20.0))]
    with Store.open(db) as store:
        for row in rows:
            store.add([row])
        assert store.measurements(fake.device, fake.problem) == rows
        assert list(store.all_measurements()) == rows


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(owners=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=6))
def test_merge_is_commutative_and_idempotent(tmp_path_factory, fake, owners):
    folder = tmp_path_factory.mktemp("merge")
    measured = [fake.measurement(f"k{i % 2}", i + 1, 1.0 + i) for i in range(len(owners))]
    parts = [folder / f"{part}.db" for part in range(3)]
    for part, path in enumerate(parts):
        with Store.open(path) as store:
            store.add(row for row, holders in zip(measured, owners, strict=True) if part in holders)
    expected = {(row.uuid, row.kernel, row.m, row.p50_us) for row in measured}
    for number, order in enumerate(list(permutations(parts))[::2]):
        merged = folder / f"merged{number}.db"
        with Store.open(merged) as store:
            added = sum(store.merge_from(path) for path in order)
            assert added == len(measured)
            assert sum(store.merge_from(path) for path in order) == 0
        assert rows_of(merged) == expected


def test_merging_a_file_that_is_no_database_changes_nothing(db, tmp_path, fake):
    (tmp_path / "bad.db").write_bytes(b"\xff\xfe")
    with Store.open(db) as store:
        with pytest.raises(DatabaseError, match=r"bad\.db"):
            store.merge_from(tmp_path / "bad.db")
        assert store.problems() == []
