"""What a quantisation config answers for a module, and the answers of ModelOpt's configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from ...errors import InvalidInput, Unsupported, message
from ...kernels.weights.codec import GROUP
from .names import aliases, ancestors, fused_around, fused_parts, pattern_matcher
from .structs import LayerQuantization, ModelOptConfig

__all__ = ["DENSE", "FOREIGN_ALGOS", "NVFP4", "NVFP4_ALGOS", "Answer", "ModelOptRules", "NoRules", "Rules", "agreed"]

NVFP4 = "NVFP4"
DENSE = ""

# AWQ and ARC change what is in the tensors, not their form; whether pre_quant_scale is there decides.
NVFP4_ALGOS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_ARC")

# Known, and not for this package. They may stand beside NVFP4 in a mixed checkpoint.
FOREIGN_ALGOS = (
    *("NVFP4_SVD", "W4A8_NVFP4_FP8", "MXFP4", "MXFP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
    *("FP8_BLOCK_SCALES", "INT4_AWQ", "W4A16_AWQ", "W4A8_AWQ", "W8A16", "W4A16", "W8A8_SQ_PER_CHANNEL"),
)
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the config says about one module.

    Attributes
    ----------
    algo
        NVFP4, DENSE, or the name of another algorithm.
    group_size
        Weights per block scale as the config has it; 0 when it has none. The tensors decide.
    """

    algo: str
    group_size: int = 0

    @property
    def quantized(self) -> bool:
        """Whether the module holds an NVFP4 weight."""
        return self.algo == NVFP4


class Rules(Protocol):
    """The answers of one config."""

    @property
    def dialect(self) -> str:
        """ "modelopt", "compressed-tensors" or ""."""
        ...

    @property
    def algos(self) -> frozenset[str]:
        """Every algorithm that the config names."""
        ...

    def answer(self, name: str) -> Answer:
        """The answer for a module. Raises InvalidInput when the parts of a fused linear disagree."""
        ...


class NoRules:
    """No config: nothing is said to be quantised, and the tensors decide."""

    dialect = ""
    algos: ClassVar[frozenset[str]] = frozenset()

    def answer(self, name: str) -> Answer:
        """Always dense."""
        return Answer(algo=DENSE)


def agreed(name: str, answers: dict[str, Answer]) -> Answer:
    """The answer that all parts of `name` have.

    Raises
    ------
    InvalidInput
        They differ; every part is named with its answer.
    """
    if len({(answer.algo, answer.group_size) for answer in answers.values()}) > 1:
        said = ", ".join(f"{part}: {answer.algo or 'not quantised'}" for part, answer in answers.items())
        raise InvalidInput(
            message(
                f"the parts of {name} are quantised differently",
                got=said,
                expected="one answer for all of them",
                do="load them one by one instead of fused",
            )
        )
    return next(iter(answers.values()))


@dataclass(frozen=True)
class ModelOptRules:
    """ModelOpt: one algorithm with exclude patterns, or an algorithm per layer.

    Raises
    ------
    Unsupported
        No algorithm, or one that this package does not run; it is named.
    """

    config: ModelOptConfig
    source: str

    dialect: ClassVar[str] = "modelopt"

    def __post_init__(self) -> None:
        if not self.algo and not self.layers and not self.config.moe_quant_algo:
            raise Unsupported(
                message(f"{self.source} names no quant_algo", expected=f"one of {', '.join((*NVFP4_ALGOS, MIXED))}")
            )
        if self.layers or self.config.moe_quant_algo:
            return
        if self.algo == MIXED:
            raise InvalidInput(
                message(
                    f"{self.source} says {MIXED}", got="no quantized_layers", expected="the algorithm of each layer"
                )
            )
        if self.algo not in NVFP4_ALGOS:
            known = "" if self.algo in FOREIGN_ALGOS else " (unknown)"
            raise Unsupported(
                message(
                    f"{self.source}: unsupported quant_algo",
                    got=f"{self.config.quant_algo!r}{known}",
                    expected=f"one of {', '.join((*NVFP4_ALGOS, MIXED))}",
                )
            )

    @property
    def algo(self) -> str:
        """Of the whole checkpoint, upper case; "" when there is none."""
        return (self.config.quant_algo or "").upper()

    @cached_property
    def algos(self) -> frozenset[str]:
        """Of the whole checkpoint, of its experts, and of the layers that are named."""
        named = [entry.quant_algo for entry in self.layers.values()]
        return frozenset((algo or "").upper() for algo in (self.algo, self.config.moe_quant_algo, *named))

    @property
    def layers(self) -> dict[str, LayerQuantization]:
        """`quantized_layers`; where it is given, it alone says what is quantised."""
        return self.config.quantized_layers or {}

    def answer(self, name: str) -> Answer:
        """By `quantized_layers`, else by the algorithm and its exclude patterns."""
        if self.layers:
            return self._listed(name)
        if self._excluded(name):
            return Answer(algo=DENSE)
        parts = fused_parts(name)
        if parts and any(self._excluded(part) for part in parts):
            return agreed(name, {part: self.answer(part) for part in parts})
        if self.config.moe_quant_algo and "experts" in name.split("."):
            return _answer(LayerQuantization(quant_algo=self.config.moe_quant_algo))
        return _answer(LayerQuantization(quant_algo=self.algo, group_size=self.config.group_size))

    def _listed(self, name: str) -> Answer:
        for spelling in _spellings(name):
            if spelling in self.layers:
                return _answer(self.layers[spelling])
        parts = fused_parts(name)
        if any(spelling in self.layers for part in parts for spelling in aliases(part)):
            return agreed(name, {part: self._listed(part) for part in parts})
        children = {
            key: _answer(self.layers[key]) for spelling in aliases(name) for key in self._children.get(spelling, ())
        }
        if children:
            return agreed(name, children)
        for around in ancestors(name):
            for spelling in aliases(around):
                if spelling in self.layers:
                    return _answer(self.layers[spelling])
        return Answer(algo=DENSE)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        """Keys of quantized_layers by the modules around them."""
        found: dict[str, list[str]] = {}
        for key in self.layers:
            for around in ancestors(key):
                found.setdefault(around, []).append(key)
        return found

    def _excluded(self, name: str) -> bool:
        return any(self._match(spelling) for spelling in _spellings(name))

    @cached_property
    def _match(self) -> Callable[[str], bool]:
        return pattern_matcher(self.config.excluded)

    def signature(self) -> Iterator[object]:
        """What two files must share to say the same; group_size is left out, the tensors decide it."""
        yield self.algo
        yield frozenset(self.config.excluded)
        yield {key: (entry.quant_algo or "").upper() for key, entry in self.layers.items()}


def _answer(entry: LayerQuantization) -> Answer:
    algo = (entry.quant_algo or "").upper()
    if algo in ("", "NONE"):
        return Answer(algo=DENSE)
    if algo not in NVFP4_ALGOS:
        return Answer(algo=algo, group_size=entry.group_size or 0)
    # That of AWQ is of the search for pre_quant_scale, not of the block scales.
    return Answer(algo=NVFP4, group_size=GROUP if algo == "NVFP4_AWQ" else entry.group_size or GROUP)


def _spellings(name: str) -> Iterator[str]:
    """All names under which a config may speak of a module: its own, and those of fused linears that it is part of."""
    yield from aliases(name)
    for fused in fused_around(name):
        yield from aliases(fused)
