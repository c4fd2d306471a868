"""bench/peers.py: ratios to the roofline and, through bf16, to the peers."""

import importlib.util
import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", BENCH / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(m, plan, baseline, burst):
    rows = [{"m": m, "label": "plan", "us": plan, "burst_us": plan / burst}]
    rows.append({"m": m, "label": "baseline", "us": baseline, "burst_us": baseline / burst})
    return {"n": 8, "k": 16, "rows": rows}


def peer(m):
    return {
        "n": 8,
        "k": 16,
        "m": m,
        "roof_us": 5.0,
        "us": {"cublas_bf16": 30.0, "marlin": 20.0, "humming": 25.0},
        "quack": {"us": 40.0, "cublas_bf16": 100.0},
    }


def test_a_peer_is_as_fast_as_it_is_beside_its_own_cublas(peers):
    assert peers.speedups(peer(1)) == {"cublas_bf16": 1.0, "marlin": 1.5, "humming": 1.2, "quack": 2.5}
    (point,) = peers.compare(problem(1, 10.0, 50.0, 4.0), [peer(1)])
    assert point["over_roof"] == 2.0 and point["peer"] == "quack" and point["over_peer"] == 2.0


def test_from_256_tokens_on_figures_after_a_pause_are_compared(peers):
    (point,) = peers.compare(problem(256, 40.0, 40.0, 2.0), [peer(256)])
    assert point["over_roof"] == 4.0 and point["over_peer"] == pytest.approx(1 / 2.5)
    assert peers.compare(problem(512, 40.0, 40.0, 2.0), [peer(256)]) == []


def test_the_notes_say_what_the_results_say(peers):
    result = json.loads((BENCH / "results" / "2026-11-30-h200-gemm.json").read_text())
    lines = peers.report(result)
    notes = (BENCH.parent / "docs" / "notes" / "wgmma-on-hopper.md").read_text()
    means = [line for line in lines if line.startswith("M=")]
    for m, cell in zip((32, 64, 128, 256, 512, 1024, 2048, 4096), _cells(notes, "geometric mean"), strict=True):
        over_roof, over_peer = cell.strip(" )").split(" (")
        assert f"M={m}: {over_roof} over the roofline, {over_peer}" in means
    assert "all: 1.17 times as fast as the best peer" in lines and "1.17 times as fast" in notes
    assert lines[-1].startswith("more than 3 % behind at 12 of 88: ") and "Twelve of 88 points" in notes


def _cells(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return line.strip("|").split("|")[1:]
