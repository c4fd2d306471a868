"""What happens inside the worker: check a candidate, time it, say what came out. docs/timing.md holds the protocol."""

from __future__ import annotations

import functools
import gc
import math
import os
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache.records import BASELINE
from ..kernels import registry
from ..kernels.device import describe
from ..kernels.kernel import Kernel, Launcher
from ..kernels.problem import Device, Problem
from ..kernels.weights.weight import Weight
from ..testing.close import assert_gemm_close, relative_error
from .inputs import POOL_ROWS, Inputs
from .messages import Ceiling, Done, Entrant, Pace, Race, Screen, Started
from .outcome import Say, Step, Wrong, classify, describe_error
from .statistics import HOPELESS, Timing, hopeless, percentile, spread, summarise
from .timing import CaptureError, Replay, Round, make_timer
from .variants import Variant

__all__ = ["Measurer", "gate_ms"]

FEW_LAUNCHES = 24  # of fast kernels in one replay: a replay takes longer than queueing the next one
LONG_US = 1000.0  # a single launch this long is timed well enough to see that it is hopeless
SLOW_US = 200_000.0  # and one this long well enough to be screened
RACE_US = 5e6  # of one race: what takes longer gets fewer rounds, at least 3
PER_M = ("oom", "launch_error")  # failures that may concern one M only


def gate_ms(ms: Sequence[int], valid: Callable[[int], bool]) -> tuple[int, ...]:
    """Where numerics are checked: the smallest M, and one short of the largest small M, so that a tile has a tail."""
    small = [m for m in ms if m <= POOL_ROWS]
    if not small:
        return (min(ms),)
    ragged = max(small) - 1
    return tuple(sorted({min(small), ragged if ragged >= 1 and valid(ragged) else max(small)}))


