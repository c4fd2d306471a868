import gc
import weakref

import msgspec
import pytest
import torch
from nvfp4.cache.records import BASELINE
from nvfp4.errors import BuildError
from nvfp4.kernels.problem import Problem
from nvfp4.testing import fakes as fake_kernels
from nvfp4.testing.fakes import FakeConfig, TroubleConfig, fake_device
from nvfp4.tuner.gemm_trial import GemmTrial
from nvfp4.tuner.inputs import POOL_ROWS, Inputs, copies_needed
from nvfp4.tuner.measure import Measurer
from nvfp4.tuner.messages import BASELINE_CONFIG, Done, Entrant, Race, Row, Screen, Started, shorten
from nvfp4.tuner.outcome import Wrong, classify
from nvfp4.tuner.output import GUARD_ROWS
from nvfp4.tuner.trial import gate_ms

PROBLEM = Problem(n=40, k=64)
MS = (1, 2, 8, 32, 200)
DEVICE = fake_device()


@pytest.fixture
def measurer(fakes):
    measurer = Measurer("cpu")
    yield measurer
    measurer.close()


def trouble(what):
    return Entrant(kernel="fake_trouble", config=TroubleConfig(what=what).to_json())


def good(delay_us=0, small_m=False):
    return Entrant(kernel="fake_good", config=FakeConfig(delay_us=delay_us, small_m=small_m).to_json())


def screen(measurer, pace, entrant, ms=MS, **kwargs):
    said = []
    request = Screen(device=DEVICE, problem=PROBLEM, entrant=entrant, ms=ms, all_ms=MS, pace=pace, **kwargs)
    done = measurer.screen(request, said.append)
    return [body for body in said if isinstance(body, Row)], done


def test_a_right_candidate_is_timed_at_every_m(measurer, pace):
    rows, done = screen(measurer, pace, good())
    assert done == Done()
    assert [(row.m, row.status, row.protocol) for row in rows] == [(m, "ok", "screen") for m in (1, 200, 2, 8, 32)]
    for row in rows:
        assert 0 < row.p20_us <= row.p50_us <= row.p80_us and row.samples >= 2
        assert row.relative_error < 3e-3


def test_the_step_in_flight_is_said_before_it_begins(measurer, pace):
    said = []
    measurer.screen(Screen(device=DEVICE, problem=PROBLEM, entrant=good(), ms=(2,), all_ms=MS, pace=pace), said.append)
    steps = [(body.step, body.m) for body in said if isinstance(body, Started)]
    assert steps[:2] == [("prepare", 0), ("build", 2)]
    assert ("check", 2) in steps


@pytest.mark.parametrize(
    ("what", "status", "detail"),
    [
        ("zeros", "wrong", "extreme scales: relative error 1"),
        ("nan", "nan", "NaN or elements never written"),
        ("unwritten_tail", "nan", "first at [30, 0]"),
        ("out_of_memory", "oom", "3.00 TiB"),
        ("launch_error", "launch_error", "too many resources"),
        ("build_error", "build_error", "expected a ';'"),
        ("ignores_bias", "wrong", "m=1, extreme scales, bfloat16 bias and pre_quant_scale: relative error"),
        ("ignores_pre_quant_scale", "wrong", "m=1, extreme scales, bfloat16 bias and pre_quant_scale: relative error"),
        ("ignores_row_scales", "wrong", "m=31, extreme scales, float32 bias and a global scale per row: relative"),
    ],
)
def test_a_failing_candidate_is_a_row_and_the_worker_goes_on(measurer, pace, what, status, detail):
    rows, done = screen(measurer, pace, trouble(what))
    assert [row.status for row in rows] == [status]
    assert detail in rows[0].detail
    assert done == Done()
    assert {row.status for row in screen(measurer, pace, good(), ms=(2,))[0]} == {"ok"}


def test_a_kernel_that_ignores_float32_biases_only_is_wrong(measurer, pace, monkeypatch):
    right = fake_kernels.multiply

    def multiply(x, weight, scale, gs, bias, out):
        right(x, weight, scale, gs, None if bias is not None and bias.dtype == torch.float32 else bias, out)

    monkeypatch.setattr(fake_kernels, "multiply", multiply)
    (row,), _ = screen(measurer, pace, good())
    assert row.status == "wrong" and "float32 bias" in row.detail


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (40, 64), (96, 1056)])
def test_a_right_kernel_passes_every_check_at_any_size(measurer, pace, dtype, n, k):
    problem = Problem(n=n, k=k, dtype=dtype)
    request = Screen(device=DEVICE, problem=problem, entrant=good(), ms=(1, 160), all_ms=(1, 160), pace=pace)
    said = []
    for _ in range(3):  # inputs are random
        assert measurer.screen(request, said.append) == Done()
        measurer.close()
    assert {row.status for row in said if isinstance(row, Row)} == {"ok"}


