"""`nvfp4 warmup --arch`: kernels for GPUs that are not here, in a folder that can be shipped."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import rich_click as click

from ..cache.records import Plan
from ..cache.store import Store
from ..dispatch.checkpoint.files import listed
from ..dispatch.offline import TYPICAL, Candidate, Wanted, build_all, capability_of
from ..errors import DatabaseError, InvalidInput, Nvfp4Error, message
from ..kernels.build import BuildPool, Built
from ..kernels.cuda import program_cache
from ..kernels.cuda.compile import known_architecture
from ..kernels.problem import Device, Problem
from ..kernels.triton_launch import interpreting
from ..kernels.weights.fragment import compile_packing
from .output import Grid, console, print_json
from .words import candidate_words, device_words, duration, plural, problem_words

__all__ = ["build_offline"]

VARIABLE = "NVFP4_KERNEL_CACHE"
INDENT = " " * 4


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate."""

    arch: str
    device: str
    problem: Problem
    kernel: str
    config: str
    seconds: float
    compiled: int  # programs that were not in the folder
    error: str


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """All that is printed."""

    folder: str
    seconds: float
    compiled: int  # programs that were not in the folder
    failed: int  # candidates
    candidates: tuple[Kept, ...]


def build_offline(
    archs: Sequence[str], problems: Sequence[Problem], *, db: Path | None, output: Path | None, as_json: bool
) -> bool:
    """Build for some architectures, and say what was done; whether all of it could be built.

    Parameters
    ----------
    archs
        "sm_90a" and the like.
    problems
        Those that the command names; without any, all that the database has.
    db
        The database; None: the user's.
    output
        The folder; None: the one in use.

    Raises
    ------
    InvalidInput
        An unknown architecture, TRITON_INTERPRET is set, or the folder holds something else than kernels.
    BuildError
        The compiler here does not know it.
    DatabaseError
        The database cannot be read; one that is missing is an error only where there is nothing else to go by.
    Nvfp4Error
        The folder cannot be written.
    """
    if interpreting():
        raise InvalidInput(
            message("Triton interprets kernels and compiles none", got="TRITON_INTERPRET", do="unset it")
        )
    plans, measured = _read(db, needed=db is not None or not problems)
    known = {device.capability: None for device, _ in measured if device.kind == "cuda"} | dict.fromkeys(TYPICAL)
    capabilities = list(dict.fromkeys(capability_of(arch, known) for arch in archs))
    names = {capability: known_architecture(capability) for capability in capabilities}
    wanted = [
        Wanted(device=device, problem=problem, plan=plans.get((device, problem)))
        for capability in capabilities
        for device in _devices(capability, measured)
        for problem in problems or dict.fromkeys(problem for _, problem in measured)
    ]
    if not wanted:
        raise Nvfp4Error(message("the database has no problems", do="run `nvfp4 tune`, or name problems"))
    begun, said = time.perf_counter(), console(stderr=True)
    done: list[Kept] = []

    def built(candidate: Candidate, outcome: Built, left: int) -> None:
        arch, problem, config = names[candidate.device.capability], candidate.problem, candidate.config.to_json()
        kept = Kept(
            arch=arch,
            device=candidate.device.name,
            problem=problem,
            kernel=candidate.kernel.name,
            config=config,
            seconds=outcome.seconds,
            compiled=outcome.programs.saved + outcome.programs.lost,
            error=outcome.error,
        )
        done.append(kept)
        took = f"{kept.seconds:.1f} s" if kept.compiled else "failed" if kept.error else "was there"
        words = candidate_words(f"{kept.kernel} {config}")
        said.print(f"{arch} {problem_words(problem)} {words}: {took}; {left} left", soft_wrap=True)
        if kept.error:
            said.print(INDENT + kept.error.replace("\n", "\n" + INDENT), soft_wrap=True)
        if outcome.programs.lost:
            raise _unwritable(folder, "a compiled program was not saved")

    with _programs_in(output) as folder:
        pool = BuildPool()
        try:
            build_all(wanted, pool=pool, built=built, warn=lambda text: click.echo(f"warning: {text}", err=True))
        finally:
            pool.close()
        for capability in capabilities:
            compile_packing(capability)
        if output is not None:
            program_cache.open_to_all(folder)
    shipped = Shipped(
        folder=str(folder.absolute()),
        seconds=time.perf_counter() - begun,
        compiled=sum(kept.compiled for kept in done),
        failed=sum(bool(kept.error) for kept in done),
        candidates=tuple(done),
    )
    if as_json:
        print_json(shipped)
    else:
        _summarise(shipped, wanted)
    return not shipped.failed


def _read(db: Path | None, *, needed: bool) -> tuple[dict[tuple[Device, Problem], Plan], list[tuple[Device, Problem]]]:
    """Plans in force, and every device and problem of the database."""
    try:
        with Store.open(db, readonly=True) as store:
            plans = {(plan.device, plan.problem): plan for plan in store.plans()}
            return plans, list(dict.fromkeys([*plans, *store.problems()]))
    except DatabaseError as error:
        if needed or error.reason != "missing":
            raise
        return {}, []


def _devices(capability: tuple[int, int], measured: Sequence[tuple[Device, Problem]]) -> list[Device]:
    """Those of the database; a typical one where it has none."""
    there = dict.fromkeys(device for device, _ in measured if device.kind == "cuda" and device.capability == capability)
    return list(there) or list(TYPICAL[capability])


@contextmanager
def _programs_in(output: Path | None) -> Iterator[Path]:
    """The folder of compiled programs, for this process and those it starts."""
    before = os.environ.get(VARIABLE)
    if output is not None:
        os.environ[VARIABLE] = str(output.absolute())
    try:
        folder = program_cache.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = program_cache.foreign(folder) if output is not None else []
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(folder, error.strerror or str(error)) from error
        if others:  # everyone may read the folder afterwards
            raise InvalidInput(
                message(
                    f"--output {folder} holds something else than kernels",
                    got=listed(others),
                    expected="a new folder, an empty one, or one that this command filled",
                )
            )
        yield folder
    finally:
        if output is not None:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def _unwritable(folder: Path, reason: str) -> Nvfp4Error:
    return Nvfp4Error(
        message(
            f"kernels cannot be kept in {folder}", got=reason, do="check it and its disk, or name another: --output"
        )
    )


def _summarise(shipped: Shipped, wanted: Sequence[Wanted]) -> None:
    out = console()
    made = Grid("device", "problem", "configs", ">candidates", ">compiled")
    for one in wanted:
        its = [c for c in shipped.candidates if c.device == one.device.name and c.problem == one.problem]
        source = "plan" if one.plan is not None else "defaults"
        made.row(one.device.name, problem_words(one.problem), source, str(len(its)), str(sum(c.compiled for c in its)))
    out.print(made)
    for device in dict.fromkeys(one.device for one in wanted if one.device in TYPICAL.get(one.device.capability, ())):
        out.print(f"the database has no {device.arch}: built for a typical one, {device_words(device)}", soft_wrap=True)
    if shipped.failed:
        out.print(f"{plural(shipped.failed, 'candidate')} could not be built: the messages are above")
    if shipped.compiled:
        out.print(f"{plural(shipped.compiled, 'program')} compiled in {duration(shipped.seconds)}")
    elif not shipped.failed:
        out.print("everything was there")
    out.print(f"{VARIABLE}={shipped.folder}", soft_wrap=True)
