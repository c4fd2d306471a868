"""`fragment_pack` run on NumPy: it writes the bytes that the torch operations write, and sees what is wrong."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from nvfp4.errors import BuildError, InvalidInput
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.launch import CudaLaunch
from nvfp4.kernels.weights import fragment, fragment_pack, layouts
from nvfp4.kernels.weights.codec import pack_codes
from nvfp4.kernels.weights.layouts import layout, to_layout
from nvfp4.testing.ptx_launch import simulated

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
FINITE = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
FILLER = 0xEE


class Stream:
    """Counts how often it is waited for."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is compiled yet, and nobody was warned."""
    monkeypatch.setattr(fragment_pack, "_warned", False)
    fragment_pack._launch.cache_clear()
    yield
    fragment_pack._launch.cache_clear()


def prepare(monkeypatch, capability):
    """A flag for a launch that is for a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    fragment_pack._launch.cache_clear()
    flag = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(fragment_pack, "_flags", [flag])
    return flag


@pytest.fixture
def simulate(fresh, monkeypatch):
    """`start` and `finish` with their launch on NumPy: (the blob, what `finish` says)."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(fragment_pack, "_index", lambda device: 0)
    monkeypatch.setattr(CudaLaunch, "load", lambda self, index: None)

    def simulated_fill(encoding, capability, weight, scale, global_scale, *, gated=False):
        flag = prepare(monkeypatch, capability)
        shape = (len(weight), -(-weight.shape[1] // 64), -(-weight.shape[2] // 32), 2304)
        data = torch.full(shape, FILLER, dtype=torch.uint8)
        before = stream.waits
        with simulated([weight, scale, global_scale, data, flag]) as launched:
            launch = fragment_pack._launch(encoding, 0)
            started = fragment_pack.start(launch, weight, scale, data, global_scale, gated=gated)
            assert started is flag and stream.waits == before and not fragment_pack._flags
            fine = fragment_pack.finish(started, data.device)
        assert launched == ["fragment_pack"] and stream.waits == before + 1
        assert fragment_pack._flags == [flag] and int(flag) == 0, "the flag is not ready for the next one"
        return data, fine

    return simulated_fill


def random_weights(experts, n, k, *, seed=0, low=0, high=256):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (experts, n, k // 16), dtype=torch.uint8, generator=generator)
    return weight, torch.where((scale & 0x7F) == 0x7F, scale - 1, scale)


def in_turns(tensor):
    """Rows of gate and up [2 I, C] in turns of eight, each half padded with zeros to a multiple of 32."""
    half = tensor.shape[0] // 2
    whole = tensor.new_zeros((2, -(-half // 32) * 32, tensor.shape[1]))
    whole[:, :half] = tensor.unflatten(0, (2, half))
    return whole.unflatten(1, (-1, 8)).transpose(0, 1).flatten(0, 2).contiguous()


def by_torch(encoding, weight, scale, *, gated=False):
    layout_id, one = f"fragment1-{encoding}", torch.ones(1)
    blobs = []
    for codes, scales in zip(weight, scale, strict=True):
        if gated:
            codes, scales = in_turns(codes), in_turns(scales)
        blobs.append(to_layout(codes, scales, one, layout_id=layout_id).data)
    return torch.stack(blobs)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("encoding", fragment_pack.ENCODINGS)
def test_every_code_under_every_scale_becomes_what_torch_makes_of_it(simulate, encoding, capability):
    generator = torch.Generator().manual_seed(1)
    groups = torch.rand((64, 4, 16), generator=generator).argsort(-1).to(torch.uint8)  # 16 different codes each
    which = torch.cat([torch.randperm(254, generator=generator), torch.tensor([0, 127])])
    scale = FINITE[which].view(1, 64, 4)
    assert len(scale.unique()) == 254
    weight = pack_codes(groups.flatten(1))[None]
    data, fine = simulate(encoding, capability, weight, scale, torch.ones(1))
    assert fine and torch.equal(data, by_torch(encoding, weight, scale))


# Experts, N, K, gated: padding of rows, of groups, of blocks that a CTA makes, of halves.
CASES = [
    ("bf16", (9, 0), (1, 1, 16, False)),
    ("bf16", (9, 0), (1, 67, 336, False)),
    ("fp16", (8, 9), (2, 34, 80, False)),
    ("bf16", (9, 0), (2, 96, 64, True)),
    ("nib", (10, 0), (1, 160, 272, True)),
    ("fp16", (8, 0), (3, 32, 48, True)),
]


@pytest.mark.parametrize(("encoding", "capability", "size"), CASES, ids=str)
def test_any_size_and_stacks_are_packed_as_by_torch(simulate, encoding, capability, size):
    experts, n, k, gated = size
    weight, scale = random_weights(experts, n, k, seed=n)
    data, fine = simulate(encoding, capability, weight, scale, torch.ones(experts, 1 + gated), gated=gated)
    assert fine and torch.equal(data, by_torch(encoding, weight, scale, gated=gated))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_among_the_scales_is_seen_wherever_it_is(simulate, byte):
    for expert, row, group in ((0, 0, 0), (1, 66, 4), (1, 9, 3)):
        weight, scale = random_weights(2, 67, 80)
        scale[expert, row, group] = byte
        assert not simulate("bf16", (9, 0), weight, scale, torch.ones(2, 1))[1]


def test_a_wrong_global_scale_is_seen_and_a_right_one_is_not(simulate):
    weight, scale = random_weights(1, 8, 16)
    for value in (0.0, -0.0, -1.0, float("inf"), float("-inf"), float("nan"), -float("nan"), -1e-45):
        many = torch.ones(300)
        many[299] = value
        assert not simulate("nib", (10, 0), weight, scale, many)[1], value
    for value in (1e-45, 1e-38, torch.finfo(torch.float32).max):
        assert simulate("nib", (10, 0), weight, scale, torch.full((1,), value))[1], value


def packed(monkeypatch, weight, scale, global_scale):
    """By `fragment.pack`, as on a GPU."""
    monkeypatch.setattr(fragment, "launcher", lambda encoding, device: fragment_pack._launch(encoding, 0))
    with simulated([weight, scale, global_scale, prepare(monkeypatch, (9, 0))]) as launched:
        made = fragment.pack("bf16", weight, scale, global_scale)
    assert launched == ["fragment_pack"]
    return made


def test_pack_fills_on_the_gpu_and_names_the_place_of_what_is_wrong(simulate, monkeypatch):
    weight, scale = random_weights(2, 66, 80)
    expected = by_torch("bf16", weight, scale)
    factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    made = packed(monkeypatch, weight, scale, factors)
    assert torch.equal(made.data, expected) and torch.equal(made.global_scale, factors)
    factors[1, 1] = -4.0
    with pytest.raises(InvalidInput, match=r"wrong global scale; got -4\.0 at row 99"):
        packed(monkeypatch, weight, scale, factors)
    scale[1, 2, 3] = 0xFF
    with pytest.raises(InvalidInput, match="1 NaN; got byte 0xFF at row 68, group 3"):
        packed(monkeypatch, weight, scale, factors)


def test_values_are_looked_at_once(monkeypatch):
    looked = []
    for module in (fragment, layouts):
        monkeypatch.setattr(module, "check_values", lambda *tensors: looked.append(tensors))
    weight, scale = random_weights(1, 8, 16)
    one, plain = torch.ones(1), layout("fragment1-bf16")
    plain.convert(weight[0], scale[0], one)
    assert len(looked) == 1
    dataclasses.replace(plain, checks_values=False).convert(weight[0], scale[0], one)
    assert len(looked) == 3


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_it_compiles_for_every_architecture_without_spills(capability, tmp_path, monkeypatch):
    """In the encodings that kernels there read; for Hopper in all."""
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(program_cache, "_open", {})
    read = {fragment.fragment_id(capability, dtype).rpartition("-")[2] for dtype in ("bfloat16", "float16")}
    for encoding in fragment_pack.ENCODINGS if capability == (9, 0) else read:
        compiled = fragment_pack.compile_pack(encoding, capability)
        assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_smem_bytes) == (0, 0, 0)
        assert compiled.registers <= 64  # eight blocks of 128 threads


def test_without_nvrtc_one_warning_says_so(fresh, monkeypatch):
    def missing(*arguments, **options):
        raise BuildError("NVRTC cannot be used")

    monkeypatch.setattr(fragment_pack, "compile_cuda", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    device = torch.device("cuda", 0)
    with pytest.warns(RuntimeWarning, match="packed in torch operations.*NVRTC cannot be used"):
        assert fragment_pack.launcher("bf16", device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fragment_pack.launcher("bf16", device) is None
        assert fragment_pack.launcher("fp16", device) is None
        assert fragment_pack.launcher("bf16", torch.device("cpu")) is None


def test_the_flag_is_no_child_of_the_modes_that_it_is_made_in(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **options: zeros(*size, **options))
    with torch.inference_mode(), torch.device("meta"):
        flag = fragment_pack._new_flag()
    assert not flag.is_inference() and flag.device.type == "cpu" and int(flag.add_(1)) == 1
