"""`nvfp4 inspect`: what was measured and decided, and why."""

from __future__ import annotations

from pathlib import Path

import msgspec
import rich_click as click

from ..cache.inspect import Limits, report, summary
from ..cache.layouts import layout_report
from ..cache.store import Store
from ..cache.why import Why, why
from ..cache.words import tune_command
from ..errors import DatabaseError, InvalidInput, Nvfp4Error, message
from ..kernels import registry
from ..kernels.device import describe
from ..kernels.kernel import Kernel
from ..kernels.problem import DTYPES, OPS, Device, Problem
from ..tuner.experts_workload import parse_problem
from ..tuner.worker import Worker
from . import views
from .checkpoint import open_for_tuning
from .checkpoint_experts import has_experts
from .coverage import Coverage, coverage, show_coverage
from .layouts import show_layouts
from .options import (
    best_device,
    check_ranks,
    checkpoint_option,
    database_option,
    ep_option,
    fused_option,
    help_style,
    json_option,
    tp_option,
)
from .output import console, print_json
from .words import device_words

__all__ = ["inspect"]

SHOWN_CONFIGS = 3


@click.command()
@help_style
@click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
@checkpoint_option(multiple=False)
@fused_option
@tp_option
@ep_option
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Of the activations; by default the checkpoint's own, or bfloat16."
)
@click.option("--device-name", metavar="TEXT", help="A device of the database, by a part of what is shown of it.")
@click.option("--why", "why_kernel", metavar="KERNEL", help="What became of this kernel's candidates.")
@click.option("--config", metavar="JSON", help="With --why: only this candidate.")
@click.option("--layout", "by_layout", is_flag=True, help="What every weight layout takes at every M, of all SHAPEs.")
@click.option("--kernels", "list_kernels", is_flag=True, help="Every kernel, and whether it can run the shape.")
@click.option(
    "--roofline",
    metavar="measure|GBPS,TFLOPS",
    help="Compare with the device's limits: measured now, or as `nvfp4 tune` printed them.",
)
@database_option
@json_option
def inspect(
    shapes: tuple[str, ...],
    checkpoint: Path | None,
    fused: bool,
    tp: int,
    ep: int,
    dtype: str | None,
    device_name: str | None,
    why_kernel: str | None,
    config: str | None,
    by_layout: bool,
    list_kernels: bool,
    roofline: str | None,
    db: Path | None,
    as_json: bool,
) -> None:
    """Show the plans of the database; with a SHAPE such as 4096x14336, all about one problem.

    Problems of experts are given as `nvfp4 tune` takes them behind --moe or --grouped. The name of a problem as tables
    print it, in quotes, is taken as well.

    \b
    Examples:
      nvfp4 inspect
      nvfp4 inspect 4096x14336 --roofline measure
      nvfp4 inspect 4096x14336 --why two_pass
      nvfp4 inspect 4096x14336 --kernels
      nvfp4 inspect experts=128,top_k=8,hidden=2048,inter=768
      nvfp4 inspect "moe 768x2048 bf16 E128 top8 swiglu"
      nvfp4 inspect --layout
      nvfp4 inspect --layout 4096x14336 6144x4096
      nvfp4 inspect --json --device-name H200
      nvfp4 inspect --checkpoint path/to/model-NVFP4
    """
    shape = shapes[0] if shapes else None
    if checkpoint is not None:
        if shapes or why_kernel or config or by_layout or list_kernels or roofline:
            raise click.UsageError("--checkpoint goes with neither a SHAPE nor options that need one")
        check_ranks(tp, ep)
        found = _coverage(checkpoint, db, device_name, tp=tp, ep=ep, dtype=dtype, fused=fused)
        print_json(found) if as_json else show_coverage(console(), found)
        return
    if fused or tp != 1 or ep != 1:
        raise click.UsageError("--fused, --tp and --ep are for --checkpoint")
    if by_layout:
        if why_kernel or config or list_kernels or roofline:
            raise click.UsageError("--layout goes with none of --why, --config, --kernels and --roofline")
        _layouts(shapes, db, device_name, dtype, as_json)
        return
    if len(shapes) > 1:
        raise click.UsageError("several SHAPEs are for --layout; a name with spaces goes in quotes")
    if shape is None:
        _refuse_without_shape(why_kernel=why_kernel, kernels=list_kernels, roofline=roofline)
    if config is not None and why_kernel is None:
        raise click.UsageError("--config is for --why KERNEL")
    if config is not None:
        _refuse_no_json(config)
    problem = parse_problem(shape, dtype=dtype) if shape is not None else None
    ops = (problem.op,) if problem is not None else OPS
    known = {kernel.name: kernel for op in ops for kernel in registry.kernels(op)}
    if problem is not None and list_kernels:
        verdicts = views.verdicts(_device_for_kernels(db, device_name), problem, known.values())
        print_json(verdicts) if as_json else views.show_verdicts(console(), verdicts)
        return
    with Store.open(db, readonly=True) as store:
        if problem is None:
            _summary(store, known, device_name, as_json)
            return
        device = _device(store, device_name)
        if (device, problem) not in store.problems():
            _refuse_unmeasured(store, device, problem)
        if why_kernel is not None:
            configs: dict[str, set[str]] = {}  # measured, perhaps by kernels that are gone
            for row in store.measurements(device, problem):
                configs.setdefault(row.kernel, set()).add(row.config)
            if why_kernel not in {*known, *configs}:
                raise InvalidInput(
                    message("--why", got=repr(why_kernel), expected="one of " + ", ".join(sorted({*known, *configs})))
                )
            answer = why(store, device, problem, known, why_kernel, config)
            if config is not None and answer.candidates:
                _refuse_unmeasured_config(config, answer, configs.get(why_kernel, set()))
            print_json(answer) if as_json else views.show_why(console(), answer)
            return
        limits = _limits(roofline, device) if roofline else None
        one = report(store, device, problem, known, limits=limits)
        print_json(one) if as_json else views.show_report(console(), one)


