"""What is shown while a tuning runs, from hand-made events."""

import io
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from nvfp4.cache.records import Environment
from nvfp4.cli.progress import JsonLines, Lines, Screen, display
from nvfp4.cli.words import (
    candidate_words,
    config_words,
    counts,
    device_words,
    duration,
    kernels_by_m,
    microseconds,
    percent,
    plural,
    range_words,
    ratio,
    ratios,
)
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner.events import (
    CeilingsMeasured,
    Note,
    ProblemFinished,
    ProblemStarted,
    Progress,
    Standing,
    TuningFinished,
    TuningStarted,
)
from rich.console import Console

PROBLEM = Problem(n=4096, k=2048)
BEST = (
    Standing(m=1, kernel="a", config='{"tile":16}', best_us=10.0, default_us=15.0, bf16_us=30.0, protocol="final"),
    Standing(m=64, kernel="b", config='{"tile":64}', best_us=20.0, default_us=None, bf16_us=18.0, protocol="screen"),
)
SOFTWARE = Environment(nvfp4="0", torch="0")
STARTED = TuningStarted(
    device=fake_device(),
    environment=Environment(nvfp4="0", torch="0"),
    problems=(PROBLEM,),
    ms=(1, 64),
    database="x.db",
)
PROGRESS = Progress(problem=PROBLEM, done=3, of=9, eta_s=75.0, best=BEST, failures={"wrong": 2})
EVENTS = (
    STARTED,
    CeilingsMeasured(copy_gbps=4100.0, bf16_tflops=701.0),
    Note(text="something to know"),
    ProblemStarted(problem=PROBLEM, index=0, of=1, candidates=9, pending=7, refused=(), budget_s=60.0),
    PROGRESS,
    ProblemFinished(
        problem=PROBLEM, plan=None, best=BEST, failures={"wrong": 2}, unexplored=1, measured=40, seconds=61.0
    ),
    TuningFinished(measured=40, without_plan=(PROBLEM,), unexplored=1, interrupted=False, seconds=61.0),
)


def console(width=100, **options):
    return Console(file=io.StringIO(), width=width, height=30, highlight=False, markup=False, **options)


def test_lines_for_files():
    shown = Lines(console())
    for event in EVENTS:
        shown(event)
    text = shown.console.file.getvalue()
    assert "database  x.db" in text
    assert "1 problem at 2 values of M, 1 to 64" in text
    assert "copy 4,100 GB/s, bf16 product 701 TFLOP/s" in text
    assert "note: something to know" in text
    assert "[1/1] gemm 4096x2048 bf16: 9 candidates, 2 measured by an earlier run, 1 min 00 s for it" in text
    assert "no plan yet (not finished): 2 wrong, 1 candidate not tried" in text
    assert "\x1b" not in text
    assert [done.measured for done in shown.finished] == [40]


def test_a_problem_that_is_tuned_again_with_time_left_by_others_is_one_problem():
    shown = Lines(console())
    done = EVENTS[5]
    for event in (done, changed(done, problem=replace(PROBLEM, n=64)), changed(done, measured=55, unexplored=0)):
        shown(event)
    assert [(one.problem.n, one.measured) for one in shown.finished] == [(64, 40), (PROBLEM.n, 55)]


@pytest.mark.parametrize(
    ("unprepared", "unexplored", "failures", "words"),
    [
        ("they need at least 900 GiB", 0, {}, "no winner (its inputs do not fit in memory)"),
        ("", 7, {}, "no plan yet (not finished): 7 candidates not tried"),
        ("", 7, {"wrong": 2}, "no plan yet (not finished): 2 wrong, 7 candidates not tried"),
        ("", 0, {"wrong": 2}, "no winner (2 wrong)"),
        ("", 0, {}, "no winner (nothing can be measured)"),
    ],
)
def test_why_there_is_no_plan(unprepared, unexplored, failures, words):
    shown = Lines(console())
    shown(
        ProblemFinished(
            problem=PROBLEM,
            plan=None,
            best=(),
            failures=failures,
            unexplored=unexplored,
            unprepared=unprepared,
            measured=0,
            seconds=1.0,
        )
    )
    assert shown.console.file.getvalue().rstrip().endswith(f": {words}")


