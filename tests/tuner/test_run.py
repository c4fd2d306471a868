"""`tune` with a worker that answers from a formula: no processes, so the decisions can be checked one by one."""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

import nvfp4.tuner.run as run_module
import pytest
from nvfp4.cache.records import BASELINE
from nvfp4.cache.store import Store
from nvfp4.errors import DatabaseError, InvalidInput
from nvfp4.kernels import registry
from nvfp4.kernels.kernel import Config, Kernel, Space
from nvfp4.kernels.problem import YES, Problem, Verdict
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner import events as ev
from nvfp4.tuner.messages import Done, Entrant, Row, Screen, Started
from nvfp4.tuner.run import Interrupted, tune
from nvfp4.tuner.statistics import hopeless, spread
from nvfp4.tuner.worker import Died

PROBLEM = Problem(n=256, k=512)
MS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Config):
    rows: int
    variant: int = 0


class Tiles(Kernel):
    """Small tiles suit small M: time is overhead by rows plus M over rows."""

    config_type = Tile
    packages = ()

    def __init__(self, name="tiles", rows=(8, 64, 512), variants=1, made_for=((1, None),)):
        self.name, self.rows, self.variants, self.made_for = name, rows, variants, made_for

    def supports(self, device, problem):
        return YES if problem.n % 2 == 0 else Verdict.no("N is odd")

    def is_valid(self, device, problem, config, m):
        return YES

    def space(self, device, problem):
        return Space(Tile, {"rows": self.rows, "variant": tuple(range(self.variants))})

    def default_config(self, device, problem, m):
        return Tile(rows=self.rows[0])

    def build(self, device, problem, config):
        raise AssertionError("nothing is built here")

    def source_files(self):
        return ()


def model_us(entrant, m):
    if entrant.kernel == BASELINE:
        return 100.0 + m
    config = registry.get(entrant.kernel).parse_config(None, PROBLEM, entrant.config)
    return config.rows / 4 + m * 8 / config.rows + config.variant / 16


class ModelWorker:
    """Stands in for Worker."""

    requests: ClassVar[list] = []
    script: ClassVar[dict] = {}  # number of a request -> what to do instead of answering

    def __init__(self, place, *, hang_s=None):
        self.closed = False

    def describe(self):
        return fake_device()

    def ceilings(self):
        return ev.CeilingsMeasured(copy_gbps=1.0, bf16_tflops=1.0)

    def close(self):
        self.closed = True

    def run(self, request):
        number = len(self.requests)
        self.requests.append(request)
        if number in self.script:
            yield from self.script[number](request)
            return
        if isinstance(request, Screen):
            served = tuple(sorted({*request.ms, *request.known_us}))
            slowdown = {m: us / request.best_us.get(m, us) for m, us in request.known_us.items()}
            for m in spread(served):
                if m not in request.known_us and not hopeless(m, served, slowdown):
                    us = model_us(request.entrant, m)
                    slowdown[m] = us / request.best_us.get(m, us)
                    yield self.row(request.entrant, m, "screen")
        else:
            for entrant in request.entrants:
                yield self.row(entrant, request.m, request.protocol)
        yield Done()

    @staticmethod
    def row(entrant, m, protocol, status="ok"):
        us = model_us(entrant, m) if status == "ok" else None
        return Row(
            kernel=entrant.kernel, config=entrant.config, m=m, status=status, protocol=protocol,
            p20_us=us, p50_us=us, p80_us=us, samples=9,
        )  # fmt: skip


@pytest.fixture
def install(monkeypatch):
    """Make these kernels the only ones, and the model the worker."""
    monkeypatch.setattr(run_module, "Worker", ModelWorker)
    monkeypatch.setattr(ModelWorker, "requests", [])
    monkeypatch.setattr(ModelWorker, "script", {})

    def install(*kernels):
        monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel for kernel in kernels})

    return install


@pytest.fixture
def go(tmp_path):
    """Tune the problem; returns the result and the events."""

    def go(problems=(PROBLEM,), ms=MS, **kwargs):
        seen = []
        result = tune(problems, ms, device="cpu", store_path=tmp_path / "t.db", events=seen.append, **kwargs)
        return result, seen

    return go


def rows_of(tmp_path, problem=PROBLEM):
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        return store.measurements(fake_device(), problem)


