"""What loading a checkpoint takes: reading its bytes, loading its layers with their checks, packing them.

    python bench/loading.py --output loading.json                         4 GB, on the GPU if there is one
    python bench/loading.py --device cpu --size-gb 0.05 --folder /tmp

A checkpoint as ModelOpt writes it (dense layers of Llama-3.1-8B's sizes, one layer of 128 experts of Qwen3-30B-A3B's;
smaller ones below 1 GB) is written to a temporary folder and read layer by layer. `read` copies the files' bytes into
one buffer, `load` is `load_linear` and `load_experts`, `pack` is `nvfp4.pack` of what they return; `load` and `pack`
take turns, and everything packed is kept. "cold" runs ask the system to drop the files' pages before.

`alone` is `nvfp4.pack` of weights that are on the device, from its call until the blob is there, over rotating copies
of three times the L2; experts with gate and up rows in turns. GB/s (1e9 bytes) count the codes and scales once, however
often they are read or written. `processor` is the time that the process had a core, "load_average" tells what else ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nvfp4
import torch
from nvfp4.dispatch.checkpoint import Checkpoint, load_experts, load_linear, open_checkpoint
from nvfp4.kernels.device import describe
from nvfp4.testing.checkpoints import HF_QUANT
from torch import Tensor

RATES = ("read", "load", "pack", "total")
POOL_BYTES = 64 << 20
CHUNK_BYTES = 32 << 20
ALONE = ((4096, 4096), (14336, 4096), (28672, 8192))  # N, K: 9, 33 and 132 MB
ALONE_EXPERTS = (128, 1536, 2048)
Tensors = dict[str, Tensor]
Packable = tuple[str, Tensor, Tensor, Tensor]


class Pool:
    """Random bytes, made once."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.codes = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, generator=generator)
        self.scales = torch.randint(1, 0x7F, (POOL_BYTES // 8,), dtype=torch.uint8, generator=generator)

    def layer(self, name: str, n: int, k: int) -> Tensors:
        """The tensors of a layer."""
        return {
            f"{name}.weight": _some(self.codes, n, k // 2),
            f"{name}.weight_scale": _some(self.scales, n, k // 16).view(torch.float8_e4m3fn),
            f"{name}.weight_scale_2": torch.rand(()) * 1e-4 + 1e-4,
        }


def _some(pool: Tensor, rows: int, columns: int) -> Tensor:
    return pool.repeat(-(-rows * columns // pool.numel()))[: rows * columns].clone().view(rows, columns)


def dense_layer(pool: Pool, prefix: str, shrink: int) -> Tensors:
    """Attention and a gated MLP."""
    hidden, kv, inter = 4096 // shrink, 1024 // shrink, 14336 // shrink
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    return {key: one for name, size in sizes.items() for key, one in pool.layer(f"{prefix}.{name}", *size).items()}


def expert_layer(pool: Pool, prefix: str, shrink: int) -> Tensors:
    """Experts, one by one."""
    hidden, inter, count = 2048 // shrink, 768 // shrink, 128 // shrink
    tensors: Tensors = {}
    for expert in range(count):
        tensors |= pool.layer(f"{prefix}.mlp.experts.{expert}.gate_proj", inter, hidden)
        tensors |= pool.layer(f"{prefix}.mlp.experts.{expert}.up_proj", inter, hidden)
        tensors |= pool.layer(f"{prefix}.mlp.experts.{expert}.down_proj", hidden, inter)
    return tensors


def write(folder: Path, size_bytes: float) -> tuple[int, int]:
    """The checkpoint: a file a layer. How many dense layers it has, and the bytes of its tensors."""
    from safetensors.torch import save_file

    pool, shrink = Pool(), 1 if size_bytes >= 1e9 else 4
    written, number = 0, 0
    while number == 0 or written < size_bytes:
        make = expert_layer if number == 0 else dense_layer
        tensors = make(pool, f"model.layers.{number}", shrink)
        save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        written += sum(tensor.nbytes for tensor in tensors.values())
        number += 1
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": dict(HF_QUANT)}))
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # dirty pages cannot be dropped
    return number - 1, written


def drop_pages(folder: Path) -> None:
    """Ask the system to forget what it keeps of the files."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Seconds to copy all bytes into a buffer."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def weights(checkpoint: Checkpoint, layers: int, device: torch.device) -> Iterator[list[Packable]]:
    """A layout and what is packed into it, a module at a time."""
    experts = load_experts(checkpoint, "model.layers.0.mlp.experts", device=device)
    yield [
        ("fragment-glu", experts.w13, experts.w13_scale, experts.w13_scale_2),
        ("fragment", experts.w2, experts.w2_scale, experts.w2_scale_2),
    ]
    del experts
    for number in range(1, layers + 1):
        prefix = f"model.layers.{number}"
        for names in (
            [f"{prefix}.self_attn.{part}_proj" for part in "qkv"],
            [f"{prefix}.self_attn.o_proj"],
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
            [f"{prefix}.mlp.down_proj"],
        ):
            one = load_linear(checkpoint, names, device=device)
            yield [("fragment", one.weight, one.weight_scale, one.weight_scale_2)]


def host_peak_bytes(*, reset: bool = False) -> int:
    """The most memory that the process has had, pages of mapped files included, since the last reset; Linux only."""
    if reset:
        with suppress(OSError):  # not everywhere allowed: then it is the most since the process began
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def load_and_pack(
    folder: Path, layers: int, device: torch.device, sync: Callable[[], None]
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of each phase, and bytes."""
    seconds = {"open": 0.0, "load": 0.0, "pack": 0.0}
    processor_seconds = time.process_time()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = host_peak_bytes(reset=True)
    kept: list[nvfp4.Weight] = []
    clock = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        sync()
        now = time.perf_counter()
        seconds[phase] += now - clock
        clock = now

    checkpoint = open_checkpoint(folder)
    lap("open")
    for found in weights(checkpoint, layers, device):
        lap("load")
        kept += [pack(*tensors) for tensors in found]
        del found
        lap("pack")
    seconds["total"] = sum(seconds.values())
    seconds["processor"] = time.process_time() - processor_seconds
    sizes = {
        "packed_bytes": sum(one.nbytes for one in kept),
        "host_peak_over_start_bytes": host_peak_bytes() - before,
    }
    if device.type == "cuda":
        sizes["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return seconds, sizes


def pack(layout: str, weight: Tensor, scale: Tensor, global_scale: Tensor) -> nvfp4.Weight:
    """Into the form of it for this device."""
    return nvfp4.pack(weight, scale, global_scale, layout=layout)


def checkpoint_rows(options: argparse.Namespace, device: torch.device, sync: Callable[[], None]) -> dict[str, Any]:
    """Everything about a checkpoint on disk."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        layers, size = write(folder, options.size_gb * 1e9)
        load_and_pack(folder, min(layers, 1), device, sync)  # kernels are built and loaded
        rows = []
        for pages in ("cold", *["cached"] * options.runs):
            if pages == "cold":
                drop_pages(folder)
            seconds = {"read": read(folder)}
            if pages == "cold":
                drop_pages(folder)
            measured, sizes = load_and_pack(folder, layers, device, sync)
            seconds |= measured
            rows.append(
                {
                    "pages": pages,
                    "seconds": {phase: round(one, 4) for phase, one in seconds.items()},
                    "gb_per_s": {phase: round(size / one / 1e9, 3) for phase, one in seconds.items() if phase in RATES},
                    "load_average": os.getloadavg()[0],
                    **sizes,
                }
            )
            print(rows[-1])
    return {"dense_layers": layers, "tensor_bytes": size, "runs": rows}


def alone(size: tuple[int, ...], device: torch.device, runs: int, sync: Callable[[], None]) -> dict[str, Any]:
    """`nvfp4.pack` of [N, K] or [E, N, K]."""
    *front, k = size
    nbytes = math.prod(front) * (k // 2 + k // 16)
    count = max(1, -(-3 * describe(device).l2_bytes // nbytes)) if device.type == "cuda" else 1
    layout = "fragment-glu" if len(size) == 3 else "fragment"
    copies = [
        (
            layout,
            torch.randint(0, 256, (*front, k // 2), dtype=torch.uint8, device=device),
            torch.randint(1, 0x7F, (*front, k // 16), dtype=torch.uint8, device=device),
            torch.ones(front[0] if len(size) == 3 else 1, device=device),
        )
        for _ in range(count)
    ]
    times = []
    for i in range(runs + count):
        sync()
        start = time.perf_counter()
        pack(*copies[i % count])
        sync()
        if i >= count:
            times.append(time.perf_counter() - start)
    median = statistics.median(times)
    row = {
        "size": size,
        "bytes": nbytes,
        "us": round(median * 1e6, 1),
        "least_us": round(min(times) * 1e6, 1),
        "gb_per_s": round(nbytes / median / 1e9, 3),
        "load_average": os.getloadavg()[0],
    }
    print(row)
    return row


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size-gb", type=float, default=4.0, help="of the checkpoint, at least")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written to, for as long as this runs")
    parser.add_argument("--runs", type=int, default=3, help="with pages in memory")
    parser.add_argument("--alone-runs", type=int, help="100 by default, on a CPU 5")
    parser.add_argument("--only-alone", action="store_true", help="no checkpoint")
    parser.add_argument("--threads", type=int, help="of torch; 1 on a machine that others use too")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.empty(0, device=options.device).device  # with its index
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = device.type == "cuda"
    sync: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    result: dict[str, Any] = {
        "benchmark": "loading",
        "date": datetime.now(UTC).date().isoformat(),
        "device": asdict(describe(device)),
        "versions": {
            "nvfp4": nvfp4.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "torch_threads": torch.get_num_threads(),
    }
    runs = options.alone_runs or (100 if on_gpu else 5)
    result["alone"] = [alone(size, device, runs, sync) for size in (*ALONE, ALONE_EXPERTS)]
    if not options.only_alone:
        result["checkpoint"] = checkpoint_rows(options, device, sync)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
