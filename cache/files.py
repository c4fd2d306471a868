"""The database as a file: where it is, opening it, what can be wrong with it, and moving a damaged one aside."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

from ..errors import DatabaseError, message
from .schema import APPLICATION_ID, VERSION

__all__ = [
    "check_schema",
    "connect_reader",
    "connect_writer",
    "default_path",
    "explain",
    "set_aside",
    "settle",
    "stamp",
]

BUSY_TIMEOUT_S = 5.0

_DO = {
    "missing": "run `nvfp4 tune`, or name another file (--db or NVFP4_DB)",
    "corrupt": "`nvfp4 tune` moves it aside and starts a fresh one",
    "newer": "update nvfp4, or name another file (--db or NVFP4_DB)",
    "foreign": "name another file (--db or NVFP4_DB)",
    "readonly": "give this user write permission on the file and its folder, or name another file (--db or NVFP4_DB)",
    "unreadable": "give this user read permission, or name another file (--db or NVFP4_DB)",
    "locked": "wait until the other process is done",
    "full": "free some space on that disk, then run it again: what was saved before is kept",
    "io": "check the file and the disk that it is on",
}


_BY_ERRNO = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "readonly",
    errno.EPERM: "readonly",
    errno.EROFS: "readonly",
}


def default_path() -> Path:
    """NVFP4_DB if set, else `nvfp4.db` in the user's cache folder."""
    named = os.environ.get("NVFP4_DB")
    if named:
        return Path(os.path.expanduser(named))
    from platformdirs import user_cache_path

    return user_cache_path("nvfp4", appauthor=False) / "nvfp4.db"


