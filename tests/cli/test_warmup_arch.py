"""`nvfp4 warmup --arch`: a folder that was filled without a GPU is all that another process needs."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from nvfp4.cache.records import Environment, Interval, LayoutPlan, Plan
from nvfp4.cache.store import Store
from nvfp4.dispatch.offline import TYPICAL
from nvfp4.dispatch.segments import decide
from nvfp4.kernels import build as build_module
from nvfp4.kernels import registry
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.triton_launch import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled")

PROBLEM = Problem(n=192, k=512)
H200 = Device(kind="cuda", name="NVIDIA H200", capability=(9, 0), units=132, smem_bytes=232448, memory_bytes=140 << 30)

# Builds what a file names, with no compiler at hand: neither those in this process nor those it could start.
BUILD = """
import importlib, json, os, sys
import msgspec, torch, triton
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.fragment import compile_packing

def refuse(*arguments, **options):
    raise AssertionError("something is compiled")

triton.compile = refuse
importlib.import_module("cuda.core").Program = refuse
sys.modules["cutlass"] = None
os.environ["PATH"] = ""
failed = {}
for device, problem, name, config in msgspec.json.decode(sys.stdin.read(), type=list[tuple[Device, Problem, str, str]]):
    kernel = registry.get(name)
    try:
        kernel.build(device, problem, kernel.parse_config(device, problem, config))
    except Exception as error:
        failed[name] = str(error)
    try:
        compile_packing(device.capability)
    except Exception as error:
        failed["packing"] = str(error)
