"""What software is recorded, and which measurements a change of it retires."""

import msgspec
import pytest
import torch
from nvfp4.cache.evidence import implementations
from nvfp4.cache.fingerprint import changes, environment, is_current
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
    a, b = fake.Kernel("a", source=source), fake.Kernel("b")
    rows = [fake.measurement(a, 1, 1.0), fake.measurement(b, 1, 1.0)]
    assert [is_current(row, implementations({"a": a, "b": b})) for row in rows] == [True, True]
    source.write_text("after")
    assert [is_current(row, implementations({"a": a, "b": b})) for row in rows] == [False, True]
    assert not is_current(rows[1], implementations({"a": a}))


@pytest.mark.parametrize(("field", "current"), [("driver", True), ("torch", True), ("triton", True), ("timing", False)])
def test_only_another_timing_protocol_retires_rows_of_an_unchanged_kernel(fake, field, current):
    a = fake.Kernel("a")
    then = msgspec.structs.replace(fake.environment, **{field: "other"})
    row = fake.measurement(a, 1, 1.0, environment=then)
    assert is_current(row, implementations({"a": a})) is current


def test_changes_are_named(fake):
    now = msgspec.structs.replace(fake.environment, driver="590.2", triton="")
    assert changes(fake.environment, now) == ("triton 3.7.1 -> none", "driver 580.1 -> 590.2")
    assert changes(now, now) == ()
