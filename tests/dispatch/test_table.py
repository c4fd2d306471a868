"""Binding: which launcher a call reaches, what is said about it, and threads."""

import threading
import time
import warnings

import nvfp4
import pytest
import torch
from nvfp4.dispatch import table
from nvfp4.kernels.problem import Problem

PROBLEM = Problem(n=32, k=64)
quiet = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def call(c, m):
    return nvfp4.gemm(c.x[:1].expand(m, c.k), c.weight, c.scale, c.gs)


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (1, ("a", 16)),
        (4, ("a", 16)),
        (5, ("b", 32)),
        (64, ("b", 32)),
        (65, ("a", 64)),
        (128, ("a", 64)),
        (129, ("b", 16)),
        (100_000, ("b", 16)),
    ],
)
def test_the_interval_that_contains_m_decides(install, fake, set_plan, case, m, expected):
    a, b = fake("a"), fake("b")
    install(a, b)
    set_plan(PROBLEM, checkpoint=[(1, 4, "a", 16), (5, 64, "b", 32), (65, 128, "a", 64), (129, None, "b", 16)])
    call(case(), m)
    assert a.launches + b.launches == [(*expected, m)]


def test_a_tuned_problem_warns_about_nothing(install, fake, set_plan, case):
    install(fake("a"))
    set_plan(PROBLEM, checkpoint=[(1, None, "a", 16)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(case(), 3)


def test_equal_candidates_are_built_once(install, fake, set_plan, case):
    a = fake("a")
    install(a)
    set_plan(PROBLEM, checkpoint=[(1, 4, "a", 16), (5, 8, "a", 32), (9, None, "a", 16)])
    for m in (1, 6, 100):
        call(case(), m)
    assert sorted(config.tile for config in a.builds) == [16, 32]


def test_dtypes_and_shapes_are_problems_of_their_own(exact, case, set_plan):
    set_plan(Problem(n=32, k=64, dtype="float16"), checkpoint=[(1, None, "exact", 64)])
    with pytest.warns(nvfp4.UntunedWarning):
        call(case(), 2)
    call(case(dtype=torch.float16), 2)
    assert [tile for _, tile, _ in exact.launches] == [16, 64]


def test_untuned_is_said_once_per_problem_and_names_database_and_command(exact, case, monkeypatch):
    monkeypatch.setenv("NVFP4_DB", "/not/there.db")  # a wrong path is no error, but the warning shows it
    c, other = case(), case(n=48)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for m in (1, 2, 300):
            call(c, m)
        call(other, 1)
        table.clear()
        call(c, 1)
    told = [str(w.message) for w in seen if issubclass(w.category, nvfp4.UntunedWarning)]
    assert len(told) == 2
    assert "nvfp4 tune --shape 32,64" in told[0] and "nvfp4 tune --shape 48,64" in told[1]
    assert all("(database: /not/there.db)" in words for words in told)


def test_a_warning_points_to_the_line_of_the_user(exact, case):
    c = case()
    with pytest.warns(nvfp4.UntunedWarning) as seen:
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    assert [w.filename for w in seen if w.category is nvfp4.UntunedWarning] == [__file__]


def test_layout_that_was_not_measured_counts_as_untuned(install, fake, set_plan, case, mirrored):
    install(fake("a"), fake("m", layout="mirrored"))
    set_plan(PROBLEM, checkpoint=[(1, None, "a", 64)])
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs, layout="mirrored")
    with pytest.warns(nvfp4.UntunedWarning, match="mirrored"):
        assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)


def test_each_layout_follows_its_own_intervals(install, fake, set_plan, case, mirrored):
    a, m = fake("a"), fake("m", layout="mirrored")
    install(a, m)
    set_plan(PROBLEM, checkpoint=[(1, 2, "a", 16), (3, None, "a", 64)], mirrored=[(1, 4, "m", 32), (5, None, "m", 16)])
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs, layout="mirrored")
    call(c, 3)
    nvfp4.gemm(c.x, packed)
    assert a.launches == [("a", 64, 3)] and m.launches == [("m", 32, 3)]


