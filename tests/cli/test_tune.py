"""`nvfp4 tune` as a command: what it says, where, and its exit codes."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from nvfp4.cache.store import Store
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.events import TuningFinished
from nvfp4.tuner.inputs import least_bytes
from nvfp4.tuner.run import Interrupted, Result

pytestmark = pytest.mark.usefixtures("fakes")

TINY = ("tune", "--shape", "40,64", "--m", "1", "--device", "cpu", "--quick")


def test_a_tuning_says_what_it_does_on_stderr_and_what_came_out_on_stdout(tuned):
    assert tuned.said.code == 0
    assert f"database  {tuned.path}" in tuned.said.err
    assert "[1/1] gemm 40x64 bf16: 7 candidates" in tuned.said.err
    assert "failed: 1 wrong" in tuned.said.err
    assert "fake_good 1+" in tuned.said.out
    assert "measurements in" in tuned.said.out


def test_a_second_run_measures_nothing_and_json_is_one_event_a_line(tuned, run):
    again = run(*tuned.arguments, "--json")
    assert again.code == 0
    events = [json.loads(line) for line in again.out.splitlines()]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "tuning_started" and kinds[-1] == "tuning_finished"
    assert events[-1]["measured"] == 0
    (finished,) = (event for event in events if event["type"] == "problem_finished")
    assert finished["plan"]["layout"] == "checkpoint"
    assert again.err == ""


def test_without_a_winner_it_ends_with_4_and_a_damaged_database_is_moved_aside(run, tmp_path):
    path = tmp_path / "t.db"
    path.write_bytes(b"not a database" * 100)
    done = run(*TINY, "--kernel", "fake_trouble", "--db", path)
    assert done.code == 4
    assert "1 problem has no winner\n`nvfp4 inspect SHAPE --kernels` and `--why KERNEL` say why\n" in done.out
    (kept,) = tmp_path.glob("t.db.corrupt-*")
    assert str(kept) in done.err
    assert "no winner (1 wrong)" in done.err


def test_a_budget_that_leaves_no_time_is_told_from_kernels_that_fail(run, tmp_path):
    arguments = (*TINY, "--kernel", "fake_good", "--db", tmp_path / "t.db")
    done = run(*arguments, "--budget", "0.001s")
    assert done.code == 4
    assert "no plan yet (not finished): 6 candidates not tried" in done.err
    assert "1 problem has no plan yet (not finished)\n6 candidates were not tried for lack of time" in done.out
    assert "say why" not in done.out and "no winner" not in done.out + done.err


def test_a_kernel_that_cannot_run_a_problem_leaves_its_plan(run, tuned):
    done = run(*tuned.arguments[:-4], "--kernel", "marlin", "--db", tuned.path)
    assert done.code == 0
    assert "note: gemm 40x64 bfloat16: nothing can be measured (marlin: " in done.err and "; its plan stays" in done.err
    assert "fake_good 1+" in done.out and "no winner" not in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name what to tune"),
        (("--shape", "40"), "N,K such as 4096,14336"),
        (("--shape", "40,63"), "multiple of 16"),
        (("--model", "no such model"), "no shipped model has this name"),
        (("--config", "no/such/folder"), "no/such/folder"),
        (("--shape", "40,64", "--m", "0"), "values of M"),
        (("--shape", "40,64", "--tp", "0"), "--tp"),
        (("--shape", "40,64", "--tp", "2"), "--tp divides the layers of --model, --config and --checkpoint; got none"),
        (("--shape", "40,64", "--fused"), "--fused is for --checkpoint; got none; leave it out"),
        (("--moe", "experts=8,top_k=2,hidden=64,inter=32", "--fused"), "--fused is for --checkpoint"),
        (("--grouped", "experts=8,n=64,k=32", "--fused"), "--fused is for --checkpoint"),
        (("--model", "mixtral", "--ep", "-1"), "--ep; got -1; expected at least 1"),
        (("--model", "mixtral", "--ep", "9"), "expert parallel size; got 9; expected 1 to 8, the number of experts"),
        (("--model", "mixtral", "--tp", "4", "--ep", "2"), "got --tp 4 --ep 2; expected a multiple of 4 for --ep"),
        (("--model", "llama-3.1-8b", "--ep", "2"), "--ep divides the routed experts of"),
        (("--moe", "experts=8,top_k=2,hidden=64,inter=32", "--ep", "2"), "--moe and --grouped name the part of one"),
        (("--shape", "40,64", "--budget", "soon"), "not a duration"),
        (("--shape", "40,64", "--budget", "0s"), "not a duration"),
        (("--shape", "40,64", "--budget", "\u0669s"), "not a duration"),
        (("--shape", "40,64", "--device", "mps"), "neither cpu nor cuda"),
        (("--shape", "40,64", "--device", "cuda:9999999999"), "neither cpu nor cuda"),
        (("--shape", "40,64", "--device", "cuda:٣"), "neither cpu nor cuda"),
        (("--shape", "40,64", "--kernel", "nobody", "--device", "cpu"), "unknown kernels"),
        (("--shape", "40,64", "--dtype", "float32"), "bfloat16"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_code_2(run, arguments, words):
    done = run("tune", *arguments)
    assert done.code == 2
    assert words in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err and done.out == ""


def test_a_device_that_is_not_there_is_code_3(run, tmp_path):
    absent = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    done = run("tune", "--shape", "40,64", "--device", absent, "--db", tmp_path / "t.db")
    assert done.code == 3
    assert done.err.splitlines()[-1].startswith("error: no ")


def test_a_database_in_use_is_code_1_and_names_who_has_it(run, tmp_path):
    with Store.open(tmp_path / "t.db"):
        done = run(*TINY, "--db", tmp_path / "t.db")
    assert done.code == 1
    assert f"process {os.getpid()}" in done.err
    assert done.err.count("\n") == 1


def test_inputs_larger_than_memory_say_how_much_and_what_to_do(run, tmp_path):
    huge = ("--shape", f"40,{1 << 24}", "--m", 1 << 20)
    done = run("tune", *huge, "--device", "cpu", "--kernel", "fake_good", "--db", tmp_path / "t.db")
    assert done.code == 4
    problem = Problem(n=40, k=1 << 24)
    assert least_bytes(problem, (1 << 20,)) > 2 * (1 << 20) * problem.k
    said = " ".join((done.out + done.err).split())
    assert (
        f"need at least {least_bytes(problem, (1 << 20,)) / 2**30:,.1f} GiB" in said and "tune smaller M (--m)" in said
    )
    assert "nothing can be measured" not in said and "lack of time" not in said and "say why" not in said


def test_an_interrupt_before_any_result_prints_no_legend(run, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise Interrupted(Result(interrupted=True))

    monkeypatch.setattr("nvfp4.cli.tune.run_tuning", stop)
    done = run(*TINY, "--db", tmp_path / "t.db")
    assert (done.code, done.out) == (130, "")
    assert done.err == "interrupted: 0 measurements are saved; the same command goes on\n"

    def stop_later(*args, events, **kwargs):
        events(TuningFinished(measured=0, without_plan=(), unexplored=0, interrupted=True, seconds=2.0))
        stop()

    monkeypatch.setattr("nvfp4.cli.tune.run_tuning", stop_later)
    done = run(*TINY, "--db", tmp_path / "t.db")
    assert (done.code, done.out) == (130, "0 measurements in 2 s\n")


def test_sigterm_ends_a_command_as_ctrl_c_does_with_its_own_code(run, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not disturb what is put away
            raise Interrupted(Result(interrupted=True, measured=3)) from error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("nvfp4.cli.tune.run_tuning", stop)
    done = run(*TINY, "--db", tmp_path / "t.db")
    assert (done.code, done.out) == (143, "")
    assert done.err == "interrupted: 3 measurements are saved; the same command goes on\n"
    monkeypatch.setattr("nvfp4.cli.inspect.parse_problem", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
    done = run("inspect", "40x64")
    assert (done.code, done.out, done.err) == (143, "", "interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_models_are_listed(run):
    done = run("tune", "--list-models")
    assert done.code == 0 and "Llama-3.1-8B" in done.out.splitlines()


def test_what_is_left_out_of_a_model_is_one_line(run, tmp_path):
    with Store.open(tmp_path / "t.db"):  # so that it ends before it measures
        done = run("tune", "--model", "gpt-oss-20b", "--tp", "8", "--device", "cpu", "--db", tmp_path / "t.db")
    first = done.err.splitlines()[0]
    assert first.startswith("warning: ") and "its experts are left out: the inner size cannot be divided" in first


@pytest.mark.parametrize(
    ("name", "said"),
    [("8x7b", ["--model 8x7b: Mixtral-8x7B"]), ("meta-llama/Llama-3.1-8b", []), ("llama-3.1-8b", [])],
)
def test_the_model_that_a_part_of_a_name_means_is_said(run, tmp_path, name, said):
    with Store.open(tmp_path / "t.db"):  # so that it ends before it measures
        done = run("tune", "--model", name, "--device", "cpu", "--db", tmp_path / "t.db")
    assert done.err.splitlines()[:-1] == said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_what_was_measured_and_has_its_own_code(tmp_path, number, code, descendants, gone):
    path = tmp_path / "t.db"
    command = [
        sys.executable,
        "-m",
        "nvfp4",
        "tune",
        "--shape",
        "40,64",
        "--device",
        "cpu",
        "--db",
        str(path),
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if json.loads(line)["type"] == "measured":
            children = descendants(process.pid)
            process.send_signal(number)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert children and gone(children)
    assert "leaked" not in err and "Traceback" not in err
    with Store.open(path, readonly=True) as store:
        saved = len(list(store.all_measurements()))
    assert saved >= 1
    assert err.splitlines()[-1] == f"interrupted: {saved} measurements are saved; the same command goes on"
