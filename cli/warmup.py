"""`nvfp4 warmup`: build the kernels that problems will run, before a server starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import rich_click as click
import torch

from ..cache.store import Store
from ..dispatch.table import planned_layout
from ..dispatch.warmup import warmup as bind
from ..errors import Nvfp4Error, message
from ..kernels.device import describe
from ..kernels.problem import Problem
from .options import best_device, database_option, device_option, help_style, json_option, problems_of, workload_options
from .output import Grid, console, print_json
from .words import problem_words

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
@database_option
@json_option
def warmup(
    models: tuple[str, ...],
    configs: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    fused: bool,
    shapes: tuple[str, ...],
    tp: int,
    dtype: str | None,
    device: str | None,
    db: Path | None,
    as_json: bool,
) -> None:
    """Build and run every kernel that the plans of some problems call for; by default of all problems in the database.

    Compiled kernels stay in the compilers' caches on disk, so that a server which starts later finds them there.

    \b
    Examples:
      nvfp4 warmup
      nvfp4 warmup --model llama-3.1-8b --device cuda:1
      nvfp4 warmup --checkpoint path/to/model-NVFP4
    """
    if db is not None:
        os.environ["NVFP4_DB"] = str(db)  # the ops look there
    place = device or best_device()
    problems = problems_of(models, configs, checkpoints, shapes, fused=fused, tp=tp, dtype=dtype) or _planned(place)
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
    if not found:
        raise Nvfp4Error(
            message(
                f"the database {store.path} has no plan for {here.name}",
                do="run `nvfp4 tune`, or name problems: --model, --config, --checkpoint or --shape",
            )
        )
    return found
