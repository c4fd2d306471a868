"""Times layers of experts: the whole op, its two products alone, and bf16 `torch._grouped_mm`, in one run.

    python bench/moe.py --output results.json                              default configs of every kernel
    python bench/moe.py --models qwen3-30b-a3b --tokens 1,64 --kernels triton_moe,triton_grouped
    python bench/moe.py --configs default,sample:8                         the best of eight configs of a kernel too
    python bench/moe.py --configs tuned                                    what the tuned database chose
    python bench/moe.py --tiny                                             a dry run of seconds, on a CPU too

Every subject is a CUDA graph of launches that rotate over weights, or over orders of the experts, of at least three
times the L2; its results are checked before. Subjects of one part are replayed in turns: `us` is the median of the
turns, `burst_us` that of single turns after 60 ms of idling. `launches` are the nodes of the graph of one call, and
`host_us` what the call takes on the host, as bench/dispatch.py times it. Peers (peers_moe.json) are compared by how
much faster than bf16 `_grouped_mm` each is in its own run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import moe_report
import msgspec
import torch
from host import median_us
from moe_subjects import MODELS, TINY, Launches, Model, Part, rows_of
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.lookup import find_plan
from nvfp4.kernels import registry
from nvfp4.kernels.build import BuildPool
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import Config, Kernel
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.outcome import Wrong
from nvfp4.tuner.timing import CaptureError, Replay, make_timer

LAUNCHES = 24  # in one graph, at least, unless they take longer than REPLAY_US
REPLAY_US = 20_000.0
IDLE_US = 60_000.0
HOST_CALLS = {"cuda": (500, 200), "cpu": (20, 5)}  # timed, and before those
PARTS = {"op": ("op",), "products": ("up", "down")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel with one config, and why it is timed."""

    label: str
    kernel: Kernel
    config: Config


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"comma-separated: {', '.join(m.name for m in MODELS)}")
    parser.add_argument("--tokens", default="", help="comma-separated; 1,8,64,512,4096 by default")
    parser.add_argument("--parts", default="op,products", help="op, products or both")
    parser.add_argument("--kernels", default="", help="names, comma-separated; all by default")
    parser.add_argument(
        "--configs", default="default", help="comma-separated: default, tuned, sample:N (the best of N, screened)"
    )
    parser.add_argument("--routing", default="random", choices=["balanced", "random", "skewed"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="layers of a few KiB")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.ts = tuple(int(t) for t in (options.tokens or ("1,5" if options.tiny else "1,8,64,512,4096")).split(","))
    known = {model.name: model for model in (TINY if options.tiny else MODELS)}
    for name, given, choices in (
        ("--models", options.models, set(known)),
        ("--kernels", options.kernels, {kernel.name for op in registry.OPS for kernel in registry.kernels(op)}),
        ("--parts", options.parts, set(PARTS)),
        ("--configs", re.sub(r"sample:\d+", "sample:N", options.configs), {"default", "tuned", "sample:N"}),
    ):
        if unknown := set(filter(None, given.split(","))) - choices:
            parser.error(f"{name}: got {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(choices))}")
    options.models = [known[name] for name in options.models.split(",") if name] or list(known.values())
    return options


class Bench:
    """What all parts share."""

    def __init__(self, place: torch.device, options: argparse.Namespace) -> None:
        self.place, self.options = place, options
        self.device, self.timer = describe(place), make_timer(place)
        self.builds = BuildPool()
        self.copy_gbs = self.burst_tflops = 0.0

    def proposals(self, problem: Problem, m: int) -> Iterator[tuple[str, Kernel, list[Config]]]:
        """For every label and kernel the configs of which the best is timed."""
        wanted = set(filter(None, self.options.kernels.split(",")))
        kinds = self.options.configs.split(",")
        for kernel in registry.kernels(problem.op):
            if not kernel.supports(self.device, problem) or (wanted and kernel.name not in wanted):
                continue
            default = kernel.default_config(self.device, problem, m)
            first = [default] if kernel.is_valid(self.device, problem, default, m) else []
            for kind in kinds:
                if kind == "default" and first:
                    yield kind, kernel, first
                elif kind.startswith("sample:"):
                    count = int(kind.removeprefix("sample:"))
                    yield f"best of {count}", kernel, self.sample(problem, kernel, m, first, count)
        plan = find_plan(self.device, problem) if "tuned" in kinds else None
        for interval in plan.intervals() if plan else ():
            planned = registry.get(interval.kernel)
            if interval.m_lo <= m and (interval.m_hi is None or m <= interval.m_hi) and planned is not None:
                config = planned.parse_config(self.device, problem, interval.config)
                yield "plan", planned, [config] if config else []

    def sample(self, problem: Problem, kernel: Kernel, m: int, first: list[Config], count: int) -> list[Config]:
        """`first`, then the valid configs that the kernel foresees to be fast; any, the same in every run, else."""
        valid = [c for c in kernel.space(self.device, problem) if kernel.is_valid(self.device, problem, c, m)]
        random.Random(m).shuffle(valid)
        predicted = {c: us for c in valid if (us := kernel.predicted_us(self.device, problem, c, m)) is not None}
        return list(dict.fromkeys([*first, *(sorted(predicted, key=predicted.__getitem__) or valid)]))[:count]

    def build(self, problem: Problem, m: int) -> None:
        """Begin to compile all of them, in other processes."""
        for _, kernel, configs in self.proposals(problem, m):
            for config in configs:
                self.builds.submit(self.device, problem, kernel, config)

    def candidates(self, part: Part, tokens: int) -> list[Candidate]:
        """What is timed at one number of tokens."""
        found = []
        for label, kernel, configs in self.proposals(part.problem, part.m(tokens)):
            some = [Candidate(label=label, kernel=kernel, config=config) for config in configs]
            best = min(some, key=lambda c: self.screen_us(part, c, tokens), default=None) if len(some) > 1 else None
            found += [best] if best else some
        return found

    def screen_us(self, part: Part, candidate: Candidate, tokens: int) -> float:
        """About its time; infinite where it fails."""
        try:
            launches, _ = self.launches(part, candidate, tokens)
            replay = self.replay(launches, REPLAY_US / 4)
        except Exception as error:
            reraise_if_fatal(error)
            print(f"  {candidate.kernel.name} {candidate.config.to_json()} at {tokens} tokens: {error}")
            return float("inf")
        us = min(self.timer.repeat(replay, 3))
        replay.close()
        return us

    def launches(self, part: Part, candidate: Candidate, tokens: int) -> tuple[Launches, float]:
        """Calls to be timed in turn and the relative error of one. Raises Wrong where that is too large."""
        kernel, problem, m = candidate.kernel, part.problem, part.m(tokens)
        if reason := self.builds.wait(self.device, problem, kernel, candidate.config):
            raise Wrong("build_error", reason)
        launcher = kernel.build(self.device, problem, candidate.config)
        layout = kernel.layout(self.device, problem)
        error = part.trial.check(launcher, layout, m, part.routing)
        return part.trial.launches(launcher, layout, m, part.routing), error

    def replay(self, launches: Launches, longest_us: float = REPLAY_US) -> Replay:
        """All of them, or as many as do not take too long; each runs before the capture."""
        launches[0]()
        launch_us = self.timer.once(launches[1])
        return self.timer.replay(launches, min(max(LAUNCHES, len(launches)), max(2, int(longest_us / launch_us))))

    def measure(self, part: Part, tokens: int) -> list[dict[str, Any]]:
        """Rows of one part at one number of tokens."""
        rows: list[dict[str, Any]] = []
        timed: list[tuple[dict[str, Any], Replay]] = []
        common = {"part": part.name, "t": tokens, "m": part.m(tokens)} | self.roof(part, tokens)
        for candidate in self.candidates(part, tokens):
            row = common | {
                "label": candidate.label,
                "kernel": candidate.kernel.name,
                "config": json.loads(candidate.config.to_json()),
                "layout": candidate.kernel.layout(self.device, part.problem),
            }
            rows.append(row)
            try:
                launches, row["relative_error"] = self.launches(part, candidate, tokens)
                timed.append((row, self.replay(launches)))
                row |= self.of_one_call(launches, tokens)
            except Exception as error:
                reraise_if_fatal(error)
                row["failed"] = str(error)
                print(f"  {candidate.kernel.name} at {tokens} tokens: {error}")
        if part.name != "op":
            row = common | {"label": "bf16", "kernel": moe_report.BF16}
            rows.append(row)
            timed.append((row, self.replay(part.bf16_launches(tokens))))
        replays = [replay for _, replay in timed]
        rounds = [self.timer.round(replays, i) for i in range(self.options.rounds)] if replays else []
        for i, (row, replay) in enumerate(timed):
            row["us"] = statistics.median(r.times_us[i] for r in rounds)
            if self.place.type == "cuda":
                bursts = []
                for _ in range(3):
                    self.timer.idle(IDLE_US)
                    bursts.append(self.timer.repeat(replay, 1)[0])
                row["burst_us"] = statistics.median(bursts)
        for replay in replays:
            replay.close()
        return rows

    def of_one_call(self, launches: Launches, tokens: int) -> dict[str, Any]:
        """Nodes of its graph, and at the smallest number of tokens its time on the host."""
        found: dict[str, Any] = {}
        if self.place.type == "cuda":
            found["launches"] = graph_nodes(launches[0])
        if tokens == min(self.options.ts):
            found["host_us"] = self.host_us({"call": launches[0]})["call"]
        return found

    def host_us(self, subjects: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds of one call of each on the host."""
        calls, warm = HOST_CALLS[self.place.type]
        return median_us(subjects, calls, self.timer.sync, warm=warm)

    def roof(self, part: Part, tokens: int) -> dict[str, Any]:
        """The least time that this device's ceilings allow."""
        active = part.active(tokens)
        nbytes, flops = part.model.work(part.name, tokens, active)
        found: dict[str, Any] = {"active": active, "bytes": nbytes, "flops": flops}
        if self.copy_gbs:
            found["roof_us"] = max(nbytes / self.copy_gbs / 1e3, flops / self.burst_tflops / 1e6)
        return found


def reraise_if_fatal(error: Exception) -> None:
    """What breaks a capture, or the device, leaves a process in which nothing can be timed."""
    lost = any(words in str(error) for words in ("CUDA error", "CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH_FAILED"))
    if isinstance(error, CaptureError) or lost or (isinstance(error, Wrong) and error.tainted):
        raise error


def graph_nodes(launch: Any) -> int:
    """Kernels, fills and copies that one call launches."""
    from cuda.bindings import runtime

    graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="thread_local")
    launch()
    graph.capture_end()
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()))
    assert error == runtime.cudaError_t.cudaSuccess, error
    graph.reset()
    return int(count)


