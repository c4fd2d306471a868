"""The tables of the tuning database, as migrations; `docs/database.md` describes them.

A migration that was released is never edited: a change is a new one at the end. Each runs in its own transaction with
the record of it, so a killed process leaves either the old schema or the new one. `PRAGMA user_version` counts them,
so that the online path can tell a newer or foreign file without importing sqlite-utils.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from .records import PROTOCOLS, RECORDED, ROUTINGS, STATUSES

if TYPE_CHECKING:
    from sqlite_utils import Database, Migrations

__all__ = ["APPLICATION_ID", "VERSION", "migrate"]

VERSION = 3  # the number of migrations below
APPLICATION_ID = 0x4E564634  # "NVF4" in the file's header


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an open database to the newest schema; nothing happens when it is there already.

    Raises
    ------
    sqlite3.Error
        As SQLite says it; the migration that failed is rolled back.
    """
    from sqlite_utils import Database

    _migrations().apply(Database(connection, execute_plugins=False, recursive_triggers=False))


def _migrations() -> Migrations:
    from sqlite_utils import Migrations

    migrations = Migrations("nvfp4")
    migrations()(first_tables)
    migrations()(routings)
    migrations()(recorded_routings)
    return migrations


def first_tables(db: Database) -> None:
    """Version 1: evidence, decisions, and two views for reading them."""
    for statement in (*_NAMES, _MEASUREMENT, *_APPEND_ONLY, *_PLAN, *_VIEWS):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute("PRAGMA user_version = 1")


def routings(db: Database) -> None:
    """Version 2: which experts the tokens of a measurement went to. Rows of gemm, all there were, have no routing."""
    names = _words(("", *ROUTINGS))
    db.execute(f"ALTER TABLE measurement ADD COLUMN routing TEXT NOT NULL DEFAULT '' CHECK (routing IN ({names}))")
    db.execute("DROP VIEW measurements")
    db.execute(_MEASUREMENTS_WITH_ROUTING)
    db.execute("PRAGMA user_version = 2")


def recorded_routings(db: Database) -> None:
    """Version 3: routings that users recorded. SQLite cannot change a CHECK, so the column is made anew."""
    known = f"routing_2 IN ({_words(('', *ROUTINGS))}) OR routing_2 GLOB '{RECORDED}*'"
    for statement in (
        "DROP VIEW measurements",
        "DROP TRIGGER measurement_is_append_only",
        f"ALTER TABLE measurement ADD COLUMN routing_2 TEXT NOT NULL DEFAULT '' CHECK ({known})",
        "UPDATE measurement SET routing_2 = routing WHERE routing <> ''",
        "ALTER TABLE measurement DROP COLUMN routing",
        "ALTER TABLE measurement RENAME COLUMN routing_2 TO routing",
        _IS_APPEND_ONLY,
        _MEASUREMENTS_WITH_ROUTING,
        "PRAGMA user_version = 3",
    ):
        db.execute(statement)


def _words(values: tuple[str, ...]) -> str:
    return ", ".join(f"'{value}'" for value in values)


# Rows that measurements and plans refer to, one per distinct content.
_NAMES = (
    """
    CREATE TABLE device (
        id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        capability_major INTEGER NOT NULL,
        capability_minor INTEGER NOT NULL,
        units INTEGER NOT NULL,
        smem_bytes INTEGER NOT NULL,
        l2_bytes INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        features TEXT NOT NULL,
        UNIQUE (kind, name, capability_major, capability_minor, units, smem_bytes, l2_bytes, memory_bytes, features)
    ) STRICT
    """,
    """
    CREATE TABLE environment (
        id INTEGER PRIMARY KEY,
        nvfp4 TEXT NOT NULL,
        torch TEXT NOT NULL,
        triton TEXT NOT NULL,
        cutlass_dsl TEXT NOT NULL,
        cuda TEXT NOT NULL,
        driver TEXT NOT NULL,
        timing TEXT NOT NULL,
        UNIQUE (nvfp4, torch, triton, cutlass_dsl, cuda, driver, timing)
    ) STRICT
    """,
    """
    CREATE TABLE problem (
        id INTEGER PRIMARY KEY,
        op TEXT NOT NULL,
        n INTEGER NOT NULL,
        k INTEGER NOT NULL,
        dtype TEXT NOT NULL,
        experts INTEGER NOT NULL,
        top_k INTEGER NOT NULL,
        activation TEXT NOT NULL,
        UNIQUE (op, n, k, dtype, experts, top_k, activation)
    ) STRICT
    """,
    """
    CREATE TABLE candidate (
        id INTEGER PRIMARY KEY,
        kernel TEXT NOT NULL,
        config TEXT NOT NULL,
        layout TEXT NOT NULL,
        implementation TEXT NOT NULL,
        UNIQUE (kernel, config, layout, implementation)
    ) STRICT
    """,
)

