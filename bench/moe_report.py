"""What bench/moe.py prints: the best of every part, against the roofline, bf16 `_grouped_mm` and the peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PEERS = Path(__file__).with_name("peers_moe.json")
BF16 = "bf16_grouped_mm"
BURST_FROM = 512  # tokens: from here the peers' figures are those after a pause, so ours are compared by the same
Row = dict[str, Any]


def compared_us(row: Row) -> float:
    """The figure to compare with the peers'."""
    return float(row["burst_us"] if row["t"] >= BURST_FROM and "burst_us" in row else row["us"])


def best(rows: list[Row], part: str, kernel: str | None = None) -> Row | None:
    """The fastest of our rows of a part, or of one kernel's."""
    found = [
        row
        for row in rows
        if row["part"] == part and "us" in row and row["kernel"] != BF16 and kernel in (None, row["kernel"])
    ]
    return min(found, key=compared_us, default=None)


def peer_ratios(model: str, tokens: int) -> dict[str, float]:
    """How much faster than bf16 `_grouped_mm` each peer's two products are together; {} where nothing was measured."""
    rows = [row for row in json.loads(PEERS.read_text())["rows"] if (row["model"], row["t"]) == (model, tokens)]
    if {row["part"] for row in rows} != {"up", "down"}:
        return {}
    names = set.intersection(*(set(row["us"]) for row in rows)) - {BF16}
    total = {name: sum(row["us"][name] for row in rows) for name in (*names, BF16)}
    return {name: total[BF16] / total[name] for name in names}


def summary(model: str, tokens: int, rows: list[Row]) -> dict[str, Any]:
    """The figures of one layer at one number of tokens; what was not timed is left out."""
    rows = [row for row in rows if row["t"] == tokens]
    found: dict[str, Any] = {"t": tokens}
    bf16 = {row["part"]: compared_us(row) for row in rows if row["kernel"] == BF16 and "us" in row}
    bf16_us = bf16["up"] + bf16["down"] if len(bf16) == 2 else None
    found |= {"bf16_us": bf16_us} if bf16_us else {}
    sums = {}
    for kernel in sorted({row["kernel"] for row in rows if row["part"] == "up"} - {BF16}):
        up, down = best(rows, "up", kernel), best(rows, "down", kernel)
        if up and down:
            sums[kernel] = compared_us(up) + compared_us(down)
    up, down = best(rows, "up"), best(rows, "down")
    if up and down:
        total = compared_us(up) + compared_us(down)
        found["products"] = {"us": total, "up": _name(up), "down": _name(down), "by_kernel_us": sums}
        if "roof_us" in up:
            found["products"]["over_roof"] = total / (up["roof_us"] + down["roof_us"])
        if bf16_us:
            found["products"]["over_bf16"] = bf16_us / total
            peers = peer_ratios(model, tokens)
            found["products"]["over_peers"] = {name: bf16_us / total / ratio for name, ratio in sorted(peers.items())}
    ours = {"op": best(rows, "op")}
    ours |= {
        "plan": next((row for row in rows if row["part"] == "op" and row["label"] == "plan" and "us" in row), None)
    }
    for label, row in ours.items():
        if row:
            found[label] = {"us": compared_us(row), "name": _name(row), "launches": row.get("launches")}
            found[label] |= {"over_roof": compared_us(row) / row["roof_us"]} if "roof_us" in row else {}
            found[label] |= {"over_bf16_products": bf16_us / compared_us(row)} if bf16_us else {}
    return found


def line(found: dict[str, Any]) -> str:
    """One line of a summary."""
    words = [f"  T={found['t']:<5}"]
    for label in ("op", "plan"):
        if label in found:
            entry = found[label]
            words.append(f"{label} {entry['us']:.1f} us" + _times(entry, "over_roof", "roof"))
            words.append(f"{entry['name']}, {entry['launches']} launches" if entry["launches"] else entry["name"])
    if "products" in found:
        entry = found["products"]
        words.append(f"products {entry['us']:.1f} us" + _times(entry, "over_roof", "roof"))
        words.append(f"{entry['up']} + {entry['down']}")
        words += [f"{kernel} {us:.1f} us" for kernel, us in entry["by_kernel_us"].items()]
        if "over_bf16" in entry:
            words.append(f"{entry['over_bf16']:.2f} x bf16 ({found['bf16_us']:.1f} us)")
            words += [f"{ratio:.2f} x {name}" for name, ratio in entry["over_peers"].items()]
    return "  |  ".join(words)


def _times(entry: dict[str, Any], key: str, what: str) -> str:
    return f" ({entry[key]:.2f} x {what})" if key in entry else ""


def _name(row: Row) -> str:
    return f"{row['kernel']} [{row['label']}]"
