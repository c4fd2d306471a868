"""What the device itself allows: copy bandwidth, matrix rate, and the time of a kernel that only reads the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from nvfp4.tuner.timing import Timer
from torch import Tensor


@triton.jit
def read_words(
    data_ptr,  # int64 words, 16-byte aligned
    out_ptr,  # one int64, never written: the sum is never this value
    total,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Reads `total` words once and needs them all."""
    base = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    seen = tl.zeros((BLOCK,), tl.int64)
    for step in tl.static_range(STEPS):
        at = base + step * BLOCK + tl.arange(0, BLOCK)
        seen ^= tl.load(data_ptr + at, mask=at < total, other=0)
    folded = tl.xor_sum(seen, axis=0)
    if folded == 0x5A5A5A5A1234567:
        tl.store(out_ptr, folded)


READERS = [(block, steps) for block in (256, 512, 1024) for steps in (1, 2, 4, 8)]


def reader(data: Tensor, block: int, steps: int) -> Callable[[], None]:
    """A launch that reads a uint8 tensor."""
    words = data.view(-1).view(torch.int64)
    grid = (triton.cdiv(words.numel(), block * steps),)
    sink = torch.empty(1, dtype=torch.int64, device=data.device)
    kernel: Any = read_words[grid]  # its parameters are Triton's, not Python's
    return lambda: kernel(words, sink, words.numel(), BLOCK=block, STEPS=steps, num_warps=4)


def stream_us(timer: Timer, copies: list[Tensor], count: int, rounds: int = 7) -> float:
    """Microseconds of the fastest plain read of one copy, rotating over all of them."""
    best = float("inf")
    for block, steps in READERS:
        launches = [reader(copy, block, steps) for copy in copies]
        launches[0]()
        timer.sync()
        replay = timer.replay(launches, count)
        times = sorted(timer.repeat(replay, rounds))
        best = min(best, times[len(times) // 2])
        replay.close()
    return best


def copy_gbs(timer: Timer, place: torch.device, nbytes: int = 2 << 30) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    source.random_(0, 256)
    target.copy_(source)

    def copy() -> None:
        target.copy_(source)

    times = sorted(timer.once(copy) for _ in range(9))
    return 2 * nbytes / times[4] / 1e3


def matrix_tflops(timer: Timer, place: torch.device, size: int = 8192, *, burst: bool) -> float:
    """TFLOP/s of a bf16 matrix product on random data: after an idle pause, or sustained."""
    a, b = (torch.randn(size, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=place, dtype=torch.bfloat16)

    def launch() -> None:
        torch.mm(a, b.T, out=out)

    launch()
    timer.sync()
    replay = timer.replay([launch], 8)
    times = []
    for _ in range(5):
        if burst:
            timer.idle(60_000)
        times += timer.repeat(replay, 1 if burst else 12)[0 if burst else 4 :]
    replay.close()
    return 2 * size**3 / sorted(times)[len(times) // 2] / 1e6