print(json.dumps(failed))
"""


def save_plan(path, device, *layouts):
    """What runs untuned on a device with sm_90, saved as a plan; `two_pass` has another config."""
    found = []
    for layout in layouts:
        segments = decide(H200, PROBLEM, layout, None).segments
        intervals = [
            Interval(
                m_lo=segment.m_lo,
                m_hi=segment.m_hi,
                kernel=segment.kernel.name,
                config=segment.config.to_json().replace('"block_words":512', '"block_words":1024'),
                expected_us=1.0,
            )
            for segment in segments
        ]
        found.append(LayoutPlan(layout=layout, intervals=tuple(intervals), traffic_us=1.0))
    plan = Plan(
        device=device,
        problem=PROBLEM,
        layout=layouts[0],
        layouts=tuple(found),
        traffic="decode-heavy",
        environment=Environment(nvfp4="0", torch="0"),
    )
    with Store.open(path) as store:
        store.save_plan(plan)
    return plan


def build(folder, candidates, home):
    """What a process without compilers cannot build: {kernel: why}."""
    environment = os.environ | {"NVFP4_KERNEL_CACHE": str(folder), "TRITON_CACHE_DIR": str(home / "triton")}
    text = json.dumps(candidates)
    done = subprocess.run(
        [sys.executable, "-c", BUILD], input=text, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def few(monkeypatch):
    """One process that compiles, which imports the compilers once, and one card that stands for an architecture."""
    monkeypatch.setattr(build_module, "available_cores", lambda: 1)
    for capability, devices in TYPICAL.items():
        monkeypatch.setitem(TYPICAL, capability, devices[:1])


@pytest.mark.slow
def test_the_folder_is_all_that_another_process_needs(run, tmp_path, few):
    pytest.importorskip("cutlass")
    db, folder = tmp_path / "tuned.db", tmp_path / "kernels"
    plan = save_plan(db, H200, "fragment1-bf16", "checkpoint")
    arguments = ("warmup", "--arch", "sm_90a,sm_120a", "--output", folder, "--db", db, "--json")
    before = os.environ.get("NVFP4_KERNEL_CACHE")
    done = run(*arguments)
    assert done.code == 0, done.err
    assert os.environ.get("NVFP4_KERNEL_CACHE") == before
    first = json.loads(done.out)
    assert first["folder"] == str(folder) and first["failed"] == 0 and first["compiled"] > 10
    on_h200 = [(c["kernel"], c["config"]) for c in first["candidates"] if c["arch"] == "sm_90a"]
    wanted = {(i.kernel, i.config) for layout in plan.layouts for i in layout.intervals}
    assert sorted(on_h200) == sorted(wanted)  # the plan covers every layout, so there are no defaults
    assert {"marlin", "cutedsl_wgmma", "triton_gemv", "triton_fused", "two_pass"} <= {name for name, _ in wanted}
    assert any('"block_words":1024' in config for _, config in wanted)
    elsewhere = {c["device"]: set() for c in first["candidates"] if c["arch"] == "sm_120a"}
    for candidate in first["candidates"]:
        if candidate["arch"] == "sm_120a":
            elsewhere[candidate["device"]].add(candidate["kernel"])
    assert elsewhere.keys() == {device.name for device in TYPICAL[12, 0]}
    assert all({"marlin", "triton_fused", "two_pass_fragment"} <= kernels for kernels in elsewhere.values())

    again = run(*(argument for argument in arguments if argument != "--json"))
    assert again.code == 0 and again.err.count("was there") == len(first["candidates"])
    assert "everything was there" in again.out and f"NVFP4_KERNEL_CACHE={folder}" in again.out

    moved = tmp_path / "image" / "opt" / "kernels"
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    devices = {device.name: device for device in (H200, *TYPICAL[12, 0])}
    given = [(as_json(devices[c["device"]]), c["problem"], c["kernel"], c["config"]) for c in first["candidates"]]
    for path in [moved, *moved.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert build(moved, given, tmp_path) == {}
    assert not (tmp_path / "triton").exists()

    missing = build(tmp_path / "empty", given, tmp_path)  # the same process does need the compilers
    assert missing.keys() == {"packing"} | {c["kernel"] for c in first["candidates"]}
    assert "something is compiled" in missing["marlin"] and "something is compiled" in missing["triton_fused"]
    assert "CuTe DSL cannot be imported" in missing["cutedsl_wgmma"]


def as_json(device):
    return {name: getattr(device, name) for name in device.__dataclass_fields__}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a,sm_8", "H200"])
def test_an_unknown_architecture(run, arch):
    done = run("warmup", "--arch", arch, "--shape", "64,64")
    assert done.code == 2
    assert "unknown architecture" in done.err and "sm_90a" in done.err and "sm_120a" in done.err


def test_an_architecture_of_the_database_that_the_compiler_does_not_know(run, tmp_path):
    db = tmp_path / "t.db"
    save_plan(db, Device(kind="cuda", name="Some 9", capability=(19, 0), units=1), "checkpoint")
    done = run("warmup", "--arch", "sm_190", "--db", db, "--output", tmp_path / "k")
    assert done.code == 1
    assert "does not compile for sm_190" in done.err and "update nvidia-cuda-nvrtc" in done.err
    assert not (tmp_path / "k").exists()


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("warmup", "--arch", "sm_90a", "--shape", "64,64", "--output", tmp_path / "file" / "kernels")
    assert done.code == 1
    assert "kernels cannot be kept in" in done.err and "Not a directory" in done.err and "--output" in done.err


def test_a_folder_with_something_else_is_left_as_it_is(run, tmp_path):
    folder = tmp_path / "home"
    (folder / "bin").mkdir(parents=True, mode=0o700)
    secret = folder / "key"
    secret.write_text("x")
    secret.chmod(0o600)
    folder.chmod(0o700)
    done = run("warmup", "--arch", "sm_90a", "--shape", "64,64", "--output", folder)
    assert done.code == 2
    assert f"--output {folder} holds something else than kernels; got bin, key; expected a new folder" in done.err
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "bin", secret)] == [0o700, 0o700, 0o600]


def test_only_programs_are_opened_to_all(tmp_path):
    folder, outside = tmp_path / "kernels", tmp_path / "outside"
    program, other = folder / "entries" / "0f" / "program", folder / "other"
    program.parent.mkdir(parents=True)
    for path in (program, other, outside):
        path.write_text("x")
        path.chmod(0o600)
    (folder / "entries" / "link").symlink_to(outside)
    program_cache.open_to_all(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, program, other, outside)] == [0o755, 0o644, 0o600, 0o600]


def test_a_program_that_cannot_be_saved_is_an_error(run, tmp_path, few, monkeypatch):
    kernel = registry.get("triton_fused")
    monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel})  # one is enough
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "entries").write_text("")  # where a folder should be
    done = run("warmup", "--arch", "sm_120a", "--shape", "64,64", "--output", folder)
    assert done.code == 1 and "a compiled program was not saved" in done.err


def test_an_interpreter_compiles_nothing(run, tmp_path):
    done = run("warmup", "--arch", "sm_90a", "--shape", "64,64", "--output", tmp_path / "k", TRITON_INTERPRET="1")
    assert done.code == 2 and "TRITON_INTERPRET" in done.err


def test_without_a_database_problems_must_be_named(run, tmp_path):
    done = run("warmup", "--arch", "sm_90a", "--output", tmp_path / "k")
    assert done.code == 1 and "nvfp4 tune" in done.err
    done = run("warmup", "--arch", "sm_90a", "--shape", "64,64", "--db", tmp_path / "other.db")
    assert done.code == 1 and "other.db" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--output", "kernels"), "--output goes with --arch"),
        (("--arch", "sm_90a", "--device", "cpu"), "takes no --device"),
    ],
)
def test_options_that_do_not_go_together(run, arguments, words):
    done = run("warmup", *arguments)
    assert done.code == 2 and words in done.err
