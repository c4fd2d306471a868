"""`nvfp4 warmup` on this machine: what is bound, what is left out, messages that help."""

import json

import msgspec
import pytest
from nvfp4.cache.store import Store
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.testing.fakes import fake_device

from .rows import row

pytestmark = pytest.mark.usefixtures("fakes")


def test_warmup_binds_what_was_tuned(tuned, run):
    done = run("warmup", "--device", "cpu", "--db", tuned.path, NVFP4_DB=str(tuned.path))
    assert done.code == 0 and "gemm 40x64 bf16" in done.out
    assert "warning" not in done.err


def test_warmup_names_the_problems_that_it_leaves_out(tuned, run, tmp_path):
    path = tmp_path / "t.db"
    path.write_bytes(tuned.path.read_bytes())
    with Store.open(path) as store:
        for n in (24, 56):
            store.add([msgspec.structs.replace(row(describe("cpu")), uuid=f"{n}", problem=Problem(n=n, k=64))])
        store.add([row(fake_device())])  # of another device
    done = run("warmup", "--device", "cpu", "--db", path, "--json", NVFP4_DB=str(path))
    assert done.code == 0 and [warm["problem"]["n"] for warm in json.loads(done.out)] == [40]
    words = "2 problems of the database have no plan and are left out: gemm 24x64 bf16, gemm 56x64 bf16"
    assert f"warning: {words}\n" in done.err


def test_warmup_of_an_untuned_shape_warns_and_prints_json(run, tmp_path):
    done = run("warmup", "--shape", "24,32", "--device", "cpu", "--json", NVFP4_DB=str(tmp_path / "no.db"))
    (warm,) = json.loads(done.out)
    assert (warm["problem"]["n"], warm["layout"]) == (24, "checkpoint")
    assert "nvfp4 tune --shape 24,32" in done.err


@pytest.mark.parametrize("archs", ["", " ", "sm_90a,"])
def test_an_architecture_without_a_name_is_refused(run, archs):
    done = run("warmup", "--arch", archs, "--shape", "40,64")
    assert done.code == 2 and f"--arch has an empty name; got {archs!r}" in done.err


def test_fused_without_a_checkpoint_is_refused_by_warmup(run):
    done = run("warmup", "--shape", "40,64", "--fused")
    assert done.code == 2 and "--fused is for --checkpoint" in done.err


def test_warmup_of_a_database_without_plans_for_this_device(two_devices, run):
    done = run("warmup", "--device", "cpu", "--db", two_devices, NVFP4_DB=str(two_devices))
    assert done.code == 1 and "has no plan for" in done.err
