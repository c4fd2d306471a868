"""What the driver is given, with the driver replaced by one that reads it as the real one does."""

import ctypes
import struct
import sys
import threading
import time
import types

import pytest
import torch
from cuda.bindings import driver as real
from nvfp4.errors import LaunchError
from nvfp4.kernels.cuda import launch as module
from nvfp4.kernels.cuda.compile import Compiled
from nvfp4.kernels.cuda.launch import CudaLaunch

OK = real.CUresult.CUDA_SUCCESS
FIELDS = "PPfiqb"  # 8 + 8 + 4 + 4 + 8 + 1
FIELD_BYTES, STRUCT_BYTES = 33, 40


class Driver(types.ModuleType):
    """Handles are made up; launches are recorded as (configuration, kernel, bytes of the struct)."""

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})
        self.calls, self.launches = [], []
        self.struct_bytes = STRUCT_BYTES
        self.result = OK
        self.pause_s = 0.0
        for name in (
            "cuLibraryLoadData",
            "cuLibraryGetKernel",
            "cuKernelGetFunction",
            "cuKernelGetParamInfo",
            "cuKernelSetAttribute",
            "cuDeviceGet",
            "cuLaunchKernelEx",
        ):
            setattr(self, name, getattr(self, f"_{name}"))

    def _cuLibraryLoadData(self, code, *_):
        self.calls.append(("load", code))
        return OK, 11

    def _cuLibraryGetKernel(self, library, name):
        self.calls.append(("kernel", library, name))
        return OK, real.CUkernel(100 + len(self.calls))

    def _cuKernelGetFunction(self, kernel):
        self.calls.append(("function", int(kernel)))
        return self.result, real.CUfunction(7)

    def _cuKernelGetParamInfo(self, kernel, index):
        return OK, 0, self.struct_bytes

    def _cuDeviceGet(self, index):
        return OK, 50 + index

    def _cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.calls.append((attribute.name, value, device))
        return (OK,)

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra == 0
        pointer = ctypes.c_uint64.from_address(parameters).value
        time.sleep(self.pause_s)  # without the interpreter's lock
        self.launches.append((config, int(function), ctypes.string_at(pointer, FIELD_BYTES)))
        return (self.result,)


@pytest.fixture
def driver(monkeypatch):
    stub = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stub)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_kernels", {})
    return stub


def compiled(**changes):
    facts = {"registers": 32, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    return Compiled(**{"cubin": b"cubin", "entry": "kernel", "arch": "sm_90a", **facts, **changes})


def launcher(**changes):
    return CudaLaunch(compiled(), **{"fields": FIELDS, "block": 128, "smem_bytes": 1024, **changes})


VALUES = (1 << 47, 0, 1.5, -3, 1 << 40, 7)


def test_struct_and_configuration(driver):
    launcher(pdl=False).launch(4, 3, 2, 99, *VALUES)
    ((config, function, argument),) = driver.launches
    assert argument == struct.pack("=QQfiqb", *VALUES)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 3, 2)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (1024, 99, 0)
    assert ("function", function) in driver.calls


def test_padding_is_that_of_c(driver):
    class Argument(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int8), ("b", ctypes.c_void_p), ("c", ctypes.c_int16), ("d", ctypes.c_float))

    driver.struct_bytes = ctypes.sizeof(Argument)
    launcher(fields="bPhf").launch(1, 1, 1, 0, -1, 1 << 33, 5, 0.25)
    assert driver.launches[0][2][: ctypes.sizeof(Argument)] == bytes(Argument(-1, 1 << 33, 5, 0.25))


