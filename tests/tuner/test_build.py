import os

import pytest
from nvfp4.kernels.build import BuildPool, _try, describe_exit
from nvfp4.kernels.problem import Problem
from nvfp4.testing.fakes import FakeConfig, Good, Trouble, TroubleConfig, fake_device

DEVICE, PROBLEM = fake_device(), Problem(n=40, k=64)


def wait(pool, what):
    return pool.wait(DEVICE, PROBLEM, Trouble(), TroubleConfig(what=what))


def test_what_needs_no_compiler_starts_no_process():
    pool = BuildPool(1)
    pool.submit(DEVICE, PROBLEM, Good(), FakeConfig(delay_us=0))
    assert pool.wait(DEVICE, PROBLEM, Good(), FakeConfig(delay_us=0)) == ""
    assert pool._pool is None
    pool.close()


def test_messages_of_the_compiler_come_back_and_others_go_on(fakes):
    pool = BuildPool(1)
    try:
        for what in ("zeros", "build_error"):
            pool.submit(DEVICE, PROBLEM, Trouble(), TroubleConfig(what=what))
        assert wait(pool, "build_error") == "BuildError: fake.cu(7): error: expected a ';'"
        assert wait(pool, "zeros") == ""
        assert wait(pool, "build_error").startswith("BuildError")  # asked twice, built once
        assert "not in the kernel's space" in wait(pool, "nothing known")
    finally:
        pool.close()


def test_a_message_with_bytes_that_are_no_text_can_be_stored_and_printed(fakes, monkeypatch):
    def build(self, device, problem, config):
        raise OSError(b"no such file: /caf\xe9/x.cubin".decode(errors="surrogateescape"))

    monkeypatch.setattr(Good, "build", build)
    error = _try("fake_good", DEVICE, PROBLEM, FakeConfig(delay_us=0).to_json())
    assert error == r"OSError: no such file: /caf\udce9/x.cubin" and error.encode()


@pytest.mark.slow
def test_a_compiler_that_hangs_or_dies_is_an_error_of_its_candidate(fakes, monkeypatch, gone):
    monkeypatch.setenv("NVFP4_FAKE_TROUBLES", "hang,segfault,zeros")
    monkeypatch.setenv("NVFP4_FAKE_IN_BUILD", "1")
    pool = BuildPool(1)
    try:
        assert wait(pool, "segfault") == "the compiler's process died (signal SIGSEGV)"
        with monkeypatch.context() as patch:  # for the one that never ends
            patch.setattr(pool, "_timeout_s", 2.0)
            assert wait(pool, "hang") == "the build took longer than 2 s"
        assert wait(pool, "zeros") == ""
        pids = list(pool._pool._pool_manager.worker_manager.workers)
    finally:
        pool.close()
    assert pids and os.getpid() not in pids
    assert gone(pids)


def test_exit_codes_in_words():
    assert describe_exit(-11) == "signal SIGSEGV"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(None) == "exit code None"
