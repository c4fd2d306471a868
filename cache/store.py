"""Store: the tuning database. One writer at a time, any number of readers."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import DatabaseError
from ..kernels.problem import Device, Problem
from . import rows
from .files import connect_reader, connect_writer, default_path, explain, failure, set_aside, settle
from .records import Measurement, Plan
from .schema import migrate

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["Store", "open_or_set_aside"]


class Store:
    """An open database; made by `Store.open`, closed by `close` or at the end of a `with` block.

    Not for use from several threads, nor across a fork.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: BaseFileLock | None) -> None:
        self.path = path
        self.readonly = lock is None
        self._connection = connection
        self._lock = lock
        self._names = rows.Names(connection)

    @classmethod
    def open(cls, path: Path | None = None, *, readonly: bool = False, wait_s: float = 0.0) -> Store:
        """Open a database; for writing, make it when it is not there.

        Parameters
        ----------
        path
            The file; by default NVFP4_DB, or `nvfp4.db` in the user's cache folder.
        readonly
            Take no lock and write nothing, not even files beside the database.
        wait_s
            How long to wait for another writer, in seconds.

        Raises
        ------
        DatabaseError
            Its `reason` says which: "missing" (only when `readonly`), "corrupt", "newer", "foreign", "readonly",
            "unreadable", "locked", "full" or "io".
        """
        path = _real_path(path)
        if readonly:
            return cls(path, connect_reader(path), None)
        lock = _lock(path, wait_s)
        try:
            return cls._open_locked(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_locked(cls, path: Path, lock: BaseFileLock) -> Store:
        connection = connect_writer(path)
        try:
            with explain(path):
                migrate(connection)
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, lock)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let the next writer in."""
        if self._lock is None:
            self._connection.close()
            return
        try:
            settle(self._connection)
            self._connection.close()
        finally:
            self._lock.release()

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Save measurements in one transaction; those whose uuid is there already are skipped.

        Returns
        -------
        int
            How many were new.

        Raises
        ------
        InvalidInput
            A status or protocol that does not exist, or an "ok" without a time. Nothing was saved.
        DatabaseError
            The disk is full, the file read-only, or the like. Nothing was saved.
        """
        added = 0
        with self._transaction():
            for measurement in measurements:
                rows.check_measurement(measurement)
                added += rows.insert_measurement(self._connection, self._names, measurement)
        return added

    def measurements(self, device: Device, problem: Problem) -> list[Measurement]:
        """All that was measured for one problem on one device, in the order of adding: the last row is the newest."""
        with self._reading():
            device_id, problem_id = self._pair(device, problem)
            if device_id is None or problem_id is None:
                return []
            return list(rows.select_measurements(self._connection, device_id, problem_id))

    def all_measurements(self) -> Iterator[Measurement]:
        """Every measurement of the database, in the order it was added."""
        with explain(self.path):
            yield from rows.select_measurements(self._connection)

    def problems(self) -> list[tuple[Device, Problem]]:
        """Every device and problem that was measured or planned."""
        with self._reading():
            return rows.select_problems(self._connection)

    def save_plan(self, plan: Plan) -> None:
        """Save a plan: it becomes the one in force for its device and problem; older ones stay.

        Raises
        ------
        DatabaseError
            As for `add`.
        """
        with self._transaction():
            rows.delete_plan(self._connection, plan.id)
            rows.insert_plan(self._connection, self._names, plan)

    def load_plan(self, device: Device, problem: Problem) -> Plan | None:
        """The plan in force for one problem on one device, or None.

        Raises
        ------
        DatabaseError
            The stored plan is not valid (reason "corrupt").
        """
        with self._reading():
            device_id, problem_id = self._pair(device, problem)
            if device_id is None or problem_id is None:
                return None
            numbers = rows.plan_numbers(self._connection, device_id, problem_id)
            return rows.plan_at(self._connection, numbers[0]) if numbers else None

    def plans(self) -> list[Plan]:
        """The plan in force of every device and problem, in the order they were saved."""
        with self._reading():
            return [rows.plan_at(self._connection, number) for number in rows.plan_numbers(self._connection)]

    def merge_from(self, other: Path) -> int:
        """Add the measurements of another database; those that are here already are skipped.

        The same rows result in whatever order files are merged, however often. Where two files timed one candidate at
        the same M, the rows added last count as the newest. Plans are not merged: make them again from the merged
        measurements.

        Returns
        -------
        int
            How many were new.

        Raises
        ------
        DatabaseError
            The other file cannot be read, or this one not written. Nothing was saved.
        """
        with Store.open(other, readonly=True) as source:
            return self.add(source.all_measurements())

    def _pair(self, device: Device, problem: Problem) -> tuple[int | None, int | None]:
        return self._names.device(device, add=False), self._names.problem(problem, add=False)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        # One snapshot for all statements: the tuner may replace a plan between two of them.
        with explain(self.path):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                # Some errors have ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("COMMIT")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self.readonly:
            raise failure(self.path, "readonly", "it was opened for reading", do="open it without readonly=True")
        with explain(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._names.forget()
                # Some errors have ended the transaction already, a full disk among them.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def open_or_set_aside(path: Path | None = None) -> tuple[Store, Path | None]:
    """Open for writing; a damaged file is renamed and a fresh database started.

    Only damage is moved: a newer, foreign or read-only database raises, and so do a folder that is not empty and an
    unreadable file of another user.

    Returns
    -------
    tuple of Store and Path or None
        The open database, and the new name of the damaged file if there was one.

    Raises
    ------
    DatabaseError
        As for `Store.open`.
    """
    path = _real_path(path)
    lock = _lock(path, 0.0)
    try:
        try:
            return Store._open_locked(path, lock), None
        except DatabaseError as error:
            if not _may_move(path, error.reason):
                raise
        kept = set_aside(path)
        return Store._open_locked(path, lock), kept
    except BaseException:
        lock.release()
        raise


def _real_path(path: Path | None) -> Path:
    """The file itself, not a link to it: SQLite keeps its WAL beside the file, and all names of it share one lock."""
    return Path(os.path.realpath(default_path() if path is None else path))


def _may_move(path: Path, reason: str) -> bool:
    if path.is_dir():
        return not any(path.iterdir())
    return reason == "corrupt" or (reason == "unreadable" and path.stat().st_uid == os.geteuid())


def _lock(path: Path, wait_s: float) -> BaseFileLock:
    """Take the writer's lock: `<path>.lock`, which holds a line that says who has it."""
    from filelock import FileLock, Timeout

    lock_path = Path(f"{path}.lock")
    with explain(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(lock_path, thread_local=False)
        try:
            lock.acquire(timeout=wait_s)
        except Timeout as error:
            owner = lock_path.read_text(errors="replace").strip() or "another process"
            raise failure(
                path,
                "locked",
                f"{owner} is writing to it",
                do="wait until it is done or stop it, or name another file in NVFP4_DB and merge later",
            ) from error
        try:
            lock_path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except BaseException:
            lock.release()
            raise
    return lock
