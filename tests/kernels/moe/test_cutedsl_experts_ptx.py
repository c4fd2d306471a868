"""Products of experts run on NumPy: the PTX that CuTe DSL makes, on tile lists made by hand, against float64."""

import re
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from nvfp4.kernels.moe._cutedsl_experts.launch import arguments
from nvfp4.kernels.moe._cutedsl_experts.shape import ExpertShape
from nvfp4.kernels.moe.activations import ACTIVATIONS, activate, constants
from nvfp4.kernels.weights.codec import dequantize
from nvfp4.kernels.weights.layouts import to_layout
from nvfp4.testing import ptx
from nvfp4.testing.experts import random_weight
from nvfp4.testing.ptx_of import ptx_of_cutedsl

pytest.importorskip("cutlass")

pytestmark = pytest.mark.slow


def ptx_of(shape):
    return ptx_of_cutedsl(lambda: arguments(shape), "sm_90a", f"cutedsl_experts {shape}").decode()


def shape_of(result, **changes):
    usual = ExpertShape(
        float16=False,
        rows=64,
        tokens=32,
        block_k=64,
        warpgroups=1,
        stages=3,
        schedule="each",
        blocks_per_sm=1,
        multicast=1,
        stream_k=False,
        wide_stores=True,
        result=result,
    )
    return replace(usual, **changes)


def blobs(weight, scale, *, glu, dtype):
    """Fragments of every expert; gate and up interleaved by eight rows, each padded to a multiple of 32."""
    found = []
    for codes, scales in zip(weight, scale, strict=True):
        if glu:
            halves = [
                torch.nn.functional.pad(t, (0, 0, 0, -t.shape[0] % 32)) for t in (*codes.chunk(2), *scales.chunk(2))
            ]
            gate, up, gate_scale, up_scale = (half.view(-1, 8, half.shape[1]) for half in halves)
            codes = torch.stack([gate, up], 1).flatten(0, 2)
            scales = torch.stack([gate_scale, up_scale], 1).flatten(0, 2)
        layout = "fragment1-fp16" if dtype == torch.float16 else "fragment1-bf16"
        found.append(to_layout(codes.contiguous(), scales.contiguous(), torch.ones(1), layout_id=layout).data)
    return torch.stack(found)


def tile_list(counts, tokens):
    """int32 [tiles, 4] of experts with that many rows each."""
    found, first = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, first + at, min(tokens, count - at), 0) for at in range(0, count, tokens)]
        first += count
    return np.array(found, np.int32).reshape(-1, 4)


