"""The page about the database: its queries run, and it names every table, view, status and reason."""

import re
from pathlib import Path

import pytest
from nvfp4.cache.files import _DO
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import PROTOCOLS, STATUSES
from nvfp4.cache.store import Store

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
        [("Fake 9000", 4096, 2048, 1, None, "a", 8.0, 25.0)],
        [(4096, 2048, 1, "a", 8.0, 2.5), (4096, 2048, 1, "b", 10.0, 2.0)],
        [("b", "timeout", 1, 1, "no answer in 10 s")],
    ]


def test_the_page_names_everything(db, sql):
    Store.open(db).close()
    names = sql("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT GLOB '*sqlite*'")
    for name in (*(row[0] for row in names), *STATUSES, *PROTOCOLS, *_DO):
        assert f"`{name}`" in PAGE
