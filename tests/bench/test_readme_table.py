"""The README's table is the committed result, rounded."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
(RESULT,) = re.findall(r"from `(bench/results/[\w-]+-gemm\.json)`", README)
PROBLEMS = {(p["n"], p["k"]): p for p in json.loads((ROOT / RESULT).read_text())["problems"]}
(HEAD,) = re.findall(r"^\| N x K \| read \|(.*)\|$", README, flags=re.MULTILINE)
MS = [int(m) for m in re.findall(r"M = (\d+)", HEAD)]
ROWS = re.findall(r"^\| (\d+) x (\d+) \| ([\d.]+) \|(.*)\|$", README, flags=re.MULTILINE)


def agree(printed, value):
    digits = len(printed.partition(".")[2])
    return float(printed.replace(",", "")) == pytest.approx(value, abs=0.5001 * 10**-digits)


def test_every_problem_has_a_row():
    assert {(int(n), int(k)) for n, k, *_ in ROWS} == set(PROBLEMS)


@pytest.mark.parametrize(("n", "k", "read", "cells"), ROWS)
def test_times_and_ratios_are_those_of_the_result(n, k, read, cells):
    problem = PROBLEMS[int(n), int(k)]
    assert agree(read, problem["stream_us"])
    us = {(row["label"], row["m"]): row["us"] for row in problem["rows"]}
    printed = re.findall(r"([\d.,]+) \(([\d.]+)x\)", cells)
    assert len(printed) == len(MS)
    for m, (time, ratio) in zip(MS, printed, strict=True):
        assert agree(time, us["plan", m]), (m, time)
        assert agree(ratio, us["baseline", m] / us["plan", m]), (m, ratio)