def test_the_plan_follows_the_times(install, go, tmp_path):
    install(Tiles())
    result, seen = go()
    plan = result.plans[PROBLEM]
    assert result.exit_code == 0 and result.measured == len(rows_of(tmp_path)) > 0
    by_m = {m: next(i.config for i in plan.intervals() if i.m_lo <= m <= (i.m_hi or m)) for m in MS}
    assert by_m[1] == Tile(rows=8).to_json()
    assert by_m[64] == Tile(rows=64).to_json()
    assert by_m[4096] == Tile(rows=512).to_json()
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        assert store.load_plan(fake_device(), PROBLEM) == plan
    finished = next(event for event in seen if isinstance(event, ev.ProblemFinished))
    assert finished.unexplored == 0 and finished.failures == {}
    assert [s.m for s in finished.best if s.m in MS] == list(MS)
    first = finished.best[0]
    assert (first.best_us, first.default_us, first.bf16_us, first.protocol) == (3.0, 3.0, 101.0, "final")


def test_a_finished_tuning_repeated_measures_nothing(install, go):
    install(Tiles(variants=4))
    first, _ = go()
    asked = len(ModelWorker.requests)
    second, seen = go()
    assert first.measured > 0 and second.measured == 0
    assert len(ModelWorker.requests) == asked
    assert second.plans == first.plans and second.exit_code == 0
    assert not any(isinstance(event, ev.CeilingsMeasured) for event in seen)


def test_crossovers_are_refined_unless_quick(install, go):
    install(Tiles(rows=(8, 100)))  # they cross at M = 25
    quick, _ = go(quick=True)
    assert {request.m for request in ModelWorker.requests if not isinstance(request, Screen)} == set(MS)
    assert quick.plans[PROBLEM].intervals()[0].m_hi == 16
    full, _ = go()
    extra = {request.m for request in ModelWorker.requests if not isinstance(request, Screen)} - set(MS)
    assert 1 <= len(extra) <= 5
    for m in extra:
        raced = [r for r in ModelWorker.requests if not isinstance(r, Screen) and r.m == m]
        assert [len(request.entrants) for request in raced] == [2]
    assert abs(full.plans[PROBLEM].intervals()[0].m_hi - 25) <= 4


def test_winners_within_noise_of_each_other_are_not_refined(install, go):
    install(Tiles(rows=(8, 64)))  # at M = 16, the next anchor after 1, they take equally long
    go(ms=(1, 16))
    assert {request.m for request in ModelWorker.requests if not isinstance(request, Screen)} == {1, 16}


def test_more_m_later_keeps_what_is_known(install, go, tmp_path):
    install(Tiles())
    go(ms=(1, 64), quick=True)
    before = {row.uuid for row in rows_of(tmp_path)}
    go(ms=MS, quick=True)
    rows = rows_of(tmp_path)
    assert before < {row.uuid for row in rows}
    keys = [(row.kernel, row.config, row.m) for row in rows if row.protocol == "screen"]
    assert len(keys) == len(set(keys))


def test_a_changed_kernel_is_measured_again(install, go, tmp_path, monkeypatch):
    install(Tiles())
    go()
    source = tmp_path / "tiles.cu"
    source.write_text("// changed")
    monkeypatch.setattr(Tiles, "source_files", lambda self: (source,))
    again, _ = go()
    assert again.measured > 0


def test_a_problem_that_nobody_can_run_has_no_winner(install, go):
    install(Tiles())
    odd = Problem(n=255, k=512)
    result, seen = go(problems=(odd, PROBLEM, PROBLEM))
    assert result.exit_code == 4 and result.without_plan == (odd,)
    started = [event for event in seen if isinstance(event, ev.ProblemStarted)]
    assert [event.problem for event in started] == [odd, PROBLEM]
    assert started[0].refused == ("tiles: N is odd",)


def test_candidates_that_all_fail_give_exit_code_4(install, go):
    install(Tiles(rows=(8,)))
    ModelWorker.script[len(MS)] = lambda request: iter([ModelWorker.row(request.entrant, 1, "screen", "wrong"), Done()])
    result, _ = go()
    assert result.exit_code == 4 and result.failures == {"wrong": 1}


def test_a_large_space_is_searched_within_its_budget(install, go, monkeypatch):
    install(Tiles(rows=tuple(range(8, 520, 8)), variants=8))  # 512 candidates
    ticks = iter(range(10**6))
    monkeypatch.setattr("nvfp4.tuner.search.time.monotonic", lambda: next(ticks) / 10)  # each look takes 0.1 s
    result, seen = go(budget_s=40.0)
    screened = {request.entrant for request in ModelWorker.requests if isinstance(request, Screen)}
    assert 20 < len(screened) < 512
    assert result.unexplored[PROBLEM] == 512 - len(screened)
    assert result.plans[PROBLEM] is not None
    assert any(isinstance(e, ev.Progress) and e.eta_s is not None and e.eta_s <= 40.0 for e in seen)