def op_host_us(bench: Bench, model: Model, tokens: int) -> dict[str, float]:
    """Microseconds on the host of `nvfp4.moe` on a checkpoint's tensors, and of allocating its result."""
    import nvfp4
    from nvfp4.testing.experts import random_weight

    place, g = bench.place, torch.Generator(bench.place).manual_seed(0)
    small = 8  # experts: their number costs nothing on the host
    first = random_weight(small, model.first_rows, model.hidden, g)
    second = random_weight(small, model.hidden, model.inter, g)
    x = torch.randn(tokens, model.hidden, device=place).bfloat16()
    ids = torch.randint(0, small, (tokens, model.top_k), device=place, dtype=torch.int32)
    router = torch.rand(tokens, model.top_k, device=place)
    subjects: dict[str, Callable[[], object]] = {
        "empty": lambda: torch.empty_like(x),
        "nvfp4.moe": lambda: nvfp4.moe(x, *first, *second, ids, router, activation=model.activation),
    }
    subjects["nvfp4.moe"]()
    return bench.host_us(subjects)


def ceilings_of(bench: Bench) -> dict[str, Any]:
    """Copy bandwidth and matrix rate of a GPU, in this run."""
    import ceilings

    bench.copy_gbs = ceilings.copy_gbs(bench.timer, bench.place)
    bench.burst_tflops = ceilings.matrix_tflops(bench.timer, bench.place, burst=True)
    sustained = ceilings.matrix_tflops(bench.timer, bench.place, burst=False)
    return {
        "copy_gbs": bench.copy_gbs,
        "matmul_8192_tflops": {"burst": bench.burst_tflops, "sustained": sustained},
    }


