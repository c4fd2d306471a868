"""Problem, Device and Verdict: plain records, importable without torch and made by hand in tests."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInput, message

__all__ = ["DTYPES", "Device", "Problem", "Verdict"]

DTYPES = ("bfloat16", "float16")


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

    Raises
    ------
    InvalidInput
        n or k is not a whole number above 0, or the dtype is none of DTYPES.
    """

    op: str = "gemm"  # "gemm", later "grouped_gemm" and "moe"
    n: int  # rows of the weight: out_features
    k: int  # columns of the weight: in_features
    dtype: str = "bfloat16"  # of x and of the output
    experts: int = 0  # local experts; 0 for gemm
    top_k: int = 0
    activation: str = ""

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1 or type(self.k) is not int or self.k < 1:
            raise InvalidInput(
                message("wrong size of a Problem", got=f"n={self.n!r}, k={self.k!r}", expected="ints, at least 1 each")
            )
        if self.dtype not in DTYPES:
            raise InvalidInput(message("wrong dtype of a Problem", got=repr(self.dtype), expected=" or ".join(DTYPES)))

    @property
    def label(self) -> str:
        """A short name for tables: "gemm 4096x14336 bfloat16"."""
        experts = f" E{self.experts} top{self.top_k} {self.activation}".rstrip() if self.experts else ""
        return f"{self.op} {self.n}x{self.k} {self.dtype}{experts}"

    @property
    def weight_bytes(self) -> int:
        """Packed codes and block scales, as a checkpoint holds them: 9/16 of a byte per weight."""
        return max(1, self.experts) * self.n * self.k * 9 // 16


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