def test_time_that_one_problem_leaves_goes_to_those_that_were_cut_short(install, go, monkeypatch):
    install(Tiles(rows=tuple(range(8, 208, 8)), variants=8))  # 200 candidates, about 0.2 s each
    ticks = iter(range(10**6))
    monkeypatch.setattr("nvfp4.tuner.search.time.monotonic", lambda: next(ticks) / 10)
    other = Problem(n=257, k=512)  # nobody runs it: its share is left over
    result, seen = go(problems=(PROBLEM, other), quick=True, budget_s=50.0)
    finished = [e for e in seen if isinstance(e, ev.ProblemFinished) and e.problem == PROBLEM]
    assert len(finished) == 2 and finished[0].unexplored > finished[1].unexplored
    assert result.unexplored.get(PROBLEM, 0) == finished[1].unexplored
    screened = [request.entrant for request in ModelWorker.requests if isinstance(request, Screen)]
    assert len(screened) == len(set(screened)) == 200 - finished[1].unexplored


def test_of_a_large_space_four_hundred_are_chosen_once(install, go):
    install(Tiles(rows=tuple(range(8, 440, 8)), variants=8))  # 432
    result, _ = go(ms=(1, 4096), quick=True)
    screened = {request.entrant for request in ModelWorker.requests if isinstance(request, Screen)}
    assert len(screened) == 400 and result.unexplored == {PROBLEM: 32}
    assert result.plans[PROBLEM].intervals()[-1].expected_us < 1.02 * (360 / 4 + 4096 * 8 / 360)
    assert go(ms=(1, 4096), quick=True)[0].measured == 0


def test_of_a_large_space_what_is_foreseen_comes_first_and_hopeless_kernels_are_not_looked_into(
    install, go, monkeypatch
):
    class Foreseen(Tiles):
        def predicted_us(self, device, problem, config, m):
            return config.rows / 4 + m * 8 / config.rows + config.variant / 16

    sizes = tuple(range(8, 520, 8))
    install(Foreseen("tiles", rows=sizes, variants=4), Foreseen("slow", rows=sizes, variants=4))  # 512 together
    quick_us = model_us
    slow = lambda entrant, m: quick_us(entrant, m) * (20 if entrant.kernel == "slow" else 1)  # noqa: E731
    monkeypatch.setitem(globals(), "model_us", slow)
    ticks = iter(range(10**6))
    monkeypatch.setattr("nvfp4.tuner.search.time.monotonic", lambda: next(ticks) / 10)  # each look takes 0.1 s
    go(ms=(4096,), quick=True, budget_s=8.0)
    order = [request.entrant for request in ModelWorker.requests if isinstance(request, Screen)]
    assert {entrant.kernel for entrant in order[:2]} == {"slow", "tiles"}  # the defaults
    foreseen = [entrant for entrant in order[2:18] if entrant.kernel == "tiles"]
    texts = [Tile(rows=rows, variant=v).to_json() for rows in sizes for v in range(4)]
    texts.sort(key=lambda text: quick_us(Entrant(kernel="tiles", config=text), 4096))
    assert [entrant.config for entrant in foreseen] == texts[: len(foreseen)]
    assert len(foreseen) == 16 and not [entrant for entrant in order[2:18] if entrant.kernel == "slow"]


def test_a_small_space_is_measured_whole(install, go):
    install(Tiles(rows=tuple(range(8, 328, 8)), variants=10))  # 400
    go(quick=True)
    assert len({request.entrant for request in ModelWorker.requests if isinstance(request, Screen)}) == 400


def test_no_time_at_all_still_ends_well(install, go):
    install(Tiles())
    result, _ = go(budget_s=0.0)
    assert result.unexplored == {PROBLEM: 3} and result.exit_code == 4


def test_merged_rows_make_a_plan_without_time_to_measure(install, go, tmp_path):
    install(Tiles())
    first, _ = go()
    (tmp_path / "t.db").rename(tmp_path / "other.db")
    with Store.open(tmp_path / "t.db") as store:
        store.merge_from(tmp_path / "other.db")
    second, _ = go(budget_s=0.0)
    assert second.measured == 0 and second.exit_code == 0
    assert second.plans[PROBLEM].id == first.plans[PROBLEM].id
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        assert store.load_plan(fake_device(), PROBLEM).id == first.plans[PROBLEM].id