@pytest.mark.parametrize(
    ("what", "detail"), [("guard_rows", "wrote outside its output"), ("changes_weights", "changed x or the weights")]
)
def test_damage_is_wrong_and_taints_the_worker(measurer, pace, what, detail):
    rows, done = screen(measurer, pace, trouble(what))
    assert [row.status for row in rows] == ["wrong"]
    assert detail in rows[0].detail
    assert detail in done.tainted


def test_unknown_kernels_and_configs_are_invalid(measurer, pace):
    for entrant in (
        Entrant(kernel="nobody", config="{}"),
        Entrant(kernel="fake_good", config='{"delay_us":64,"small_m":false}'),
        Entrant(kernel="fake_good", config='{"a":'),
    ):
        rows, done = screen(measurer, pace, entrant)
        assert [row.status for row in rows] == ["invalid"] and done == Done()


def test_an_m_without_memory_does_not_end_the_others(measurer, pace, monkeypatch):
    whole = Inputs.out

    def out(self, m, *, poison=True):
        if m == 200:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(self, m, poison=poison)

    monkeypatch.setattr(Inputs, "out", out)
    rows, done = screen(measurer, pace, good())
    assert {row.m: row.status for row in rows} == {1: "ok", 200: "oom", 2: "ok", 8: "ok", 32: "ok"}
    assert done == Done()


def test_a_candidate_far_behind_is_timed_at_the_probes_only(measurer, pace):
    rows, _ = screen(measurer, pace, good(3000), best_us=dict.fromkeys(MS, 10.0))
    assert [row.m for row in rows] == [1, 200]


def test_what_is_known_is_not_timed_again(measurer, pace):
    rows, _ = screen(measurer, pace, good(), ms=(2, 8), known_us={1: 500.0, 200: 500.0, 32: float("inf")})
    assert [row.m for row in rows] == [2, 8]


def test_inputs_that_do_not_fit_are_nobodys_fault(measurer, pace, monkeypatch):
    def no_memory(self, *args):
        raise MemoryError("no")

    monkeypatch.setattr(Inputs, "__init__", no_memory)
    rows, done = screen(measurer, pace, good())
    assert rows == [] and "MemoryError" in done.unprepared


def race(measurer, pace, entrants, m=8, protocol="final"):
    said = []
    request = Race(device=DEVICE, problem=PROBLEM, entrants=entrants, m=m, all_ms=MS, protocol=protocol, pace=pace)
    done = measurer.race(request, said.append)
    return {row.config: row for row in said if isinstance(row, Row)}, done


def test_a_race_ranks_its_entrants_and_leaves_failing_ones_out(measurer, pace):
    baseline = Entrant(kernel=BASELINE, config=BASELINE_CONFIG)
    rows, done = race(measurer, pace, (good(3000), good(), trouble("zeros"), baseline))
    assert done == Done()
    assert rows[good().config].p50_us < rows[good(3000).config].p50_us
    assert rows[good().config].samples == pace.rounds and rows[good().config].protocol == "final"
    assert rows[trouble("zeros").config].status == "wrong"
    assert rows[BASELINE_CONFIG].relative_error < 5e-3  # its weights are rounded to bf16


def test_a_burst_is_a_race_with_pauses(measurer, pace):
    rows, _ = race(measurer, pace, (good(),), protocol="burst")
    assert rows[good().config].protocol == "burst"


def test_a_race_of_nobody_left(measurer, pace):
    rows, done = race(measurer, pace, (trouble("nan"),))
    assert [row.status for row in rows.values()] == ["nan"] and done == Done()


def test_ceilings_are_positive(measurer):
    ceiling = measurer.ceilings()
    assert ceiling.copy_gbps > 0 and ceiling.bf16_tflops > 0


def test_everything_is_given_back(measurer, pace):
    screen(measurer, pace, good())
    refs = [
        weakref.ref(tensor)
        for tensor in (measurer._trial.inputs.x, measurer._trial.inputs.plain.exact, measurer._trial.inputs.out(8))
    ]
    measurer.close()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_what_a_failed_candidate_held_is_given_back(measurer, pace, monkeypatch):
    """Also what only the collector finds, where all that was there before is frozen, as in the worker."""
    held = []

    def out(self, m, *, poison=True):
        cycle = [torch.zeros(8)]
        cycle.append(cycle)
        held.append(weakref.ref(cycle[0]))
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Inputs, "out", out)
    gc.freeze()
    try:
        rows, _ = screen(measurer, pace, good())
        assert {row.status for row in rows} == {"oom"}
        assert held and [ref() for ref in held] == [None] * len(held)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("x"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 500 bytes"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (BuildError("ptxas"), "build_error"),
        (RuntimeError("invalid argument"), "launch_error"),
        (NotImplementedError("x"), "launch_error"),
    ],
)
def test_what_an_exception_means(error, status):
    assert classify(error) == status


