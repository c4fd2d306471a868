"""Times gemm candidates beside bf16 cuBLAS, a plain read of the weights and the device's ceilings, in one run.

    python bench/gemm.py --shape 4096,4096 --shape 28672,4096 --m 1,16,64,256,2048 --output results.json
    python bench/gemm.py --shape 4096,4096 --m 1,16 --sweep        every valid config, the best of each kernel kept
    python bench/gemm.py --shape 4096,4096 --m 1-8192 --plan       what the tuned database chose, beside the defaults

Every subject is a CUDA graph over rotating weight copies of at least three times the L2. Subjects are replayed in
turns; `us` is the sustained median of the turns, `burst_us` the median of single turns after 60 ms of idling. On a CPU
there is no graph, no ceiling and no burst.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.lookup import find_plan
from nvfp4.cache.records import BASELINE
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import Config, Kernel
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.close import relative_error
from nvfp4.tuner.inputs import Inputs
from nvfp4.tuner.timing import Replay, Timer, make_timer
from nvfp4.tuner.workload import parse_ms, parse_shape
from torch import Tensor

LAUNCHES = 24  # in one graph, at least
IDLE_US = 60_000.0
Launches = list[Callable[[], None]]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", required=True, help="N,K; may be given again")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="", help="names, comma-separated; all by default")
    parser.add_argument("--sweep", action="store_true", help="screen every valid config and keep each kernel's best")
    parser.add_argument("--plan", action="store_true", help="time the tuned winners too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def multiply(x: Tensor, dense: Tensor, out: Tensor) -> None:
    """What users have today."""
    torch.mm(x, dense.T, out=out)


class Bench:
    """One problem on one device."""

    def __init__(self, place: torch.device, timer: Timer, problem: Problem, ms: tuple[int, ...]) -> None:
        self.device: Device = describe(place)
        self.timer, self.problem = timer, problem
        self.inputs = Inputs(self.device, place, problem, ms)

    def kernel_launches(self, kernel: Kernel, config: Config, m: int) -> tuple[Launches, float]:
        """One launch per weight copy, and the relative error of the first."""
        launcher = kernel.build(self.device, self.problem, config)
        x, out = self.inputs.x[:m], self.inputs.out(m)
        launches: Launches = [
            partial(launcher, x, w.data, w.scale, w.global_scale, None, None, out)
            for w in self.inputs.copies(kernel.layout(self.device, self.problem))
        ]
        launches[0]()
        self.timer.sync()
        rows, known = self.inputs.plain.rows(0, m)
        return launches, relative_error(out[rows], self.inputs.plain.exact[known])

    def matmul_launches(self, m: int) -> Launches:
        """bf16 matmul on dequantised copies."""
        x, out = self.inputs.x[:m], self.inputs.out(m)
        launches: Launches = [partial(multiply, x, dense, out) for dense in self.inputs.dense_copies()]
        launches[0]()
        return launches

    def replay(self, launches: Launches) -> Replay:
        """All copies, at least LAUNCHES times."""
        return self.timer.replay(launches, max(LAUNCHES, len(launches)))

    def best_of(self, kernel: Kernel, m: int) -> Config | None:
        """The fastest valid config by a short screen."""
        best: tuple[float, Config | None] = (float("inf"), None)
        for config in kernel.space(self.device, self.problem):
            if kernel.is_valid(self.device, self.problem, config, m):
                replay = self.replay(self.kernel_launches(kernel, config, m)[0])
                best = min(best, (min(self.timer.repeat(replay, 3)), config), key=lambda pair: pair[0])
                replay.close()
        return best[1]


def subjects(bench: Bench, kernels: list[Kernel], m: int, *, sweep: bool, plan: bool) -> dict[str, tuple[str, str]]:
    """What is timed at one M: (kernel, config JSON) by label."""
    chosen: dict[str, tuple[str, str]] = {"baseline": (BASELINE, "{}")}
    for kernel in kernels:
        default = kernel.default_config(bench.device, bench.problem, m)
        if kernel.is_valid(bench.device, bench.problem, default, m):
            chosen[f"{kernel.name} default"] = (kernel.name, default.to_json())
        if sweep and (best := bench.best_of(kernel, m)) is not None:
            chosen[f"{kernel.name} best"] = (kernel.name, best.to_json())
    found = find_plan(bench.device, bench.problem) if plan else None
    for interval in found.intervals() if found else ():
        if interval.m_lo <= m and (interval.m_hi is None or m <= interval.m_hi):
            chosen["plan"] = (interval.kernel, interval.config)
    return chosen


def measure(bench: Bench, kernels: list[Kernel], m: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one M."""
    rows, replays = [], []
    for label, (name, text) in subjects(bench, kernels, m, sweep=options.sweep, plan=options.plan).items():
        error = None
        if name == BASELINE:
            launches = bench.matmul_launches(m)
        else:
            kernel = registry.get(name)
            assert kernel is not None
            config = kernel.parse_config(bench.device, bench.problem, text)
            assert config is not None
            launches, error = bench.kernel_launches(kernel, config, m)
        replays.append(bench.replay(launches))
        rows.append({"m": m, "label": label, "kernel": name, "config": json.loads(text), "relative_error": error})
    rounds = [bench.timer.round(replays, i) for i in range(options.rounds)]
    for i, row in enumerate(rows):
        row["us"] = statistics.median(r.times_us[i] for r in rounds)
        if bench.device.kind == "cuda":
            bursts = []
            for _ in range(3):
                bench.timer.idle(IDLE_US)
                bursts.append(bench.timer.repeat(replays[i], 1)[0])
            row["burst_us"] = statistics.median(bursts)
    for replay in replays:
        replay.close()
    return rows


