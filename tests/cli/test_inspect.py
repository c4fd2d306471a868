"""`nvfp4 inspect` and `env`: tables that fit, JSON that parses, messages that help."""

import json
import sqlite3

import msgspec
import pytest
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.inspect import ProblemReport, Summary
from nvfp4.cache.layouts import LayoutReport
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import Interval
from nvfp4.cache.store import Store
from nvfp4.cache.why import Why
from nvfp4.cli.words import planned
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.fakes import fake_device

from .rows import row

pytestmark = pytest.mark.usefixtures("fakes")


def fits(text, columns):
    """No line is wider than the terminal, and nothing is cut."""
    too_wide = [line for line in text.splitlines() if len(line.rstrip()) > columns and not line.startswith("database ")]
    return not too_wide and "…" not in text


def test_the_summary_has_a_line_for_every_problem_at_any_width(tuned, run, columns):
    done = run("inspect", "--db", tuned.path, columns=columns)
    assert done.code == 0 and done.err == ""
    assert fits(done.out, columns)
    for words in ("gemm 40x64 bf16", "fake_good 1+", "1 wrong", "bf16"):
        assert words in done.out


def test_one_problem_at_any_width(tuned, run, columns):
    done = run("inspect", "40x64", "--db", tuned.path, "--roofline", "10,0.1", columns=columns)
    assert done.code == 0 and done.err == ""
    assert fits(done.out, columns)
    for words in ("delay_us=0", "fake_good", "runner-up", "of limit", "untuned", "failed: 1 wrong"):
        assert words in done.out


def test_gaps_of_a_plan_run_untuned():
    def interval(m_lo, m_hi, kernel):
        return Interval(m_lo=m_lo, m_hi=m_hi, kernel=kernel, config="{}", expected_us=1.0)

    assert planned([interval(1, 64, "a"), interval(65, 512, "a"), interval(1025, None, "a")]) == (
        "a 1-512, untuned 513-1024, a 1025+"
    )
    assert planned([interval(2, 8, "a")]) == "untuned 1, a 2-8, untuned 9+"
    assert planned(()) == ""


def test_one_problem_as_json(tuned, run):
    done = run("inspect", "40,64", "--db", tuned.path, "--roofline", "10,0.1", "--json")
    report = msgspec.json.decode(done.out, type=ProblemReport)
    assert report.problem == Problem(n=40, k=64)
    assert report.device == describe("cpu")
    assert {at.m for at in report.anchors} >= {1, 8}
    assert all(at.of_roofline > 0 for at in report.anchors)
    assert report.plan.intervals()[-1].m_hi is None


def test_a_problem_is_found_by_its_name_in_the_tables(tuned, run):
    (name,) = (
        line.strip().split("  ")[0] for line in run("inspect", "--db", tuned.path).out.splitlines() if "40x64" in line
    )
    assert name == "gemm 40x64 bf16"
    expected = run("inspect", "40,64", "--db", tuned.path)
    for text in (name, "gemm 40x64 bfloat16"):
        assert run("inspect", text, "--db", tuned.path).out == expected.out
    done = run("inspect", "--layout", name, "--db", tuned.path)
    assert done.code == 0 and name in done.out
    done = run("inspect", *name.split(), "--db", tuned.path)
    assert done.code == 2 and "a name with spaces goes in quotes" in " ".join(done.err.replace("│", " ").split())
    done = run("inspect", name, "--dtype", "float16", "--db", tuned.path)
    assert done.code == 2 and "has another dtype" in done.err


def test_the_roofline_can_be_measured(tuned, run):
    report = msgspec.json.decode(
        run("inspect", "40,64", "--db", tuned.path, "--roofline", "measure", "--json").out, type=ProblemReport
    )
    assert all(0 < at.of_roofline < 2 for at in report.anchors)


def test_all_problems_as_json(tuned, run):
    found = msgspec.json.decode(run("inspect", "--db", tuned.path, "--json").out, type=tuple[Summary, ...])
    assert [line.problem for line in found] == [Problem(n=40, k=64)]


