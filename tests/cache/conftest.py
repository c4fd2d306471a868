"""A hand-made device, fake kernels and a maker of measurements."""

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import filelock
import platformdirs  # noqa: F401  loaded before a test gives up root, which may be needed to read it
import pytest
import sqlite_utils  # noqa: F401
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import BASELINE, Environment, Measurement
from nvfp4.kernels.kernel import Config, Kernel, Space, implementation_hash
from nvfp4.kernels.problem import YES, Device, Problem, Verdict

assert filelock.FileLock

DEVICE = Device(kind="cuda", name="Fake 9000", capability=(9, 0), units=132, features=("a", "b"))
PROBLEM = Problem(n=4096, k=2048)
ENVIRONMENT = Environment(nvfp4="0.1.0", torch="2.13.0", triton="3.7.1", driver="580.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Config):
    tile: int = 16
    num_warps: int = 4


class FakeKernel(Kernel):
    """Every limit is given by hand."""

    config_type = Tile

    def __init__(self, name: str, *, layout: str = "checkpoint", source: Path | None = None, **limits: object) -> None:
        self.name = name
        self.reads = layout
        self.source = source
        self.limits = SimpleNamespace(
            **({"max_m": 2**30, "min_m": 1, "hole": 0, "supported": True, "default_tile": 16} | limits)
        )
        self.deterministic = bool(limits.get("deterministic", True))

    def layout(self, device, problem):
        return self.reads

    def supports(self, device, problem):
        return YES if self.limits.supported else Verdict.no("needs a newer card")

    def is_valid(self, device, problem, config, m):
        if self.limits.min_m <= m <= self.limits.max_m and m != self.limits.hole:
            return YES
        return Verdict.no(f"M must be {self.limits.min_m} to {self.limits.max_m}")

    def space(self, device, problem):
        return Space(Tile, {"tile": (16, 32, 64), "num_warps": (4, 8)})

    def default_config(self, device, problem, m):
        return Tile(tile=self.limits.default_tile)

    def build(self, device, problem, config):
        raise NotImplementedError

    def source_files(self):
        return (self.source,) if self.source else ()


def measurement(kernel: Kernel | str, m: int, p50_us: float | None = None, /, **fields: object) -> Measurement:
    """An "ok" screen at M = m; a failure if a status is given."""
    p50_us = fields.get("p50_us", p50_us)  # type: ignore[assignment]
    defaults: dict[str, object] = {
        "device": DEVICE,
        "environment": ENVIRONMENT,
        "problem": PROBLEM,
        "kernel": kernel if isinstance(kernel, str) else kernel.name,
        "config": Tile(tile=fields.pop("tile", 16), num_warps=fields.pop("num_warps", 4)).to_json(),  # type: ignore
        "layout": "checkpoint" if isinstance(kernel, str) else kernel.layout(DEVICE, PROBLEM),
        "implementation": "" if isinstance(kernel, str) else implementation_hash(kernel),
        "m": m,
        "status": "ok" if p50_us is not None else "crash",
        "p50_us": p50_us,
        "samples": 20,
    }
    return Measurement(**(defaults | fields))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    return SimpleNamespace(
        Kernel=FakeKernel,
        Tile=Tile,
        measurement=measurement,
        device=DEVICE,
        problem=PROBLEM,
        environment=ENVIRONMENT,
        baseline=BASELINE,
    )


@pytest.fixture
def plan(fake):
    def make(rows, *kernels, **options):
        return make_plan(
            fake.device,
            fake.problem,
            rows,
            kernels={kernel.name: kernel for kernel in kernels},
            environment=fake.environment,
            **options,
        )

    return make


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "nvfp4.db"


@pytest.fixture
def sql(db: Path) -> Callable[..., list[tuple]]:
    """Runs statements on the database as another program would."""

    def run(*statements: str, path: Path = db) -> list[tuple]:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            return [row for statement in statements for row in connection.execute(statement).fetchall()]
        finally:
            connection.close()

    return run


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def unprivileged() -> Callable:
    """A context in which permissions count: root gives its rights up for as long."""

    @contextmanager
    def drop() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.setresuid(65534, 65534, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)

    return drop
