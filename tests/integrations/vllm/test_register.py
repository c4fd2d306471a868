"""The plug-in for vLLM is found, is plugged in when it is asked for and fits, and says why if not.

Real: everything of this package. Fake: vLLM 0.33.0 (fake.py says how far it is like that release).
"""

import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from nvfp4.integrations import vllm as plugin

ROOT = Path(__file__).parents[3]


def test_it_is_an_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"nvfp4": "nvfp4.integrations.vllm:register"}


def test_finding_it_imports_neither_vllm_nor_the_classes():
    code = "import sys; from nvfp4.integrations.vllm import register; register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    loaded = done.stdout.split()
    assert "nvfp4.integrations.vllm" in loaded
    assert "vllm" not in loaded and "nvfp4.integrations.vllm.configs" not in loaded


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_happens_unless_it_is_asked_for(fake_vllm, monkeypatch, value):
    monkeypatch.delenv("NVFP4_VLLM")
    if value is not None:
        monkeypatch.setenv("NVFP4_VLLM", value)
    plugin.register()
    assert not fake_vllm.registered and "nvfp4.integrations.vllm.configs" not in sys.modules


@pytest.mark.parametrize("value", ["yes", "true", "on"])
def test_what_may_have_been_meant_is_told_in_a_warning(fake_vllm, monkeypatch, value):
    monkeypatch.setenv("NVFP4_VLLM", value)
    with pytest.warns(RuntimeWarning, match=f"not plugged into vLLM; got NVFP4_VLLM={value}; expected NVFP4_VLLM=1"):
        plugin.register()
    assert not fake_vllm.registered


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setenv("NVFP4_VLLM", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.warns(RuntimeWarning, match=r"got no vLLM in this environment; expected vLLM 0\.33\.0"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.33.1", "0.32.0", "0.34.0rc1", "dev"])
def test_another_release_is_told_apart_in_one_warning(fake_vllm, version):
    fake_vllm.modules["vllm"].__version__ = version
    with pytest.warns(RuntimeWarning) as caught:
        plugin.register()
    assert [str(warning.message) for warning in caught] == [
        f"nvfp4 is not plugged into vLLM; got vLLM {version}; expected vLLM 0.33.0; "
        "vLLM's own kernels run; unset NVFP4_VLLM to silence this"
    ]
    assert not fake_vllm.registered and "nvfp4.integrations.vllm.configs" not in sys.modules


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu130"])
def test_the_configs_take_the_place_of_vllms(fake_vllm, version):
    fake_vllm.modules["vllm"].__version__ = version
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
        plugin.register()  # vLLM may do so
    names, found = fake_vllm.names, fake_vllm.registered
    assert set(found) == {"modelopt_fp4", "modelopt_mixed", "compressed-tensors"}
    bases = (names.ModelOptNvFp4Config, names.ModelOptMixedPrecisionConfig, names.CompressedTensorsConfig)
    for base, (first, second) in zip(bases, found.values(), strict=True):
        assert issubclass(first, base) and first is second
        assert getattr(import_module(first.__module__), first.__qualname__) is first  # or it could not be pickled