def test_why_a_kernel_was_not_chosen(tuned, run, columns):
    done = run("inspect", "40x64", "--why", "fake_trouble", "--db", tuned.path, columns=columns)
    assert done.code == 0 and fits(done.out, columns)
    assert "distrusted" in done.out and "what=zeros" in done.out and "wrong at M" in " ".join(done.out.split())


def test_why_shows_every_m_of_the_config_it_names(tuned, run):
    done = run(
        "inspect", "40x64", "--why", "fake_good", "--config", '{"delay_us": 3000, "small_m": false}', "--db", tuned.path
    )
    assert "delay_us=3000 small_m=False at every M\n" in done.out and "winner µs" in done.out


@pytest.mark.parametrize("config", ["", "x", "{bad"])
def test_a_config_that_is_no_json_is_told_to_be_none(tuned, run, config):
    done = run("inspect", "40x64", "--why", "fake_good", "--config", config, "--db", tuned.path)
    assert done.code == 2 and not done.out
    assert done.err.startswith("error: --config is no JSON: ") and f"got {config!r}; expected such as" in done.err


@pytest.mark.parametrize("config", ["1", "{}", '{"delay_us": 1}'])
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_why_of_a_config_that_nobody_measured_lists_what_was(tuned, run, config, extra):
    done = run("inspect", "40x64", "--why", "fake_good", "--config", config, "--db", tuned.path, *extra)
    said = " ".join(done.err.split())
    assert done.code == 2 and not done.out
    assert "not measured of fake_good; the kernel has no such config here" in said and repr(config) in said
    assert '"delay_us"' in said and "leave --config out" in said


def test_why_of_a_config_of_a_kernel_that_was_not_measured_says_how_to_tune(tuned, run):
    done = run("inspect", "40x64", "--why", "cpu_blocked", "--config", "{}", "--db", tuned.path)
    said = " ".join(done.err.split())
    assert done.code == 2 and "got '{}'; run `nvfp4 tune --shape 40,64`" in said


def test_why_as_json_for_one_config(tuned, run):
    arguments = ("--why", "fake_good", "--config", '{"delay_us": 3000, "small_m": false}', "--json")
    answer = msgspec.json.decode(run("inspect", "40x64", *arguments, "--db", tuned.path).out, type=Why)
    (fate,) = answer.candidates
    assert fate.outcome == "lost" and all(at.slower > 0 for at in fate.at if at.slower is not None)


def test_why_of_a_kernel_that_nobody_knows_lists_the_known(tuned, run):
    done = run("inspect", "40x64", "--why", "fake_goot", "--db", tuned.path)
    assert done.code == 2 and "fake_goot" in done.err and "fake_good" in done.err and not done.out


def test_every_kernel_has_a_verdict_without_a_database(run, columns, tmp_path):
    done = run("inspect", "40x64", "--kernels", "--db", tmp_path / "none.db", columns=columns)
    assert done.code == 0 and fits(done.out, columns)
    assert all(kernel.name in done.out for kernel in registry.kernels("gemm"))
    assert not (tmp_path / "none.db").exists()
    verdicts = {one["kernel"]: one for one in json.loads(run("inspect", "40x64", "--kernels", "--json").out)}
    assert verdicts["fake_good"]["ok"] and verdicts["fake_good"]["configs"] == 6


def test_kernels_for_a_device_of_the_database(run, tmp_path):
    card = Device(kind="cuda", name="Card 1", capability=(9, 0), units=8, smem_bytes=1 << 17)
    with Store.open(tmp_path / "t.db") as store:
        store.add([row(card)])
    found = json.loads(
        run("inspect", "40x64", "--kernels", "--device-name", "card", "--db", tmp_path / "t.db", "--json").out
    )
    assert {one["kernel"]: one["reason"] for one in found}["fake_good"] == "fakes run on the CPU"


H200 = Device(kind="cuda", name="NVIDIA H200", capability=(9, 0), units=132, smem_bytes=232448, memory_bytes=140 << 30)


MEASURED = {  # kernel -> M -> microseconds
    "triton_fused": {16: 11.0, 32: 11.0},
    "two_pass": {256: 26.0, 1024: 60.0},
    "triton_fused_fragment": {16: 9.0, 32: 9.0},
    "two_pass_fragment": {256: 20.0, 4096: 190.0},
}


