"""Experts in the fragment layouts: every expert by itself, gate and up rows in turns, and back to the checkpoint's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights import fragment_bytes
from nvfp4.kernels.weights.codec import dequantize, unpack_codes
from nvfp4.kernels.weights.experts import pack_experts
from nvfp4.kernels.weights.layouts import family, first_layout, layout, layout_ids, to_layout

ENCODINGS = ("bf16", "fp16", "nib")


def random_experts(experts, n, k, *, seed=0, low=0, high=256, parts=1):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high, (experts, n, k // 16), dtype=torch.uint8, generator=g)
    scale = torch.where((scale & 0x7F) == 0x7F, scale - 1, scale)
    return weight, scale, torch.rand(experts, parts, generator=g) + 0.5


def pack(layout_id, tensors):
    return pack_experts(*tensors, layout_id=layout_id)


def in_turns(inter):
    """For each row of a gated blob, the row of a checkpoint's [gate; up] that lies there, or -1 for padding."""
    rows = []
    for subtile in range(2 * (-(-inter // 32) * 32) // 16):
        eight = [8 * subtile + i for i in range(8)]
        rows += [row if row < inter else -1 for row in eight]
        rows += [inter + row if row < inter else -1 for row in eight]
    return rows


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("experts", "n", "k"), [(1, 64, 64), (3, 128, 192), (5, 40, 80), (2, 65, 16)])
def test_every_expert_is_packed_by_itself(encoding, experts, n, k):
    weight, scale, factor = random_experts(experts, n, k, seed=n)
    packed = pack(f"fragment1-{encoding}", (weight, scale, factor))
    assert packed.scale is None and packed.out_features == n and packed.in_features == k
    assert packed.data.shape == (experts, -(-n // 64), -(-k // 64), 2304)
    for e in range(experts):
        alone = to_layout(weight[e], scale[e], torch.ones(1), layout_id=packed.layout)
        assert torch.equal(packed.data[e], alone.data)
    assert torch.equal(packed.global_scale, factor)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("experts", "inter", "k"), [(1, 32, 64), (3, 64, 128), (4, 48, 80), (2, 16, 16), (3, 176, 96)])
def test_gate_and_up_lie_in_turns_of_eight(encoding, experts, inter, k):
    """As the plain layout of rows in that order has it, zeros for the padding of each half."""
    weight, scale, factor = random_experts(experts, 2 * inter, k, seed=inter, parts=2)
    packed = pack(f"fragment1-{encoding}-glu", (weight, scale, factor))
    order = torch.tensor(in_turns(inter))
    assert packed.data.shape == (experts, len(order) // 64, -(-k // 64), 2304) and packed.out_features == 2 * inter
    for e in range(experts):
        rows, scales = (t[e][order] * (order >= 0).to(torch.uint8)[:, None] for t in (weight, scale))
        alone = to_layout(rows, scales, torch.ones(1), layout_id=f"fragment1-{encoding}")
        assert torch.equal(packed.data[e], alone.data)


def test_what_a_lane_of_a_gated_blob_holds():
    """Nibble by nibble, by docs/layouts.md: register h of lane 4 g + q is gate (h = 0) or up (h = 1) of row 8 s + g."""
    experts, inter, k = 2, 48, 80
    weight, scale, factor = random_experts(experts, 2 * inter, k, low=1, high=0x7F)
    data = pack("fragment1-nib-glu", (weight, scale, factor)).data.numpy()
    codes = unpack_codes(weight).numpy()
    values = (scale.view(torch.float8_e4m3fn).float() * 128).half().numpy().view(np.uint16) >> 7
    seen = 0
    for e in range(experts):
        for s in range(2 * 64 // 16):  # 48 rows of a half are padded to 64
            for column in range(2):
                subtile = data[e, s // 4, column, 576 * (s % 4) : 576 * (s % 4 + 1)]
                for lane, j, h, step, p in np.ndindex(32, 4, 2, 2, 2):
                    row, col = 8 * s + lane // 4, 64 * column + 16 * j + 2 * (lane % 4) + 8 * step + p
                    got = subtile[16 * lane + 4 * j + h + 2 * step] >> 4 * p & 15
                    inside = row < inter and col < k
                    assert got == (codes[e, h * inter + row, col] if inside else 0)
                    seen += inside
                for g, j, h, o in np.ndindex(8, 2, 2, 2):
                    row, group = 8 * s + g, 4 * column + 2 * j + o
                    inside = row < inter and group < k // 16
                    got = subtile[512 + 8 * g + 4 * j + 2 * h + o]
                    assert got == (values[e, h * inter + row, group] if inside else 0)
    assert seen == experts * 2 * inter * k


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 1 << 30),
    st.booleans(),
    st.sampled_from([*ENCODINGS, "checkpoint"]),
)
def test_round_trip(experts, rows, groups, seed, gated, encoding):
    n, k = 16 * rows * (2 if gated else 1), 16 * groups
    weight, scale, factor = random_experts(experts, n, k, seed=seed, parts=2 if gated else 1)
    glu = "-glu" if gated else ""
    layout_id = encoding if encoding == "checkpoint" else f"fragment1-{encoding}{glu}"
    got, got_scale, got_factor = pack(layout_id, (weight, scale, factor)).to_checkpoint()
    assert got.shape == weight.shape and got_scale.shape == scale.shape
    assert got.dtype == torch.uint8 and got_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(got_factor, factor)
    one = torch.ones(1)
    for e in range(experts):
        right = dequantize(weight[e], scale[e], one, torch.float64)
        assert torch.equal(dequantize(got[e], got_scale[e], one, torch.float64), right)
    same = (scale > 0) & (scale < 0x80)
    assert torch.equal(got_scale.view(torch.uint8)[same], scale[same])
    same = same.repeat_interleave(8, 2)
    assert torch.equal(got[same], weight[same])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk", [1, 3 * 2048, 30 * 2048, 1 << 25])
def test_chunks_do_not_change_the_result(monkeypatch, chunk, gated):
    tensors = random_experts(7, 96, 208)
    layout_id = "fragment1-fp16-glu" if gated else "fragment1-fp16"
    expected = pack(layout_id, tensors)
    monkeypatch.setattr(fragment_bytes, "CHUNK_BYTES", {"cpu": chunk})
    packed = pack(layout_id, tensors)
    assert torch.equal(packed.data, expected.data)
    for a, b in zip(packed.to_checkpoint(), expected.to_checkpoint(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_arguments_are_only_read_and_may_begin_anywhere():
    weight, scale, factor = random_experts(3, 96, 80)
    plain = pack("fragment1-bf16-glu", (weight, scale, factor))
    store = torch.zeros(weight.numel() + 3, dtype=torch.uint8)[3:].view(weight.shape).copy_(weight)
    scales = torch.zeros(scale.numel() + 5, dtype=torch.uint8)[5:].view(scale.shape).copy_(scale)
    packed = pack("fragment1-bf16-glu", (store, scales, torch.cat([factor, factor], 1)[:, :1]))
    assert torch.equal(packed.data, plain.data)
    assert torch.equal(packed.global_scale, factor) and packed.global_scale.is_contiguous()
    assert torch.equal(store, weight) and torch.equal(scales, scale)


@pytest.mark.parametrize("low", [-126, 1])
@pytest.mark.parametrize(("experts", "n", "k"), [(4, 512, 1024), (64, 128, 256), (32, 192, 320)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_peak_memory(monkeypatch, experts, n, k, low, gated, elsewhere):
    """Beside its result, a conversion takes less than the weight; with the chunks of a GPU too."""
    if elsewhere:
        monkeypatch.setattr(fragment_bytes, "CHUNK_BYTES", {})
    weight = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(low, 127, (experts, n, k // 16), dtype=torch.int8).view(torch.uint8).clamp(max=0xFE)
    size = weight.nbytes + scale.nbytes
    entry = layout("fragment1-bf16-glu" if gated else "fragment1-bf16")
    packed = entry.pack(weight, scale, torch.ones(experts, 1))  # the tables are made
    packed.to_checkpoint()
    assert peak_bytes(lambda: entry.pack(weight, scale, torch.ones(experts, 1))) < size + packed.data.nbytes
    assert peak_bytes(packed.to_checkpoint) < size + size


def peak_bytes(call):
    """The most memory that torch held at once beyond what it had, by the profiler's record of every allocation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = call()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak >= (result.data.nbytes if hasattr(result, "data") else result[0].nbytes)
    return peak


def test_swizzled_and_damaged_scales():
    weight, scale, factor = random_experts(3, 64, 64, low=1, high=0x7F)
    damaged = scale.clone()
    damaged[2, 5, 1] = 0x7F
    with pytest.raises(InvalidInput, match=r"1 NaN; got byte 0x7F at row 133, group 1"):
        pack("fragment1-bf16-glu", (weight, damaged, factor))
    repaired = pack_experts(weight, damaged, factor, layout_id="fragment1-bf16-glu", repair_nan=True)
    assert repaired.to_checkpoint()[1].view(torch.uint8)[2, 5, 1] == 0x7E


@pytest.mark.parametrize("layout_id", ["checkpoint", "fragment1-bf16"])
def test_what_experts_cannot_be(layout_id):
    weight, scale, factor = random_experts(3, 79, 64)
    for tensors, options, words in (
        ((weight, scale, torch.ones(3, 2)), {}, r"\(3, 2\); expected .*\(3,\) or \(3, 1\): 79 rows have no halves"),
        ((torch.randn(3, 79, 64).bfloat16(), scale, factor), {}, "wrong dtype of weight; got torch.bfloat16.*ignore"),
        ((weight[:, :, :17].contiguous(), scale, factor), {}, "K must be a multiple of 16"),
        ((weight[:, :, ::2], scale, factor), {}, "weight is not contiguous"),
        ((weight.transpose(0, 1), scale, factor), {}, "weight is not contiguous"),
        ((weight[0], scale, factor), {}, "wrong shape of the experts' weight; got \\(79, 32\\)"),
        ((weight[:0], scale[:0], factor[:0]), {}, "wrong shape of the experts' weight; got \\(0, 79, 32\\)"),
        ((weight, scale, factor.int()), {}, "wrong weight_scale_2 of experts; got torch.int32"),
        # as many bytes, but for other rows
        ((weight, scale.view(-1, 4), factor), {}, "does not fit the experts' weight; got shape \\(237, 4\\)"),
        ((weight, scale.view(79, 3, 4), factor), {}, "does not fit the experts' weight; got shape \\(79, 3, 4\\)"),
        ((weight, torch.cat([scale, scale], 2), factor), {}, "does not fit the experts' weight; got shape .*8"),
        ((weight, torch.cat([scale, scale], 2)[:, :, :4], factor), {}, "strides \\(632, 8, 1\\); expected contiguous"),
        ((weight, scale.float(), factor), {}, "wrong dtype of weight_scale; got torch.float32"),
        ((weight, scale.to("meta"), factor), {}, "different devices; got cpu, meta, cpu"),
        ((weight, scale, factor), {"scale_layout": "8x4"}, "unknown scale_layout; got '8x4'"),
        ((weight, scale.view(-1)[:-1], factor), {"scale_layout": "swizzled"}, "swizzled scales have the wrong size"),
        ((weight, scale, factor), {"scale_layout": "swizzled"}, r"wrong size; got 316.*128 \* 4 for 79 rows"),
        (([weight], scale, factor), {}, r"weight is no tensor; got list \["),
    ):
        with pytest.raises(InvalidInput, match=f"(?s){words}") as caught:
            pack_experts(*tensors, layout_id=layout_id, **options)
        assert "\n" not in str(caught.value)


def test_rows_that_are_no_gate_and_up():
    with pytest.raises(InvalidInput, match=r"wrong number of rows of a gated weight; got 48 in shape \(2, 48, 32\)"):
        pack("fragment1-bf16-glu", random_experts(2, 48, 64))


def test_experts_and_single_weights_in_wrong_layouts():
    weight, scale, factor = random_experts(2, 64, 64)
    with pytest.raises(InvalidInput, match=r'layout "fragment1-bf16-glu" is for experts.*"fragment1-bf16"'):
        to_layout(weight[0], scale[0], torch.ones(1), layout_id="fragment1-bf16-glu")
    with pytest.raises(InvalidInput, match="unknown weight layout"):
        pack("fragment2", (weight, scale, factor))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_layout_of_the_first_weight(activation):
    problem = Problem(op="moe", n=32, k=64, experts=2, top_k=1, activation=activation)
    for encoding in ENCODINGS:
        first = first_layout(f"fragment1-{encoding}", problem)
        assert first == f"fragment1-{encoding}" + ("-glu" if problem.gated else "")
        assert layout(first).gated == problem.gated and family(first) == f"fragment1-{encoding}"
    assert first_layout("checkpoint", problem) == family("checkpoint") == "checkpoint"
    grouped = Problem(op="grouped_gemm", n=32, k=64, experts=2)
    assert first_layout("fragment1-nib", grouped) == "fragment1-nib"
    assert all(layout(one).gated == one.endswith("-glu") for one in layout_ids())
