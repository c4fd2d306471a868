"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

from ..errors import InvalidInput, message
from ..kernels.problem import DTYPES, Problem
from ..tuner.experts_workload import parse_grouped, parse_moe
from ..tuner.hf_config import read_config
from ..tuner.workload import parse_shape, problems_of_config, problems_of_model, resolve_model
from .checkpoint import open_for_tuning, problems_of_checkpoint
from .checkpoint_experts import has_experts

__all__ = [
    "best_device",
    "check_ranks",
    "checkpoint_option",
    "database_option",
    "device_option",
    "duration",
    "ep_option",
    "fused_option",
    "help_style",
    "json_option",
    "problems_of",
    "tp_option",
    "workload_options",
]

F = TypeVar("F", bound=Callable[..., Any])

DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", re.ASCII)


def duration(text: str) -> float:
    """Seconds from "90", "90s", "5m" or "1h30m"."""
    found = DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in found.groups()) if found else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise click.BadParameter(f"{text!r} is not a duration such as 90s, 5m or 1h30m")
    return total


def torch_device(text: str) -> str:
    """The text itself, if it names a kind of device that has kernels."""
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", text):  # torch counts in one signed byte
        raise click.BadParameter(f"{text!r} is neither cpu nor cuda nor cuda:N")
    return text


device_option = click.option(
    "--device", type=torch_device, metavar="cpu|cuda[:N]", help="Which device; by default a GPU if there is one."
)
database_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The database; by default NVFP4_DB or the one in the user's cache folder.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


fused_option = click.option(
    "--fused", is_flag=True, help="Of checkpoints: q, k and v, or gate and up, as one layer, as serving engines do."
)
tp_option = click.option(
    "--tp",
    type=int,
    default=1,
    metavar="N",
    help="Tensor parallel size of models, configs and checkpoints; without --ep every rank has a share of all experts.",
)
ep_option = click.option(
    "--ep",
    type=int,
    default=1,
    metavar="N",
    help="Expert parallel size of the same, a multiple of --tp: every rank has some of the experts, whole.",
)


def checkpoint_option(*, multiple: bool) -> Callable[[F], F]:
    """--checkpoint, once or several times."""
    return click.option(
        "--checkpoint",
        "checkpoints" if multiple else "checkpoint",
        multiple=multiple,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A folder with NVFP4 safetensors files: its linear layers and experts. No weight is read.",
    )


help_style = click.rich_config(
    {
        "padding_helptext_first_line": (0, 0, 1, 0),
        "style_options_panel_border": "dim",
        "style_commands_panel_border": "dim",
    }
)


def best_device() -> str:
    """A GPU if one can be used, else the CPU."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def workload_options(command: F) -> F:
    """--model, --config, --checkpoint, --fused, --shape, --moe, --grouped, --tp, --ep and --dtype."""
    for option in reversed(
        (
            click.option(
                "--model",
                "models",
                multiple=True,
                metavar="NAME",
                help="A shipped model, such as llama-3.1-8b or a unique prefix: its layers, fused, and routed experts.",
            ),
            click.option(
                "--config",
                "configs",
                multiple=True,
                type=click.Path(path_type=Path),
                metavar="PATH",
                help="A Hugging Face config.json, or the folder with it: its layers and routed experts, as --model's.",
            ),
            checkpoint_option(multiple=True),
            fused_option,
            click.option(
                "--shape", "shapes", multiple=True, metavar="N,K", help="out_features,in_features of one linear layer."
            ),
            click.option(
                "--moe",
                "moes",
                multiple=True,
                metavar="NAME=N,...",
                help="A layer of experts: experts=8,top_k=2,hidden=256,inter=128,activation=swiglu.",
            ),
            click.option(
                "--grouped",
                "grouped",
                multiple=True,
                metavar="NAME=N,...",
                help="One product by groups of rows: experts=8,n=256,k=128.",
            ),
            tp_option,
            ep_option,
            click.option(
                "--dtype",
                type=click.Choice(DTYPES),
                help="Of the activations; by default the config's own, or bfloat16.",
            ),
        )
    ):
        command = option(command)
    return command


def check_ranks(tp: int, ep: int) -> None:
    """Raise InvalidInput for what are no numbers of ranks, or none that go together."""
    for name, size in (("--tp", tp), ("--ep", ep)):
        if size < 1:
            raise InvalidInput(message(name, got=size, expected="at least 1"))
    if ep > 1 and ep % tp:
        raise InvalidInput(
            message("--ep has all ranks of --tp, once or several times", got=f"--tp {tp} --ep {ep}",
                    expected=f"a multiple of {tp} for --ep")
        )  # fmt: skip


def problems_of(
    models: Sequence[str],
    configs: Sequence[Path],
    checkpoints: Sequence[Path],
    shapes: Sequence[str],
    moes: Sequence[str],
    grouped: Sequence[str],
    *,
    fused: bool,
    tp: int,
    ep: int,
    dtype: str | None,
) -> list[Problem]:
    """All problems that the workload options name, each once, in the order of the options.

    Raises
    ------
    InvalidInput
        One of them means nothing.
    """
    check_ranks(tp, ep)
    if fused and not (checkpoints or models or configs):
        raise InvalidInput(
            message("--fused is for --checkpoint", got="none", do="leave it out; --shape names the layer as it runs")
        )
    if tp > 1 and not (models or configs or checkpoints):
        raise InvalidInput(
            message("--tp divides the layers of --model, --config and --checkpoint", got="none of these",
                    do="leave it out; --shape, --moe and --grouped name the part of one rank")
        )  # fmt: skip
    found: list[Problem] = []
    for name in models:
        taken = resolve_model(name)
        if taken.lower() != name.rsplit("/", 1)[-1].strip().lower():
            click.echo(f"--model {name}: {taken}", err=True)
        found += problems_of_model(name, tp=tp, ep=ep, dtype=dtype or DTYPES[0])
    for path in configs:
        found += problems_of_config(path, tp=tp, ep=ep, dtype=dtype)
    for path in checkpoints:
        found += problems_of_checkpoint(path, tp=tp, ep=ep, dtype=dtype, fused=fused)
    if ep > 1 and not (any(problem.op == "moe" for problem in found) or _with_experts(configs, checkpoints)):
        raise InvalidInput(
            message("--ep divides the routed experts of --model, --config and --checkpoint", got="none of these",
                    do="leave it out; --moe and --grouped name the part of one rank")
        )  # fmt: skip
    for texts, parse in ((shapes, parse_shape), (moes, parse_moe), (grouped, parse_grouped)):
        found += [parse(text, dtype=dtype or DTYPES[0]) for text in texts]
    return list(dict.fromkeys(found))


def _with_experts(configs: Sequence[Path], checkpoints: Sequence[Path]) -> bool:
    """Whether one of these has routed experts, if only such as were left out, of which warnings told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(read_config(path).expert_layers for path in configs) or any(
            has_experts(open_for_tuning(path)) for path in checkpoints
        )