@pytest.fixture
def two_layouts(tmp_path):
    """An H200 with a problem whose fragment layout is ahead, measured with another implementation of its kernel."""
    path = tmp_path / "layouts.db"
    problem = Problem(n=4096, k=4096)
    rows, implementations = [], {}
    for name, times in MEASURED.items():
        kernel = registry.get(name)
        implementations[name] = "0123456789abcdef" if name == "two_pass_fragment" else implementation_hash(kernel)
        for m, us in times.items():
            config = kernel.default_config(H200, problem, m).to_json()
            about = {"layout": kernel.layout(H200, problem), "implementation": implementations[name]}
            other = {"problem": problem, "kernel": name, "config": config, "m": m, "p50_us": us}
            rows.append(msgspec.structs.replace(row(H200), uuid=f"{name} {m}", **about, **other))
    known = {name: registry.get(name) for name in implementations}
    plan = make_plan(
        H200, problem, rows, kernels=known, environment=environment(), implementation_by_kernel=implementations
    )
    with Store.open(path) as store:
        store.add(rows)
        store.save_plan(plan)
        store.add([msgspec.structs.replace(row(H200), problem=Problem(n=40, k=64, dtype="float16"))])
    return path


def test_layouts_side_by_side_at_any_width(two_layouts, run, columns):
    done = run("inspect", "--layout", "4096x4096", "--db", two_layouts, columns=columns)
    assert done.code == 0 and done.err == ""
    tables = [line for line in done.out.splitlines() if line.startswith((" ", "M ", "kernel", "costs"))]
    assert fits("\n".join(tables), columns) and "…" not in done.out
    for words in ("marks layout fragment1-bf16, for decode-heavy traffic", "two_pass_fragment*", "60.0", "190.0 @4096"):
        assert words in done.out
    for words in (
        "+22 %",
        "-68 %",
        "none",
        "not measured",
        "* rows measured with another implementation",
    ):
        assert words in done.out
    assert "checkpoint: not measured at the largest M, so it cannot be marked" in done.out


def test_layouts_as_json_are_those_of_all_problems_of_the_device(two_layouts, run):
    done = run("inspect", "--layout", "--db", two_layouts, "--json")
    small, big = msgspec.json.decode(done.out, type=tuple[LayoutReport, ...])
    assert (big.device, big.marked, big.stale) == (H200, "fragment1-bf16", {"two_pass_fragment": 2})
    assert [(row.m, *(cell.p50_us for cell in row.layouts)) for row in big.rows] == [
        (16, 9.0, 11.0),
        (32, 9.0, 11.0),
        (256, 20.0, 26.0),
        (1024, 190.0, 60.0),
        (4096, 190.0, None),
    ]
    assert (small.problem.dtype, small.plan_id, small.rows) == ("float16", "", ())
    for arguments, count in ((("--dtype", "float16"), 1), (("4096x4096", "4096,4096"), 1)):
        done = run("inspect", "--layout", *arguments, "--db", two_layouts, "--json")
        assert len(json.loads(done.out)) == count


def test_layouts_of_a_problem_without_a_plan(tuned, two_devices, run):
    done = run("inspect", "--layout", "--device-name", "3000", "--db", two_devices)
    assert done.code == 0 and "no plan yet; by these measurements it would mark layout checkpoint" in done.out
    assert "Fake 4000" not in done.out
    assert "costs" not in done.out  # there is one layout, so nothing costs more than the first
    assert run("inspect", "--layout", "40x64", "64x64", "--db", tuned.path).code == 1


def test_a_device_is_chosen_by_a_part_of_its_name(two_devices, run):
    done = run("inspect", "40x64", "--device-name", "fake 4", "--db", two_devices, "--json")
    assert msgspec.json.decode(done.out, type=ProblemReport).device.name == "Fake 4000"
    assert "Fake 3000" not in run("inspect", "--device-name", "4000", "--db", two_devices).out
    for arguments in (("40x64", "--device-name", "4000"), ()):
        assert "no plan yet (not finished)" in run("inspect", *arguments, "--db", two_devices).out


