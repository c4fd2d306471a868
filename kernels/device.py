"""What class of device a torch device is: the facts that candidates, databases and messages need."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import NoDevice, message
from .problem import Device

__all__ = ["describe"]

GIB = 1 << 30

# Instruction sets that decide which CPU code can run, as /proc/cpuinfo spells them (x86 and Arm).
CPU_FEATURES = (
    "avx2",
    "f16c",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)


def describe(device: torch.device | str) -> Device:
    """Describe the class of a device. Cached; creates a CUDA context only for a CUDA device.

    Parameters
    ----------
    device
        A CPU or CUDA device; "cuda" without an index means the current one.

    Raises
    ------
    NoDevice
        There is no such device here, or it is of another kind.
    """
    device = torch.device(device)
    kind = device.type
    if kind == "cpu":
        return _describe_cpu()
    if kind != "cuda":
        raise NoDevice(message("this kind of device has no kernels", got=str(device), expected="cpu or cuda"))
    if device.index is not None:
        return _describe_cuda(device.index)
    _check_cuda()
    return _describe_cuda(torch.cuda.current_device())


def _check_cuda() -> None:
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise NoDevice(
            message(
                "no CUDA device can be used here",
                got=f"torch {torch.__version__}, built for {built_for}",
                do="check the driver (nvidia-smi) and that torch is a CUDA build",
            )
        )


@cache
def _describe_cuda(index: int) -> Device:
    _check_cuda()
    if index >= torch.cuda.device_count():
        raise NoDevice(message("no such CUDA device", got=f"cuda:{index}", expected=f"< {torch.cuda.device_count()}"))
    facts: Any = torch.cuda.get_device_properties(index)  # its stub lacks fields
    return Device(
        kind="cuda",
        name=facts.name,
        capability=(facts.major, facts.minor),
        units=facts.multi_processor_count,
        smem_bytes=facts.shared_memory_per_block_optin,
        l2_bytes=facts.L2_cache_size,
        memory_bytes=_whole_gib(facts.total_memory),
    )


@cache
def _describe_cpu() -> Device:
    info = _read("/proc/cpuinfo")
    flags = set(_field(info, "flags").split()) | set(_field(info, "Features").split())
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return Device(
        kind="cpu",
        name=_field(info, "model name") or platform.processor() or platform.machine(),
        units=os.cpu_count() or 1,
        l2_bytes=_last_level_cache_bytes(),
        memory_bytes=_whole_gib(_physical_memory_bytes()),
        features=(f"torch:{capability}", *(name for name in CPU_FEATURES if name in flags)),
    )


def _whole_gib(size_bytes: int) -> int:
    # Firmware and drivers reserve a varying few MiB, and equal machines must be equal Devices.
    return max(1, round(size_bytes / GIB)) * GIB


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # not Linux, or a sandbox without it: the facts it would give stay empty
        return ""


def _field(text: str, name: str) -> str:
    """The first `name : value` of /proc/cpuinfo."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _last_level_cache_bytes() -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(path).strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def _physical_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not POSIX
        return 0
