"""What a call costs on the host beyond allocating the output and launching the kernel.

    python bench/dispatch.py [--device cuda] [--output results.json]

Subjects are called in turns, so that they meet the same clocks and noise, and each call is timed alone; the figure is
the median, less that of an empty function. With `noop` every kernel is replaced by an empty launcher; with `bound` the
kernel that the table chose runs (its time on the GPU is not counted: launches return at once, and the queue is drained
between rounds). `trivial_op` is torch's share: an op of the same schema that checks nothing, allocates and launches.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import nvfp4
import torch
from host import median_us, nothing
from nvfp4.dispatch import table
from nvfp4.kernels.device import describe

LIBRARIES: list[Any] = []  # an op lives as long as its library


def trivial_op(m: int, n: int, launcher: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """An op with the schema of nvfp4::gemm that allocates [m, n] and launches."""
    library: Any = torch.library.Library("nvfp4_bench", "FRAGMENT")
    name = f"trivial_{len(LIBRARIES)}"
    LIBRARIES.append(library)
    schema = str(torch.ops.nvfp4.gemm.default._schema).removeprefix("nvfp4::gemm")
    library.define(name + schema)

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        weight_scale_2: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        pre_quant_scale: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        out = x.new_empty((m, n))
        launcher(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, out)
        return out

    library.impl(name, run, "CPU")
    library.impl(name, run, "CUDA")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    op: Callable[..., torch.Tensor] = getattr(torch.ops.nvfp4_bench, name).default
    return op


def measure(device: torch.device, *, m: int, n: int, k: int, calls: int, launcher: str) -> dict[str, Any]:
    """One row of the result."""
    weight, scale, gs = nvfp4.quantize(torch.randn(n, k, device=device))
    packed = nvfp4.pack(weight, scale, gs, layout="checkpoint")
    x = torch.randn(m, k, device=device).bfloat16()
    problem = nvfp4.Problem(n=n, k=k)
    table.clear()
    if launcher == "noop":
        table._bound[device, problem, "checkpoint"] = ((), (nothing,))
    nvfp4.gemm(x, packed)
    _, launchers = table.bind(device, problem, "checkpoint", None)
    uppers, _ = table.bind(device, problem, "checkpoint", None)
    bare = launchers[sum(m > upper for upper in uppers)]
    out = torch.empty(m, n, dtype=x.dtype, device=device)
    data, scale_bytes, global_scale = packed.data, packed.scale, packed.global_scale
    op, trivial = torch.ops.nvfp4.gemm.default, trivial_op(m, n, bare)
    # Memory of its own: nobody calls one weight with two kinds of scales in turns.
    raw = (weight.clone(), scale.clone(), gs.clone())
    x_3d = x.view(1, m, k)
    medians = median_us(
        {
            "empty": lambda: torch.empty((m, n), dtype=x.dtype, device=device),
            "launcher": lambda: bare(x, data, scale_bytes, global_scale, None, None, out),
            "trivial_op": lambda: trivial(x, data, scale_bytes, global_scale),
            "op": lambda: op(x, data, scale_bytes, global_scale),
            "op_checkpoint_tensors": lambda: op(x, *raw),
            "gemm_weight": lambda: nvfp4.gemm(x, packed),
            "gemm_weight_3d": lambda: nvfp4.gemm(x_3d, packed),
        },
        calls,
        torch.cuda.synchronize if device.type == "cuda" else nothing,
    )
    floor = medians["empty"] + medians["launcher"]
    over = {name: round(us - floor, 3) for name, us in medians.items() if name not in ("empty", "launcher")}
    return {"launcher": launcher, "m": m, "n": n, "k": k, "median_us": medians, "over_empty_and_launcher_us": over}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--shape", default="4096,4096", help="N,K")
    parser.add_argument("--ms", default="1,16,64", help="numbers of tokens, comma-separated")
    parser.add_argument("--output", help="a file for the JSON, instead of standard output")
    options = parser.parse_args()
    warnings.simplefilter("ignore", nvfp4.UntunedWarning)
    torch.set_num_threads(1)
    device = torch.empty(0, device=options.device).device  # with its index
    n, k = (int(size) for size in options.shape.split(","))
    rows = []
    for launcher in ("noop", "bound"):
        for m in (int(size) for size in options.ms.split(",")):
            try:
                rows.append(measure(device, m=m, n=n, k=k, calls=options.calls, launcher=launcher))
            except nvfp4.Unsupported as error:
                rows.append({"launcher": launcher, "m": m, "n": n, "k": k, "skipped": str(error)})
    result = {
        "benchmark": "dispatch",
        "date": datetime.now(UTC).date().isoformat(),
        "device": asdict(describe(device)),
        "versions": {
            "nvfp4": nvfp4.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
        },
        "calls": options.calls,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.output:
        with open(options.output, "w") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
