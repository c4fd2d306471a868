"""One decoder layer while it decodes, NVFP4 beside bf16: norms, rotary, attention and residuals included.

    python bench/layer.py --output layer.json
    python bench/layer.py --models llama-3.1-8b --batches 1 --kv-length 4096
    python bench/layer.py --tiny --device cpu                        a dry run of seconds

Both layers run the same torch operations (rms_norm, rotary embedding, scaled_dot_product_attention over a cache whose
last place the step writes, silu, softmax and topk of the router), one after the other, in a CUDA graph. They differ in
their products: `nvfp4.nn.Linear` (qkv and gate_up fused) and `nvfp4.nn.FusedMoE`, against `F.linear` and, for experts,
`torch._grouped_mm` over pairs sorted by expert, with what sorts, gathers and adds up around it. The bf16 layer has the
dequantised weights. Graphs rotate over copies of a layer that together read three times the L2 or more; they are
replayed in turns, `us` is the median of the turns for one layer, `burst_us` of single turns after 60 ms of idling.

Before it is timed, the NVFP4 layer is compared with float32 on the dequantised weights, the routing being its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nvfp4
import torch
from layer_models import MODELS, TINY, Block, Shape, as_bf16, as_float32, as_nvfp4, quantized
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.lookup import find_plan
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Device
from nvfp4.tuner.timing import Timer, make_timer
from torch import Tensor

COLD = 3  # times the L2
LAUNCHES = 24  # in one graph, at least
IDLE_US = 60_000.0
LARGEST_ERROR = 0.02  # of what the layer adds to x, in the 2-norm; five roundings to bfloat16 in a row are 0.004 each


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"comma-separated: {', '.join(shape.name for shape in MODELS)}")
    parser.add_argument("--batches", default="", help="sequences, comma-separated; 1,64 by default")
    parser.add_argument("--kv-length", type=int, help="1024 by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="layers of a few KiB")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    known = {shape.name: shape for shape in (TINY if options.tiny else MODELS)}
    if unknown := set(filter(None, options.models.split(","))) - set(known):
        parser.error(f"--models: got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
    options.shapes = [known[name] for name in options.models.split(",") if name] or list(known.values())
    options.batches = [int(m) for m in (options.batches or ("1,5" if options.tiny else "1,64")).split(",")]
    options.kv_length = options.kv_length or (32 if options.tiny else 1024)
    return options


def relative_error(block: Block, exact: Block, x: Tensor) -> float:
    """Of what a layer adds to x, against float32; raises where it is too large."""
    added = block(x).float() - x.float()
    expected = exact(x.float(), block.routing) - x.float()
    error = float((added - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:
        raise AssertionError(f"{block.shape.name}: the NVFP4 layer is off by {error:.4f}, more than {LARGEST_ERROR}")
    return error


def plans(shape: Shape, device: Device) -> dict[str, bool]:
    """Which of the layer's products were tuned here."""
    return {problem.label: find_plan(device, problem) is not None for problem in shape.problems()}


def measure(timer: Timer, kinds: dict[str, list[Callable[[], object]]], rounds: int, *, idle: bool) -> dict[str, Any]:
    """Microseconds of one layer of each kind."""
    replays = []
    for launches in kinds.values():
        for launch in launches:  # binds, loads and allocates
            launch()
        count = len(launches) * -(-LAUNCHES // len(launches))
        replays.append(timer.replay([partial(_drop, launch) for launch in launches], count))
    turns = [timer.round(replays, i) for i in range(rounds)]
    found: dict[str, Any] = {}
    for i, kind in enumerate(kinds):
        found[f"{kind}_us"] = round(statistics.median(turn.times_us[i] for turn in turns), 2)
        if idle:
            bursts = []
            for _ in range(3):
                timer.idle(IDLE_US)
                bursts.append(timer.repeat(replays[i], 1)[0])
            found[f"{kind}_burst_us"] = round(statistics.median(bursts), 2)
    for replay in replays:
        replay.close()
    return found


def _drop(launch: Callable[[], object]) -> None:
    launch()


def rows_of(shape: Shape, options: argparse.Namespace, place: torch.device, timer: Timer) -> list[dict[str, Any]]:
    """A row for each batch size."""
    generator = torch.Generator(place).manual_seed(0)
    device = describe(place)
    source = quantized(shape, generator)
    copies = max(2, math.ceil(COLD * device.l2_bytes / shape.touched_bytes(1))) if place.type == "cuda" else 2
    blocks = {
        "nvfp4": [as_nvfp4(shape, source) for _ in range(copies)],
        "bf16": [as_bf16(shape, source) for _ in range(copies)],
    }
    rows = []
    for batch in options.batches:
        x = torch.randn(batch, shape.hidden, generator=generator, device=place).bfloat16()
        cache = torch.randn(
            2, batch, shape.kv_heads, options.kv_length, shape.head_dim, generator=generator, device=place
        )
        for block in (*blocks["nvfp4"], *blocks["bf16"]):
            block.remember(cache.bfloat16())
        exact = as_float32(shape, source)
        exact.remember(cache.bfloat16().float())
        error = relative_error(blocks["nvfp4"][0], exact, x)
        del exact, cache
        kinds: dict[str, list[Callable[[], object]]] = {
            kind: [partial(block, x) for block in some] for kind, some in blocks.items()
        }
        row: dict[str, Any] = {"batch": batch, "copies": copies, "relative_error": round(error, 5)}
        row["layouts"] = sorted({weight.layout for weight in blocks["nvfp4"][0].weights()})
        row |= measure(timer, kinds, options.rounds, idle=place.type == "cuda")
        row["speedup"] = round(row["bf16_us"] / row["nvfp4_us"], 3)
        row["touched_bytes"] = shape.touched_bytes(batch)
        rows.append(row)
        print(f"{shape.name} batch {batch}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    timer.release()
    return rows


@torch.inference_mode()
def main() -> None:
    """Measure and write."""
    options = arguments()
    warnings.simplefilter("ignore", nvfp4.UntunedWarning)
    place = torch.device(options.device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0)
    timer, device = make_timer(place), describe(place)
    result: dict[str, Any] = {
        "benchmark": "layer",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "environment": msgspec.to_builtins(environment()),
        "kv_length": options.kv_length,
        "models": [],
    }
    for shape in options.shapes:
        entry = asdict(shape) | {"tuned": plans(shape, device), "rows": rows_of(shape, options, place, timer)}
        result["models"].append(entry)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
