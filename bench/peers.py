"""Plans of bench/gemm.py against the roofline and other W4A16 kernels (peers_dense.json).

    python bench/peers.py bench/results/2026-11-30-h200-gemm.json

Peers were timed on other days, so each is compared by how much faster than bf16 cuBLAS it is in its own run. From
BURST_FROM tokens on all figures are those after a pause.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

PEERS = Path(__file__).with_name("peers_dense.json")
BURST_FROM = 256
BEHIND = 0.97  # of the best peer's speed: below it a point is listed
CUBLAS = "cublas_bf16"
Row = dict[str, Any]


def speedups(peer: Row) -> dict[str, float]:
    """Every peer's speed relative to cuBLAS beside it; cuBLAS itself is one of them."""
    found = {name: peer["us"][CUBLAS] / us for name, us in peer["us"].items()}
    if "quack" in peer:
        found["quack"] = peer["quack"][CUBLAS] / peer["quack"]["us"]
    return found


def compare(problem: Row, peers: list[Row]) -> list[Row]:
    """For every M that both have: time over the roofline, and speed relative to the best peer."""
    found = []
    for peer in peers:
        if (peer["n"], peer["k"]) != (problem["n"], problem["k"]):
            continue
        timed = "burst_us" if peer["m"] >= BURST_FROM else "us"
        own = {row["label"]: row[timed] for row in problem["rows"] if row["m"] == peer["m"]}
        if "plan" not in own:
            continue
        others = speedups(peer)
        best = max(others, key=others.__getitem__)
        found.append(
            {
                "n": problem["n"],
                "k": problem["k"],
                "m": peer["m"],
                "over_roof": own["plan"] / peer["roof_us"],
                "peer": best,
                "over_peer": own["baseline"] / own["plan"] / others[best],
            }
        )
    return found


def report(result: Row) -> list[str]:
    """Lines of text: a table, the geometric means, and where the plan is behind."""
    peers = json.loads(PEERS.read_text())["rows"]
    points = [point for problem in result["problems"] for point in compare(problem, peers)]
    lines = []
    for n, k in dict.fromkeys((point["n"], point["k"]) for point in points):
        own = [point for point in points if (point["n"], point["k"]) == (n, k)]
        cells = (f"M={p['m']} {p['over_roof']:.2f} ({p['over_peer']:.2f} {p['peer']})" for p in own)
        lines.append(f"{n} x {k}: " + ", ".join(cells))
    for m in sorted({point["m"] for point in points}):
        lines.append(f"M={m}: {mean(points, 'over_roof', m):.2f} over the roofline, {mean(points, 'over_peer', m):.2f}")
    lines.append(f"all: {mean(points, 'over_peer'):.2f} times as fast as the best peer")
    behind = [f"{p['n']} x {p['k']} at {p['m']} ({p['peer']})" for p in points if p["over_peer"] < BEHIND]
    lines.append(f"more than 3 % behind at {len(behind)} of {len(points)}: " + ", ".join(behind))
    return lines


def mean(points: list[Row], name: str, m: int | None = None) -> float:
    """Geometric, over all shapes."""
    return statistics.geometric_mean([point[name] for point in points if m in (None, point["m"])])


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what bench/gemm.py --plan wrote")
    for line in report(json.loads(parser.parse_args().result.read_text())):
        print(line)


if __name__ == "__main__":
    main()