def test_several_parameters(driver, monkeypatch):
    sizes, seen = (128, 8, 4, 8, 4), []
    monkeypatch.setattr(driver, "cuKernelGetParamInfo", lambda kernel, index: (OK, 0, sizes[index]))

    def run(config, function, parameters, extra):
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        seen.append([ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)])
        return (OK,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", run)
    one = launcher(fields=("128s", "2i", "i", "P", "i"))
    one.launch(1, 1, 1, 0, b"\1" * 128, 2, 3, 4, 1 << 40, 5)
    assert seen == [
        [b"\1" * 128, struct.pack("=2i", 2, 3), struct.pack("=i", 4), struct.pack("=Q", 1 << 40), b"\5\0\0\0"]
    ]
    with pytest.raises(LaunchError, match="not its struct"):
        launcher(fields=("128s", "i", "i", "P", "i")).launch(1, 1, 1, 0, b"", 2, 4, 1 << 40, 5)


def test_a_parameter_is_aligned_as_its_widest_field(driver, monkeypatch):
    sizes, seen = (4, 16), []
    monkeypatch.setattr(driver, "cuKernelGetParamInfo", lambda kernel, index: (OK, 0, sizes[index]))

    def run(config, function, parameters, extra):
        pointers = (ctypes.c_uint64 * 2).from_address(parameters)
        seen.append([ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)])
        return (OK,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", run)
    launcher(fields=("i", "iP")).launch(1, 1, 1, 0, 1, 2, 1 << 40)
    assert seen == [[struct.pack("=i", 1), struct.pack("=i4xQ", 2, 1 << 40)]]


def test_shared_memory_is_preferred_only_when_asked(driver):
    launcher(prefer_smem=True).launch(1, 1, 1, 0, *VALUES)
    assert ("CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", 100, 50) in driver.calls
    driver.calls.clear()
    launcher().launch(1, 1, 1, 0, *VALUES)
    assert not [call for call in driver.calls if "CARVEOUT" in str(call[0])]


@pytest.mark.parametrize(("cluster", "pdl"), [(1, True), (4, False), (2, True)])
def test_attributes(driver, cluster, pdl):
    launcher(cluster=cluster, pdl=pdl).launch(8, 1, 1, 0, *VALUES)
    found = {attribute.id.name: attribute.value for attribute in driver.launches[0][0].attrs}
    assert driver.launches[0][0].numAttrs == len(found) == (cluster > 1) + pdl
    if cluster > 1:
        shape = found["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"].clusterDim
        assert (shape.x, shape.y, shape.z) == (cluster, 1, 1)
    if pdl:
        value = found["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]
        assert value.programmaticStreamSerializationAllowed == 1


def test_loaded_once(driver):
    first, second, other = launcher(), launcher(), launcher(smem_bytes=2048)
    for one in (first, first, second, other):
        one.launch(1, 1, 1, 0, *VALUES)
    assert [call[0] for call in driver.calls].count("load") == 2
    functions = [function for _, function, _ in driver.launches]
    assert functions[0] == functions[1] == functions[2] != functions[3]


@pytest.mark.parametrize(
    ("static", "dynamic", "cluster", "expected"),
    [
        (0, 48 << 10, 1, []),
        (0, (48 << 10) + 16, 1, [("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", (48 << 10) + 16, 50)]),
        (1024, 48 << 10, 1, [("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 48 << 10, 50)]),
        (0, 0, 8, []),
        (0, 0, 16, [("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1, 50)]),
    ],
)
def test_what_must_be_asked_for(driver, static, dynamic, cluster, expected):
    code = compiled(static_smem_bytes=static)
    CudaLaunch(code, fields=FIELDS, block=128, smem_bytes=dynamic, cluster=cluster).launch(16, 1, 1, 0, *VALUES)
    assert [call for call in driver.calls if call[0].startswith("CU_")] == expected


def test_threads_do_not_share_memory(driver):
    driver.pause_s = 0.001
    shared = launcher()
    barrier = threading.Barrier(4)

    def work(number):
        barrier.wait()
        for i in range(50):
            shared.launch(1, 1, 1, number, number, i, 0.5, number, i, 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((int(config.hStream), argument) for config, _, argument in driver.launches)
    expected = [(n, struct.pack("=QQfiqb", n, i, 0.5, n, i, 1)) for n in range(4) for i in range(50)]
    assert seen == sorted(expected)


def test_one_thread_uses_one_memory(driver, monkeypatch):
    one = launcher()
    addresses = set()
    monkeypatch.setattr(
        driver, "cuLaunchKernelEx", lambda config, kernel, address, _: (addresses.add(address), (OK,))[1]
    )
    for grid in range(1, 6):
        one.launch(grid, 1, 1, 0, *VALUES)
    assert len(addresses) == 1


def test_configurations_are_kept_but_not_without_end(driver, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONFIGS", 4)
    one = launcher()
    for grid in (1, 1, 2, 3, 4, 5, 1):
        one.launch(grid, 1, 1, 0, *VALUES)
    configs = [config for config, _, _ in driver.launches]
    assert configs[0] is configs[1]
    assert [config.gridDimX for config in configs] == [1, 1, 2, 3, 4, 5, 1]
    assert len(one._configs) <= 4


@pytest.mark.parametrize(("fields", "size"), [("PPfiqb", 40), ("iib", 12), ("iiP", 16), ("128sP", 192), ("3b", 3)])
def test_sizes_that_a_struct_of_these_fields_may_have(driver, fields, size):
    driver.struct_bytes = size
    values = [
        b"map" if part == "128s" else 1 for part in (["128s", "P"] if "s" in fields else fields.replace("3b", "bbb"))
    ]
    launcher(fields=fields).launch(1, 1, 1, 0, *values)
    assert len(driver.launches) == 1


class TestErrors:
    def test_launch(self, driver):
        one = launcher()
        one.launch(1, 1, 1, 0, *VALUES)
        driver.result = real.CUresult.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(LaunchError, match=r"kernel kernel .*grid \(70000, 1, 1\); got CUDA_ERROR_INVALID_VALUE"):
            one.launch(70000, 1, 1, 0, *VALUES)
        driver.result = OK
        one.launch(1, 1, 1, 0, *VALUES)

    def test_load(self, driver):
        driver.result = real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
        one = launcher()
        with pytest.raises(LaunchError, match=r"\(sm_90a; .*cannot be loaded; got CUDA_ERROR_NO_BINARY_FOR_GPU"):
            one.launch(1, 1, 1, 0, *VALUES)
        assert not driver.launches
        driver.result = OK
        one.launch(1, 1, 1, 0, *VALUES)

    @pytest.mark.parametrize("size", [32, 36, 48])
    def test_fields_of_another_struct(self, driver, size):
        driver.struct_bytes = size
        with pytest.raises(LaunchError, match=f"'PPfiqb' are not its struct; got 33 bytes; expected {size} bytes"):
            launcher().launch(1, 1, 1, 0, *VALUES)
        assert not driver.launches

    def test_too_few_values(self, driver):
        with pytest.raises(struct.error):
            launcher().launch(1, 1, 1, 0, 1, 2)
        assert not driver.launches
