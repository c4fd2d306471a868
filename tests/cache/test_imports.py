"""What runs online loads neither the tuner's libraries nor a compiler, and makes no CUDA context."""

import subprocess
import sys

CODE = """
import sys
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.lookup import find_plan
from nvfp4.cache.plan import make_plan
from nvfp4.kernels.problem import Device, Problem

find_plan(Device(kind="cpu", name="x"), Problem(n=16, k=16))
environment()
print(*sorted({"sqlite_utils", "optuna", "triton", "cutlass"} & set(sys.modules)))
import torch
print(torch.cuda.is_initialized())
"""


def test_looking_up_a_plan_and_the_environment_loads_little(db):
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={"NVFP4_DB": str(db), "HOME": str(db.parent)}
    )
    assert (done.stdout, done.stderr) == ("\nFalse\n", "")