def test_foreign_entry_is_ignored_with_one_warning(install, fake, set_plan, case):
    a = fake("a")
    install(a)
    set_plan(PROBLEM, checkpoint=[(1, 4, "a", 999), (5, None, "gone", 16)])
    c = case()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for m in (1, 9):
            call(c, m)
    assert [str(w.message)[:31] for w in seen] == ["2 of the tuned entries of gemm "]
    assert a.launches == [("a", 16, 1), ("a", 16, 9)]


def test_kernel_that_does_not_compile_gives_way(install, fake, no_plan, case):
    good = fake("good")
    install(fake("bad", made_for=((1, 1),), build_error="no compiler"), good)
    c = case()
    with (
        pytest.warns(nvfp4.UntunedWarning),
        pytest.warns(RuntimeWarning, match="kernel bad cannot be built: no compiler"),
    ):
        call(c, 1)
    assert good.launches == [("good", 16, 1)]


def test_nothing_can_run(install, fake, no_plan, case):
    install(fake("a", refuses="needs sm_90"), fake("b", build_error="no compiler"))
    with pytest.raises(nvfp4.Unsupported, match=r"(?s)a: needs sm_90.*b: cannot be built: no compiler"):
        call(case(), 1)


@quiet
def test_threads_that_call_first_together(install, fake, no_plan, case):
    slow = fake("slow", default_tile=lambda m: time.sleep(0.002) or 16)
    install(slow)
    c = case()
    start = threading.Barrier(8)
    results, errors = [], []

    def work():
        try:
            start.wait()
            results.append(nvfp4.gemm(c.x, c.weight, c.scale, c.gs))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(results) == 8
    assert all(torch.equal(result, c.ref) for result in results)
    assert len(slow.builds) == 1


@quiet
@pytest.mark.parametrize(
    "content", [b'{"a":', b"\xff\xfe", b"", "directory", b"SQLite format 3\x00" + b"\x00" * 200], ids=repr
)
def test_damaged_database_never_stops_a_call(install, fake, case, tmp_path, monkeypatch, content):
    path = tmp_path / "tuning.db"
    if content == "directory":
        path.mkdir()
    else:
        path.write_bytes(content)
    monkeypatch.setenv("NVFP4_DB", str(path))
    install(fake("a"))
    c = case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
    if content != "directory":
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.db"]


def test_unbound_problem_under_capture_names_warmup(exact, monkeypatch):
    monkeypatch.setattr(table, "_is_capturing", lambda device: True)
    with pytest.raises(nvfp4.NotWarm, match=r"nvfp4\.warmup"):
        table.bind(torch.device("cpu"), PROBLEM, "checkpoint", None)
    assert exact.builds == []


@quiet
def test_bound_problem_works_under_capture(exact, case, monkeypatch):
    c = case()
    call(c, 1)
    monkeypatch.setattr(table, "_is_capturing", lambda device: True)
    for m in (1, 50, 4000):
        call(c, m)
    new_key = nvfp4.gemm(c.x, c.weight, c.scale.view(torch.float8_e4m3fn), c.gs.view(()))
    assert torch.equal(new_key, c.ref)


@quiet
def test_loading_runs_every_launcher_once_at_an_m_it_serves(install, fake, set_plan):
    a = fake("a")
    install(a)
    rows = [
        (1, 4, "a", 16),
        (5, 200_000, "a", 32),
        (200_001, None, "a", 64),
    ]
    set_plan(PROBLEM, checkpoint=rows)
    loaded = []
    table.bind(torch.device("cpu"), PROBLEM, "checkpoint", lambda launcher, m: loaded.append(m))
    assert loaded == [1, 5, 200_001]
    table.clear()
    set_plan(Problem(n=32, k=1 << 20), checkpoint=rows)
    loaded.clear()
    table.bind(torch.device("cpu"), Problem(n=32, k=1 << 20), "checkpoint", lambda launcher, m: loaded.append(m))
    assert loaded == [1, 5, 24]  # the largest anchor within the memory that loading may take
