import nvfp4.tuner.run as run_module
import pytest
from nvfp4.kernels import build, registry
from nvfp4.tuner.messages import Pace, Screen
from nvfp4.tuner.run import tune
from nvfp4.tuner.worker import Worker

from .model_worker import MS, PROBLEM, ModelWorker


class PatientWorker(Worker):
    """Waits two seconds for what hangs for ever, and for all else longer than the slowest machine takes."""

    def run(self, request):
        hangs = isinstance(request, Screen) and '"hang"' in request.entrant.config
        self._hang_s = 2.0 if hangs else 240.0
        return super().run(request)


@pytest.fixture(scope="session")
def patient_worker():
    return PatientWorker


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch):
    """Every process that compiles imports torch: one is enough for the little that is compiled here."""
    monkeypatch.setattr(build, "available_cores", lambda: 1)


@pytest.fixture
def fakes(monkeypatch):
    """The fake kernels are in the registry of this process and of its children."""
    monkeypatch.setenv("NVFP4_KERNELS", "nvfp4.testing.fakes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()


@pytest.fixture(scope="session")
def pace():
    return Pace(screen_us=200.0, rounds=9, sustain_us=200.0, idle_us=100.0)


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
