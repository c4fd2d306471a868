"""`tune` with a worker that answers from a formula: what it measures, in which order, and what it decides."""

import pytest
from nvfp4.cache.store import Store
from nvfp4.errors import DatabaseError, InvalidInput
from nvfp4.kernels.problem import YES, Problem, Verdict
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner import events as ev
from nvfp4.tuner.messages import Done, Entrant, Screen

from . import model_worker
from .model_worker import MS, PROBLEM, ModelWorker, Tile, Tiles, rows_of


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


def races():
    return [request for request in ModelWorker.requests if not isinstance(request, Screen)]


def test_crossovers_beyond_the_m_of_a_run_are_left_to_others(install, go):
    """x is made for the M of a run: at a larger one a right kernel would be wrong."""
    install(Tiles(rows=(8, 100)))
    go(quick=True)
    del ModelWorker.requests[:]
    go(ms=(1, 2))
    assert {request.m for request in races()} == {2}


def test_two_winners_race_only_where_one_of_them_is_the_best(install, go, monkeypatch):
    """All are measured at 64 and 512; where the larger tiles begin to serve, it is not for their time."""
    least, times = {8: 1, 64: 129, 512: 193}, {8: 1.25, 64: 1.15, 512: 1.0}

    class Limited(Tiles):
        def is_valid(self, device, problem, config, m):
            return YES if m >= least[config.rows] else Verdict.no("too few tokens")

    plain = model_worker.model_us
    parse = Limited().parse_config
    monkeypatch.setattr(
        model_worker,
        "model_us",
        lambda e, m: plain(e, m) if e.kernel != "tiles" else (9 + m) * times[parse(None, PROBLEM, e.config).rows],
    )
    install(Limited(rows=tuple(least)))
    result, _ = go(ms=(64, 512))
    assert [(i.m_lo, i.m_hi, i.config) for i in result.plans[PROBLEM].intervals()] == [
        (1, 128, Tile(rows=8).to_json()),
        (129, 192, Tile(rows=64).to_json()),
        (193, None, Tile(rows=512).to_json()),
    ]
    for request in races():
        if request.m > 192 and request.m not in (64, 512):
            assert Entrant(kernel="tiles", config=Tile(rows=512).to_json()) in request.entrants


def test_what_failed_at_a_crossover_is_not_planned_there(install, go, monkeypatch):
    install(Tiles(rows=(8, 100)))
    row = ModelWorker.row
    monkeypatch.setattr(
        ModelWorker,
        "row",
        staticmethod(lambda entrant, m, protocol: row(entrant, m, protocol, "launch_error" if m == 40 else "ok")),
    )
    result, _ = go()
    assert [request.m for request in races()].count(40) == 1
    assert not [i for i in result.plans[PROBLEM].intervals() if i.m_lo <= 40 <= (i.m_hi or 40)]


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
    assert result.notes == ["gemm 255x512 bfloat16: nothing can be measured (tiles: N is odd)"]


def test_a_kernel_that_cannot_run_a_problem_leaves_its_plan(install, go, tmp_path, monkeypatch):
    able, unable = Tiles(), Tiles(name="unable")
    monkeypatch.setattr(unable, "supports", lambda device, problem: Verdict.no("never"))
    install(able, unable)
    first, _ = go()
    again, seen = go(kernels=["unable"])
    assert again.plans == first.plans and again.exit_code == 0 and again.measured == 0
    words = "gemm 256x512 bfloat16: nothing can be measured (unable: never); its plan stays"
    assert again.notes == [words] and [event.text for event in seen if isinstance(event, ev.Note)] == [words]


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
    quick_us = model_worker.model_us
    slow = lambda entrant, m: quick_us(entrant, m) * (20 if entrant.kernel == "slow" else 1)  # noqa: E731
    monkeypatch.setattr(model_worker, "model_us", slow)
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