def test_progress_within_a_problem_is_not_a_flood():
    shown = Lines(console())
    for event in EVENTS[:4] + 50 * (PROGRESS,):
        shown(event)
    assert "3 of 9" not in shown.console.file.getvalue()
    shown._last_s -= 11
    shown(PROGRESS)
    line = shown.console.file.getvalue().splitlines()[-1]
    assert "3 of 9 candidates; about 1 min 15 s left" in line
    assert "M = 1: a 10.0 µs (1.50x untuned, 3.00x bf16)" in line
    assert "M = 64: b 20.0 µs (0.90x bf16)" in line


@pytest.mark.parametrize("width", [30, 80, 120])
def test_a_terminal_sees_the_best_so_far(width):
    shown = Screen(console(width, force_terminal=True))
    shown(STARTED)
    shown(EVENTS[3])
    picture = console(width)
    picture.print(shown._picture(PROGRESS))
    text = " ".join(picture.file.getvalue().split())
    for words in ("1.50x", "3.00x", "0.90x", "3 of 9", "failed: 2 wrong", "tile=16"):
        assert words in text
    assert all(len(line) <= width for line in picture.file.getvalue().splitlines())


def test_the_terminal_is_left_as_it_was_after_an_error():
    shown = Screen(console(force_terminal=True))
    with pytest.raises(KeyboardInterrupt), shown:
        shown(STARTED)
        raise KeyboardInterrupt
    text = shown.console.file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and shown again


def test_each_console_gets_the_display_that_suits_it():
    assert isinstance(display(console(force_terminal=True), as_json=False), Screen)
    assert isinstance(display(console(), as_json=False), Lines)
    assert isinstance(display(console(force_terminal=True), as_json=True), JsonLines)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (microseconds(None), ""),
        (microseconds(3.14159), "3.14"),
        (microseconds(31.4159), "31.4"),
        (microseconds(314.159), "314"),
        (microseconds(31415.9), "31,416"),
        (ratio(None), ""),
        (ratio(1.234), "1.23x"),
        (ratio(123.4), "123x"),
        (ratios(()), ""),
        (ratios((1.5, 0.9, 2.0)), "0.90-2.00x"),
        (ratios((1.5,)), "1.50x"),
        (percent(None), ""),
        (percent(0.031), "3.1 %"),
        (percent(0.87), "87 %"),
        (counts({"wrong": 2, "crash": 1, "oom": 0}), "2 wrong, 1 crash"),
        (plural(1, "problem"), "1 problem"),
        (plural(2, "problem"), "2 problems"),
        (duration(8.2), "8 s"),
        (duration(59.6), "1 min 00 s"),
        (duration(185), "3 min 05 s"),
        (duration(7800), "2 h 10 min"),
        (range_words(1, 1), "1"),
        (range_words(2, 8), "2-8"),
        (range_words(9, None), "9+"),
        (kernels_by_m(()), ""),
        (
            kernels_by_m([("a", 1, 8), ("a", 9, 16), ("b", 17, 17), ("a", 18, None)]),
            "a 1-16, b 17, a 18+",
        ),
        (config_words('{"a":1,"b":"x"}'), "a=1 b=x"),
        (config_words("[not a config"), "[not a config"),
        (candidate_words('two_pass {"rows":4}'), "two_pass rows=4"),
        (candidate_words("two_pass"), "two_pass"),
        (device_words(fake_device()), "Fake 3000 (cpu, 4 cores, 8 GiB)"),
        (
            device_words(Device(kind="cuda", name="Card", capability=(9, 0), units=132, memory_bytes=140 << 30)),
            "Card (sm_90, 132 SMs, 140 GiB)",
        ),
    ],
)
def test_words(got, expected):
    assert got == expected
