import math
from dataclasses import dataclass

import pytest
from nvfp4.kernels.kernel import Config, Kernel, Space
from nvfp4.kernels.problem import YES, Problem, Verdict
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner.candidates import candidates_of
from nvfp4.tuner.suggest import Suggester

DEVICE, PROBLEM = fake_device(), Problem(n=48, k=64)
MS = (1, 8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Config):
    rows: int
    columns: int
    stages: int


class Big(Kernel):
    name = "big"
    config_type = Tile

    def supports(self, device, problem):
        return YES

    def is_valid(self, device, problem, config, m):
        return YES if config.rows * config.columns <= 1 << 14 else Verdict.no("too large")

    def space(self, device, problem):
        powers = tuple(2**i for i in range(3, 12))
        return Space(Tile, {"rows": powers, "columns": powers, "stages": tuple(range(2, 10))})

    def default_config(self, device, problem, m):
        return Tile(rows=8, columns=8, stages=2)

    def build(self, device, problem, config):
        raise NotImplementedError

    def source_files(self):
        return ()


def slowdown(config, m):
    """A smooth bowl; the best rows grow with M."""
    best = 4 + math.log2(m) / 3
    return (
        1 + abs(math.log2(config.rows) - best) / 4 + abs(math.log2(config.columns) - 6) / 4 + abs(config.stages - 5) / 8
    )


@pytest.fixture(scope="module")
def candidates():
    return candidates_of(DEVICE, PROBLEM, MS, [Big()])[0]


def search(candidates, trials):
    suggester = Suggester(candidates, {"big": Big().space(DEVICE, PROBLEM)})
    seen = []
    for _ in range(trials):
        candidate = suggester.propose()
        if candidate is None:
            break
        seen.append(candidate)
        suggester.tell(candidate, {m: slowdown(candidate.config, m) for m in candidate.ms})
    return seen


def test_a_sixth_of_the_space_comes_close_to_the_best_of_every_m(candidates):
    assert len(candidates) == 360
    seen = search(candidates, 60)
    for m in MS:
        best = min(slowdown(candidate.config, m) for candidate in candidates.values())
        found = min(slowdown(candidate.config, m) for candidate in seen)
        assert found < best + 0.35


def test_no_candidate_is_proposed_twice_and_the_space_is_exhausted():
    small = candidates_of(DEVICE, PROBLEM, MS, [Big()])[0]
    few = dict(list(small.items())[:25])
    seen = search(few, 100)
    assert sorted(c.entrant.config for c in seen) == sorted(e.config for e in few)


def test_equal_evidence_gives_equal_proposals(candidates):
    assert [c.entrant for c in search(candidates, 12)] == [c.entrant for c in search(candidates, 12)]


def test_a_candidate_that_failed_is_told_as_the_worst(candidates):
    suggester = Suggester(candidates, {"big": Big().space(DEVICE, PROBLEM)})
    first = suggester.propose()
    suggester.tell(first, {})
    assert suggester.propose().entrant != first.entrant
