"""Problems of experts on the command line: named, shown, and refused."""

import json

import pytest
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import ROUTINGS, Measurement
from nvfp4.cache.store import Store
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.problem import Problem

MOE = Problem(op="moe", n=128, k=256, experts=8, top_k=2, activation="swiglu")
NAME = "experts=8,top_k=2,hidden=256,inter=128"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A database in which blocks of 128 rows win on the whole, and those of 64 with skewed routing."""
    path, kernel, device = tmp_path_factory.mktemp("experts") / "t.db", registry.get("cpu_moe"), describe("cpu")
    rows = [
        Measurement(
            device=device, environment=environment(), problem=MOE, kernel="cpu_moe", layout="checkpoint",
            config=kernel.config_type(block_rows=size, threads=0).to_json(), implementation=implementation_hash(kernel),
            m=16, status="ok", protocol="final", routing=routing, p20_us=us, p50_us=us, p80_us=us, samples=11,
        )
        for size, times in ((128, (10.0, 10.0, 15.0)), (64, (20.0, 20.0, 12.0)))
        for routing, us in zip(ROUTINGS, times, strict=True)
    ]  # fmt: skip
    with Store.open(path) as store:
        store.add(rows)
        store.save_plan(make_plan(device, MOE, rows, kernels={"cpu_moe": kernel}, environment=environment()))
    return path


def test_a_report_shows_the_mean_and_the_worst_routing(run, measured):
    done = run("inspect", NAME, "--db", measured)
    assert done.code == 0 and "moe 128x256 bf16 E8 top2 swiglu" in done.out
    line = next(line.split() for line in done.out.splitlines() if line.split()[:2] == ["16", "cpu_moe"])
    assert line[2] == "11.4"  # (10 * 10 * 15) ** (1 / 3)
    assert "skewed +25 %" in " ".join(line) and "bf16  " not in done.out
    (at,) = json.loads(run("inspect", NAME, "--db", measured, "--json").out)["anchors"]
    assert at["by_routing_us"] == {"balanced": 10.0, "random": 10.0, "skewed": 15.0}
    assert (at["worst_routing"], at["worst"]) == ("skewed", pytest.approx(0.25))


def test_the_summary_counts_rows_of_every_op(run, measured):
    (line,) = json.loads(run("inspect", "--db", measured, "--json").out)
    assert (line["problem"]["op"], line["measurements"], line["retired"]) == ("moe", 6, 0)


def test_why_a_config_of_experts_lost(run, measured):
    done = run("inspect", NAME, "--why", "cpu_moe", "--db", measured)
    assert done.code == 0 and "block_rows=64" in done.out
    assert "16.9 µs against 11.4 µs" in " ".join(done.out.split())
    (_, lost) = json.loads(run("inspect", NAME, "--why", "cpu_moe", "--db", measured, "--json").out)["candidates"]
    assert lost["at"][0]["slower"] == pytest.approx(2 / 1.25 - 1)
    assert lost["at"][0]["reason"].endswith("with random routing, by 100%, the other with skewed routing, by 25%")


def test_what_was_not_measured_names_the_command(run, measured):
    done = run("inspect", "experts=4,n=64,k=32", "--db", measured)
    assert done.code == 1 and "run `nvfp4 tune --grouped experts=4,n=64,k=32`" in done.err
    done = run("inspect", "experts=8,top_k=2,hidden=256,inter=64,activation=relu2", "--db", measured)
    assert "nvfp4 tune --moe experts=8,top_k=2,hidden=256,inter=64,activation=relu2`" in done.err


def test_kernels_of_experts(run, measured):
    done = run("inspect", "experts=4,n=64,k=32", "--kernels", "--db", measured)
    assert done.code == 0 and "cpu_grouped" in done.out and "cpu_blocked" not in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--moe", "experts=8,top_k=2,hidden=256"), "--moe"),
        (("--moe", "experts=8,top_k=2,hidden=250,inter=128"), "hidden"),
        (("--grouped", "experts=8,n=64"), "--grouped"),
        ((), "--moe or --grouped"),
    ],
)
def test_what_names_no_problem_is_usage(run, arguments, words):
    done = run("tune", *arguments)
    assert done.code == 2 and words in done.err


def test_warmup_binds_experts(run):
    done = run("warmup", "--device", "cpu", "--moe", NAME, "--grouped", "experts=3,n=64,k=32", "--json")
    assert done.code == 0
    assert [one["problem"]["op"] for one in json.loads(done.out)] == ["moe", "grouped_gemm"]
