"""`nvfp4 warmup`: build the kernels that problems will run, before a server starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import rich_click as click
import torch

from ..cache.store import Store
from ..dispatch.layout import planned_layout
from ..dispatch.warmup import warmup as bind
from ..errors import InvalidInput, Nvfp4Error, message
from ..kernels.device import describe
from ..kernels.problem import Problem
from .offline import build_offline
from .options import best_device, database_option, device_option, help_style, json_option, problems_of, workload_options
from .output import Grid, console, print_json
from .words import plural, problem_words

__all__ = ["warmup"]


class Warm(msgspec.Struct, frozen=True, kw_only=True):
    """One problem that is bound."""

    problem: Problem
    layout: str
    seconds: float


@click.command()
@help_style
@workload_options
@device_option
@click.option(
    "--arch",
    "archs",
    metavar="LIST",
    help="Build for these architectures instead, such as sm_90a,sm_120a; no GPU is needed, and nothing is run.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="With --arch: the folder to fill, which NVFP4_KERNEL_CACHE names where the kernels run.",
)
@database_option
@json_option
@click.pass_context
def warmup(
    ctx: click.Context,
    models: tuple[str, ...],
    configs: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    fused: bool,
    shapes: tuple[str, ...],
    moes: tuple[str, ...],
    grouped: tuple[str, ...],
    tp: int,
    ep: int,
    dtype: str | None,
    device: str | None,
    archs: str | None,
    output: Path | None,
    db: Path | None,
    as_json: bool,
) -> None:
    """Build and run every kernel that the plans of some problems call for; by default of all problems in the database
    that have a plan.

    Compiled kernels stay on disk, so that a server which starts later finds them there.

    With --arch, all that these problems can reach on GPUs which are not here is compiled into a folder: what the plans
    of such GPUs name, and default configs for problems without a plan. Where the database has no GPU of that
    architecture, a typical one is assumed: A100 (sm_80), L40S (sm_89), H200 (sm_90a), B200 (sm_100a), RTX PRO 6000 and
    GeForce RTX 5090 (sm_120a).

    \b
    Examples:
      nvfp4 warmup
      nvfp4 warmup --model llama-3.1-8b --device cuda:1
      nvfp4 warmup --checkpoint path/to/model-NVFP4
      nvfp4 warmup --arch sm_90a,sm_120a --output compiled --db tuned.db

    \b
    Exit codes: 0 ok; 1 failed, also when a kernel does not compile; 2 usage;
    3 no usable device; 130 interrupted, 143 terminated, what was compiled is kept.
    """
    if archs is None and output is not None:
        raise click.UsageError("--output goes with --arch")
    if archs is not None and not all(arch.strip() for arch in archs.split(",")):
        raise InvalidInput(message("--arch has an empty name", got=repr(archs), expected="such as sm_90a,sm_120a"))
    if archs is not None and device is not None:
        raise click.UsageError("--arch builds for GPUs that are not here: it takes no --device")
    named = problems_of(models, configs, checkpoints, shapes, moes, grouped, fused=fused, tp=tp, ep=ep, dtype=dtype)
    if archs is not None:
        ctx.exit(0 if build_offline(archs.split(","), named, db=db, output=output, as_json=as_json) else 1)
    if db is not None:
        Store.open(db, readonly=True).close()  # a file that is named is there
        os.environ["NVFP4_DB"] = str(db)  # the ops look there
    place = device or best_device()
    problems = named or _planned(place)
    done, progress = [], console(stderr=True)
    for problem in problems:
        begun = time.perf_counter()
        bind(problem, device=place)
        seconds = time.perf_counter() - begun
        progress.print(f"{problem_words(problem)}: {seconds:.1f} s")
        done.append(Warm(problem=problem, layout=planned_layout(torch.device(place), problem), seconds=seconds))
    if as_json:
        print_json(done)
        return
    made = Grid("problem", "layout", ">seconds")
    for warm in done:
        made.row(problem_words(warm.problem), warm.layout, f"{warm.seconds:.1f}")
    console().print(made)


def _planned(place: str) -> list[Problem]:
    here = describe(place)
    with Store.open(readonly=True) as store:
        found = [plan.problem for plan in store.plans() if plan.device == here]
        others = [problem for known, problem in store.problems() if known == here and problem not in found]
    if not found:
        raise Nvfp4Error(
            message(
                f"the database {store.path} has no plan for {here.name}",
                do="run `nvfp4 tune`, or name problems: --model, --config, --checkpoint, --shape, --moe or --grouped",
            )
        )
    if others:
        are, names = ("has", "is") if len(others) == 1 else ("have", "are"), ", ".join(map(problem_words, others))
        words = f"{plural(len(others), 'problem')} of the database {are[0]} no plan and {are[1]} left out: {names}"
        click.echo(f"warning: {words}", err=True)
    return found
