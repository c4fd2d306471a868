"""In an environment with the wheel: every module imports, the data files are there, and a product is right.

Usage: python check_wheel.py FOLDER, where FOLDER must hold the imported package.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

import nvfp4
import torch
from nvfp4.tuner.workload import model_names

here = Path(nvfp4.__file__).resolve()
if not here.is_relative_to(Path(sys.argv[1]).resolve()):
    sys.exit(f"imported {here}, not the wheel in {sys.argv[1]}")
names = [info.name for info in pkgutil.walk_packages(nvfp4.__path__, "nvfp4.") if not info.name.endswith("__main__")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "vllm":  # the plug-in's classes are made from vLLM's
            raise
if not (here.with_name("py.typed").exists() and model_names()):
    sys.exit("a data file is missing")
w = torch.randn(48, 64)
weight = nvfp4.pack(*nvfp4.quantize(w))
x = torch.randn(3, 64, dtype=torch.bfloat16)
error = (nvfp4.gemm(x, weight).float() - x.float() @ w.t()).norm() / (x.float() @ w.t()).norm()
if not error < 0.2:
    sys.exit(f"a product is off by {error:.3f}")
print(f"nvfp4 {nvfp4.__version__}: {len(names)} modules of the wheel import, and a product is right")