def test_a_problem_without_a_plan_of_which_something_failed_may_be_finished(tmp_path, run):
    failed = msgspec.structs.replace(row(fake_device()), status="wrong", p50_us=None)
    with Store.open(tmp_path / "t.db") as store:
        store.add([failed])
    out = run("inspect", "--db", tmp_path / "t.db").out
    assert "no plan yet  " in out and "1 wrong" in out
    assert (
        "the tuning was cut short, or no candidate could be used"
        in run("inspect", "40x64", "--db", tmp_path / "t.db").out
    )


@pytest.mark.parametrize("arguments", [("40x64",), ("40x64", "--device-name", "fake"), ("--device-name", "x")])
def test_a_device_that_is_not_clear_is_refused_with_all_names(two_devices, run, arguments):
    done = run("inspect", *arguments, "--db", two_devices)
    assert done.code == 2
    assert "Fake 3000" in done.err and "Fake 4000" in done.err


def test_a_problem_that_was_not_measured(tuned, run):
    done = run("inspect", "64x64", "--db", tuned.path)
    assert done.code == 1
    assert "gemm 40x64 bfloat16" in done.err and "nvfp4 tune --shape 64,64" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--why", "fake_good"),
        ("--kernels",),
        ("--roofline", "measure"),
        ("40x64", "--config", "{}"),
        ("40x64x3",),
        ("40x64", "64x64"),
        ("--layout", "40x64", "--kernels"),
        ("--layout", "--roofline", "1,1"),
        ("--layout", "40x"),
    ],
)
def test_options_that_do_not_fit_together(tuned, run, arguments):
    done = run("inspect", *arguments, "--db", tuned.path)
    assert done.code == 2 and done.out == ""


@pytest.mark.parametrize("text", ["fast", "1", "0,1", "nan,1", "1,inf", "1,2,3"])
def test_a_roofline_that_is_none(tuned, run, text):
    done = run("inspect", "40x64", "--roofline", text, "--db", tuned.path)
    assert done.code == 2 and "GBPS,TFLOPS" in done.err


def test_a_missing_or_damaged_database_is_one_message(run, tmp_path):
    path = tmp_path / "t.db"
    done = run("inspect", "--db", path)
    assert done.code == 1 and "run `nvfp4 tune`" in done.err and done.err.count("\n") == 1
    path.write_bytes(b"x" * 5000)
    done = run("inspect", "--db", path)
    assert done.code == 1 and "not a database" in done.err and done.err.count("\n") == 1
    assert path.read_bytes() == b"x" * 5000


def test_an_empty_database(run, tmp_path):
    Store.open(tmp_path / "t.db").close()
    done = run("inspect", "--db", tmp_path / "t.db")
    assert done.code == 0 and "run `nvfp4 tune`" in done.out
    assert run("inspect", "40x64", "--db", tmp_path / "t.db").code == 1


def test_a_database_that_is_named_must_be_there(run, tmp_path):
    commands = (("inspect", "40x64"), ("inspect",), ("warmup", "--shape", "40,64", "--device", "cpu"), ("warmup",))
    for command in commands:
        done = run(*command, "--db", tmp_path / "none.db")
        assert (done.code, done.out) == (1, "") and f"{tmp_path / 'none.db'}: there is none" in done.err


def test_env_at_any_width(tuned, run, columns):
    done = run("env", "--db", tuned.path, columns=columns)
    assert done.code == 0 and fits(done.out, columns)
    assert "1 plan, 1 problem measured" in done.out and "fake_good" in done.out
    assert "moe kernels" in done.out and "cpu_moe" in done.out


@pytest.mark.parametrize("state", ["ok", "missing", "corrupt", "foreign"])
def test_env_tells_the_state_of_the_database(run, tmp_path, state):
    path = tmp_path / "t.db"
    if state == "ok":
        Store.open(path).close()
    elif state == "corrupt":
        path.write_bytes(b"x" * 5000)
    elif state == "foreign":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE other (a)")
    done = run("env", "--json", "--db", path)
    report = json.loads(done.out)
    assert done.code == 0
    assert report["database"]["state"] == state
    assert report["devices"]["cpu"]["kind"] == "cpu"
    assert report["versions"]["torch"]
    assert "cpu_blocked" in report["kernels"]["gemm"] and "cpu_grouped" in report["kernels"]["grouped_gemm"]