class Measurer:
    """Measures candidates on one torch device; keeps the inputs of the problem at hand between requests."""

    def __init__(self, place: str) -> None:
        self.place = torch.device(place)
        if self.place.type == "cuda" and self.place.index is None:
            self.place = torch.device("cuda", 0)
        self.device = describe(self.place)
        self.timer = make_timer(self.place)
        for op in registry.OPS:  # a kernel that cannot be imported is no candidate's failure: it raises here
            registry.kernels(op)
        self._inputs: Inputs | None = None
        self._key: tuple[Problem, tuple[int, ...]] | None = None
        self._launchers: dict[Entrant, tuple[Kernel, Launcher]] = {}

    def screen(self, request: Screen, say: Say) -> Done:
        """Check the candidate once, then time it at every M that is not hopeless.

        A failure ends it, but for an M that it cannot be launched at or has no memory for.
        """
        step = Step(say, request.entrant, "screen")
        done = self._prepare(request.device, request.problem, request.all_ms, step)
        if done is not None:
            return done
        served = tuple(sorted({*request.ms, *request.known_us}))
        slowdown = {m: us / request.best_us.get(m, us) for m, us in request.known_us.items() if us < math.inf}
        layout = ""
        try:
            step.begin("build", served[0])
            kernel, launcher = self._launcher(request.device, request.problem, request.entrant)
            layout = kernel.layout(request.device, request.problem)
            self._gate(kernel, launcher, layout, served, step)
            for m in spread(served):
                if m in request.known_us or hopeless(m, served, slowdown):
                    continue
                step.begin("check", m)
                best_us = request.best_us.get(m)
                try:
                    timing, error = self._screen_one(launcher, layout, m, best_us, request.pace)
                except Exception as failure:
                    done = self._failed(failure, step, layout)
                    if done.tainted or step.status not in PER_M:
                        return done
                    continue
                step.ok(timing, error)
                slowdown[m] = timing.p50_us / (best_us or timing.p50_us)
            self._inputs_unchanged(layout)
        except (Exception, SystemExit) as error:  # whatever a candidate raises is data
            return self._failed(error, step, layout)
        return Done()

    def race(self, request: Race, say: Say) -> Done:
        """Time the entrants at one M in turns; one that fails is left out of the race."""
        entries: list[tuple[Step, Replay, float]] = []
        for entrant in request.entrants:
            step = Step(say, entrant, request.protocol)
            done = self._prepare(request.device, request.problem, request.all_ms, step)
            if done is not None:
                return done
            try:
                step.begin("check", request.m)
                launches, launch_us, error = self._entrant(request, entrant)
                count = _count(len(launches), launch_us, request.pace.screen_us, self.device.kind)
                entries.append((step, self.timer.replay(launches, count), error))
            except (Exception, SystemExit) as problem:
                done = self._failed(problem, step, self._layout(entrant, request))
                if done.tainted:
                    return done  # the process ends, and the replays with it
        try:
            if entries:
                self._run_race(request, entries, say)
            for _, replay, _ in entries:
                replay.close()
        except Exception as error:  # of the device while it replayed: nobody can say whose it is
            return Done(tainted=describe_error(error))
        return Done()

    def _run_race(self, request: Race, entries: list[tuple[Step, Replay, float]], say: Say) -> None:
        replays = [replay for _, replay, _ in entries]
        pace = request.pace
        rounds: list[Round] = []

        def alive() -> None:
            say(Started(pid=os.getpid(), m=request.m, step=request.protocol))

        if request.protocol == "burst":
            for _ in range(pace.rounds):
                turns = []
                for replay in replays:
                    alive()
                    self.timer.idle(pace.idle_us)
                    turns.append(self.timer.round([replay], 0))
                rounds.append(Round(tuple(turn.times_us[0] for turn in turns), turns[0].clock_mhz))
        else:
            spent_us, warmed = 0.0, 0
            while spent_us < (pace.sustain_us if request.m >= pace.sustain_from else pace.screen_us):
                alive()
                times = self.timer.round(replays, 0).times_us
                spent_us += sum(us * replay.launches for us, replay in zip(times, replays, strict=True))
                warmed += 1
            for i in range(max(3, min(pace.rounds, int(RACE_US * warmed / spent_us)))):
                alive()
                rounds.append(self.timer.round(replays, i))
        clocks = [turn.clock_mhz for turn in rounds]
        for i, (step, _, error) in enumerate(entries):
            step.ok(summarise([turn.times_us[i] for turn in rounds], clocks), error)

    def ceilings(self) -> Ceiling:
        """Copy bandwidth and bf16 matrix rate, measured for as long as a screen of everything else takes."""
        cuda = self.place.type == "cuda"
        copied = min(1 << 30, self.device.memory_bytes // 16) if cuda else 1 << 26
        source = torch.ones(copied, dtype=torch.uint8, device=self.place)
        target = torch.empty_like(source)
        size = 8192 if cuda else 1024
        # Random values: a product of ones draws less power, so it runs at a higher clock.
        a, b, c = (torch.randn(size, size, device=self.place).to(torch.bfloat16) for _ in range(3))

        def copy() -> None:  # called, for as a graph node it reaches two thirds of this (H200, 2026-11)
            target.copy_(source)

        copy_us = percentile([self.timer.once(copy) for _ in range(6)][1:], 0.5)
        matmul_us = self._plain_us(lambda: torch.mm(a, b.t(), out=c))
        return Ceiling(copy_gbps=2 * source.nbytes / copy_us / 1e3, bf16_tflops=2 * size**3 / matmul_us / 1e6)

    def close(self) -> None:
        """Give back all memory of the problem at hand."""
        self._launchers.clear()
        self.timer.release()
        if self._inputs is not None:
            self._inputs.close()
        self._inputs = self._key = None

    def _plain_us(self, call: Callable[[], object]) -> float:
        def launch() -> None:
            call()

        launch()
        replay = self.timer.replay([launch], 4)
        try:
            return percentile(self.timer.repeat(replay, 5), 0.5)
        finally:
            replay.close()

    def _prepare(self, device: Device, problem: Problem, ms: tuple[int, ...], step: Step) -> Done | None:
        if self._key == (problem, ms):
            return None
        step.begin("prepare", 0)
        try:
            self.close()
            self._inputs = Inputs(device, self.place, problem, ms)
            self.timer.sync()
            self._key = (problem, ms)
        except (RuntimeError, MemoryError) as error:
            detail = describe_error(error)
            self.close()
            return Done(unprepared=detail)
        return None

    def _launcher(self, device: Device, problem: Problem, entrant: Entrant) -> tuple[Kernel, Launcher]:
        found = self._launchers.get(entrant)
        if found is None:
            kernel = registry.get(entrant.kernel)
            if kernel is None:
                raise Wrong("invalid", f"no kernel named {entrant.kernel!r} in the worker")
            config = kernel.parse_config(device, problem, entrant.config)
            if config is None:
                raise Wrong("invalid", "the config is not in the kernel's space")
            found = self._launchers[entrant] = (kernel, kernel.build(device, problem, config))
        return found

    def _bind(
        self, launcher: Launcher, weight: Weight, x: Tensor, out: Tensor, variant: Variant | None = None
    ) -> Callable[[], None]:
        bias, pre_quant_scale = (None, None) if variant is None else (variant.bias, variant.pre_quant_scale)
        return functools.partial(
            launcher, x, weight.data, weight.scale, weight.global_scale, bias, pre_quant_scale, out
        )

    def _gate(self, kernel: Kernel, launcher: Launcher, layout: str, ms: Sequence[int], step: Step) -> None:
        """Extreme scales, fresh rows of x, a ragged M; element by element. Then all that a call may have besides."""
        inputs = self._at_hand()
        config = kernel.parse_config(inputs.device, inputs.problem, step.entrant.config)
        at = gate_ms(ms, lambda m: bool(kernel.is_valid(inputs.device, inputs.problem, config, m)))
        calls: list[tuple[int, Variant | None]] = [(m, None) for m in at]
        calls += zip((at[0], at[-1]), inputs.variants, strict=True)
        for m, variant in calls:
            step.begin("check", m)
            start = random.randrange(max(1, POOL_ROWS - m + 1))
            weight = inputs.extreme_weight(layout, per_row=variant is not None and variant.per_row)
            self._check_extreme(launcher, weight, m, start, variant)
            self._inputs_unchanged(layout)

    def _check(self, launcher: Launcher, weight: Weight, m: int) -> float:
        """Run once and compare with the exact result; the relative error."""
        case = self._at_hand().plain
        out = self._run(launcher, weight, m)
        at, known = case.rows(0, m)
        error = relative_error(out[at], case.exact[known])
        if not error <= case.tolerance(0, m):
            raise Wrong("wrong", f"m={m}: relative error {error:.4g} above {case.tolerance(0, m):.4g}", error=error)
        return error

    def _check_extreme(
        self, launcher: Launcher, weight: Weight, m: int, start: int, variant: Variant | None = None
    ) -> None:
        """Run once with extreme scales and compare every element."""
        case = self._at_hand().extreme
        out = self._run(launcher, weight, m, start, variant)
        at, known = case.rows(start, m)
        assert case.magnitude is not None
        exact, magnitude = case.exact[known], case.magnitude[known]
        if variant is not None:
            exact, magnitude = variant.expected(known), variant.magnitude(magnitude)
        try:
            assert_gemm_close(out[at], exact, k=case.k, dtype=case.dtype, magnitude=magnitude)
        except AssertionError as problem:
            what = "extreme scales" if variant is None else f"extreme scales, {variant.name}"
            raise Wrong("wrong", f"m={m}, {what}: {problem}", error=relative_error(out[at], exact)) from problem

    def _run(
        self, launcher: Launcher, weight: Weight, m: int, start: int = 0, variant: Variant | None = None
    ) -> Tensor:
        """Run once into a poisoned output and return that."""
        inputs = self._at_hand()
        out = inputs.out(m)
        self._bind(launcher, weight, inputs.x[start : start + m], out, variant)()
        self.timer.sync()
        if not inputs.guards_intact(m):
            raise Wrong("wrong", f"m={m}: it wrote outside its output", tainted=True)
        nan = torch.isnan(out)
        if bool(nan.any()):
            first = [int(i) for i in nan.nonzero()[0]]
            raise Wrong("nan", f"m={m}: {int(nan.sum())} NaN or elements never written, the first at {first}")
        return out

    def _inputs_unchanged(self, layout: str) -> None:
        if not self._at_hand().unchanged(layout):
            raise Wrong("wrong", "it changed x or the weights", tainted=True)

    def _screen_one(
        self, launcher: Launcher, layout: str, m: int, best_us: float | None, pace: Pace
    ) -> tuple[Timing, float]:
        inputs = self._at_hand()
        copies = inputs.copies(layout)
        error = self._check(launcher, copies[0], m)
        launches = [self._bind(launcher, weight, inputs.x[:m], inputs.out(m, poison=False)) for weight in copies]
        launch_us = self.timer.once(launches[1])
        if best_us is not None and launch_us > max(LONG_US, HOPELESS * best_us):
            return summarise([launch_us]), error
        if launch_us > SLOW_US:
            return summarise([launch_us, self.timer.once(launches[0])]), error
        replay = self.timer.replay(launches, _count(len(launches), launch_us, pace.screen_us, self.device.kind))
        try:
            times = self.timer.repeat(replay, 3)
            replay_us = percentile(times, 0.5) * replay.launches
            more = min(17, int(pace.screen_us / max(replay_us, 1.0)) - 3)
            if more > 0:
                times += self.timer.repeat(replay, more)
        finally:
            replay.close()
        return summarise(times), error

    def _entrant(self, request: Race, entrant: Entrant) -> tuple[list[Callable[[], None]], float, float]:
        """Launches over all copies, microseconds of one with its overhead, relative error."""
        inputs, m = self._at_hand(), request.m
        if entrant.kernel == BASELINE:
            out, x = inputs.out(m), inputs.x[:m]
            launches: list[Callable[[], None]] = [
                functools.partial(_matmul, x, dense, out) for dense in inputs.dense_copies()
            ]
            launches[0]()
            at, known = inputs.plain.rows(0, m)
            error = relative_error(out[at], inputs.plain.exact[known])
        else:
            kernel, launcher = self._launcher(request.device, request.problem, entrant)
            copies = inputs.copies(kernel.layout(request.device, request.problem))
            error = self._check(launcher, copies[0], m)
            out = inputs.out(m, poison=False)
            launches = [self._bind(launcher, weight, inputs.x[:m], out) for weight in copies]
        return launches, self.timer.once(launches[1]), error

    def _at_hand(self) -> Inputs:
        assert self._inputs is not None
        return self._inputs

    def _layout(self, entrant: Entrant, request: Race) -> str:
        kernel = registry.get(entrant.kernel)
        return kernel.layout(request.device, request.problem) if kernel else ""

    def _failed(self, error: BaseException, step: Step, layout: str) -> Done:
        """Say what happened and find out whether the worker can go on."""
        status, detail = classify(error), describe_error(error)
        tainted = detail if isinstance(error, CaptureError) or (isinstance(error, Wrong) and error.tainted) else ""
        relative = error.error if isinstance(error, Wrong) else None
        error.__traceback__ = None  # its frames hold tensors
        del error
        gc.collect()
        try:
            if self.place.type == "cuda":
                torch.cuda.empty_cache()
                self.timer.sync()
            if not tainted and self._inputs is not None and not self._inputs.unchanged(layout):
                status, tainted = "wrong", "it changed x or the weights"
                detail = f"{tainted}; {detail}"
        except Exception as sticky:  # the context is lost: every later call would fail
            status, tainted = "crash", describe_error(sticky)
            detail = f"{detail}; then {tainted}" if detail != tainted else detail
        step.failed(status, detail, relative)
        return Done(tainted=tainted)


def _matmul(x: Tensor, dense: Tensor, out: Tensor) -> None:
    torch.mm(x, dense.t(), out=out)


def _count(copies: int, launch_us: float, screen_us: float, kind: str) -> int:
    """Launches in one replay: all copies, in whole turns, unless that takes far longer than a screen should."""
    if copies * launch_us > 4 * screen_us:
        return max(1, round(screen_us / launch_us))
    few = FEW_LAUNCHES if kind == "cuda" else 1
    affordable = max(1, int(screen_us / (copies * launch_us)))
    return copies * min(-(-few // copies), affordable)