_MEASUREMENT = f"""
    CREATE TABLE measurement (
        id INTEGER PRIMARY KEY,
        uuid TEXT NOT NULL UNIQUE,
        device_id INTEGER NOT NULL REFERENCES device (id),
        environment_id INTEGER NOT NULL REFERENCES environment (id),
        problem_id INTEGER NOT NULL REFERENCES problem (id),
        candidate_id INTEGER NOT NULL REFERENCES candidate (id),
        m INTEGER NOT NULL CHECK (m >= 1),
        status TEXT NOT NULL CHECK (status IN ({_words(STATUSES)})),
        protocol TEXT NOT NULL CHECK (protocol IN ({_words(PROTOCOLS)})),
        p20_us REAL,
        p50_us REAL,
        p80_us REAL,
        samples INTEGER NOT NULL,
        relative_error REAL,
        clock_mhz INTEGER,
        detail TEXT NOT NULL,
        recorded_at REAL NOT NULL,
        CHECK (status <> 'ok' OR p50_us > 0)
    ) STRICT
"""

_IS_APPEND_ONLY = """
    CREATE TRIGGER measurement_is_append_only BEFORE UPDATE ON measurement
    BEGIN SELECT RAISE (ABORT, 'measurements are append-only: add a new row instead'); END
"""
_APPEND_ONLY = (
    "CREATE INDEX measurement_by_problem ON measurement (device_id, problem_id, m)",
    _IS_APPEND_ONLY,
)

# number orders the plans of a problem: the largest is the one in force. A clock would not do, it can go backwards.
_PLAN = (
    """
    CREATE TABLE plan (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        device_id INTEGER NOT NULL REFERENCES device (id),
        problem_id INTEGER NOT NULL REFERENCES problem (id),
        environment_id INTEGER NOT NULL REFERENCES environment (id),
        layout TEXT NOT NULL,
        traffic TEXT NOT NULL,
        saved_at REAL NOT NULL
    ) STRICT
    """,
    "CREATE INDEX plan_by_problem ON plan (device_id, problem_id, number)",
    """
    CREATE TABLE plan_layout (
        plan_number INTEGER NOT NULL REFERENCES plan (number) ON DELETE CASCADE,
        layout TEXT NOT NULL,
        position INTEGER NOT NULL,
        traffic_us REAL,
        PRIMARY KEY (plan_number, layout)
    ) STRICT
    """,
    """
    CREATE TABLE plan_interval (
        plan_number INTEGER NOT NULL,
        layout TEXT NOT NULL,
        m_lo INTEGER NOT NULL CHECK (m_lo >= 1),
        m_hi INTEGER CHECK (m_hi >= m_lo),
        kernel TEXT NOT NULL,
        config TEXT NOT NULL,
        expected_us REAL NOT NULL,
        runner_up TEXT NOT NULL,
        margin REAL NOT NULL,
        PRIMARY KEY (plan_number, layout, m_lo),
        FOREIGN KEY (plan_number, layout) REFERENCES plan_layout (plan_number, layout) ON DELETE CASCADE
    ) STRICT
    """,
)

_VIEWS = (
    """
    CREATE VIEW measurements AS
    SELECT measurement.id, device.name AS device, problem.op, problem.n, problem.k, problem.dtype, problem.experts,
        problem.top_k, problem.activation, measurement.m, candidate.kernel, candidate.config, candidate.layout,
        candidate.implementation, measurement.status, measurement.protocol, measurement.p20_us, measurement.p50_us,
        measurement.p80_us, measurement.samples, measurement.relative_error, measurement.clock_mhz,
        environment.driver, environment.torch, environment.triton, environment.nvfp4, environment.timing,
        datetime(measurement.recorded_at, 'unixepoch') AS recorded_at, measurement.detail, measurement.uuid
    FROM measurement
    JOIN device ON device.id = measurement.device_id
    JOIN environment ON environment.id = measurement.environment_id
    JOIN problem ON problem.id = measurement.problem_id
    JOIN candidate ON candidate.id = measurement.candidate_id
    """,
    """
    CREATE VIEW current_plans AS
    SELECT plan.id AS plan, device.name AS device, problem.op, problem.n, problem.k, problem.dtype, problem.experts,
        problem.top_k, problem.activation, plan_interval.layout, plan_interval.layout = plan.layout AS marked,
        plan_interval.m_lo, plan_interval.m_hi, plan_interval.kernel, plan_interval.config,
        plan_interval.expected_us, plan_interval.runner_up, plan_interval.margin, plan.traffic,
        datetime(plan.saved_at, 'unixepoch') AS saved_at
    FROM plan
    JOIN device ON device.id = plan.device_id
    JOIN problem ON problem.id = plan.problem_id
    JOIN plan_interval ON plan_interval.plan_number = plan.number
    WHERE plan.number IN (SELECT max(number) FROM plan GROUP BY device_id, problem_id)
    """,
)

_MEASUREMENTS_WITH_ROUTING = """
    CREATE VIEW measurements AS
    SELECT measurement.id, device.name AS device, problem.op, problem.n, problem.k, problem.dtype, problem.experts,
        problem.top_k, problem.activation, measurement.m, candidate.kernel, candidate.config, candidate.layout,
        candidate.implementation, measurement.status, measurement.protocol, measurement.routing,
        measurement.p20_us, measurement.p50_us, measurement.p80_us, measurement.samples,
        measurement.relative_error, measurement.clock_mhz,
        environment.driver, environment.torch, environment.triton, environment.nvfp4, environment.timing,
        datetime(measurement.recorded_at, 'unixepoch') AS recorded_at, measurement.detail, measurement.uuid
    FROM measurement
    JOIN device ON device.id = measurement.device_id
    JOIN environment ON environment.id = measurement.environment_id
    JOIN problem ON problem.id = measurement.problem_id
    JOIN candidate ON candidate.id = measurement.candidate_id
"""
