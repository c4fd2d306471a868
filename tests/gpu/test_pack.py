"""Packing on this machine's GPU: the bytes that the CPU makes, of one launch; what is wrong is named; other streams."""

import threading
import warnings

import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels.weights import fragment_pack
from nvfp4.kernels.weights.experts import pack_experts
from nvfp4.kernels.weights.layouts import to_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ENCODINGS = fragment_pack.ENCODINGS


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weights are packed in torch operations")
        assert fragment_pack.launcher("bf16", torch.device("cuda", 0)) is not None
        yield


def random_weights(*shape, seed=0, low=0, high=256):
    """Codes and finite scales of [N, K] or [E, N, K], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    *front, k = shape
    weight = torch.randint(0, 256, (*front, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (*front, k // 16), dtype=torch.uint8, generator=generator)
    return weight, torch.where((scale & 0x7F) == 0x7F, scale - 1, scale)


SIZES = [(1, 16), (63, 48), (64, 64), (65, 80), (130, 1040), (1000, 4112), (4096, 4096)]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_are_those_of_the_cpu(encoding, size):
    layout_id = f"fragment1-{encoding}"
    for low, high in ((0, 256), (1, 127)):  # any scales, positive ones
        weight, scale = random_weights(*size, seed=size[0], low=low, high=high)
        one = torch.ones(1)
        expected = to_layout(weight, scale, one, layout_id=layout_id)
        packed = to_layout(weight.cuda(), scale.cuda(), one.cuda(), layout_id=layout_id)
        assert packed.data.is_cuda and torch.equal(packed.data.cpu(), expected.data)
        codes, scales, _ = packed.to_checkpoint()
        again = to_layout(codes, scales, one.cuda(), layout_id=layout_id)
        assert torch.equal(again.data, packed.data)


@pytest.mark.parametrize("ending", ["", "-glu"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [(1, 32, 16), (3, 96, 80), (5, 224, 1040), (16, 1536, 2048)], ids=str)
def test_bytes_of_stacks_are_those_of_the_cpu(encoding, ending, size):
    layout_id = f"fragment1-{encoding}{ending}"
    weight, scale = random_weights(*size, seed=size[1])
    factors = torch.rand(size[0], 2) + 0.5
    expected = pack_experts(weight, scale, factors, layout_id=layout_id)
    packed = pack_experts(weight.cuda(), scale.cuda(), factors.cuda(), layout_id=layout_id)
    assert torch.equal(packed.data.cpu(), expected.data)
    assert torch.equal(packed.global_scale.cpu(), factors)


@pytest.mark.parametrize("offset", [1, 4, 8, 15])
def test_tensors_may_begin_anywhere(offset):
    weight, scale = random_weights(96, 160)
    expected = to_layout(weight, scale, torch.ones(1), layout_id="fragment1-bf16").data
    buffers = (
        torch.empty(offset + weight.numel(), device="cuda", dtype=torch.uint8),
        torch.empty(offset + scale.numel(), device="cuda", dtype=torch.uint8),
    )
    views = []
    for buffer, tensor in zip(buffers, (weight, scale), strict=True):
        views.append(buffer[offset:].view(tensor.shape))
        views[-1].copy_(tensor)
    packed = to_layout(*views, torch.ones(2, device="cuda")[1:], layout_id="fragment1-bf16")
    assert torch.equal(packed.data.cpu(), expected)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (699, 130), (321, 77)])
def test_a_nan_scale_is_named_by_row_and_group_and_the_next_weight_packs(byte, place):
    weight, scale = random_weights(700, 2096)
    good = scale.clone()
    scale[place] = byte
    tensors = weight.cuda(), scale.cuda(), torch.ones(1, device="cuda")
    row, group = place
    match = f"1 NaN; got byte 0x{byte:02X} at row {row}, group {group}"
    with pytest.raises(InvalidInput, match=match):
        to_layout(*tensors, layout_id="fragment1-bf16")
    repaired = to_layout(*tensors, layout_id="fragment1-bf16", repair_nan=True)
    good[place] = 0x7E
    expected = to_layout(weight, good, torch.ones(1), layout_id="fragment1-bf16")
    assert torch.equal(repaired.data.cpu(), expected.data)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wrong_global_scale_is_named_by_its_row(value):
    weight, scale = random_weights(3000, 64)
    factors = torch.ones(3000)
    factors[2999] = value
    with pytest.raises(InvalidInput, match=f"wrong global scale; got {value} at row 2999"):
        to_layout(weight.cuda(), scale.cuda(), factors.cuda(), layout_id="fragment1-bf16")
    experts = torch.ones(3, 2)
    experts[2, 1] = value
    weight, scale = random_weights(3, 96, 64)
    with pytest.raises(InvalidInput, match=f"wrong global scale; got {value} at row 240"):
        pack_experts(weight.cuda(), scale.cuda(), experts.cuda(), layout_id="fragment1-bf16-glu")


def test_threads_and_streams_do_not_mix_up_their_answers():
    weight, scale = random_weights(512, 1024)
    wrong = scale.clone()
    wrong[100, 7] = 0x7F
    expected = to_layout(weight, scale, torch.ones(1), layout_id="fragment1-bf16").data
    on_gpu = weight.cuda(), scale.cuda(), wrong.cuda(), torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    failures = []

    def work(which):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(40):
                bad = (i + which) % 3 == 0
                try:
                    scales = on_gpu[2] if bad else on_gpu[1]
                    packed = to_layout(on_gpu[0], scales, on_gpu[3], layout_id="fragment1-bf16")
                    if bad or not torch.equal(packed.data.cpu(), expected):
                        failures.append((which, i))
                except InvalidInput:
                    if not bad:
                        failures.append((which, i))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_modes_of_the_first_caller_do_not_matter_to_the_next(monkeypatch):
    monkeypatch.setattr(fragment_pack, "_flags", [])
    weight, scale = random_weights(96, 160)
    expected = to_layout(weight, scale, torch.ones(1), layout_id="fragment1-bf16").data
    wrong = scale.clone()
    wrong[5, 6] = 0x7F
    tensors = weight.cuda(), wrong.cuda(), torch.ones(1, device="cuda")
    for _ in range(2):
        with torch.inference_mode(), torch.device("cuda"), pytest.raises(InvalidInput, match="row 5, group 6"):
            to_layout(*tensors, layout_id="fragment1-bf16")
        with pytest.raises(InvalidInput, match="row 5, group 6"):
            to_layout(*tensors, layout_id="fragment1-bf16")
    packed = to_layout(tensors[0], scale.cuda(), tensors[2], layout_id="fragment1-bf16")
    assert torch.equal(packed.data.cpu(), expected) and len(fragment_pack._flags) == 1


def test_a_large_stack_is_packed_as_its_experts_one_by_one():
    size = (128, 1536, 2048)
    weight, scale = random_weights(*size, low=1, high=127)
    weight, scale, factors = weight.cuda(), scale.cuda(), torch.ones(128, 1, device="cuda")
    packed = pack_experts(weight, scale, factors, layout_id="fragment1-bf16")
    for expert in (0, 1, 77, 127):
        one = to_layout(weight[expert], scale[expert], factors[expert], layout_id="fragment1-bf16")
        assert torch.equal(packed.data[expert], one.data)
    on_cpu = to_layout(weight[127].cpu(), scale[127].cpu(), torch.ones(1), layout_id="fragment1-bf16")
    assert torch.equal(packed.data[127].cpu(), on_cpu.data)


def test_without_the_kernel_torch_packs_the_same(monkeypatch):
    weight, scale = random_weights(1000, 1040)
    tensors = weight.cuda(), scale.cuda(), torch.ones(1, device="cuda")
    expected = to_layout(*tensors, layout_id="fragment1-fp16").data
    monkeypatch.setattr(fragment_pack, "_launch", lambda encoding, index: None)
    assert torch.equal(to_layout(*tensors, layout_id="fragment1-fp16").data, expected)