def main() -> None:
    """Measure and write."""
    options = arguments()
    place = torch.device(options.device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0)
    timer, device = make_timer(place), describe(place)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "environment": msgspec.to_builtins(environment()),
        "problems": [],
    }
    if place.type == "cuda":
        import ceilings

        result["copy_gbs"] = ceilings.copy_gbs(timer, place)
        result["matmul_8192_tflops"] = {
            "burst": ceilings.matrix_tflops(timer, place, burst=True),
            "sustained": ceilings.matrix_tflops(timer, place, burst=False),
        }
    wanted = set(filter(None, options.kernels.split(",")))
    for text in options.shape:
        problem = parse_shape(text, dtype=options.dtype)
        kernels = [
            kernel
            for kernel in registry.kernels("gemm")
            if kernel.supports(device, problem) and (not wanted or kernel.name in wanted)
        ]
        ms = parse_ms(options.m)
        bench = Bench(place, timer, problem, ms)
        entry: dict[str, Any] = {
            "n": problem.n,
            "k": problem.k,
            "dtype": options.dtype,
            "weight_bytes": problem.weight_bytes,
        }
        if place.type == "cuda":
            copies = bench.inputs.copies("checkpoint")
            blobs = [torch.cat([w.data.view(-1), w.scale.view(-1)]) for w in copies if w.scale is not None]
            entry["stream_us"] = ceilings.stream_us(timer, blobs, max(LAUNCHES, len(blobs)))
            del blobs
        entry["rows"] = [row for m in ms for row in measure(bench, kernels, m, options)]
        bench.inputs.close()
        result["problems"].append(entry)
        show(entry)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1))


def show(entry: dict[str, Any]) -> None:
    """A line per M: microseconds, with the ratio of the baseline's time in brackets."""
    print(f"{entry['n']}x{entry['k']} {entry['dtype']}, plain read {entry.get('stream_us', float('nan')):.1f} us")
    for m in sorted({row["m"] for row in entry["rows"]}):
        rows = [row for row in entry["rows"] if row["m"] == m]
        base = next(row["us"] for row in rows if row["label"] == "baseline")
        print(f"  M={m:<5}" + "  ".join(f"{row['label']} {row['us']:.1f} ({base / row['us']:.2f}x)" for row in rows))


if __name__ == "__main__":
    main()
