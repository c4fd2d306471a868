"""Records to rows and back, on a plain sqlite3 connection; every row is validated before it becomes a record."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import DatabaseError, InvalidInput, message
from ..kernels.problem import Device, Problem
from .records import (
    PROTOCOLS,
    RECORDED,
    ROUTINGS,
    STATUSES,
    Environment,
    Interval,
    LayoutPlan,
    Measurement,
    Plan,
)
from .routings import is_routing

__all__ = [
    "Names",
    "check_measurement",
    "delete_plan",
    "insert_measurement",
    "insert_plan",
    "plan_at",
    "plan_numbers",
    "select_measurements",
    "select_problems",
]

R = TypeVar("R")

_DEVICE = (
    "kind",
    "name",
    "capability_major",
    "capability_minor",
    "units",
    "smem_bytes",
    "l2_bytes",
    "memory_bytes",
    "features",
)
_ENVIRONMENT = tuple(Environment.__struct_fields__)
_PROBLEM = ("op", "n", "k", "dtype", "experts", "top_k", "activation")
_CANDIDATE = ("kernel", "config", "layout", "implementation")
_COLUMNS = (
    "uuid",
    "m",
    "status",
    "protocol",
    "routing",
    "p20_us",
    "p50_us",
    "p80_us",
    "samples",
    "relative_error",
    "clock_mhz",
    "detail",
)


class Names:
    """Ids of the rows that measurements refer to: each distinct content is stored once.

    Ids are remembered, so `forget` must be called when a transaction that may have added some is rolled back.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._known: dict[tuple[str, tuple[Any, ...]], int] = {}

    def forget(self) -> None:
        """Drop what is remembered; the next use asks the database again."""
        self._known.clear()

    def device(self, device: Device, *, add: bool) -> int | None:
        """The device's id, or None when it is not there and must not be added."""
        return self._id("device", _DEVICE, _device_values(device), add)

    def environment(self, environment: Environment, *, add: bool) -> int | None:
        """The environment's id, or None."""
        return self._id("environment", _ENVIRONMENT, msgspec.structs.astuple(environment), add)

    def problem(self, problem: Problem, *, add: bool) -> int | None:
        """The problem's id, or None."""
        return self._id("problem", _PROBLEM, tuple(getattr(problem, name) for name in _PROBLEM), add)

    def candidate(self, measurement: Measurement, *, add: bool) -> int | None:
        """The id of the measurement's candidate, or None."""
        return self._id("candidate", _CANDIDATE, tuple(getattr(measurement, name) for name in _CANDIDATE), add)

    def _id(self, table: str, columns: tuple[str, ...], values: tuple[Any, ...], add: bool) -> int | None:
        known = self._known.get((table, values))
        if known is not None:
            return known
        where = " AND ".join(f"{column} = ?" for column in columns)
        row = self._connection.execute(f"SELECT id FROM {table} WHERE {where}", values).fetchone()
        if row is None and add:
            marks = ", ".join("?" * len(columns))
            sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) RETURNING id"
            row = self._connection.execute(sql, values).fetchone()
        if row is None:
            return None
        self._known[table, values] = int(row[0])
        return int(row[0])


def _device_values(device: Device) -> tuple[Any, ...]:
    features = msgspec.json.encode(device.features).decode()
    plain = (device.units, device.smem_bytes, device.l2_bytes, device.memory_bytes)
    return (device.kind, device.name, *device.capability, *plain, features)


def check_measurement(measurement: Measurement) -> None:
    """Raise InvalidInput for what no row may hold: the tables refuse most of it, but files are edited by hand too."""
    if measurement.status not in STATUSES:
        raise InvalidInput(
            message("a measurement with an unknown status", got=measurement.status, expected=", ".join(STATUSES))
        )
    if measurement.protocol not in PROTOCOLS:
        raise InvalidInput(
            message("a measurement with an unknown protocol", got=measurement.protocol, expected=", ".join(PROTOCOLS))
        )
    if not is_routing(measurement.routing):
        expected = f"{', '.join(ROUTINGS)}, or {RECORDED} and 12 hex digits"
        raise InvalidInput(message("a measurement with an unknown routing", got=measurement.routing, expected=expected))
    if measurement.status == "ok" and not (measurement.p50_us is not None and 0 < measurement.p50_us < float("inf")):
        raise InvalidInput(
            message('a measurement with status "ok" needs its median', got=measurement.p50_us, expected="p50_us > 0")
        )
    if measurement.m < 1:
        raise InvalidInput(message("a measurement of no tokens", got=f"m={measurement.m}", expected="m >= 1"))


