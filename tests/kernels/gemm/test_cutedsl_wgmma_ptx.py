"""`cutedsl_wgmma` run on NumPy: the PTX of CuTe DSL, through the launcher, on inputs with every kind of tail."""

import numpy as np
import pytest
import torch
from nvfp4.kernels.cuda.compile import Compiled
from nvfp4.kernels.gemm import cutedsl_wgmma
from nvfp4.kernels.gemm._cutedsl_wgmma import launch as module
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing import ptx
from nvfp4.testing.gemm import GemmCase
from nvfp4.testing.ptx_of import ptx_of_cutedsl

pytest.importorskip("cutlass")

pytestmark = pytest.mark.slow

KERNEL = cutedsl_wgmma.CuteDslWgmma()
CARD = Device(kind="cuda", name="card", capability=(9, 0), units=3, smem_bytes=232448)


def ptx_of(shape):
    return ptx_of_cutedsl(lambda: module.arguments(shape), "sm_90a", f"cutedsl_wgmma {shape}").decode()


@pytest.fixture
def simulate(monkeypatch):
    """Runs a config and returns the case and out."""
    facts = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    monkeypatch.setattr(
        module, "compile_cutedsl", lambda *_, **__: Compiled(cubin=b"", entry="kernel", arch="", **facts)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def simulated(problem, config, m, seed, order=0):
        case = GemmCase.random(problem, m, seed, torch.device("cpu"), KERNEL.layout(CARD, problem))
        weight, _, global_scale, bias, _ = case.arguments
        out = torch.full((m, problem.n), torch.nan, dtype=case.x.dtype)
        launcher = KERNEL.build(CARD, problem, config)
        shape, (_, floats, flags) = launcher.shape, launcher.grid(m)
        monkeypatch.setattr(
            module.TensorMaps, "get", lambda self, address, *matrix: (address, *matrix, shape.tokens // shape.multicast)
        )

        def launch(self, grid_x, grid_y, grid_z, stream, matrix, *values):
            memory = ptx.GlobalMemory()
            address, rows, columns, stride, box = matrix
            x = torch.empty(0, dtype=case.x.dtype).set_(case.x.untyped_storage())
            start = memory.add(x.view(torch.uint8).numpy()) + address - x.data_ptr()
            places = [start, *(memory.add(t.flatten().view(torch.uint8).numpy()) for t in (weight, out, global_scale))]
            places.append(0 if bias is None else memory.add(bias.view(torch.uint8).numpy()))
            places.append(memory.add(np.full(max(1, floats), np.nan, np.float32)))
            places.append(memory.add(np.zeros(max(1, flags), np.uint32)))
            ptx.run(
                ptx_of(shape),
                [ptx.tensor_map(start, rows, columns, stride, box), bytes(8), *places[1:], *values[8:]],
                memory,
                grid=(grid_x, grid_y, grid_z),
                threads=shape.threads,
                smem_bytes=shape.smem_bytes,
                seed=order,
                # Nothing but the warp's common pace orders the producer's other lanes behind the one that made the
                # barriers, when they first wait for a stage to be free.
                ordered=-(-problem.k // config.block_k) <= config.stages,
            )
            assert not memory.read(places[6], np.uint32, max(1, flags)).any(), "flags are not zero again"
            out.copy_(torch.from_numpy(memory.read(places[2], np.int16, out.numel())).view(out.dtype).view_as(out))

        monkeypatch.setattr(module.CudaLaunch, "launch", launch)
        launcher(case.x, weight, None, global_scale, bias, None, out)
        return case, out

    return simulated


def config_of(rows, tokens, block_k, warpgroups, schedule, stream_k):
    return cutedsl_wgmma.CuteDslWgmmaConfig(
        rows=rows,
        tokens=tokens,
        block_k=block_k,
        warpgroups=warpgroups,
        stages=3,
        schedule=schedule,
        blocks_per_sm=1,
        multicast=1,
        stream_k=stream_k,
        band=8,
    )


# dtype; N, K, M; rows, tokens, block_k, warpgroups, schedule, stream_k; seed (see `conformance.check`).
CASES = [
    ("bfloat16", (64, 64, 16), (64, 16, 64, 1, "each", False), 0),
    ("float16", (100, 208, 20), (64, 32, 128, 1, "ends", False), 9),
    ("bfloat16", (260, 320, 33), (128, 32, 64, 2, "ends-prefetch", True), 12),
]


@pytest.mark.parametrize(("dtype", "size", "config", "seed"), CASES, ids=str)
def test_results(simulate, dtype, size, config, seed):
    n, k, m = size
    case, out = simulate(Problem(n=n, k=k, dtype=dtype), config_of(*config), m, seed)
    case.compare(out)