def _layouts(
    shapes: tuple[str, ...], db: Path | None, device_name: str | None, dtype: str | None, as_json: bool
) -> None:
    with Store.open(db, readonly=True) as store:
        device = _device(store, device_name)
        measured = [problem for known, problem in store.problems() if known == device]
        problems = [problem for problem in measured if dtype in (None, problem.dtype)]
        if shapes:
            problems = list(dict.fromkeys(parse_problem(shape, dtype=dtype) for shape in shapes))
        for problem in problems:
            if problem not in measured:
                _refuse_unmeasured(store, device, problem)
        known = {op: {kernel.name: kernel for kernel in registry.kernels(op)} for op in OPS}
        found = tuple(layout_report(store, device, problem, known[problem.op]) for problem in problems)
    print_json(found) if as_json else show_layouts(console(), found)


def _coverage(
    path: Path, db: Path | None, device_name: str | None, *, tp: int, ep: int, dtype: str | None, fused: bool
) -> Coverage:
    checkpoint = open_for_tuning(path)
    if ep > 1 and not has_experts(checkpoint):
        raise InvalidInput(message(f"{path} has no NVFP4 experts", got=f"--ep {ep}", do="leave it out"))
    here = describe(best_device())
    try:
        with Store.open(db, readonly=True) as store:
            device = here if device_name is None else _device(store, device_name)
            return coverage(checkpoint, store, device, tp=tp, ep=ep, dtype=dtype, fused=fused)
    except DatabaseError as error:
        if error.reason != "missing" or db is not None or device_name is not None:
            raise
    return coverage(checkpoint, None, here, tp=tp, ep=ep, dtype=dtype, fused=fused)


def _refuse_without_shape(**options: object) -> None:
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name.removesuffix('_kernel')} needs a SHAPE such as 4096x14336")


def _summary(store: Store, known: dict[str, Kernel], device_name: str | None, as_json: bool) -> None:
    wanted = _device(store, device_name) if device_name else None
    found = tuple(line for line in summary(store, known) if wanted in (None, line.device))
    print_json(found) if as_json else views.show_summary(console(), store.path, found)


def _device(store: Store, name: str | None) -> Device:
    """The device that is asked for; by default this machine's, or the only one of the database."""
    known = list(dict.fromkeys(device for device, _ in store.problems()))
    labels = "; ".join(device_words(device) for device in known)
    if name is not None:
        found = [device for device in known if name.lower() in device_words(device).lower()]
        if len(found) != 1:
            raise InvalidInput(message("--device-name", got=repr(name), expected=f"a part of one of: {labels}"))
        return found[0]
    if not known:
        raise Nvfp4Error(message(f"nothing was measured in {store.path}", do="run `nvfp4 tune`"))
    if len(known) == 1:
        return known[0]
    here = describe(best_device())
    if here in known:
        return here
    raise InvalidInput(
        message(
            "the database has several devices, and none is this machine's",
            got=device_words(here),
            expected=labels,
            do="name one: --device-name",
        )
    )


def _device_for_kernels(db: Path | None, name: str | None) -> Device:
    if name is None:
        return describe(best_device())
    with Store.open(db, readonly=True) as store:
        return _device(store, name)


def _refuse_unmeasured(store: Store, device: Device, problem: Problem) -> None:
    there = sorted({other.label for known, other in store.problems() if known == device})
    raise Nvfp4Error(
        message(
            f"{problem.label} was not measured on {device.name}",
            expected=", ".join(there) if there else None,
            do=f"run `{tune_command(problem)}`",
        )
    )


def _refuse_no_json(config: str) -> None:
    try:
        msgspec.json.decode(config.encode(errors="replace"))
    except msgspec.DecodeError as error:
        raise InvalidInput(
            message(f"--config is no JSON: {error}", got=repr(config), expected="""such as '{"rows":64}', in quotes""")
        ) from error


def _refuse_unmeasured_config(config: str, answer: Why, measured: set[str]) -> None:
    (fate,) = answer.candidates
    if not measured & {config, fate.config}:
        some = ", ".join(sorted(measured)[:SHOWN_CONFIGS]) + (", ..." if len(measured) > SHOWN_CONFIGS else "")
        raise InvalidInput(
            message(
                f"--config: not measured of {answer.kernel}; {fate.reason}",
                got=repr(config),
                expected=some or None,
                do="leave --config out to see all" if measured else f"run `{tune_command(answer.problem)}`",
            )
        )


def _limits(text: str, device: Device) -> Limits:
    if text == "measure":
        place = best_device()
        worker = Worker(place)
        try:
            if worker.describe() != device:
                raise InvalidInput(
                    message(
                        "--roofline measure works on the device itself",
                        got=f"{place} of this machine for a plan of {device.name}",
                        do="give what `nvfp4 tune` printed there: --roofline GBPS,TFLOPS",
                    )
                )
            ceiling = worker.ceilings()
        finally:
            worker.close()
        return Limits(copy_bytes_per_s=1e9 * ceiling.copy_gbps, matrix_flops_per_s=1e12 * ceiling.bf16_tflops)
    try:
        gbps, tflops = (float(part) for part in text.split(","))
    except ValueError:
        gbps = tflops = 0.0
    if not (0 < gbps < float("inf") and 0 < tflops < float("inf")):
        raise InvalidInput(message("--roofline", got=repr(text), expected="measure, or GBPS,TFLOPS such as 4000,700"))
    return Limits(copy_bytes_per_s=1e9 * gbps, matrix_flops_per_s=1e12 * tflops)
