"""What the kernels for CPUs share: decoding a block of weights by table look-up, and threads that work side by side.

Codes become values by table look-up: one 8-byte gather yields two float32 values per packed byte ("pair"), or four
float16 values per two bytes ("quad"; half the gathers, one more conversion). Block scales multiply the block in place,
so code * scale is exact.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Decoder", "prepare_tables", "side_by_side"]

T = TypeVar("T")


def side_by_side(work: Callable[[Sequence[T]], None], shares: Sequence[Sequence[T]]) -> None:
    """One share on each worker; inference mode, which belongs to a thread, goes along."""
    import torch

    inference = torch.is_inference_mode_enabled()

    def run(share: Sequence[T]) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(share)

    list(_workers(len(shares)).map(run, shares))


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads whose torch ops run on one thread each.

    torch.set_num_threads also sets the default of threads that start later, so all workers start here, and the setting
    of the caller is put back behind them.
    """
    import torch

    before = torch.get_num_threads()
    all_here = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, "nvfp4-cpu", initializer=torch.set_num_threads, initargs=(1,))
    list(pool.map(lambda _: all_here.wait(), range(count)))
    torch.set_num_threads(before)
    return pool


os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has none of its parent's threads


class Decoder:
    """Scratch for one block, and the look-ups that fill it."""

    def __init__(self, lookup: str, rows: int, k: int) -> None:
        import torch

        self.k = k
        self.codes, self.scales = _code_table(lookup), _scale_table()
        self.values = torch.empty(rows * k, dtype=torch.float32, device="cpu")
        self.halves = torch.empty_like(self.values, dtype=torch.float16) if lookup == "quad" else None
        self.code_index = torch.empty(rows * k // (2 if self.halves is None else 4), dtype=torch.int32, device="cpu")
        self.scale_index = torch.empty(rows * k // 16, dtype=torch.int32, device="cpu")
        self.scale_values = torch.empty_like(self.scale_index, dtype=torch.float32)

    def __call__(self, weight: Tensor, weight_scale: Tensor) -> Tensor:
        """code * block scale of [R, K/2] and [R, K/16], as float32 [R, K]; valid until the next call."""
        import torch

        size = weight.shape[0] * self.k
        codes, values, scales = weight.view(-1), self.values[:size], self.scale_values[: size // 16]
        if self.halves is None:
            index, target = self.code_index[: size // 2], values
            index.copy_(codes)
        else:
            index, target = self.code_index[: size // 4], self.halves[:size]
            index.copy_(_as_uint16(codes))
        torch.index_select(self.codes, 0, index, out=target.view(torch.float64))
        if self.halves is not None:
            values.copy_(target)
        index = self.scale_index[: size // 16]
        index.copy_(weight_scale.view(-1))
        torch.index_select(self.scales, 0, index, out=scales)
        values.view(-1, 16).mul_(scales.view(-1, 1))
        return values.view(-1, self.k)


def _as_uint16(codes: Tensor) -> Tensor:
    import torch

    aligned = codes if codes.storage_offset() % 2 == 0 else codes.clone()
    return aligned.view(torch.uint16)


def prepare_tables(lookup: str) -> None:
    """Make the tables now, and not in the first call."""
    _code_table(lookup), _scale_table()


@cache
def _code_table(lookup: str) -> Tensor:
    """Values of all codes in a byte (float32) or in two (float16), in order of k, as 8-byte entries."""
    import torch

    from .weights.codec import e2m1_decode

    code_bytes, dtype = (1, torch.float32) if lookup == "pair" else (2, torch.float16)
    packed = torch.arange(256**code_bytes, device="cpu").unsqueeze(1)
    shifts = 4 * torch.arange(2 * code_bytes, device="cpu")
    values = e2m1_decode((packed >> shifts) & 15, dtype)
    return values.view(torch.float64).flatten()


@cache
def _scale_table() -> Tensor:
    import torch

    from .weights.codec import scale_values

    return scale_values(torch.arange(256, dtype=torch.uint8, device="cpu"))
