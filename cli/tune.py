"""`nvfp4 tune`: measure problems on this machine and save a plan for each."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from ..tuner.run import Interrupted
from ..tuner.run import tune as run_tuning
from ..tuner.workload import ANCHORS, QUICK_ANCHORS, model_names, parse_ms
from .options import best_device, database_option, device_option, help_style, problems_of, workload_options
from .options import duration as parse_duration
from .output import Grid, console
from .progress import Display, display, is_unfinished, without_plan
from .signals import TERMINATED, Terminated
from .words import NOT_FINISHED, duration, planned, plural, problem_words, ratios

__all__ = ["tune"]


@click.command()
@help_style
@workload_options
@click.option("--m", "ms", metavar="LIST", help="Numbers of tokens, such as 1,8,64-512; by default 1 to 8192.")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Measure only this one; may be repeated.")
@click.option("--allow-nondeterministic", is_flag=True, help="Also kernels whose last bits differ from run to run.")
@click.option(
    "--budget", type=parse_duration, metavar="TIME", help="For all problems together: 90s (or 90), 5m, 1h30m."
)
@click.option("--quick", is_flag=True, help="Fewer M, and crossovers between kernels are not refined.")
@click.option(
    "--routing",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Recorded ids [tokens, top_k] of experts, as .npy, .safetensors or .json: timed with these too.",
)
@device_option
@database_option
@click.option("--list-models", is_flag=True, help="Print the names of the shipped models and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print every event as a line of JSON on stdout.")
@click.pass_context
def tune(
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
    ms: str | None,
    kernels: tuple[str, ...],
    allow_nondeterministic: bool,
    budget: float | None,
    quick: bool,
    routing: Path | None,
    device: str | None,
    db: Path | None,
    list_models: bool,
    as_json: bool,
) -> None:
    """Measure kernels on this machine and save, for every problem, which runs at how many tokens.

    What an earlier run measured is not measured again, so an interrupted run goes on where it stopped.

    \b
    Examples:
      nvfp4 tune --model llama-3.1-8b
      nvfp4 tune --config path/to/model --tp 2 --budget 30m
      nvfp4 tune --checkpoint path/to/model-NVFP4
      nvfp4 tune --shape 4096,14336 --shape 6144,4096 --m 1,8,64-512
      nvfp4 tune --moe experts=128,top_k=8,hidden=2048,inter=768
      nvfp4 tune --model qwen3-30b-a3b --routing topk_ids.npy
      nvfp4 tune --quick --shape 4096,4096 --json > events.jsonl

    \b
    Exit codes: 0 ok; 1 failed; 2 usage; 3 no usable device; 4 finished, but some
    problems have no winner, or no plan yet; 130 interrupted, what was measured is saved;
    143 the same, by SIGTERM.
    """
    if list_models:
        click.echo("\n".join(model_names()))
        return
    problems = problems_of(models, configs, checkpoints, shapes, moes, grouped, fused=fused, tp=tp, ep=ep, dtype=dtype)
    if not problems:
        raise click.UsageError("name what to tune: --model, --config, --checkpoint, --shape, --moe or --grouped")
    anchors = QUICK_ANCHORS if quick else ANCHORS
    shown = display(console(stderr=True), as_json=as_json)
    terminated = False
    try:
        with shown:
            result = run_tuning(
                problems,
                anchors if ms is None else parse_ms(ms, anchors=anchors),
                device=device or best_device(),
                store_path=db,
                budget_s=budget,
                quick=quick,
                events=shown,
                kernels=kernels or None,
                allow_nondeterministic=allow_nondeterministic,
                routing=routing,
            )
    except Interrupted as stop:
        result, terminated = stop.result, isinstance(stop.__cause__, Terminated)
        click.echo(f"interrupted: {result.measured} measurements are saved; the same command goes on", err=True)
    if not as_json:
        _summarise(shown)
    ctx.exit(TERMINATED if terminated else result.exit_code)


def _summarise(shown: Display) -> None:
    out = console()
    if shown.finished:
        made = Grid("problem", "~kernels by M", ">untuned", ">bf16")
        for done in shown.finished:
            made.row(
                problem_words(done.problem),
                planned(done.plan.intervals() if done.plan else ()) or without_plan(done),
                ratios(at.over_default for at in done.best),
                ratios(at.over_bf16 for at in done.best),
            )
        out.print(made)
        out.print("untuned, bf16: how many times faster than what runs untuned, and than torch.matmul on bf16 weights")
    if shown.end is None:
        return
    end, too_large = shown.end, [done for done in shown.finished if done.unprepared]
    without = [done for done in shown.finished if done.plan is None and not done.unprepared]
    unfinished, failed = sum(map(is_unfinished, without)), any(done.failures for done in without)
    out.print(f"{plural(end.measured, 'measurement')} in {duration(end.seconds)}")
    for count, what in ((unfinished, NOT_FINISHED), (len(without) - unfinished, "no winner")):
        if count:
            out.print(f"{plural(count, 'problem')} {'has' if count == 1 else 'have'} {what}")
    if failed or len(without) > unfinished:
        out.print("`nvfp4 inspect SHAPE --kernels` and `--why KERNEL` say why")
    for done in too_large:
        out.print(done.unprepared, soft_wrap=True)
    if end.unexplored:
        out.print(f"{end.unexplored} candidates were not tried for lack of time: the same command goes on")
