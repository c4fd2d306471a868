"""Search of spaces too large to measure whole: Optuna's TPE, asked and told in the parent.

The fastest candidate differs with M, so there is one study per band of M. A study's value is the geometric mean, over
the band, of a candidate's time relative to the best known there. Every candidate that was measured is told to all bands
it serves, whoever asked for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np

from ..kernels.kernel import Space
from .candidates import Candidate
from .messages import Entrant
from .statistics import HOPELESS

__all__ = ["BANDS", "Suggester"]

BANDS = ((1, 16), (17, 256), (257, None))
SEED = 0  # of the sampler: equal evidence gives equal proposals
WORST = 100.0  # value of what is invalid or failed


class Suggester:
    """Proposes candidates that are not measured yet.

    Parameters
    ----------
    candidates
        All of the problem.
    spaces
        The space of every kernel among them, by name.
    """

    def __init__(self, candidates: Mapping[Entrant, Candidate], spaces: Mapping[str, Space[Any]]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._candidates = candidates
        self._open = dict.fromkeys(candidates)
        self._random = random.Random(SEED)
        self._bands = [
            (low, high)
            for low, high in BANDS
            if any(_in_band(m, low, high) for candidate in candidates.values() for m in candidate.ms)
        ]
        self._studies = [optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED)) for _ in self._bands]
        self._choices = {name: space.choices for name, space in spaces.items()}
        self._shelves = {
            name: _Shelf([c for c in candidates.values() if c.kernel.name == name], self._choices[name], self._bands)
            for name in sorted({candidate.kernel.name for candidate in candidates.values()})
        }
        self._turn = 0

    def propose(self) -> Candidate | None:
        """A candidate that was neither proposed nor told yet, or None when there is none left."""
        from optuna.trial import TrialState

        if not self._open:
            return None
        self._turn = (self._turn + 1) % len(self._bands)
        study = self._studies[self._turn]
        trial = study.ask()
        name = trial.suggest_categorical("kernel", list(self._shelves))
        wanted = [
            trial.suggest_categorical(f"{name}.{choice}", list(range(len(options))))
            for choice, options in self._choices[name].items()
        ]
        study.tell(trial, state=TrialState.FAIL)  # the value of what is taken comes with `tell`
        entrant = self._shelves[name].nearest(wanted, self._turn)
        if entrant is None:
            entrant = self._random.choice(list(self._open))
        self._take(entrant)
        return self._candidates[entrant]

    def _take(self, entrant: Entrant) -> None:
        if self._open.pop(entrant, "gone") is None:
            self._shelves[entrant.kernel].take(entrant)

    def tell(self, candidate: Candidate, slowdown: Mapping[int, float]) -> None:
        """What was measured: by M, the candidate's time over the best known; empty when it failed."""
        import optuna

        self._take(candidate.entrant)
        for i, (low, high) in enumerate(self._bands):
            served = [m for m in candidate.ms if _in_band(m, low, high)]
            if not served:
                continue
            value = _value(slowdown, served)
            params, distributions = self._parameters(candidate)
            self._studies[i].add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=value)
            )

    def _parameters(self, candidate: Candidate) -> tuple[dict[str, Any], dict[str, Any]]:
        from optuna.distributions import CategoricalDistribution

        name = candidate.kernel.name
        params: dict[str, Any] = {"kernel": name}
        distributions: dict[str, Any] = {"kernel": CategoricalDistribution(list(self._shelves))}
        for choice, options in self._choices[name].items():
            params[f"{name}.{choice}"] = options.index(getattr(candidate.config, choice))
            distributions[f"{name}.{choice}"] = CategoricalDistribution(list(range(len(options))))
        return params, distributions


class _Shelf:
    """The open candidates of one kernel; finds the one nearest to a wish.

    Most combinations of a large space are invalid, so a wish seldom is a candidate itself.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        choices: Mapping[str, Sequence[Any]],
        bands: Sequence[tuple[int, int | None]],
    ) -> None:
        self._entrants = [candidate.entrant for candidate in candidates]
        self._place = {entrant: i for i, entrant in enumerate(self._entrants)}
        self._indices = np.array(
            [[options.index(getattr(c.config, name)) for name, options in choices.items()] for c in candidates]
        )
        # Options are in order, so two that are next to each other are nearer than the ends.
        self._weights = np.array([1 / max(1, len(options) - 1) for options in choices.values()])
        # [band, candidate]: open, and of use somewhere in the band
        self._open = np.array(
            [[any(_in_band(m, low, high) for m in c.ms) for c in candidates] for low, high in bands], dtype=bool
        )

    def nearest(self, wanted: Sequence[int], band: int) -> Entrant | None:
        """The open candidate of a band that differs least, all fields added up; None when the band has none left."""
        if not self._open[band].any():
            return None
        apart = np.abs(self._indices - np.array(wanted)) @ self._weights
        apart[~self._open[band]] = np.inf
        return self._entrants[int(apart.argmin())]

    def take(self, entrant: Entrant) -> None:
        """It is open no longer."""
        self._open[:, self._place[entrant]] = False


def _in_band(m: int, low: int, high: int | None) -> bool:
    return low <= m and (high is None or m <= high)


def _value(slowdown: Mapping[int, float], served: Iterable[int]) -> float:
    """M that were left out as hopeless count as that; a candidate without any time counts as a failure."""
    if not any(m in slowdown for m in served):
        return WORST
    ratios = (slowdown.get(m, HOPELESS) for m in served)
    return geometric_mean(min(ratio, WORST) if ratio < math.inf else WORST for ratio in ratios)