def test_winners_of_a_similar_shape_go_early(install, go):
    install(Tiles(rows=tuple(range(8, 520, 8))))
    go(ms=(4096,), quick=True)
    best = Tile(rows=360).to_json()
    del ModelWorker.requests[:]
    go(problems=(Problem(n=256, k=528),), ms=(4096,), quick=True)
    order = [request.entrant.config for request in ModelWorker.requests if isinstance(request, Screen)]
    assert order[0] == Tile(rows=8).to_json()  # the default
    assert best in order[1:6]


def test_a_crash_costs_one_candidate(install, go, tmp_path):
    install(Tiles())

    def die(request):
        yield ModelWorker.row(request.entrant, 1, "screen")
        last = Started(pid=1, kernel=request.entrant.kernel, config=request.entrant.config, m=4096, step="check")
        raise Died("crash", "the worker died: signal SIGSEGV", last)

    ModelWorker.script[len(MS) + 1] = die
    result, _ = go()
    crashed = [row for row in rows_of(tmp_path) if row.status == "crash"]
    assert len(crashed) == 1 and crashed[0].m == 4096
    assert "SIGSEGV while it was at: check, M = 4096" in crashed[0].detail
    loser = crashed[0].config
    assert all(interval.config != loser for interval in result.plans[PROBLEM].intervals())
    assert go()[0].measured == 0  # it is not tried again


def test_a_worker_that_somebody_kills_is_no_fault_of_its_candidate(install, go, tmp_path):
    install(Tiles())

    def killed(request):
        yield from ()
        raise Died("crash", "the worker died: signal SIGKILL", Started(pid=1, m=1, step="check"), killed=True)

    ModelWorker.script[len(MS)] = killed
    race = len(MS) + 1 + 3
    ModelWorker.script[race] = killed
    result, _ = go(quick=True)
    assert result.exit_code == 0 and result.failures == {}
    finals = [row.config for row in rows_of(tmp_path) if row.protocol == "final" and row.m == 1]
    assert len(finals) == len(set(finals)) > 1


def test_a_race_that_dies_is_run_again_without_its_culprit(install, go, tmp_path):
    install(Tiles(rows=(8, 16)))
    culprit = Tile(rows=16).to_json()

    def die(request):
        yield from ()
        raise Died("crash", "the worker died: signal SIGABRT", Started(pid=1, m=request.m, step="final"))

    def alone(request):
        if request.entrants[0].config == culprit:
            yield from die(request)
        yield ModelWorker.row(request.entrants[0], request.m, "screen")
        yield Done()

    races = len(MS) + 2  # the baseline's screens and two candidates'
    ModelWorker.script.update({races: die, races + 1: alone, races + 2: alone, races + 3: alone})
    result, _ = go(quick=True)
    rows = rows_of(tmp_path)
    assert [row.config for row in rows if row.status == "crash"] == [culprit]
    assert {row.m for row in rows if row.protocol == "final" and row.config == Tile(rows=8).to_json()} == set(MS)
    assert [interval.config for interval in result.plans[PROBLEM].intervals()] == [Tile(rows=8).to_json()]


def test_inputs_that_do_not_fit_leave_the_other_problems_alone(install, go):
    install(Tiles())
    ModelWorker.script[0] = lambda request: iter([Done(unprepared="MemoryError: no")])
    other = Problem(n=128, k=512)
    result, seen = go(problems=(PROBLEM, other))
    assert result.plans[PROBLEM] is None and result.plans[other] is not None
    assert "do not fit in memory for M up to" in result.notes[0] and "MemoryError" in result.notes[0]
    assert "need at least 0.0 GiB, and the device has 8.0 GiB" in result.notes[0]
    assert PROBLEM not in result.unexplored
    (finished,) = (event for event in seen if isinstance(event, ev.ProblemFinished) and event.problem == PROBLEM)
    assert finished.unprepared == result.notes[0] and finished.unexplored == 0


def test_inputs_larger_than_the_device_are_not_even_tried(install, go):
    install(Tiles())
    result, _ = go(ms=(1, 1 << 24))
    assert result.plans[PROBLEM] is None and result.exit_code == 4
    assert ModelWorker.requests == []
    need = 2 * (1 << 24) * (PROBLEM.n + PROBLEM.k) / 2**30
    assert f"need at least {need:.1f} GiB, and the device has 8.0 GiB; tune smaller M (--m)" in result.notes[0]


