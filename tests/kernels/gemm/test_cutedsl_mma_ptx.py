"""`cutedsl_mma` run on NumPy: the PTX that CuTe DSL makes, through the launcher, on inputs with every kind of tail."""

import re

import numpy as np
import pytest
import torch
from nvfp4.kernels.cuda.compile import Compiled
from nvfp4.kernels.gemm import cutedsl_mma
from nvfp4.kernels.gemm._cutedsl_mma import launch as module
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.codec import dequantize, pack_codes
from nvfp4.kernels.weights.layouts import to_layout
from nvfp4.testing import ptx
from nvfp4.testing.gemm import GemmCase
from nvfp4.testing.ptx_of import ptx_of_cutedsl

pytest.importorskip("cutlass")

KERNEL = cutedsl_mma.CuteDslMma()
SMEM_BYTES = {(8, 0): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (12, 0): 101376}
TYPES = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


def card(capability):
    return Device(kind="cuda", name="card", capability=capability, units=8, smem_bytes=SMEM_BYTES[capability])


def ptx_of(shape, arch):
    return ptx_of_cutedsl(lambda: module.arguments(shape), arch, f"cutedsl_mma {shape}").decode()


@pytest.fixture
def simulate(monkeypatch):
    """Runs a config and returns out; x, weights and so on are copied into memory with gaps, workspaces are NaNs."""
    facts = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    monkeypatch.setattr(
        module, "compile_cutedsl", lambda *_, **__: Compiled(cubin=b"", entry="kernel", arch="", **facts)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def simulated(capability, problem, config, m, seed, order=0):
        device = card(capability)
        case = GemmCase.random(problem, m, seed, torch.device("cpu"), KERNEL.layout(device, problem))
        weight, _, global_scale, bias, pre_quant_scale = case.arguments
        x, buffer = case.x, case.x_buffer
        if pre_quant_scale is not None:
            x = buffer = x * pre_quant_scale
        launcher = KERNEL.build(device, problem, config)
        shape, (tiles, floats) = launcher.shape, launcher.grid(m)
        out = torch.full((m, problem.n), torch.nan, dtype=x.dtype)
        known = [tensor for tensor in (buffer, weight, global_scale, bias, out) if tensor is not None]

        def launch(self, grid_x, grid_y, grid_z, stream, *values):
            memory = ptx.GlobalMemory()
            places = {tensor.data_ptr(): memory.add(tensor.flatten().view(torch.uint8).numpy()) for tensor in known}
            addresses = [places[value] if value else 0 for value in values[:5]]
            if floats:
                addresses.append(memory.add(np.full(floats, np.nan, np.float32)))
                addresses.append(memory.add(np.zeros(tiles, np.uint32)))
            else:
                addresses += values[5:7]
            ptx.run(
                ptx_of(shape, TYPES[capability]),
                [*addresses, *values[7:]],
                memory,
                grid=(grid_x, grid_y, grid_z),
                threads=shape.threads,
                smem_bytes=shape.smem_bytes,
                seed=order,
                ordered=False,  # the last step loads one more stage, which nobody uses, while others store results
            )
            out.copy_(torch.from_numpy(memory.read(addresses[2], np.int16, out.numel())).view(out.dtype).view_as(out))
            if floats:
                assert not memory.read(addresses[6], np.uint32, tiles).any(), "counters are not zero again"

        monkeypatch.setattr(module.CudaLaunch, "launch", launch)
        launcher(x, weight, None, global_scale, bias, None, out)
        return case, out

    return simulated


def config_of(rows, tokens, warps, block_k, stages, split):
    return cutedsl_mma.CuteDslMmaConfig(
        rows=rows, tokens=tokens, warps=warps, block_k=block_k, stages=stages, split=split
    )


# Capability, dtype; N, K, M; rows, tokens, warps, block_k, stages, split; seed (see `conformance.check`).
CASES = [
    ((8, 0), "bfloat16", (64, 64, 32), (64, 32, 4, 64, 3, 1), 0),
    ((8, 0), "float16", (100, 208, 5), (64, 32, 4, 128, 3, 1), 1),  # one block of 64 k is left for a stage of two
    ((8, 0), "bfloat16", (232, 320, 33), (256, 64, 8, 64, 2, 2), 8),
    ((8, 9), "bfloat16", (65, 352, 40), (64, 64, 8, 64, 4, 2), 34),
    ((8, 9), "float16", (66, 16, 31), (128, 32, 8, 64, 2, 1), 27),
    ((8, 9), "bfloat16", (1, 80, 65), (64, 128, 4, 64, 3, 1), 13),
    ((9, 0), "bfloat16", (140, 192, 1), (128, 32, 4, 64, 4, 1), 5),
    ((9, 0), "float16", (200, 1056, 16), (128, 32, 8, 64, 3, 8), 22),
    ((10, 0), "bfloat16", (48, 256, 64), (64, 64, 4, 128, 4, 1), 55),
    ((10, 0), "float16", (100, 80, 130), (64, 128, 8, 64, 3, 1), 37),
    ((12, 0), "bfloat16", (129, 528, 33), (128, 64, 4, 64, 3, 4), 30),
    ((12, 0), "float16", (8, 192, 100), (64, 128, 8, 128, 2, 1), 17),
]


@pytest.mark.parametrize(("capability", "dtype", "size", "config", "seed"), CASES, ids=str)
def test_results(simulate, capability, dtype, size, config, seed):
    n, k, m = size
    problem, config = Problem(n=n, k=k, dtype=dtype), config_of(*config)
    case, out = simulate(capability, problem, config, m, seed)
    case.compare(out)


def test_blocks_meet_in_any_order_with_the_same_result(simulate):
    problem, config = Problem(n=64, k=512), config_of(64, 32, 4, 64, 2, 4)
    results = [simulate((8, 0), problem, config, 16, seed=0, order=order)[1].view(torch.int16) for order in range(3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


DECODE = """
.visible .entry decode(
    .param .u64 words, .param .u64 scales, .param .u64 fragments
)
{{
    .reg .b32 %r<9>; .reg .b64 %rd<5>;
    mov.u32 %r6, %tid.x; mov.u32 %r7, %ctaid.x; shl.b32 %r7, %r7, 5; add.s32 %r6, %r6, %r7;
    ld.param.b64 %rd0, [words]; mul.wide.s32 %rd1, %r6, 4; add.s64 %rd0, %rd0, %rd1; ld.global.b32 %r4, [%rd0];
    ld.param.b64 %rd2, [scales]; add.s64 %rd2, %rd2, %rd1; ld.global.b32 %r5, [%rd2];
    {code}
    ld.param.b64 %rd3, [fragments]; mul.wide.s32 %rd4, %r6, 16; add.s64 %rd3, %rd3, %rd4;
    st.global.v4.b32 [%rd3], {{%r0, %r1, %r2, %r3}};
    ret;
}}
"""


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("encoding", "dtype", "hopper"),
    [
        ("bf16", "bfloat16", True),
        ("bf16", "bfloat16", False),
        ("fp16", "float16", False),
        ("nib", "bfloat16", True),
        ("nib", "float16", True),
    ],
)
def test_decode_is_exact_for_every_code_and_scale(encoding, dtype, hopper, odd):
    from nvfp4.kernels.gemm._cutedsl_mma.decode import decode_ptx, unscale

    n, k = 64, 512
    codes = torch.arange(k) + 5 * torch.arange(n).unsqueeze(1) + torch.arange(k) // 16  # all of them in every group
    weight = pack_codes((codes % 16).to(torch.uint8))
    scale = (torch.arange(n * k // 16) * 89 % 254).to(torch.uint8).view(n, k // 16)
    scale += (scale >= 127).to(torch.uint8)  # all bytes but the two NaNs
    right = dequantize(weight, scale, torch.ones(1), dtype=torch.float64).view(4, 2, 8, k // 16, 2, 4, 2)
    blob = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}").data.view(k // 64, 4, 576)
    # Per block of 64 k, subtile and lane: the two words of even or of odd steps, and the scale codes that go with them.
    words = blob[..., :512].contiguous().view(torch.int32).view(k // 64, 4, 32, 4)[..., odd::2].contiguous()
    scales = blob[..., 512:].contiguous().view(torch.int32).view(k // 64, 4, 8, 1, 2).expand(-1, -1, -1, 4, -1)
    memory = ptx.GlobalMemory()
    places = [memory.add(words.numpy()), memory.add(scales.contiguous().numpy())]
    places.append(memory.add(np.zeros(4 * words.numel(), np.uint32)))
    code = decode_ptx(encoding, dtype == "float16", odd, hopper)
    text = DECODE.format(code=re.sub(r"\$(\d)", r"%r\1", code))
    ptx.run(text, places, memory, grid=(words.numel() // 32, 1, 1), threads=32)
    got = torch.from_numpy(memory.read(places[2], np.int16, 8 * words.numel())).view(getattr(torch, dtype)).double()
    got = got.view(k // 64, 4, 8, 4, 2, 2, 2, 2) * unscale(encoding, dtype == "float16")
    # [block, subtile, g, q, step, k half, row half, p] against [subtile, row half, g, step, k half, q, p]
    right = right.unflatten(3, (k // 64, 2, 2))[:, :, :, :, :, odd]
    assert torch.equal(got, right.permute(3, 0, 2, 6, 4, 5, 1, 7))