def insert_measurement(connection: sqlite3.Connection, names: Names, measurement: Measurement) -> bool:
    """Add one row unless its uuid is there; whether it was added."""
    # Not INSERT OR IGNORE: that would also skip, without a word, rows which break a CHECK.
    columns = ("device_id", "environment_id", "problem_id", "candidate_id", "recorded_at", *_COLUMNS)
    sql = (
        f"INSERT INTO measurement ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        " ON CONFLICT (uuid) DO NOTHING"
    )
    values = (
        names.device(measurement.device, add=True),
        names.environment(measurement.environment, add=True),
        names.problem(measurement.problem, add=True),
        names.candidate(measurement, add=True),
        measurement.when,
        *(getattr(measurement, column) for column in _COLUMNS),
    )
    return connection.execute(sql, values).rowcount == 1


def _columns(connection: sqlite3.Connection) -> tuple[str, ...]:
    """What to select for `_COLUMNS`: a database of version 1, which a reader leaves as it is, knows no routings."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    absent = {"routing"} if version < 2 else set()
    return tuple("''" if name in absent else f"measurement.{name}" for name in _COLUMNS)


def select_measurements(
    connection: sqlite3.Connection, device_id: int | None = None, problem_id: int | None = None
) -> Iterator[Measurement]:
    """Measurements in the order they were added: all, or those of one device and problem."""
    parts = [
        *(f"device.{name}" for name in _DEVICE),
        *(f"environment.{name}" for name in _ENVIRONMENT),
        *(f"problem.{name}" for name in _PROBLEM),
        *(f"candidate.{name}" for name in _CANDIDATE),
        *_columns(connection),
        "measurement.recorded_at",
    ]
    where = "" if device_id is None else " WHERE measurement.device_id = ? AND measurement.problem_id = ?"
    sql = (
        f"SELECT {', '.join(parts)} FROM measurement JOIN device ON device.id = measurement.device_id"
        " JOIN environment ON environment.id = measurement.environment_id"
        " JOIN problem ON problem.id = measurement.problem_id"
        f" JOIN candidate ON candidate.id = measurement.candidate_id{where} ORDER BY measurement.id"
    )
    for row in connection.execute(sql, () if device_id is None else (device_id, problem_id)):
        yield _measurement(row)


def _measurement(row: Sequence[Any]) -> Measurement:
    at = iter(row)
    device = _device_record([next(at) for _ in _DEVICE])
    environment = {name: next(at) for name in _ENVIRONMENT}
    problem = {name: next(at) for name in _PROBLEM}
    rest = {name: next(at) for name in (*_CANDIDATE, *_COLUMNS, "when")}
    record = {"device": device, "environment": environment, "problem": problem, **rest}
    measurement: Measurement = _convert(record, Measurement, "a measurement")
    try:
        check_measurement(measurement)
    except InvalidInput as error:
        raise _invalid("a measurement", error) from error
    return measurement


def _device_record(values: Sequence[Any]) -> dict[str, Any]:
    """The columns of a device row as the fields of a Device."""
    kind, name, major, minor, units, smem_bytes, l2_bytes, memory_bytes, features = values
    try:
        listed = msgspec.json.decode(features)
    except (msgspec.DecodeError, TypeError) as error:
        raise _invalid("a device", error) from error
    return {
        "kind": kind,
        "name": name,
        "capability": (major, minor),
        "units": units,
        "smem_bytes": smem_bytes,
        "l2_bytes": l2_bytes,
        "memory_bytes": memory_bytes,
        "features": listed,
    }


def _convert(value: Any, wanted: type[R], what: str) -> R:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise _invalid(what, error) from error


def _invalid(what: str, error: Exception | str) -> DatabaseError:
    return DatabaseError(
        message(
            f"the database holds {what} that is not valid: {error}",
            do="remove that row, or name another file in NVFP4_DB",
        ),
        reason="corrupt",
    )


def select_problems(connection: sqlite3.Connection) -> list[tuple[Device, Problem]]:
    """Every device and problem that was measured or planned, sorted by name and size."""
    columns = [*(f"device.{name}" for name in _DEVICE), *(f"problem.{name}" for name in _PROBLEM)]
    sql = (
        f"SELECT {', '.join(columns)} FROM (SELECT device_id, problem_id FROM measurement"
        " UNION SELECT device_id, problem_id FROM plan) AS pair"
        " JOIN device ON device.id = pair.device_id JOIN problem ON problem.id = pair.problem_id"
        " ORDER BY device.name, device.id, problem.op, problem.n, problem.k, problem.id"
    )
    found = []
    for row in connection.execute(sql):
        device = _convert(_device_record(row[: len(_DEVICE)]), Device, "a device")
        problem = _convert(dict(zip(_PROBLEM, row[len(_DEVICE) :], strict=True)), Problem, "a problem")
        found.append((device, problem))
    return found


def delete_plan(connection: sqlite3.Connection, plan_id: str) -> None:
    """Remove one plan with its layouts and intervals."""
    connection.execute("DELETE FROM plan WHERE id = ?", (plan_id,))


def insert_plan(connection: sqlite3.Connection, names: Names, plan: Plan) -> None:
    """Add a plan; it becomes the one in force for its device and problem."""
    values = (
        plan.id,
        names.device(plan.device, add=True),
        names.problem(plan.problem, add=True),
        names.environment(plan.environment, add=True),
        plan.layout,
        plan.traffic,
        time.time(),
    )
    sql = (
        "INSERT INTO plan (id, device_id, problem_id, environment_id, layout, traffic, saved_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING number"
    )
    (number,) = connection.execute(sql, values).fetchone()
    for position, entry in enumerate(plan.layouts):
        connection.execute(
            "INSERT INTO plan_layout (plan_number, layout, position, traffic_us) VALUES (?, ?, ?, ?)",
            (number, entry.layout, position, entry.traffic_us),
        )
        for interval in entry.intervals:
            fields = Interval.__struct_fields__
            connection.execute(
                f"INSERT INTO plan_interval (plan_number, layout, {', '.join(fields)})"
                f" VALUES (?, ?, {', '.join('?' * len(fields))})",
                (number, entry.layout, *msgspec.structs.astuple(interval)),
            )


def plan_numbers(
    connection: sqlite3.Connection, device_id: int | None = None, problem_id: int | None = None
) -> list[int]:
    """Numbers of the plans in force: of every device and problem, or of one."""
    where = "" if device_id is None else " WHERE device_id = ? AND problem_id = ?"
    sql = f"SELECT max(number) FROM plan{where} GROUP BY device_id, problem_id ORDER BY 1"
    return [row[0] for row in connection.execute(sql, () if device_id is None else (device_id, problem_id))]


def plan_at(connection: sqlite3.Connection, number: int) -> Plan:
    """One plan, validated.

    Raises
    ------
    DatabaseError
        Its intervals overlap, its marked layout has none, or a column holds something else (reason "corrupt").
    """
    parts = [
        *(f"device.{name}" for name in _DEVICE),
        *(f"problem.{name}" for name in _PROBLEM),
        *(f"environment.{name}" for name in _ENVIRONMENT),
        "plan.layout",
        "plan.traffic",
    ]
    row = connection.execute(
        f"SELECT {', '.join(parts)} FROM plan JOIN device ON device.id = plan.device_id"
        " JOIN problem ON problem.id = plan.problem_id JOIN environment ON environment.id = plan.environment_id"
        " WHERE plan.number = ?",
        (number,),
    ).fetchone()
    if row is None:
        raise _invalid("a plan", "a row that it refers to is missing")
    at = iter(row)
    record = {
        "device": _device_record([next(at) for _ in _DEVICE]),
        "problem": {name: next(at) for name in _PROBLEM},
        "environment": {name: next(at) for name in _ENVIRONMENT},
        "layout": next(at),
        "traffic": next(at),
        "layouts": [
            {"layout": layout, "traffic_us": traffic_us, "intervals": _intervals(connection, number, layout)}
            for layout, traffic_us in connection.execute(
                "SELECT layout, traffic_us FROM plan_layout WHERE plan_number = ? ORDER BY position", (number,)
            ).fetchall()
        ],
    }
    plan: Plan = _convert(record, Plan, "a plan")
    for entry in plan.layouts:
        _check_intervals(entry)
    if not plan.intervals():
        raise _invalid("a plan", f"its layout {plan.layout!r} has no intervals")
    return plan


def _intervals(connection: sqlite3.Connection, number: int, layout: str) -> list[dict[str, Any]]:
    fields = Interval.__struct_fields__
    sql = f"SELECT {', '.join(fields)} FROM plan_interval WHERE plan_number = ? AND layout = ? ORDER BY m_lo"
    return [dict(zip(fields, row, strict=True)) for row in connection.execute(sql, (number, layout))]


def _check_intervals(entry: LayoutPlan) -> None:
    least = 1
    for interval in entry.intervals:
        if not interval.m_lo >= least > 0:
            raise _invalid("a plan", f"layout {entry.layout!r} has an interval from {interval.m_lo} within another")
        # After an open interval none may follow: 0 is no m_lo.
        least = 0 if interval.m_hi is None else interval.m_hi + 1
