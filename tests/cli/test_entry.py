"""The command as a process: Ctrl-C while it starts, and output that cannot be written."""

import os
import signal
import subprocess
import sys
import time

import pytest
from nvfp4._interrupt import is_command

COMMAND = (sys.executable, "-m", "nvfp4")


def test_ctrl_c_while_torch_is_imported_is_one_line_and_130():
    process = subprocess.Popen([*COMMAND, "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while "libtorch_cpu" not in maps(process.pid):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def maps(pid):
    with open(f"/proc/{pid}/maps") as file:
        return file.read()


def test_ctrl_c_in_a_program_that_imports_nvfp4_stays_its_own():
    code = "import signal, nvfp4; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize(
    ("argv", "orig_argv", "answer"),
    [
        (["-m", "env"], ["python", "-X", "dev", "-m", "nvfp4", "env"], True),
        (["/bin/nvfp4", "env"], ["python", "/bin/nvfp4", "env"], True),
        (["/bin/nvfp4", "env"], ["python", "-c", "from multiprocessing.spawn import spawn_main"], False),
        (["-m"], ["python", "-m", "server", "-m", "nvfp4"], False),
        (["server.py"], ["python", "server.py", "nvfp4"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_ends_at_once(argv, orig_argv, answer):
    assert is_command(argv, orig_argv) is answer


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("tune", "--list-models"), ("tune", "--help"), ("env", "--json")])
def test_a_full_disk_behind_stdout_is_a_message(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("full", [True, False])
def test_a_tuning_whose_events_nobody_takes_ends_and_keeps_its_database(tmp_path, full):
    path = tmp_path / "t.db"
    command = [*COMMAND, "tune", "--shape", "40,64", "--m", "1", "--device", "cpu", "--db", str(path), "--json"]
    if full:
        with open("/dev/full", "w") as stdout:
            done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    else:
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
    assert done.returncode == 1
    assert done.stderr == ("error: the output could not be written: No space left on device\n" if full else "")
    assert path.exists()