def test_ctrl_c_keeps_what_was_measured(install, go, tmp_path):
    install(Tiles())

    def stop(request):
        yield ModelWorker.row(request.entrant, 1, "screen")
        signal.raise_signal(signal.SIGINT)

    ModelWorker.script[len(MS) + 1] = stop
    with pytest.raises(KeyboardInterrupt) as caught:
        go()
    assert isinstance(caught.value, Interrupted)
    result = caught.value.result
    assert result.interrupted and result.exit_code == 130
    assert result.measured == len(rows_of(tmp_path)) == len(MS) * 2 + 1
    with Store.open(tmp_path / "t.db", readonly=True) as store:  # of what there is
        assert store.load_plan(fake_device(), PROBLEM).intervals()
    resumed, _ = go()
    assert resumed.exit_code == 0
    keys = [(row.kernel, row.config, row.m) for row in rows_of(tmp_path) if row.protocol == "screen"]
    assert len(keys) == len(set(keys))


def test_a_full_disk_stops_with_advice_and_keeps_the_rows(install, go, tmp_path, monkeypatch):
    install(Tiles())
    whole = Store.add
    count = 0

    def add(self, rows):
        nonlocal count
        count += 1
        if count > 5:
            raise DatabaseError("database t.db: database or disk is full; free some space", reason="full")
        return whole(self, rows)

    monkeypatch.setattr(Store, "add", add)
    with pytest.raises(DatabaseError, match="free some space"):
        go()
    assert len(rows_of(tmp_path)) == 5
    monkeypatch.undo()


def test_a_damaged_database_is_kept_and_a_fresh_one_started(install, go, tmp_path):
    install(Tiles())
    (tmp_path / "t.db").write_bytes(b'{"a":' * 1000)
    result, seen = go()
    assert result.exit_code == 0
    kept = list(tmp_path.glob("t.db.corrupt-*"))
    assert len(kept) == 1 and kept[0].read_bytes().startswith(b'{"a":')
    assert str(kept[0]) in result.notes[0]
    assert any(isinstance(event, ev.Note) for event in seen)


def test_a_newer_database_is_left_alone(install, go, tmp_path):
    import sqlite3

    install(Tiles())
    go(ms=(1,))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (tmp_path / "t.db").read_bytes()
    with pytest.raises(DatabaseError, match="update nvfp4"):
        go()
    assert (tmp_path / "t.db").read_bytes() == before


def test_a_read_only_database_is_refused_before_anything_is_measured(install, go, tmp_path, monkeypatch):
    install(Tiles())
    go(ms=(1,))
    del ModelWorker.requests[:]
    monkeypatch.setattr("nvfp4.cache.files.os.access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(DatabaseError, match="write permission"):
        go()
    assert ModelWorker.requests == []


def test_two_tuners_at_once(install, go, tmp_path):
    install(Tiles())
    with Store.open(tmp_path / "t.db"), pytest.raises(DatabaseError, match=r"is writing to it.*wait until it is done"):
        go()
    assert go()[0].exit_code == 0  # the lock is free again


def test_a_kernel_can_be_chosen_and_plans_still_weigh_all_rows(install, go):
    install(Tiles(), Tiles("bad", rows=(1,)))
    go()
    result, _ = go(kernels=("bad",))
    assert {interval.kernel for interval in result.plans[PROBLEM].intervals()} == {"tiles"}
    with pytest.raises(InvalidInput, match="unknown kernels; got nobody"):
        go(kernels=("nobody",))


@pytest.mark.parametrize("kwargs", [{"problems": ()}, {"ms": ()}, {"ms": (0, 1)}])
def test_nothing_to_tune_is_an_error(install, go, kwargs):
    install(Tiles())
    with pytest.raises(InvalidInput, match="nothing to tune"):
        go(**kwargs)


def test_kernels_that_are_not_deterministic_are_tried_only_when_asked(install, go):
    class Atomic(Tiles):
        deterministic = False

    install(Tiles(), Atomic("atomic", rows=(64,)))
    assert {i.kernel for i in go()[0].plans[PROBLEM].intervals()} == {"tiles"}
    assert not any("atomic" in str(request) for request in ModelWorker.requests)
    go(allow_nondeterministic=True)
    assert any("atomic" in str(request) for request in ModelWorker.requests)


def test_events_are_json(install, go):
    import msgspec

    install(Tiles())
    _, seen = go()
    text = [msgspec.json.encode(event) for event in seen]
    assert [msgspec.json.decode(line, type=ev.Event) for line in text] == seen
    assert msgspec.json.decode(text[0])["type"] == "tuning_started"
