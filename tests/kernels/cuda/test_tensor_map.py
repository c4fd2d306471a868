"""What the driver is asked to encode; the driver is replaced by one that keeps it."""

import ctypes
import types

import pytest
from nvfp4.errors import LaunchError
from nvfp4.kernels.cuda import tensor_map
from nvfp4.kernels.cuda.tensor_map import TensorMaps


@pytest.fixture
def driver(monkeypatch):
    stub = types.SimpleNamespace(asked=[], error=0)

    def encode(target, kind, rank, pointer, sizes, strides, box, element_strides, interleave, swizzle, promotion, fill):
        assert target.value % 64 == 0
        ctypes.memset(target.value, len(stub.asked) + 1, 128)
        asked = (kind, pointer.value, list(sizes), strides._obj.value, list(box), list(element_strides))
        assert (rank, interleave, swizzle, promotion, fill) == (2, 0, 3, 2, 0)
        stub.asked.append(asked)
        return stub.error

    stub.cuTensorMapEncodeTiled = encode
    monkeypatch.setattr(tensor_map, "_driver", lambda: stub)
    return stub


def test_inner_dimension_first_and_strides_in_bytes(driver):
    maps = TensorMaps("bfloat16", 48)
    assert maps.get(1 << 40, 1000, 208, 232) == bytes([1]) * 128
    assert driver.asked == [(9, 1 << 40, [208, 1000], 464, [64, 48], [1, 1])]
    TensorMaps("float16", 128).get(1 << 41, 1, 16, 16)
    assert driver.asked[1] == (6, 1 << 41, [16, 1], 32, [64, 128], [1, 1])


def test_known_maps_are_not_made_again(driver, monkeypatch):
    monkeypatch.setattr(tensor_map, "MAX_MAPS", 2)
    maps = TensorMaps("bfloat16", 16)
    first = maps.get(256, 1, 64, 64)
    assert maps.get(256, 1, 64, 64) is first
    for changed in ((512, 1, 64, 64), (256, 2, 64, 64), (256, 1, 80, 64), (256, 1, 64, 80)):
        assert maps.get(*changed) != first
    assert len(driver.asked) == 5
    maps.get(256, 1, 64, 64)  # forgotten meanwhile
    assert len(driver.asked) == 6


def test_errors_name_the_matrix(driver):
    driver.error = 1
    with pytest.raises(LaunchError, match="error 1 for 3 x 64 at 0x101, 68 elements"):
        TensorMaps("bfloat16", 16).get(0x101, 3, 64, 68)
