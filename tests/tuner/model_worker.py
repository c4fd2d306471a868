"""A worker that answers from a formula, and kernels for it: no processes, so decisions can be checked one by one."""

from dataclasses import dataclass
from typing import ClassVar

from nvfp4.cache.records import BASELINE
from nvfp4.cache.store import Store
from nvfp4.kernels import registry
from nvfp4.kernels.kernel import Config, Kernel, Space
from nvfp4.kernels.problem import YES, Problem, Verdict
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner import events as ev
from nvfp4.tuner.messages import Done, Row, Screen
from nvfp4.tuner.statistics import hopeless, spread

PROBLEM = Problem(n=256, k=512)
MS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Config):
    rows: int
    variant: int = 0


class Tiles(Kernel):
    """Small tiles suit small M: time is overhead by rows plus M over rows."""

    config_type = Tile
    packages = ()

    def __init__(self, name="tiles", rows=(8, 64, 512), variants=1, made_for=((1, None),)):
        self.name, self.rows, self.variants, self.made_for = name, rows, variants, made_for

    def supports(self, device, problem):
        return YES if problem.n % 2 == 0 else Verdict.no("N is odd")

    def is_valid(self, device, problem, config, m):
        return YES

    def space(self, device, problem):
        return Space(Tile, {"rows": self.rows, "variant": tuple(range(self.variants))})

    def default_config(self, device, problem, m):
        return Tile(rows=self.rows[0])

    def build(self, device, problem, config):
        raise AssertionError("nothing is built here")

    def source_files(self):
        return ()


def model_us(entrant, m):
    if entrant.kernel == BASELINE:
        return 100.0 + m
    config = registry.get(entrant.kernel).parse_config(None, PROBLEM, entrant.config)
    return config.rows / 4 + m * 8 / config.rows + config.variant / 16


class ModelWorker:
    """Stands in for Worker."""

    requests: ClassVar[list] = []
    script: ClassVar[dict] = {}  # number of a request -> what to do instead of answering

    def __init__(self, place, *, hang_s=None):
        self.closed = False

    def describe(self):
        return fake_device()

    def ceilings(self):
        return ev.CeilingsMeasured(copy_gbps=1.0, bf16_tflops=1.0)

    def close(self):
        self.closed = True

    def run(self, request):
        number = len(self.requests)
        self.requests.append(request)
        if number in self.script:
            yield from self.script[number](request)
            return
        if isinstance(request, Screen):
            served = tuple(sorted({*request.ms, *request.known_us}))
            slowdown = {m: us / request.best_us.get(m, us) for m, us in request.known_us.items()}
            for m in spread(served):
                if m not in request.known_us and not hopeless(m, served, slowdown):
                    us = model_us(request.entrant, m)
                    slowdown[m] = us / request.best_us.get(m, us)
                    yield self.row(request.entrant, m, "screen")
        else:
            for entrant in request.entrants:
                yield self.row(entrant, request.m, request.protocol)
        yield Done()

    @staticmethod
    def row(entrant, m, protocol, status="ok"):
        us = model_us(entrant, m) if status == "ok" else None
        return Row(
            kernel=entrant.kernel, config=entrant.config, m=m, status=status, protocol=protocol,
            p20_us=us, p50_us=us, p80_us=us, samples=9,
        )  # fmt: skip


def rows_of(tmp_path, problem=PROBLEM):
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        return store.measurements(fake_device(), problem)
