"""Runs commands as a user would; a small database tuned with fake kernels."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from nvfp4.cache.store import Store
from nvfp4.cli.app import app
from nvfp4.kernels import build, registry
from nvfp4.testing.fakes import fake_device

from .rows import row

WIDTHS = (40, 80, 120)


def invoke(*args, columns=120, **environment):
    """(exit code, stdout, stderr) of one command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)} | environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture(scope="session")
def run():
    return invoke


@contextmanager
def installed_fakes():
    """The fake kernels are in the registry of this process and of its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNELS", "nvfp4.testing.fakes")
        patch.setenv("NVFP4_FAKE_TROUBLES", "zeros")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(build, "available_cores", lambda: 1)  # every process that compiles imports torch
        registry.refresh()
        yield
    registry.refresh()


@pytest.fixture
def fakes():
    with installed_fakes():
        yield


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """A database with one problem, tuned by the command, and what the command said."""
    path = tmp_path_factory.mktemp("tuned") / "t.db"
    arguments = ("tune", "--shape", "40,64", "--m", "1,8", "--device", "cpu", "--quick", "--db", path)
    arguments += ("--kernel", "fake_good", "--kernel", "fake_trouble")
    with installed_fakes():
        said = invoke(*arguments)
    return SimpleNamespace(path=path, said=said, arguments=arguments)


@pytest.fixture(params=WIDTHS)
def columns(request):
    return request.param


@pytest.fixture(autouse=True)
def no_database_of_the_user(tmp_path, monkeypatch):
    if "NVFP4_DB" not in os.environ:
        monkeypatch.setenv("NVFP4_DB", str(tmp_path / "none.db"))


@pytest.fixture
def two_devices(tmp_path):
    path = tmp_path / "two.db"
    with Store.open(path) as store:
        store.add([row(fake_device("Fake 3000")), row(fake_device("Fake 4000"))])
    return path
