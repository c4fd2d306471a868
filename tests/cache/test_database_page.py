"""The page about the database: its queries run, and it names every table, view, status and reason."""

import re
from pathlib import Path

import pytest
from nvfp4.cache.files import _DO
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import PROTOCOLS, STATUSES
from nvfp4.cache.store import Store
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Problem

PAGE = (Path(__file__).parents[2] / "docs" / "database.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def answers(db, sql, fake):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    rows = [
        fake.measurement(fake.baseline, 1, 20.0, protocol="final"),
        fake.measurement(a, 1, 8.0, protocol="final"),
        fake.measurement(b, 1, 10.0, protocol="final"),
        fake.measurement(b, 64, status="timeout", detail="no answer in 10 s"),
    ]
    plan = make_plan(fake.device, fake.problem, rows, kernels={"a": a, "b": b}, environment=fake.environment)
    with Store.open(db) as store:
        store.add(rows)
        store.save_plan(plan)
    return [sql(query) for query in QUERIES]


def test_the_queries_of_the_page_run(answers):
    assert answers == [
        [("Fake 9000", "gemm", 4096, 2048, "bfloat16", 0, 0, 1, None, "a", 8.0, 25.0)],
        [(4096, 2048, "bfloat16", 1, "a", 8.0, 2.5), (4096, 2048, "bfloat16", 1, "b", 10.0, 2.0)],
        [("b", "timeout", 1, 1, "no answer in 10 s")],
    ]


def test_the_lines_that_merge_make_plans_of_the_rows_of_both_files(fake, tmp_path, monkeypatch, capsys):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    monkeypatch.setattr(registry, "_all", lambda: {"a": a, "b": b})
    monkeypatch.chdir(tmp_path)
    moe = Problem(op="moe", n=64, k=128, experts=4, top_k=2, activation="swiglu")
    present = {"environment": environment()}
    with Store.open(tmp_path / "mine.db") as store:
        rows = [fake.measurement(a, 1, 8.0, **present)]
        store.add(rows)
        store.save_plan(make_plan(fake.device, fake.problem, rows, kernels={"a": a}, environment=environment()))
    with Store.open(tmp_path / "other.db") as store:
        store.add([fake.measurement(b, 1, 5.0, **present), fake.measurement(b, 1, problem=moe, **present)])
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    for said in ("2 rows are new\n", "0 rows are new\n"):
        exec(code, {})
        assert capsys.readouterr().out == said
        with Store.open(tmp_path / "mine.db", readonly=True) as store:
            (plan,) = store.plans()
            assert (plan.problem, [one.kernel for one in plan.intervals()]) == (fake.problem, ["b"])


def test_the_page_names_everything(db, sql):
    Store.open(db).close()
    names = sql("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT GLOB '*sqlite*'")
    for name in (*(row[0] for row in names), *STATUSES, *PROTOCOLS, *_DO):
        assert f"`{name}`" in PAGE
