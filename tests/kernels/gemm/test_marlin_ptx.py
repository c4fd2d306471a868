"""`marlin` run on NumPy: the PTX that NVRTC makes, through the launcher: results, addresses, and what orders copies."""

import struct

import numpy as np
import pytest
import torch
from nvfp4.kernels.cuda import compile as cuda
from nvfp4.kernels.gemm import marlin
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing import ptx
from nvfp4.testing.gemm import GemmCase
from nvfp4.testing.ptx_of import ptx_of

SMEM_BYTES = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}
FIELDS = "<8QQ5I4x"  # struct Args


def card(capability):
    return Device(kind="cuda", name="card", capability=capability, units=8, smem_bytes=SMEM_BYTES[capability])


@pytest.fixture
def simulate(monkeypatch):
    """Runs a config and returns out; x, weights and so on are copied into memory with gaps, workspaces are NaNs."""
    made = []
    facts = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}

    def compiled(source, capability, *, entry, defines):
        made.append((source, capability, defines))
        return cuda.Compiled(cubin=b"", entry=entry, arch="", **facts)

    monkeypatch.setattr(marlin, "compile_cuda", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def simulated(capability, problem, config, m, seed, order=0, changes=()):
        device = card(capability)
        case = GemmCase.random(problem, m, seed, torch.device("cpu"), marlin.KERNEL.layout(device, problem))
        made.clear()
        launcher = marlin.KERNEL.build(device, problem, config)
        plain, scaled = made
        text = ptx_of(*(plain if case.pre_quant_scale is None else scaled), changes)
        out = torch.full((m, problem.n), torch.nan, dtype=case.x.dtype)
        known = [*case.tensors(), out]

        def launch(self, grid_x, grid_y, grid_z, stream, *values):
            memory = ptx.GlobalMemory()
            places = {tensor.data_ptr(): memory.add(tensor.flatten().view(torch.uint8).numpy()) for tensor in known}
            addresses = [places[value] if value else 0 for value in values[:6]]
            if launcher.partials:
                addresses.append(memory.add(np.full(launcher.partials, np.nan, np.float32)))
                addresses.append(memory.add(np.zeros(launcher.counters, np.uint32)))
            else:
                addresses += [0, 0]
            ptx.run(
                text,
                [struct.pack(FIELDS, *addresses, *values[8:])],
                memory,
                grid=(grid_x, grid_y, grid_z),
                threads=config.threads,
                smem_bytes=self.smem_bytes,
                cluster=self.cluster,
                seed=order,
            )
            out.copy_(torch.from_numpy(memory.read(addresses[2], np.int16, out.numel())).view(out.dtype).view_as(out))
            if launcher.counters:
                left = memory.read(addresses[7], np.uint32, launcher.counters)
                assert not left.any(), "counters are not zero again"

        monkeypatch.setattr(marlin.CudaLaunch, "launch", launch)
        case.launch(launcher, out)
        return case, out

    return simulated


def config_of(capability, tokens, subtiles, row_groups, k_groups, chunk, stages, split, meet="memory"):
    return marlin.MarlinConfig(
        tokens=tokens,
        subtiles=subtiles,
        row_groups=row_groups,
        k_groups=k_groups,
        chunk=chunk,
        stages=stages,
        split=split,
        meet=meet,
        copy="bulk" if capability >= (9, 0) else "async",
    )


# Capability, dtype; N, K, M; tokens, subtiles, row groups, K groups, chunk, stages, split; seed (`conformance.check`).
CASES = [
    ((8, 0), "bfloat16", (64, 512, 8), (8, 2, 2, 1, 1, 2, 1), 0),  # x is shared; all its slots are used twice and more
    ((8, 0), "float16", (100, 656, 5), (8, 1, 4, 1, 1, 2, 1), 7),
    ((8, 0), "bfloat16", (97, 528, 13), (16, 2, 2, 2, 1, 2, 2), 13),
    ((8, 0), "float16", (130, 768, 3), (8, 4, 1, 4, 1, 2, 2), 17),
    ((8, 0), "bfloat16", (50, 1024, 40), (64, 1, 2, 1, 2, 2, 1), 10),
    ((8, 0), "float16", (48, 1040, 20), (24, 3, 1, 4, 1, 3, 4), 22),
    ((9, 0), "bfloat16", (64, 512, 8), (8, 2, 2, 1, 1, 2, 1), 0),
    ((9, 0), "float16", (232, 784, 7), (8, 8, 2, 2, 1, 2, 2), 3),
    ((9, 0), "bfloat16", (100, 512, 16), (16, 2, 1, 4, 2, 2, 4), 5),
    ((9, 0), "float16", (150, 592, 7), (8, 2, 2, 2, 1, 2, 2, "cluster"), 6),
    ((9, 0), "bfloat16", (70, 1040, 9), (16, 4, 1, 4, 1, 2, 4, "cluster"), 23),
    ((10, 0), "float16", (70, 400, 2), (8, 2, 3, 1, 1, 2, 1), 14),
    ((10, 0), "bfloat16", (64, 512, 1), (8, 4, 1, 4, 1, 2, 1), 4),
]


@pytest.mark.parametrize(("capability", "dtype", "size", "config", "seed"), CASES, ids=str)
def test_results(simulate, capability, dtype, size, config, seed):
    n, k, m = size
    problem, config = Problem(n=n, k=k, dtype=dtype), config_of(capability, *config)
    case, out = simulate(capability, problem, config, m, seed, order=seed)
    case.compare(out)


SHARED = {  # two warps share a ring of x, and use each of its slots twice and more
    "async": ((8, 0), Problem(n=64, k=512), config_of((8, 0), 8, 2, 2, 1, 1, 2, 1), 8),
    "bulk": ((9, 0), Problem(n=64, k=512), config_of((9, 0), 8, 2, 2, 1, 1, 2, 1), 8),
}
OWN = {  # each warp has its own
    "async": ((8, 0), Problem(n=64, k=512), config_of((8, 0), 8, 4, 1, 2, 1, 2, 1), 8),
    "bulk": ((9, 0), Problem(n=64, k=512), config_of((9, 0), 8, 4, 1, 2, 1, 2, 1), 8),
}
CLUSTER = {"bulk": ((9, 0), Problem(n=64, k=256), config_of((9, 0), 8, 4, 1, 2, 1, 2, 2, "cluster"), 5)}


@pytest.mark.parametrize("copy", SHARED)
def test_any_order_of_warps_and_copies_gives_the_same_result(simulate, copy):
    results = [simulate(*SHARED[copy], seed=0, order=order)[1].view(torch.int16) for order in range(8)]
    assert all(torch.equal(results[0], other) for other in results)


ARRIVE = "if (SHARED_X) barrier_arrive(x_free + x_slot * 8);"
READERS = "barrier_init(x_free + s * 8, C::row_groups * 32);"
X_FREE = "if (i > 0) barrier_wait(x_free + x_next * 8, x_slot ? x_parity : x_parity ^ 1);"
X_FULL = "if (SHARED_X) barrier_wait(x_full + x_slot * 8, x_parity);"
FULL = "barrier_wait(bar, parity);"
WARP = "__syncwarp();\n            "
RETURNED = "const bool returned = __all_sync(0xffffffffu, (loaded & never) == 0);"
MEET = "if (SHARED_X || C::gather) __syncthreads();"
FAULTS = {
    "x is refilled without a wait": (SHARED, (X_FREE, "")),
    "x is refilled after a wait for the phase before": (
        SHARED,
        (X_FREE, X_FREE.replace("x_parity : x_parity ^ 1", "x_parity ^ 1 : x_parity")),
    ),
    "a warp says that it has read x before it has": (SHARED, (ARRIVE, ""), (X_FULL, X_FULL + ARRIVE)),
    "half of the lanes are enough": (SHARED, (READERS, READERS.replace("32", "16"))),
    "nobody says so": (SHARED, (ARRIVE, "")),
    "x is read without a wait": (SHARED, (X_FULL, "")),
    "weights are read without a wait": (OWN, (FULL, "")),
    "weights are refilled while lanes read them": (OWN, (WARP + ARRIVE, "")),
    "weights are refilled while loads are on their way": (
        {"bulk": OWN["bulk"]},
        (RETURNED, "const bool returned = true;"),
    ),
    "another block is sent sums before its barrier is there": (CLUSTER, ("cluster_wait();", "")),
    "sums are read before all blocks have sent them": (CLUSTER, ("barrier_wait_cluster(received, 0);", "")),
    "barriers of other warps are used before they are there": (SHARED, (MEET, "")),
}


@pytest.mark.parametrize(("fault", "copy"), [(fault, copy) for fault in FAULTS for copy in FAULTS[fault][0]])
def test_a_fault_in_the_order_is_seen(simulate, fault, copy):
    """With any timing, not only with one that shows in the result."""
    launches, *changes = FAULTS[fault]
    for order in range(3):
        with pytest.raises(AssertionError, match=r"may be|wait, and nothing|initialised|ends before"):
            simulate(*launches[copy], seed=0, order=order, changes=tuple(changes))
