"""What devices are described as."""

import pytest
import torch
from nvfp4.errors import NoDevice
from nvfp4.kernels import device as module
from nvfp4.kernels.device import describe


def test_cpu():
    cpu = describe("cpu")
    assert cpu.kind == "cpu" and cpu.arch == "cpu" and cpu.name and cpu.units >= 1
    assert cpu.memory_bytes % (1 << 30) == 0 and cpu.memory_bytes >= 1 << 30
    assert describe(torch.device("cpu")) is cpu
    assert any(feature.startswith("torch:") for feature in cpu.features)


def test_cpu_facts_come_from_cpuinfo(monkeypatch):
    text = "processor : 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: fpu avx2 avx512f xyz\n"
    monkeypatch.setattr(module, "_read", lambda path: text if path == "/proc/cpuinfo" else "")
    cpu = module._describe_cpu.__wrapped__()
    assert cpu.name == "Some CPU @ 2 GHz"
    assert cpu.features[1:] == ("avx2", "avx512f") and cpu.l2_bytes == 0


def test_a_machine_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(module, "_read", lambda path: "")
    cpu = module._describe_cpu.__wrapped__()
    assert cpu.name and cpu.features[1:] == ()


def test_memory_is_rounded_so_that_equal_machines_are_equal():
    assert module._whole_gib((80 << 30) - (300 << 20)) == module._whole_gib((80 << 30) + (100 << 20)) == 80 << 30


def test_other_kinds_of_device():
    with pytest.raises(NoDevice, match="cpu or cuda"):
        describe("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA device")
def test_cuda_without_a_gpu():
    with pytest.raises(NoDevice, match="no CUDA device"):
        describe("cuda")


@pytest.mark.parametrize(("version", "words"), [(None, "built for CPUs only"), ("13.0", "built for CUDA 13.0")])
def test_without_a_gpu_the_message_says_what_torch_was_built_for(monkeypatch, version, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(NoDevice, match=words):
        describe("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda():
    gpu = describe("cuda")
    assert gpu.kind == "cuda" and gpu.capability == torch.cuda.get_device_capability()
    assert gpu.units > 1 and gpu.smem_bytes >= 48 << 10 and gpu.l2_bytes > 0 and gpu.memory_bytes > 0
    assert describe(torch.device("cuda", torch.cuda.current_device())) is gpu
    with pytest.raises(NoDevice, match="no such"):
        describe(f"cuda:{torch.cuda.device_count()}")