def run(shape, x, blob, global_scale, counts, out, *, n, blocks=3, band=2, pairs=None, order=0, **given):
    memory = ptx.GlobalMemory()

    def place(tensor):
        return 0 if tensor is None else memory.add(tensor.contiguous().flatten().view(torch.uint8).numpy())

    tiles = tile_list(counts, shape.tokens)
    bias, vector = given.get("bias"), given.get("vector")
    gathered = shape.gathered
    at = [place(x), place(blob), place(out), place(global_scale), place(bias)]
    at += [memory.add(tiles) if len(tiles) else 0, memory.add(np.array([len(tiles)], np.int32))]
    taken = memory.add(np.zeros(1, np.int32))
    at += [taken, place(pairs), place(given.get("factors")), place(vector)]
    x_rows = 0
    if gathered:  # its rows may be strided
        x_rows = memory.add(x.as_strided((x.stride(0) * (len(x) - 1) + x.shape[1],), (1,)).view(torch.uint8).numpy())
    integers = [n, blob.shape[1], blob.shape[2], global_scale.shape[1]]
    integers.append(0 if bias is None else 1 if bias.dtype == x.dtype else 2)
    integers += [n if vector is not None and vector.ndim == 2 else 0, band]
    integers += [x.shape[1], x.stride(0) // 8, given.get("top_k", 0)]
    floats = [struct.pack("<f", value) for value in given.get("constants", (0, 0, 0))]
    x_map = ptx.tensor_map(at[0], x.shape[0], x.shape[1], x.shape[1], shape.box_tokens)
    ptx.run(
        ptx_of(shape),
        [bytes(128) if gathered else x_map, bytes(8), x_rows, *at[1:], *integers, *floats],
        memory,
        grid=(blocks, 1, 1),
        threads=shape.threads,
        smem_bytes=shape.smem_bytes,
        seed=order,
    )
    # Every block with a tile takes one more behind each of its own: as many as there are if none is done twice.
    total = len(tiles) * -(-blob.shape[1] // shape.row_blocks)
    assert memory.read(taken, np.int32, 1)[0] == total + min(blocks, total)
    raw = memory.read(at[2], np.uint8, out.numel() * out.element_size())
    return torch.from_numpy(raw).view(out.dtype).view_as(out)


def products(x, weight, scale, counts):
    """Float64 [rows, N], without global scales."""
    found, first = [], 0
    for expert, count in enumerate(counts):
        w = dequantize(weight[expert], scale[expert], torch.ones(1), dtype=torch.float64)
        found.append(x[first : first + count].double() @ w.t())
        first += count
    return torch.cat(found)


def per_row(values, counts):
    """[rows, ...] of [E, ...]."""
    return values.repeat_interleave(torch.tensor(counts), 0)


def close(got, right, bits):
    limit = right.abs() * 2.0**-bits + 2e-4
    assert bool(((got.double() - right).abs() <= limit).all()), float(((got.double() - right).abs() / limit).max())


COUNTS = [5, 0, 65, 1]
SHAPES = [
    {},
    {"pieces": 2},
    {"rows": 128, "warpgroups": 2, "tokens": 64, "pieces": 4, "schedule": "ends-prefetch", "block_k": 128},
    {"rows": 128, "tokens": 16, "block_k": 128, "schedule": "ends", "float16": True},
    {"rows": 256, "warpgroups": 2, "tokens": 48, "pieces": 3},
    {"rows": 128, "warpgroups": 2, "tokens": 160, "pieces": 10, "schedule": "ends-prefetch"},
    {"rows": 128, "warpgroups": 2, "tokens": 192, "pieces": 8, "block_k": 128},
]


@pytest.mark.parametrize(("changes", "n"), [(SHAPES[0], 101), (SHAPES[2], 136)], ids=str)
def test_out(changes, n):
    """Rows that end on no 16-byte boundary and are stored one by one, and such that do."""
    shape = shape_of("out", wide_stores=n % 8 == 0, **changes)
    dtype, k = torch.float16 if shape.float16 else torch.bfloat16, 208
    g = torch.Generator().manual_seed(n)
    parts = 2 if n % 2 == 0 else 1
    weight, scale, global_scale = random_weight(len(COUNTS), n, k, g, parts=parts)
    m = sum(COUNTS)
    x = torch.randn(m + 3, k, generator=g).to(dtype)
    out = torch.full((m + 3, n), 7.0, dtype=dtype)
    got = run(shape, x, blobs(weight, scale, glu=False, dtype=dtype), global_scale, COUNTS, out, n=n)
    right = products(x, weight, scale, COUNTS) * per_row(global_scale.repeat_interleave(n // parts, 1), COUNTS)
    close(got[:m], right, 8 if dtype == torch.bfloat16 else 11)
    assert bool((got[m:] == 7).all()), "rows of no expert are not touched"


@pytest.mark.parametrize("changes", SHAPES[2:], ids=str)
def test_summands(changes):
    shape = shape_of("summand", **changes)
    dtype, k, n = torch.float16 if shape.float16 else torch.bfloat16, 96, 144
    g = torch.Generator().manual_seed(1)
    weight, scale, global_scale = random_weight(len(COUNTS), n, k, g)
    m = sum(COUNTS)
    x = torch.randn(m, k, generator=g).to(dtype)
    pairs = torch.randperm(m + 20, generator=g)[:m].int()
    bias = torch.randn(len(COUNTS), n, generator=g)
    out = torch.full((m + 20, n), 7.0)
    blob = blobs(weight, scale, glu=False, dtype=dtype)
    got = run(shape, x, blob, global_scale, COUNTS, out, n=n, pairs=pairs, bias=bias)
    right = products(x, weight, scale, COUNTS) * per_row(global_scale, COUNTS) + per_row(bias, COUNTS)
    close(got[pairs.long()], right, 20)
    others = torch.ones(m + 20, dtype=torch.bool)
    others[pairs.long()] = False
    assert bool((got[others] == 7).all()), "rows of other pairs are not touched"


@pytest.mark.parametrize(
    ("changes", "name"), [*((changes, "swiglu") for changes in SHAPES[1:]), (SHAPES[4], "relu2")], ids=str
)
def test_activated(changes, name):
    """With bias, factors and a vector. A warpgroup has one part of 64 rows, or two (SHAPES[3:])."""
    check_activated(changes, name, COUNTS, inter=80)


@pytest.mark.parametrize("name", [entry.name for entry in ACTIVATIONS])
def test_every_activation(name):
    check_activated({"tokens": 16}, name, [4, 0, 2], inter=16, bare=True)


def check_activated(changes, name, counts, *, inter, bare=False):
    gated = name != "relu2"
    shape = shape_of("activated", activation=name, gated=gated, **changes)
    dtype, k = torch.float16 if shape.float16 else torch.bfloat16, 96
    g = torch.Generator().manual_seed(2)
    rows = inter * (2 if gated else 1)
    weight, scale, global_scale = random_weight(len(counts), rows, k, g, parts=2 if gated else 1)
    m = sum(counts)
    x = torch.randn(m, k, generator=g).to(dtype)
    x[3] = torch.nan
    values = constants(name)
    bias = torch.randn(len(counts), rows, generator=g).to(dtype)
    factors = 0.5 + torch.rand(m, generator=g)
    vector = (0.5 + torch.rand((len(counts), inter), generator=g)).to(dtype)
    given = {} if bare else {"bias": bias, "factors": factors, "vector": vector}
    out = torch.full((m + 1, inter), 7.0, dtype=dtype)
    blob = blobs(weight, scale, glu=gated, dtype=dtype)
    got = run(shape, x, blob, global_scale, counts, out, n=inter, constants=values, **given)
    a = products(x, weight, scale, counts) * per_row(global_scale.repeat_interleave(inter, 1), counts)
    if not bare:
        a = (a + per_row(bias, counts).double()) * factors[:, None]
    right = activate(name, *(a.chunk(2, 1) if gated else (a, None)), values)
    if not bare:
        right = right * per_row(vector, counts).double()
    nan = right.isnan()
    assert torch.equal(got[:m].isnan(), nan) and bool(nan[3].all()) and int(nan.sum()) == inter
    close(got[:m].where(~nan, 0), right.where(~nan, 0), 7 if dtype == torch.bfloat16 else 10)
    assert bool((got[m:] == 7).all())


GATHERED = [
    ({"tokens": 16}, 96),
    ({"tokens": 16, "schedule": "ends-prefetch"}, 64),
    ({"tokens": 16, "block_k": 128, "rows": 128, "schedule": "ends", "float16": True}, 208),
    ({"rows": 128, "warpgroups": 2, "tokens": 64, "pieces": 4, "schedule": "ends-prefetch", "block_k": 128}, 96),
    ({"rows": 256, "warpgroups": 2, "tokens": 48, "pieces": 3}, 208),
    ({"rows": 128, "warpgroups": 2, "tokens": 160, "pieces": 10, "schedule": "ends-prefetch"}, 96),
    ({"rows": 128, "warpgroups": 2, "tokens": 256, "pieces": 4, "schedule": "ends-prefetch"}, 64),
]


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize(("changes", "k"), GATHERED, ids=str)
def test_gathered(changes, k, order):
    """Rows of x where they lie: strided, each in several tiles, and some in none, which are NaN."""
    shape = shape_of("activated", activation="swiglu", gated=True, gathered=True, **changes)
    dtype, top_k, inter, counts = torch.float16 if shape.float16 else torch.bfloat16, 3, 48, [5, 0, 161, 1]
    g = torch.Generator().manual_seed(order)
    weight, scale, global_scale = random_weight(len(counts), 2 * inter, k, g)
    m = sum(counts)
    tokens = m // top_k + 9
    pairs = torch.randperm(tokens * top_k, generator=g)[:m].int()
    x = torch.full((tokens, k + 24), torch.nan, dtype=dtype)[:, :k]
    used = (pairs // top_k).long()
    x[used] = torch.randn(m, k, generator=g).to(dtype)
    out = torch.full((m + 1, inter), 7.0, dtype=dtype)
    blob = blobs(weight, scale, glu=True, dtype=dtype)
    given = {"top_k": top_k, "constants": constants("swiglu"), "order": order}
    got = run(shape, x, blob, global_scale, counts, out, n=inter, pairs=pairs, **given)
    a = products(x[used], weight, scale, counts) * per_row(global_scale, counts)
    close(got[:m], activate("swiglu", *a.chunk(2, 1), constants("swiglu")), 7 if dtype == torch.bfloat16 else 10)
    assert bool((got[m:] == 7).all())


def test_no_tiles_and_more_blocks_than_tiles():
    shape = shape_of("out")
    g = torch.Generator().manual_seed(3)
    weight, scale, global_scale = random_weight(2, 64, 64, g)
    blob = blobs(weight, scale, glu=False, dtype=torch.bfloat16)
    x = torch.randn(4, 64, generator=g).bfloat16()
    out = torch.full((4, 64), 7.0).bfloat16()
    assert torch.equal(run(shape, x, blob, global_scale, [0, 0], out, n=64), out)
    got = run(shape, x, blob, global_scale, [0, 3], out, n=64, blocks=4)
    right = products(x, weight, scale, [0, 3]) * global_scale[1]
    close(got[:3], right, 8)


def one_row_each(schedule, stages=3):
    """Arguments of `run` for 13 tiles of one row, each of one stage: slots are used again as soon as they may be."""
    counts, k = [1] * 13, 64
    g = torch.Generator().manual_seed(4)
    weight, scale, global_scale = random_weight(len(counts), 64, k, g)
    x = torch.randn(len(counts), k, generator=g).bfloat16()
    pairs = torch.randperm(len(counts), generator=g).int()
    right = torch.empty(len(counts), 64, dtype=torch.float64)
    right[pairs.long()] = products(x, weight, scale, counts) * per_row(global_scale, counts)
    shape = shape_of("summand", tokens=16, schedule=schedule, stages=stages)
    blob = blobs(weight, scale, glu=False, dtype=x.dtype)
    out = torch.full((len(counts), 64), 7.0)
    return (shape, x, blob, global_scale, counts, out), {"n": 64, "pairs": pairs}, right


@pytest.mark.parametrize("schedule", ["each", "ends-prefetch"])
@pytest.mark.parametrize("stages", [3, 4])
def test_tiles_of_one_stage_in_any_order(schedule, stages):
    """More tiles than slots, by few blocks; the bits are the same whoever takes which."""
    given, options, right = one_row_each(schedule, stages)
    found = [run(*given, **options, blocks=1 + order % 4, order=order) for order in range(8)]
    close(found[0], right, 18)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("schedule", ["each", "ends-prefetch"])
def test_too_few_slots_show(schedule, monkeypatch):
    """One fewer than stages: a slot is written again before all have read what it says."""
    given, options, _ = one_row_each(schedule)
    wrap = r"(setp\.gt\.s32\s+%p\d+, %r\d+, )3(;\s+selp\.b32\s+%r\d+, 0, )"
    text, found = re.subn(wrap, r"\g<1>1\2", ptx_of(given[0]))
    assert found == 2, "the producer's and the others' way around"
    monkeypatch.setitem(globals(), "ptx_of", lambda _: text)
    for order in range(3):
        with pytest.raises(AssertionError, match="may be"):
            run(*given, **options, blocks=1, order=order)


@pytest.mark.parametrize(
    ("instruction", "instead", "message"),
    [
        (r"(wgmma\.wait_group\.sync\.aligned)\s+2;", r"\1 9;", "may still read"),
        (r"bar\.sync\s+%r\d+, 128;", "", "may be"),
    ],
)
def test_mistakes_show(monkeypatch, instruction, instead, message):
    """Stages that are given back while wgmmas read them; no barriers around the chunks on the way out."""
    shape = shape_of("out")
    text, found = re.subn(instruction, instead, ptx_of(shape))
    assert found
    g = torch.Generator().manual_seed(3)
    weight, scale, global_scale = random_weight(2, 64, 512, g)
    blob = blobs(weight, scale, glu=False, dtype=torch.bfloat16)
    x, out = torch.randn(40, 512, generator=g).bfloat16(), torch.full((40, 64), 7.0).bfloat16()
    run(shape, x, blob, global_scale, [7, 33], out, n=64, blocks=1)
    monkeypatch.setitem(globals(), "ptx_of", lambda _: text)
    with pytest.raises(AssertionError, match=message):
        run(shape, x, blob, global_scale, [7, 33], out, n=64, blocks=1)


@pytest.mark.parametrize(
    ("instruction", "instead", "message"),
    [
        (r"mbarrier\.try_wait\S+ P1, \[[^;]*;(?=.*cp\.async\.mb)", "mov.pred P1, 1;", "may |more arrivals"),
        (r"fence\.proxy\.async\S*;", "", "no fence between the proxies"),
        (r"(mov\.b32\s+%r\d+), 129;", r"\1, 128;", "may |more arrivals"),
        (r"(mov\.b32\s+%r\d+), 129;", r"\1, 130;", "all warps wait"),
        (
            r"cp\.async(\.mbarrier\.arrive)\.noinc(\.shared\.b64)\s+(\[[^;]*;)",
            r"mbarrier.arrive\2 _, \3",
            "may be writing",
        ),
        (r"(wgmma\.wait_group\.sync\.aligned)\s+2;", r"\1 9;", "may still read"),
        (r"bar\.sync\s+6, 128;(?=.*bar\.sync\s+6, 128;)", "", "may be reading"),
        (r"(bar\.sync\s+6, 128;.*)bar\.sync\s+6, 128;", r"\1", "may |outside of all buffers"),
    ],
)
def test_mistakes_show_where_rows_are_gathered(monkeypatch, instruction, instead, message):
    """No wait for an empty stage, or for the copies; no fence; wrong counts; stages given back early; an open list."""
    shape = shape_of("activated", activation="swiglu", gated=True, gathered=True)
    text, found = re.subn(instruction, instead, ptx_of(shape), flags=re.DOTALL)
    assert found == (4 if "wgmma" in instruction else 1)
    g = torch.Generator().manual_seed(3)
    weight, scale, global_scale = random_weight(2, 64, 512, g)
    blob = blobs(weight, scale, glu=True, dtype=torch.bfloat16)
    x, out = torch.randn(20, 512, generator=g).bfloat16(), torch.full((40, 32), 7.0).bfloat16()
    given = {"n": 32, "blocks": 1, "pairs": torch.randperm(40, generator=g).int(), "top_k": 2}
    run(shape, x, blob, global_scale, [7, 33], out, **given)
    monkeypatch.setitem(globals(), "ptx_of", lambda _: text)
    with pytest.raises(AssertionError, match=message):
        run(shape, x, blob, global_scale, [7, 33], out, **given)
