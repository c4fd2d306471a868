"""What happens inside the worker: check a candidate, time it, say what came out. docs/timing.md holds the protocol."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean

import torch

from ..cache.records import BASELINE
from ..kernels import registry
from ..kernels.device import describe
from ..kernels.kernel import Kernel, Launcher
from ..kernels.problem import Device, Problem
from .events import CeilingsMeasured
from .experts_trial import ExpertsTrial
from .gemm_trial import GemmTrial
from .messages import Done, Entrant, Pace, Race, Recorded, Screen, Started
from .outcome import Say, Step, Wrong, classify, describe_error
from .statistics import HOPELESS, Timing, hopeless, percentile, spread, summarise
from .timing import CaptureError, Launch, Replay, Round, make_timer
from .trial import Trial

__all__ = ["Measurer"]

FEW_LAUNCHES = 24  # of fast kernels in one replay: a replay takes longer than queueing the next one
LONG_US = 1000.0  # a single launch this long is timed well enough to see that it is hopeless
SLOW_US = 200_000.0  # and one this long well enough to be screened
RACE_US = 5e6  # of one race: what takes longer gets fewer rounds, at least 3
PER_M = ("oom", "launch_error")  # failures that may concern one M only


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entrant of a race."""

    step: Step
    replay: Replay
    launches: list[Launch]  # of the replay: they hold the tensors that it reads
    error: float


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
        self._trial: Trial | None = None
        self._key: tuple[Problem, tuple[int, ...], Recorded | None] | None = None
        self._launchers: dict[Entrant, tuple[Kernel, Launcher]] = {}

    def screen(self, request: Screen, say: Say) -> Done:
        """Check the candidate once, then time it at every M that is not hopeless.

        A failure ends it, but for an M that it cannot be launched at or has no memory for.
        """
        step = Step(say, request.entrant, "screen")
        done = self._prepare(request, step)
        if done is not None:
            return done
        served = tuple(sorted({*request.ms, *request.known_us}))
        slowdown = {m: us / request.best_us.get(m, us) for m, us in request.known_us.items() if us < math.inf}
        layout = ""
        try:
            step.begin("build", served[0])
            kernel, launcher = self._launcher(request.device, request.problem, request.entrant)
            layout = kernel.layout(request.device, request.problem)
            trial = self._at_hand()
            trial.gate(kernel, launcher, served, step)
            for m in spread(served):
                if m in request.known_us or hopeless(m, served, slowdown):
                    continue
                best_us = request.best_us.get(m)
                times_us = []
                try:
                    for routing in trial.routings:
                        step.begin("check", m)
                        error = trial.check(launcher, layout, m, routing)
                        launches = trial.launches(launcher, layout, m, routing)
                        timing = self._screen_one(launches, best_us, request.pace)
                        step.ok(timing, error, routing)
                        times_us.append(timing.p50_us)
                except Exception as failure:
                    done = self._failed(failure, step, layout)
                    if done.tainted or step.status not in PER_M:
                        return done
                    continue
                mean_us = geometric_mean(times_us)
                slowdown[m] = mean_us / (best_us or mean_us)
            trial.require_unchanged(layout)
        except (Exception, SystemExit) as error:  # whatever a candidate raises is data
            return self._failed(error, step, layout)
        return Done()

    def race(self, request: Race, say: Say) -> Done:
        """Time the entrants at one M in turns, once per routing; one that fails is left out of the race."""
        steps = [Step(say, entrant, request.protocol) for entrant in request.entrants]
        for step in steps[:1]:
            done = self._prepare(request, step)
            if done is not None:
                return done
        for routing in self._at_hand().routings:
            entries: list[_Entry] = []
            for step in steps:
                try:
                    step.begin("check", request.m)
                    entries.append(self._entry(request, step, routing))
                except (Exception, SystemExit) as problem:
                    done = self._failed(problem, step, self._layout(step.entrant, request))
                    if done.tainted:
                        return done  # the process ends, and the replays with it
            steps = [entry.step for entry in entries]
            try:
                if entries:
                    self._run_race(request, entries, routing, say)
                for entry in entries:
                    entry.replay.close()
            except Exception as error:  # of the device while it replayed: nobody can say whose it is
                return Done(tainted=describe_error(error))
        return Done()

    def _entry(self, request: Race, step: Step, routing: str) -> _Entry:
        trial, m = self._at_hand(), request.m
        if step.entrant.kernel == BASELINE:
            launches, error = trial.baseline(m)
        else:
            kernel, launcher = self._launcher(request.device, request.problem, step.entrant)
            layout = kernel.layout(request.device, request.problem)
            error = trial.check(launcher, layout, m, routing)
            launches = trial.launches(launcher, layout, m, routing)
        launch_us = self.timer.once(launches[1])
        count = _count(len(launches), launch_us, request.pace.screen_us, self.device.kind)
        return _Entry(step=step, replay=self.timer.replay(launches, count), launches=launches, error=error)

    def _run_race(self, request: Race, entries: list[_Entry], routing: str, say: Say) -> None:
        replays = [entry.replay for entry in entries]
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
        for i, entry in enumerate(entries):
            entry.step.ok(summarise([turn.times_us[i] for turn in rounds], clocks), entry.error, routing)

    def ceilings(self) -> CeilingsMeasured:
        """Copy bandwidth and bf16 matrix rate, measured for as long as a screen of everything else takes."""
        cuda = self.place.type == "cuda"
        copied = min(1 << 30, self.device.memory_bytes // 16) if cuda else 1 << 26
        source = torch.ones(copied, dtype=torch.uint8, device=self.place)
        target = torch.empty_like(source)
        size = 8192 if cuda else 512
        # Random values: a product of ones draws less power, so it runs at a higher clock.
        a, b, c = (torch.randn(size, size, device=self.place).to(torch.bfloat16) for _ in range(3))

        def copy() -> None:  # called, for as a graph node it reaches two thirds of this (H200, 2026-11)
            target.copy_(source)

        copy_us = percentile([self.timer.once(copy) for _ in range(6)][1:], 0.5)
        matmul_us = self._plain_us(lambda: torch.mm(a, b.t(), out=c))
        return CeilingsMeasured(copy_gbps=2 * source.nbytes / copy_us / 1e3, bf16_tflops=2 * size**3 / matmul_us / 1e6)

    def close(self) -> None:
        """Give back all memory of the problem at hand."""
        self._launchers.clear()
        self.timer.release()
        if self._trial is not None:
            self._trial.close()
        self._trial = self._key = None

    def _plain_us(self, call: Callable[[], object]) -> float:
        def launch() -> None:
            call()

        launch()
        replay = self.timer.replay([launch], 4)
        try:
            return percentile(self.timer.repeat(replay, 5), 0.5)
        finally:
            replay.close()

    def _prepare(self, request: Screen | Race, step: Step) -> Done | None:
        problem, ms, recorded = request.problem, request.all_ms, request.recorded
        if self._key == (problem, ms, recorded):
            return None
        step.begin("prepare", 0)
        try:
            self.close()
            made = (request.device, self.place, problem, ms, self.timer.sync)
            self._trial = GemmTrial(*made) if problem.op == "gemm" else ExpertsTrial(*made, recorded)
            self.timer.sync()
            self._key = (problem, ms, recorded)
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

    def _screen_one(self, launches: list[Launch], best_us: float | None, pace: Pace) -> Timing:
        launch_us = self.timer.once(launches[1])
        if best_us is not None and launch_us > max(LONG_US, HOPELESS * best_us):
            return summarise([launch_us])
        if launch_us > SLOW_US:
            return summarise([launch_us, self.timer.once(launches[0])])
        replay = self.timer.replay(launches, _count(len(launches), launch_us, pace.screen_us, self.device.kind))
        try:
            times = self.timer.repeat(replay, 3)
            replay_us = percentile(times, 0.5) * replay.launches
            more = min(17, int(pace.screen_us / max(replay_us, 1.0)) - 3)
            if more > 0:
                times += self.timer.repeat(replay, more)
        finally:
            replay.close()
        return summarise(times)

    def _at_hand(self) -> Trial:
        assert self._trial is not None
        return self._trial

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
            if not tainted and self._trial is not None and not self._trial.unchanged(layout):
                status, tainted = "wrong", "it changed x or the weights"
                detail = f"{tainted}; {detail}"
        except Exception as sticky:  # the context is lost: every later call would fail
            status, tainted = "crash", describe_error(sticky)
            detail = f"{detail}; then {tainted}" if detail != tainted else detail
        step.failed(status, detail, relative)
        return Done(tainted=tainted)


def _count(copies: int, launch_us: float, screen_us: float, kind: str) -> int:
    """Launches in one replay: all copies, in whole turns, unless that takes far longer than a screen should."""
    if copies * launch_us > 4 * screen_us:
        return max(1, round(screen_us / launch_us))
    few = FEW_LAUNCHES if kind == "cuda" else 1
    affordable = max(1, int(screen_us / (copies * launch_us)))
    return copies * min(-(-few // copies), affordable)
