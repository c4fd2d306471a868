"""bench/moe.py: a dry run on the CPU, and what its report makes of figures."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("moe_report", BENCH / "moe_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(part, kernel, us, t=64, **more):
    return {"part": part, "t": t, "kernel": kernel, "label": "default", "us": us, "roof_us": 10.0} | more


def test_products_are_compared_with_bf16_and_through_it_with_the_peers(report):
    rows = [row("up", "a", 60.0), row("down", "a", 30.0), row("up", "b", 40.0), row("down", "b", 45.0)]
    rows += [row("up", report.BF16, 200.0), row("down", report.BF16, 100.0), row("op", "a", 120.0, launches=5)]
    found = report.summary("qwen3-30b-a3b", 64, rows)
    assert found["products"]["by_kernel_us"] == {"a": 90.0, "b": 85.0}
    assert found["products"]["us"] == 70.0  # up from b, down from a
    assert found["products"]["over_roof"] == 3.5
    assert found["bf16_us"] == 300.0
    assert found["products"]["over_bf16"] == pytest.approx(300 / 70)
    marlin = (263.89 + 152.65) / (87.11 + 51.67)  # of peers_moe.json
    assert found["products"]["over_peers"]["marlin"] == pytest.approx(300 / 70 / marlin)
    assert found["op"] == {
        "us": 120.0,
        "name": "a [default]",
        "launches": 5,
        "over_roof": 12.0,
        "over_bf16_products": 2.5,
    }
    assert "3.50 x roof" in report.line(found)


def test_long_runs_are_compared_after_a_pause_as_the_peers_are(report):
    rows = [row("up", "a", 60.0, 512, burst_us=50.0), row("down", "a", 30.0, 512, burst_us=20.0)]
    found = report.summary("qwen3-30b-a3b", 512, [*rows, *(row(r["part"], report.BF16, 9.0, 512) for r in rows)])
    assert found["products"]["us"] == 70.0
    assert found["bf16_us"] == 18.0  # a CPU has no figure after a pause


def test_what_failed_and_what_no_peer_was_measured_at_is_left_out(report):
    failed = row("op", "a", 1.0)
    del failed["us"]
    assert report.summary("tiny", 64, [failed]) == {"t": 64}
    assert report.peer_ratios("qwen3-30b-a3b", 65) == {}


def test_a_dry_run_checks_and_times_every_part(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, "moe.py", "--tiny", "--device", "cpu", "--models", "tiny", "--tokens", "3"]
    command += ["--rounds", "2", "--output", str(output)]
    subprocess.run(command, cwd=BENCH, check=True, capture_output=True, timeout=300)
    (model,) = json.loads(output.read_text())["models"]
    parts = [(found["part"], found["kernel"], found["m"]) for found in model["rows"]]
    products = [(part, kernel, 6) for part in ("up", "down") for kernel in ("cpu_grouped", "bf16_grouped_mm")]
    assert parts == [("op", "cpu_moe", 3), *products]
    assert all(found["us"] > 0 for found in model["rows"])
    assert all(found["relative_error"] < 3e-3 for found in model["rows"] if found["kernel"].startswith("cpu"))
    assert model["summary"][0]["products"]["over_bf16"] > 0
