"""Reading a checkpoint layer by layer needs less memory than two layers, fused ones included."""

import os
import subprocess
import sys

import pytest
import torch
from nvfp4.testing.checkpoints import modelopt, write_checkpoint

LAYERS, N, K = 6, 2048, 16384  # 18 MiB each

SCRIPT = """
import sys, threading, time
import torch
from nvfp4.dispatch.checkpoint import load_linear, open_checkpoint
import nvfp4
torch.set_num_threads(1)
checkpoint = open_checkpoint(sys.argv[1])
names = [f"model.layers.{i}.mlp" for i in range(int(sys.argv[2]))]

def anonymous():  # bytes that belong to no file; the mapped file's pages can be dropped at any time
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def layer(name):
    got = load_linear(checkpoint, [f"{name}.gate_proj", f"{name}.up_proj"])
    nvfp4.pack(got.weight, got.weight_scale, got.weight_scale_2, layout="checkpoint")
    return got.weight.nbytes + got.weight_scale.nbytes

small = load_linear(checkpoint, "small")  # whatever is allocated once
nvfp4.pack(small.weight, small.weight_scale, small.weight_scale_2, layout="checkpoint")
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
for name in names:
    size = layer(name)
done.set()
thread.join()
print(size, peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_layer_at_a_time(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for part in ("gate_proj", "up_proj"):
            name = f"model.layers.{layer}.mlp.{part}"
            tensors[f"{name}.weight"] = torch.randint(0, 256, (N // 2, K // 2), dtype=torch.uint8, generator=generator)
            tensors[f"{name}.weight_scale"] = torch.ones(N // 2, K // 16).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_2"] = torch.tensor(1e-3 * (1 + layer))
    tensors |= modelopt("small", 64, 64)
    path = write_checkpoint(tmp_path / "big", tensors, files=2)
    command = [sys.executable, "-c", SCRIPT, str(path), str(LAYERS)]
    # A fixed threshold: glibc then gives freed tensors back at once, and what is counted is what is in use.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    size, peak = (int(word) for word in done.stdout.split())
    assert size == N * K * 9 // 16
    assert size <= peak < 2 * size
