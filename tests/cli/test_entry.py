"""The command as a process: output that cannot be written, Ctrl-C and SIGTERM."""

import os
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-m", "nvfp4")


def test_importing_the_package_leaves_ctrl_c_alone():
    code = "import signal, nvfp4; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_commands_are_imported_is_no_traceback(number, code):
    script = f"""
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "nvfp4.cli.app":
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Finder())
from nvfp4.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "interrupted\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("tune", "--help"), ("env", "--json")])
def test_a_full_disk_behind_stdout_is_a_message(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("full", [True, False])
def test_a_tuning_whose_events_nobody_takes_ends_and_keeps_its_database(tmp_path, full):
    path = tmp_path / "t.db"
    command = [*COMMAND, "tune", "--shape", "40,64", "--m", "1", "--device", "cpu", "--db", str(path), "--json"]
    command += ["--quick", "--kernel", "cpu_blocked"]
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
