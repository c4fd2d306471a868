"""What counts as a config when it comes from a database or a file."""

import msgspec
import pytest
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem

PROBLEM = Problem(n=256, k=256)


@pytest.fixture
def kernel():
    return registry.get("cpu_blocked")


@pytest.fixture
def fields(kernel):
    """Those of a config in the kernel's space."""
    return msgspec.json.decode(kernel.default_config(describe("cpu"), PROBLEM, 1).to_json())


def parse(kernel, value):
    return kernel.parse_config(describe("cpu"), PROBLEM, msgspec.json.encode(value))


def test_a_config_comes_back(kernel):
    for config in kernel.space(describe("cpu"), PROBLEM):
        assert kernel.parse_config(describe("cpu"), PROBLEM, config.to_json()) == config


def test_fields_that_the_config_does_not_have(kernel, fields):
    for value in (1, "x", None, [1], {"a": 1}):
        assert parse(kernel, fields | {"of_another_version": value}) is None
    assert parse(kernel, fields) is not None


def test_what_is_no_config(kernel, fields):
    name = next(iter(fields))
    for value in (None, "text", -12345, [1], 0.5):
        assert parse(kernel, fields | {name: value}) is None
    for value in (None, 3, [], [fields], "text"):
        assert parse(kernel, value) is None
    for text in ("", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000):
        assert kernel.parse_config(describe("cpu"), PROBLEM, text) is None
