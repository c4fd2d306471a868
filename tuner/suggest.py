"""Search of spaces too large to measure whole: Optuna's TPE, asked and told in the parent.

The fastest candidate differs with M, so there is one study per band of M. A study's value is the geometric mean, over
the band, of a candidate's time relative to the best known there. Every candidate that was measured is told to all bands
it serves, whoever asked for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..kernels.kernel import Space
from .candidates import Candidate
from .messages import Entrant
from .statistics import HOPELESS, geometric_mean

if TYPE_CHECKING:
    import optuna

__all__ = ["BANDS", "Suggester"]

BANDS = ((1, 16), (17, 256), (257, None))
ATTEMPTS = 30  # suggestions that are invalid or known before a random one is taken
WORST = 100.0  # value of what is invalid or failed


class Suggester:
    """Proposes candidates that are not measured yet.

    Parameters
    ----------
    candidates
        All of the problem.
    spaces
        The space of every kernel among them, by name.
    seed
        Of the sampler: equal evidence gives equal proposals.
    """

    def __init__(
        self, candidates: Mapping[Entrant, Candidate], spaces: Mapping[str, Space[Any]], *, seed: int = 0
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._candidates = candidates
        self._open = dict.fromkeys(candidates)
        self._random = random.Random(seed)
        self._bands = [
            (low, high)
            for low, high in BANDS
            if any(_in_band(m, low, high) for candidate in candidates.values() for m in candidate.ms)
        ]
        self._studies = [optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed)) for _ in self._bands]
        self._kernels = {candidate.kernel.name: candidate for candidate in candidates.values()}
        self._choices = {name: space.choices for name, space in spaces.items()}
        self._turn = 0
        self._values: dict[tuple[int, Entrant], float] = {}

    def propose(self) -> Candidate | None:
        """A candidate that was neither proposed nor told yet, or None when there is none left."""
        if not self._open:
            return None
        self._turn = (self._turn + 1) % len(self._bands)
        study = self._studies[self._turn]
        for _ in range(ATTEMPTS):
            trial = study.ask()
            entrant = self._entrant(trial)
            candidate = self._candidates.get(entrant)
            served = candidate is not None and any(_in_band(m, *self._bands[self._turn]) for m in candidate.ms)
            if candidate is not None and served and entrant in self._open:
                study.tell(trial, state=_failed_state())  # its value comes with `tell`
                del self._open[entrant]
                return candidate
            study.tell(trial, self._values.get((self._turn, entrant), WORST))
        entrant = self._random.choice(list(self._open))
        del self._open[entrant]
        return self._candidates[entrant]

    def tell(self, candidate: Candidate, slowdown: Mapping[int, float]) -> None:
        """What was measured: by M, the candidate's time over the best known; empty when it failed."""
        import optuna

        self._open.pop(candidate.entrant, None)
        for i, (low, high) in enumerate(self._bands):
            served = [m for m in candidate.ms if _in_band(m, low, high)]
            if not served:
                continue
            value = _value(slowdown, served)
            self._values[i, candidate.entrant] = value
            params, distributions = self._parameters(candidate)
            self._studies[i].add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=value)
            )

    def _entrant(self, trial: optuna.Trial) -> Entrant:
        name = trial.suggest_categorical("kernel", sorted(self._kernels))
        values = {
            choice: options[trial.suggest_categorical(f"{name}.{choice}", list(range(len(options))))]
            for choice, options in self._choices[name].items()
        }
        config = self._kernels[name].kernel.config_type(**values)
        return Entrant(kernel=name, config=config.to_json())

    def _parameters(self, candidate: Candidate) -> tuple[dict[str, Any], dict[str, Any]]:
        from optuna.distributions import CategoricalDistribution

        name = candidate.kernel.name
        params: dict[str, Any] = {"kernel": name}
        distributions: dict[str, Any] = {"kernel": CategoricalDistribution(sorted(self._kernels))}
        for choice, options in self._choices[name].items():
            params[f"{name}.{choice}"] = options.index(getattr(candidate.config, choice))
            distributions[f"{name}.{choice}"] = CategoricalDistribution(list(range(len(options))))
        return params, distributions


def _failed_state() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _in_band(m: int, low: int, high: int | None) -> bool:
    return low <= m and (high is None or m <= high)


def _value(slowdown: Mapping[int, float], served: Iterable[int]) -> float:
    """M that were left out as hopeless count as that; a candidate without any time counts as a failure."""
    if not any(m in slowdown for m in served):
        return WORST
    ratios = (slowdown.get(m, HOPELESS) for m in served)
    return geometric_mean(min(ratio, WORST) if ratio < math.inf else WORST for ratio in ratios)
