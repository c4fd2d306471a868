"""`nvfp4 env`: what this machine has, and where things are."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import rich_click as click

from ..cache.files import default_path
from ..cache.fingerprint import environment
from ..cache.records import Environment
from ..cache.store import Store
from ..errors import DatabaseError, NoDevice
from ..kernels import registry
from ..kernels.cuda import program_cache
from ..kernels.device import describe
from ..kernels.problem import OPS, Device
from .options import database_option, help_style, json_option
from .output import Grid, console, print_json
from .words import device_words, plural

__all__ = ["env"]

LABELS = {"timing": "timing protocol"}
OPTIONS = ("NVFP4_DB", "NVFP4_KERNELS", "NVFP4_KERNEL_CACHE", "NVFP4_PDL", "NVFP4_VLLM")


class Database(msgspec.Struct, frozen=True, kw_only=True):
    """The file that tuning results are in."""

    path: str
    state: str  # "ok", or the reason of a DatabaseError: "missing", "corrupt", …
    detail: str = ""
    size_bytes: int = 0
    plans: int = 0
    problems: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that is printed."""

    devices: dict[str, Device]  # by torch's name
    python: str
    system: str
    versions: Environment
    kernels: dict[str, tuple[str, ...]]  # names by op
    database: Database
    caches: dict[str, str]  # folder by what is in it
    variables: dict[str, str]  # those that are set


@click.command()
@help_style
@database_option
@json_option
def env(db: Path | None, as_json: bool) -> None:
    """Show devices, versions, kernels, the database and the cache folders.

    \b
    Examples:
      nvfp4 env
      nvfp4 env --json
    """
    report = Report(
        devices=_devices(),
        python=platform.python_version(),
        system=platform.platform(),
        versions=environment(),
        kernels={op: tuple(kernel.name for kernel in registry.kernels(op)) for op in OPS},
        database=_database(db or default_path()),
        caches=_caches(),
        variables={name: os.environ[name] for name in OPTIONS if name in os.environ},
    )
    if as_json:
        print_json(report)
        return
    made = Grid("", "~")
    for place, device in report.devices.items():
        made.row(place, device_words(device))
    made.row("python", f"{report.python} on {report.system}")
    for name, version in msgspec.to_builtins(report.versions).items():
        made.row(LABELS.get(name, name.replace("_", "-")), version or "-")
    for op, names in report.kernels.items():
        made.row(f"{op} kernels", ", ".join(names))
    made.row("database", report.database.path)
    made.row("", _state(report.database))
    for what, folder in (*report.caches.items(), *report.variables.items()):
        made.row(what, folder)
    console().print(made)


def _devices() -> dict[str, Device]:
    import torch

    places = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    found: dict[str, Device] = {}
    for place in (*places, "cpu"):
        try:
            found[place] = describe(place)
        except (NoDevice, RuntimeError) as error:  # a device that is counted but does not answer
            click.echo(f"warning: {place}: {error}", err=True)
    return found


def _database(path: Path) -> Database:
    try:
        with Store.open(path, readonly=True) as store:
            return Database(
                path=str(path),
                state="ok",
                size_bytes=path.stat().st_size,
                plans=len(store.plans()),
                problems=len(store.problems()),
            )
    except DatabaseError as error:
        return Database(path=str(path), state=error.reason, detail=str(error))


def _state(database: Database) -> str:
    if database.state == "ok":
        there = f"{plural(database.plans, 'plan')}, {plural(database.problems, 'problem')} measured"
        return f"{there}, {database.size_bytes / 1e6:.1f} MB"
    return "none yet: run `nvfp4 tune`" if database.state == "missing" else database.detail


def _caches() -> dict[str, str]:
    triton = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton/cache")
    return {"compiled kernels": str(program_cache.folder()), "triton cache": str(triton)}
