"""Problem, Device and Verdict: plain records, importable without torch and made by hand in tests."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInput, message
from .moe.activations import activation

__all__ = ["DTYPES", "OPS", "SHORT_DTYPES", "SIZE_END", "Device", "Problem", "Verdict"]

DTYPES = ("bfloat16", "float16")
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # in tables
OPS = ("gemm", "grouped_gemm", "moe")
SIZE_END = 1 << 31  # sizes are 32-bit ints in kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A class of device: equal cards are equal Devices (no serial numbers, no index)."""

    kind: str  # "cuda" or "cpu"
    name: str  # "NVIDIA H200"; the processor's model for a CPU
    capability: tuple[int, int] = (0, 0)  # compute capability; (0, 0) for a CPU
    units: int = 1  # streaming multiprocessors; cores for a CPU
    smem_bytes: int = 0  # shared memory one block can opt in to
    l2_bytes: int = 0  # L2 cache; the last-level cache for a CPU
    memory_bytes: int = 0
    features: tuple[str, ...] = ()  # instruction sets of a CPU

    @property
    def arch(self) -> str:
        """What compilers call it: "sm_90" and the like; "cpu" for a CPU."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.kind == "cuda" else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed, without M: every field that changes the answer, and none that does not.

    M counts rows of x: for `moe` tokens, each of which goes to top_k experts.

    Raises
    ------
    InvalidInput
        The op is none of OPS, the dtype none of DTYPES, or the activation unknown; or a size is not a whole number
        above 0 and below 2^31: n and k of every op, experts of grouped_gemm and moe, top_k of moe.
    """

    op: str = "gemm"  # one of OPS
    n: int  # rows of the weight: out_features; for moe the inner size of an expert, `inter`
    k: int  # columns of the weight: in_features; for moe the size of a token, `hidden`
    dtype: str = "bfloat16"  # of x and of the output
    experts: int = 0  # local experts; 0 for gemm
    top_k: int = 0  # experts per token; 0 but for moe
    activation: str = ""  # name of one of `kernels.moe.activations`; "" but for moe

    def __post_init__(self) -> None:
        if any(type(size) is not int or not 1 <= size < SIZE_END for size in (self.n, self.k)):
            raise InvalidInput(
                message(
                    "wrong size of a Problem",
                    got=f"n={self.n!r}, k={self.k!r}",
                    expected="ints, at least 1 each, below 2^31",
                )
            )
        if self.dtype not in DTYPES:
            raise InvalidInput(message("wrong dtype of a Problem", got=repr(self.dtype), expected=" or ".join(DTYPES)))
        if self.op not in OPS:
            raise InvalidInput(message("wrong op of a Problem", got=repr(self.op), expected=" or ".join(OPS)))
        counts = [("experts", self.op != "gemm", self.experts), ("top_k", self.op == "moe", self.top_k)]
        for name, needed, count in counts:
            if type(count) is not int or not (1 <= count < SIZE_END if needed else count == 0):
                expected = "an int, at least 1, below 2^31" if needed else 0
                raise InvalidInput(
                    message(f"wrong {name} of a Problem", got=f"{count!r} for {self.op}", expected=expected)
                )
        if self.op == "moe":
            if (name := activation(self.activation).name) != self.activation:
                raise InvalidInput(message("wrong activation of a Problem", got=repr(self.activation), expected=name))
        elif self.activation:
            raise InvalidInput(message("wrong activation of a Problem", got=repr(self.activation), expected="none"))

    @property
    def gated(self) -> bool:
        """Whether w13 of a moe has two halves, gate and up."""
        return self.op == "moe" and activation(self.activation).gated

    @property
    def label(self) -> str:
        """A short name for tables: "gemm 4096x14336 bfloat16", "moe 768x2048 bfloat16 E128 top8 swiglu"."""
        experts = f" E{self.experts}" if self.experts else ""
        routed = f" top{self.top_k} {self.activation}" if self.op == "moe" else ""
        return f"{self.op} {self.n}x{self.k} {self.dtype}{experts}{routed}"

    @property
    def weight_bytes(self) -> int:
        """Packed codes and block scales, as a checkpoint holds them: 9/16 of a byte per weight."""
        matrices = 1 if self.op != "moe" else 3 if self.gated else 2
        return max(1, self.experts) * matrices * self.n * self.k * 9 // 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes, or no with the reason in words. Truthy when yes."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def no(reason: str) -> Verdict:
        """A refusal; the reason is shown to users as it stands."""
        return Verdict(False, reason)


YES = Verdict(True)