def test_numerics_are_checked_at_the_smallest_m_and_at_a_ragged_one():
    assert gate_ms((1, 16, 64, 4096), lambda m: True) == (1, 63)
    assert gate_ms((1, 16), lambda m: m % 16 == 0) == (1, 16)
    assert gate_ms((512, 1024), lambda m: True) == (512,)
    assert gate_ms((1,), lambda m: True) == (1,)


def test_copies_cover_three_times_the_cache_within_bounds():
    device = fake_device()  # 1 MiB cache, 8 GiB
    assert copies_needed(device, 1 << 18) == 12
    assert copies_needed(device, 1 << 30) == 2
    assert copies_needed(device, 16) == 64
    assert copies_needed(device, 5 << 30) == 2


def test_inputs_see_damage_anywhere():
    inputs = Inputs(DEVICE, torch.device("cpu"), PROBLEM, MS)
    copies = inputs.copies("checkpoint")
    assert inputs.unchanged("checkpoint")
    assert len({copy.data.data_ptr() for copy in copies}) == len(copies)
    for tensor in (
        copies[-1].data,
        copies[3].scale,
        inputs.extreme_weight("checkpoint").scale,
        inputs.variants[1].bias.unsqueeze(0).view(torch.uint8),
        inputs.x.view(torch.uint8),
    ):
        tensor[-1, -1] ^= 1
        assert not inputs.unchanged("checkpoint")
        tensor[-1, -1] ^= 1
        assert inputs.unchanged("checkpoint")


@pytest.mark.parametrize("at", [-1, -GUARD_ROWS, 8, 8 + GUARD_ROWS - 1])
def test_guard_rows_see_writes_outside_the_output(at):
    inputs = Inputs(DEVICE, torch.device("cpu"), PROBLEM, MS)
    out = inputs.out(8)
    assert torch.isnan(out).all()
    out.zero_()
    assert inputs.guards_intact(8)
    inputs._buffer[GUARD_ROWS + at, 5] = float("nan")  # another NaN than the poison is seen too
    assert not inputs.guards_intact(8)


def test_results_are_known_for_small_m_whole_and_for_large_m_at_its_tail():
    inputs = Inputs(DEVICE, torch.device("cpu"), PROBLEM, (1000,))
    at, known = inputs.plain.rows(0, 100)
    assert at.tolist() == list(range(100))
    at, known = inputs.plain.rows(0, 1000)
    assert len(at) <= POOL_ROWS and set(range(984, 1000)) <= set(at.tolist())
    x = inputs.x[at].double()
    dense = inputs.dense_copies()[0]
    assert len(known) == len(at)
    assert torch.allclose(inputs.plain.exact[known], x @ dense.double().t(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("m", [1000, 437])
def test_the_last_rows_are_compared_also_of_an_m_that_comes_later(m):
    trial = GemmTrial(DEVICE, torch.device("cpu"), PROBLEM, (1000,), lambda: None)

    def right(x, weight, scale, gs, bias, pqs, out):
        fake_kernels.multiply(x, weight, scale, gs, bias, out)

    def wrong(*arguments):
        right(*arguments)
        arguments[-1][-2] *= 1.5

    assert trial.check(right, "checkpoint", m, "") < 2e-3
    assert {*range(m - 16, m)} <= {*trial.inputs.plain.rows(0, m)[0].tolist()}
    with pytest.raises(Wrong, match=f"m={m}: relative error"):
        trial.check(wrong, "checkpoint", m, "")
    assert trial.check(right, "checkpoint", 1000, "") < 2e-3


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 10_000, "\x1b" * 10_000, "short", ""])
def test_a_message_fits_a_line_that_a_pipe_takes_whole(text):
    short = shorten(text)
    assert text.startswith(short) and len(msgspec.json.encode(short)) <= 1500
    assert len(text) > 1500 or short == text


def test_a_message_with_bytes_that_are_no_text_is_a_row_too(measurer, pace, monkeypatch):
    """As that of a compiler about a folder whose name is no UTF-8."""

    def multiply(*arguments):
        raise RuntimeError(b"no such file: /caf\xe9/x.cubin".decode(errors="surrogateescape"))

    with monkeypatch.context() as patch:
        patch.setattr(fake_kernels, "multiply", multiply)
        rows, done = screen(measurer, pace, good())
    assert rows and {row.status for row in rows} == {"launch_error"} and done == Done()
    assert rows[0].detail == r"RuntimeError: no such file: /caf\udce9/x.cubin"
    assert msgspec.json.encode(rows[0])


@pytest.mark.parametrize(
    ("copies", "launch_us", "launches"),
    [
        (20, 10.0, 40),  # fast kernels: whole turns of at least 24 launches
        (3, 300.0, 6),  # as many turns as the time of a screen holds
        (3, 2000.0, 3),  # one turn at least
        (3, 9000.0, 1),  # unless that takes far longer than a screen
    ],
)
def test_a_replay_takes_about_as_long_as_a_screen(copies, launch_us, launches):
    from nvfp4.tuner.measure import _count

    assert _count(copies, launch_us, 2500.0, "cuda") == launches