def stamp() -> tuple[object, ...]:
    """Not what it was if the user's database has been written, made or named anew since; much cheaper than a look."""
    path = _found(os.environ.get("NVFP4_DB"), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    written = _written(path)
    return path, written, written and _written(f"{path}-wal")


@cache
def _found(*_: str | None) -> str:
    """`default_path`, which takes a while, with these in the environment."""
    return str(default_path())


def _written(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def failure(path: Path, reason: str, what: str, *, got: object = None, do: str = "") -> DatabaseError:
    """A DatabaseError that names the file and says what to do."""
    return DatabaseError(message(f"database {path}: {what}", got=got, do=do or _DO[reason]), reason=reason)


@contextmanager
def explain(path: Path) -> Iterator[None]:
    """Turn what SQLite or the file system raises into a DatabaseError with a reason."""
    try:
        yield
    except sqlite3.Error as error:
        reason = _reason(error, path)
        raise failure(path, reason, str(error)) from error
    except UnicodeDecodeError as error:  # SQLite's message quotes bytes of a damaged schema, and is no text then
        raise failure(path, "corrupt", "its schema is damaged") from error
    except OSError as error:
        reason = _BY_ERRNO.get(error.errno or 0, "io")
        raise failure(path, reason, error.strerror or str(error)) from error


def _reason(error: sqlite3.Error, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    by_code = {
        sqlite3.SQLITE_CORRUPT: "corrupt",
        sqlite3.SQLITE_NOTADB: "corrupt",
        sqlite3.SQLITE_SCHEMA: "corrupt",
        sqlite3.SQLITE_READONLY: "readonly",
        sqlite3.SQLITE_PERM: "readonly",
        sqlite3.SQLITE_BUSY: "locked",
        sqlite3.SQLITE_LOCKED: "locked",
        sqlite3.SQLITE_FULL: "full",
    }
    if code == sqlite3.SQLITE_CANTOPEN:
        return "unreadable" if path.exists() and not os.access(path, os.R_OK) else "readonly"
    return by_code.get(code, "io")


def inspect_file(path: Path) -> bytes:
    """The file's header; raises what can be seen without SQLite: no file, a folder or a
    device, no permission, a file cut short.

    Raises
    ------
    DatabaseError
        With reason "missing", "corrupt", "foreign" or "unreadable".
    """
    try:
        if path.is_dir():
            raise failure(path, "corrupt", "it is a folder, not a file", do="name a file (--db or NVFP4_DB)")
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise failure(path, "foreign", "it is no regular file", do="name a file (--db or NVFP4_DB)")
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError as error:
        raise failure(path, "missing", "there is none") from error
    except OSError as error:
        raise failure(path, "unreadable", error.strerror or str(error)) from error
    if size and not header.startswith(b"SQLite format 3\0"):
        raise failure(path, "corrupt", "it is not a database")
    if size and not Path(f"{path}-wal").exists():
        # SQLite reads pages that are cut off as zeros and does not always complain.
        page_bytes = int.from_bytes(header[16:18], "big")
        page_bytes = 65536 if page_bytes == 1 else page_bytes
        if size < page_bytes * int.from_bytes(header[28:32], "big"):
            raise failure(path, "corrupt", "it is cut short", got=f"{size} bytes")
    return header


def check_schema(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database has its tables; False for a fresh one.

    Raises
    ------
    DatabaseError
        With reason "newer" or "foreign".
    """
    if sqlite3.sqlite_version_info < (3, 37):
        # An older one would call every STRICT table damaged.
        raise failure(path, "io", f"SQLite {sqlite3.sqlite_version} is too old", do="use a Python with SQLite 3.37")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    listed = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    tables = {row[0] for row in listed} - {"_sqlite_migrations", "sqlite_sequence"}
    if application not in (0, APPLICATION_ID):
        raise failure(path, "foreign", "it belongs to another program", got=f"application_id {application}")
    if not tables:
        return False
    if application != APPLICATION_ID:
        raise failure(path, "foreign", "it holds other tables", got=", ".join(sorted(tables)[:4]))
    if version > VERSION:
        raise failure(path, "newer", f"its schema has version {version}, this nvfp4 knows {VERSION}")
    return True


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open for writing; the caller holds the lock. A missing or empty file becomes a fresh database."""
    if path.exists():
        inspect_file(path)
        if not os.access(path, os.W_OK):
            raise failure(path, "readonly", "the file is read-only")
    if not os.access(path.parent, os.W_OK):
        raise failure(path, "readonly", "its folder is read-only")
    with explain(path):
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            present = check_schema(connection, path)
            if present and (found := connection.execute("PRAGMA quick_check (1)").fetchone()[0]) != "ok":
                raise failure(path, "corrupt", found.splitlines()[-1])
            connection.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing; a power cut may lose the last commits, never the database.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
    return connection


def settle(connection: sqlite3.Connection) -> None:
    """Put everything into the one file before closing: it can then be copied, and read from a read-only folder."""
    # A reader that is open at this moment prevents it: the WAL stays, and the next writer to close does this.
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = DELETE")


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open for reading, creating no file beside the database.

    Raises
    ------
    DatabaseError
        With any reason but "full"; a fresh file counts as "missing".
    """
    header = inspect_file(path)
    # A plain read of a WAL database leaves two files beside it, and fails in a folder that is read-only. `settle` sees
    # to it that a closed database is no WAL database; one that became so otherwise (copied while it was open) has no
    # writer if it has no WAL file, so nothing can change under an immutable read.
    alone = header[18:20] == b"\2\2" and not Path(f"{path}-wal").exists()
    mode = "mode=ro&immutable=1" if alone else "mode=ro"
    with explain(path):
        uri = f"file:{quote(os.fsencode(path.resolve()))}?{mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            if not check_schema(connection, path):
                raise failure(path, "missing", "it is empty")
        except BaseException:
            connection.close()
            raise
    return connection


def set_aside(path: Path) -> Path:
    """Rename a damaged database, its WAL first: a WAL left behind would be replayed into the fresh one.

    Returns
    -------
    Path
        The new name, `<path>.corrupt-<UTC time>`.
    """
    with explain(path):
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        kept = Path(f"{path}.corrupt-{stamp}")
        number = 1
        while kept.exists():
            kept = Path(f"{path}.corrupt-{stamp}-{number}")
            number += 1
        for suffix in ("-wal", "-shm", "-journal", ""):
            if Path(f"{path}{suffix}").exists():
                os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    return kept