def main() -> None:
    """Measure and write."""
    options = arguments()
    warnings.simplefilter("ignore", UserWarning)  # untuned
    place = torch.device(options.device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0)
    bench = Bench(place, options)
    result: dict[str, Any] = {
        "benchmark": "moe",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(bench.device),
        "environment": msgspec.to_builtins(environment()),
        "routing": options.routing,
    }
    result |= ceilings_of(bench) if place.type == "cuda" else {}
    result["models"] = []
    names = [name for kind in options.parts.split(",") for name in PARTS[kind]]
    for model, name, tokens in itertools.product(options.models, names, options.ts):
        bench.build(model.problem(name), rows_of(name, model, tokens))
    result["op_host_us"] = op_host_us(bench, options.models[0], min(options.ts))
    print("host: " + ", ".join(f"{name} {us:.1f} us" for name, us in result["op_host_us"].items()))
    for model in options.models:
        entry: dict[str, Any] = asdict(model) | {"rows": [], "summary": []}
        result["models"].append(entry)
        for name in names:
            part = Part(name, model, options.ts, options.routing, place, bench.device, bench.timer.sync)
            for tokens in options.ts:
                entry["rows"] += bench.measure(part, tokens)
                write(result, options.output)
            bench.timer.release()
            part.close()
        entry["summary"] = [moe_report.summary(model.name, tokens, entry["rows"]) for tokens in options.ts]
        write(result, options.output)
        print(model.name)
        for found in entry["summary"]:
            print(moe_report.line(found))
    bench.builds.close()


def write(result: dict[str, Any], output: Path | None) -> None:
    """What there is so far."""
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
