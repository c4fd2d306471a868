"""What software is recorded, and which measurements a change of it retires."""

import msgspec
import torch
from nvfp4.cache.evidence import implementations
from nvfp4.cache.fingerprint import changes, environment
from nvfp4.cache.records import TIMING
from nvfp4.cache.store import Store


def test_the_environment_names_the_software_of_this_process():
    found = environment()
    assert found.torch == torch.__version__
    assert found.cuda == (torch.version.cuda or "")
    assert found.timing == TIMING
    assert found.nvfp4


def test_a_checkout_that_is_not_installed_names_its_own_version(monkeypatch):
    import nvfp4
    from nvfp4.cache import fingerprint

    def absent(distribution):
        raise fingerprint.PackageNotFoundError(distribution)

    monkeypatch.setattr(fingerprint, "version", absent)
    found = environment.__wrapped__()
    assert (found.nvfp4, found.triton) == (nvfp4.__version__, "")


def test_the_environment_of_this_process_can_be_saved(db, fake):
    row = fake.measurement("a", 1, 1.0, environment=environment())
    with Store.open(db) as store:
        store.add([row])
        assert store.measurements(fake.device, fake.problem) == [row]
    assert msgspec.json.decode(msgspec.json.encode(environment())) == msgspec.to_builtins(environment())


def test_a_changed_kernel_retires_its_own_rows_only(tmp_path, fake):
    source = tmp_path / "device.cu"
    source.write_text("before")
    kernels = {"a": fake.Kernel("a", source=source), "b": fake.Kernel("b")}
    before = implementations(kernels)
    source.write_text("after")
    after = implementations(kernels)
    assert before["a"] != after["a"] and before["b"] == after["b"]


def test_changes_are_named(fake):
    now = msgspec.structs.replace(fake.environment, driver="590.2", triton="")
    assert changes(fake.environment, now) == ("triton 3.7.1 -> none", "driver 580.1 -> 590.2")
    assert changes(now, now) == ()
