"""Every state a database file can be in: a clear error, nothing lost, and `open_or_set_aside` goes on."""

import os
import sqlite3

import pytest
from nvfp4.cache.store import Store, open_or_set_aside
from nvfp4.errors import DatabaseError


def refusal(path, **options) -> DatabaseError:
    with pytest.raises(DatabaseError) as caught:
        Store.open(path, **options)
    assert str(path) in str(caught.value)
    return caught.value


def filled(path, fake, rows=200):
    with Store.open(path) as store:
        store.add(fake.measurement("a", m + 1, 1.0, detail="x" * 100) for m in range(rows))
    return path.read_bytes()


DAMAGE = {
    "half a JSON": lambda whole: b'{"a":',
    "not UTF-8": lambda whole: b"\xff\xfe",
    "cut in its header": lambda whole: whole[:50],
    "cut after its header": lambda whole: whole[:100],
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "without its last bytes": lambda whole: whole[:-100],
    "a byte of its schema": lambda whole: whole.replace(b"CREATE TABLE", b"CREATE TABL\x83", 1),
    "overwritten in the middle": lambda whole: whole[:4096] + b"\xa5" * 8192 + whole[12288:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_then_moved_aside(db, fake, damage):
    damaged = damage(filled(db, fake))
    db.write_bytes(damaged)
    assert refusal(db).reason == "corrupt"
    assert db.read_bytes() == damaged
    store, kept = open_or_set_aside(db)
    with store:
        assert store.problems() == []
        assert store.add([fake.measurement("a", 1, 1.0)]) == 1
    assert kept.name.startswith("nvfp4.db.corrupt-")
    assert kept.read_bytes() == damaged


def test_two_damaged_files_get_two_names(db):
    for text in (b"first", b"second"):
        db.unlink(missing_ok=True)
        db.write_bytes(text)
        open_or_set_aside(db)[0].close()
    kept = sorted(path.read_bytes() for path in db.parent.glob("*.corrupt-*"))
    assert kept == [b"first", b"second"]


def test_the_wal_of_a_damaged_file_goes_with_it(db, fake):
    """Left behind, it would be replayed into the fresh database."""
    with Store.open(db) as store:
        store.add([fake.measurement("a", 1, 1.0)])
        # As a killed process leaves it.
        left = {name: (db.with_name(name)).read_bytes() for name in ("nvfp4.db-wal", "nvfp4.db-shm")}
    for name, content in left.items():
        db.with_name(name).write_bytes(content)
    wal = db.with_name("nvfp4.db-wal")
    before = wal.read_bytes()
    assert before
    db.write_bytes(b"garbage")
    store, kept = open_or_set_aside(db)
    with store:
        assert store.problems() == []
    assert kept.with_name(kept.name + "-wal").read_bytes() == before


def test_a_sound_database_is_not_moved(db, fake):
    filled(db, fake)
    store, kept = open_or_set_aside(db)
    with store:
        assert kept is None
        assert len(store.measurements(fake.device, fake.problem)) == 200


def test_an_empty_file_is_a_fresh_database(db, fake):
    db.touch()
    assert refusal(db, readonly=True).reason == "missing"
    with Store.open(db) as store:
        assert store.add([fake.measurement("a", 1, 1.0)]) == 1


def test_a_missing_file_is_missing_only_for_readers(db):
    error = refusal(db, readonly=True)
    assert error.reason == "missing"
    assert "nvfp4 tune" in str(error)
    assert list(db.parent.iterdir()) == []
    Store.open(db).close()


def test_an_empty_folder_is_moved_aside_and_a_filled_one_is_not(db):
    db.mkdir()
    assert refusal(db).reason == "corrupt"
    assert refusal(db, readonly=True).reason == "corrupt"
    (db / "thesis.txt").write_text("mine")
    with pytest.raises(DatabaseError, match="folder"):
        open_or_set_aside(db)
    (db / "thesis.txt").unlink()
    store, kept = open_or_set_aside(db)
    store.close()
    assert kept.is_dir()
    assert db.is_file()


@pytest.mark.parametrize("opener", [Store.open, open_or_set_aside])
def test_a_newer_schema_is_refused_and_left_alone(db, sql, fake, opener):
    filled(db, fake)
    sql("PRAGMA user_version = 99")
    before = db.read_bytes()
    with pytest.raises(DatabaseError, match=r"99.*update nvfp4") as caught:
        opener(db)
    assert caught.value.reason == "newer"
    assert db.read_bytes() == before
    assert refusal(db, readonly=True).reason == "newer"


@pytest.mark.parametrize("opener", [Store.open, open_or_set_aside])
def test_the_database_of_another_program_is_refused_and_left_alone(db, sql, opener):
    sql("CREATE TABLE bookmarks (url TEXT)")
    before = db.read_bytes()
    with pytest.raises(DatabaseError, match="bookmarks") as caught:
        opener(db)
    assert caught.value.reason == "foreign"
    assert db.read_bytes() == before


@pytest.mark.parametrize("statement", ["PRAGMA application_id = 77", "CREATE VIEW theirs AS SELECT 1 AS one"])
@pytest.mark.parametrize("opener", [Store.open, open_or_set_aside])
def test_another_program_s_database_without_tables_is_refused_too(db, opener, statement):
    with sqlite3.connect(db) as connection:
        connection.execute(statement)
    connection.close()
    before = db.read_bytes()
    with pytest.raises(DatabaseError, match="another") as caught:
        opener(db)
    assert caught.value.reason == "foreign"
    assert db.read_bytes() == before


@pytest.mark.parametrize("opener", [Store.open, open_or_set_aside, lambda path: Store.open(path, readonly=True)])
def test_a_pipe_is_refused_without_waiting_for_its_other_end(db, opener):
    os.mkfifo(db)
    held = os.open(db, os.O_RDWR)
    os.write(held, bytes(100))  # who opens it nevertheless need not wait: the test fails instead of hanging
    try:
        with pytest.raises(DatabaseError, match="no regular file") as caught:
            opener(db)
    finally:
        os.close(held)
    assert caught.value.reason == "foreign"


def test_a_link_and_its_file_are_one_database(db, tmp_path, fake):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(db)
    with Store.open(db) as writer:
        writer.add([fake.measurement("a", 1, 1.0)])
        with Store.open(link, readonly=True) as reader:  # its WAL lies beside the file, not beside the link
            assert len(list(reader.all_measurements())) == 1
        with pytest.raises(DatabaseError, match="is writing to it"):
            Store.open(link)


def test_a_damaged_file_behind_a_link_is_moved_and_the_link_stays(db, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(db)
    db.write_bytes(b"damage")
    store, kept = open_or_set_aside(link)
    store.close()
    assert kept is not None and kept.parent == db.parent and kept.read_bytes() == b"damage"
    assert link.is_symlink() and db.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.parametrize("opener", [Store.open, open_or_set_aside])
def test_a_read_only_file_is_refused_and_left_alone(open_folder, unprivileged, fake, opener):
    path = open_folder / "nvfp4.db"
    before = filled(path, fake)
    path.chmod(0o444)
    (open_folder / "nvfp4.db.lock").chmod(0o666)
    with unprivileged():
        with pytest.raises(DatabaseError, match="read-only") as caught:
            opener(path)
        with Store.open(path, readonly=True) as store:
            assert len(store.measurements(fake.device, fake.problem)) == 200
    assert caught.value.reason == "readonly"
    assert path.read_bytes() == before


def test_a_read_only_folder_can_be_read_but_not_written(open_folder, unprivileged, fake):
    path = open_folder / "nvfp4.db"
    filled(path, fake)
    open_folder.chmod(0o555)
    with unprivileged():
        assert refusal(path).reason == "readonly"
        assert refusal(open_folder / "sub" / "new.db").reason == "readonly"
        with Store.open(path, readonly=True) as store:
            assert len(store.measurements(fake.device, fake.problem)) == 200
    open_folder.chmod(0o777)


def test_an_unreadable_file_is_moved_aside_by_its_owner_only(open_folder, unprivileged, fake):
    path = open_folder / "nvfp4.db"
    filled(path, fake)
    (open_folder / "nvfp4.db.lock").chmod(0o666)
    path.chmod(0)
    with unprivileged():
        if path.stat().st_uid != os.geteuid():
            assert refusal(path).reason == "unreadable"
            with pytest.raises(DatabaseError, match="read permission"):
                open_or_set_aside(path)
            path.rename(open_folder / "other")
            path.touch(mode=0)
        assert refusal(path, readonly=True).reason == "unreadable"
        store, kept = open_or_set_aside(path)
        store.close()
    assert kept.exists()


def test_a_full_disk_saves_nothing_and_keeps_what_was_there(db, fake):
    filled(db, fake, rows=10)
    with Store.open(db) as store:
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(DatabaseError, match="free some space") as caught:
            store.add(fake.measurement("b", m + 1, 1.0, detail="y" * 1000) for m in range(500))
        assert caught.value.reason == "full"
        assert len(store.measurements(fake.device, fake.problem)) == 10
        store._connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert store.add([fake.measurement("b", 1, 1.0)]) == 1
    with Store.open(db) as store:
        assert len(store.measurements(fake.device, fake.problem)) == 11


def test_a_second_writer_is_told_who_has_it_and_readers_are_let_in(db, fake):
    with Store.open(db) as first:
        first.add([fake.measurement("a", 1, 1.0)])
        error = refusal(db)
        assert error.reason == "locked"
        assert f"process {os.getpid()}" in str(error)
        with Store.open(db, readonly=True) as reader:
            assert len(reader.measurements(fake.device, fake.problem)) == 1
    Store.open(db).close()


def test_a_failed_open_frees_the_lock(db):
    db.write_bytes(b"garbage")
    refusal(db)
    db.unlink()
    Store.open(db).close()


def test_another_program_in_a_transaction_is_waited_for_then_named_as_the_reason(db, fake, monkeypatch):
    monkeypatch.setattr("nvfp4.cache.files.BUSY_TIMEOUT_S", 0.05)
    filled(db, fake, rows=1)
    with Store.open(db) as store:
        other = sqlite3.connect(db, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError) as caught:
            store.add([fake.measurement("a", 2, 1.0)])
        assert caught.value.reason == "locked"
        other.execute("ROLLBACK")
        other.close()
        assert store.add([fake.measurement("a", 2, 1.0)]) == 1
