"""The pages tell the truth: every option is documented, every command line parses, every example runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich_click as click
import torch
from nvfp4.cli.app import app
from nvfp4.dispatch.offline import TYPICAL, capability_of
from nvfp4.kernels import registry
from nvfp4.kernels.cuda.compile import ARCHITECTURES
from nvfp4.testing.checkpoints import modelopt, write_checkpoint
from nvfp4.tuner.workload import ANCHORS, QUICK_ANCHORS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *sorted((ROOT / "docs" / "notes").glob("*.md")), ROOT / "examples" / "README.md"]
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = sorted(app.commands)


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def options(command):
    return [name for option in command.params if isinstance(option, click.Option) for name in option.opts]


def section(name):
    found = re.search(rf"^## nvfp4 {name}\n(.*?)(?=^## |\Z)", CLI_PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found, f"docs/cli.md has no section on nvfp4 {name}"
    return found.group(1)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_no_other(name):
    documented = set(re.findall(r"`(--?[a-z-]+)", section(name)))
    existing = {option for option in options(app.commands[name]) if option not in ("--help", "-h")}
    assert documented == existing


@pytest.mark.parametrize(("option", "ms"), [("--m LIST", ANCHORS), ("--quick", QUICK_ANCHORS)])
def test_the_page_has_the_numbers_of_tokens_that_are_tuned(option, ms):
    (line,) = (line for line in section("tune").splitlines() if line.startswith(f"| `{option}`"))
    count, numbers = re.search(r"these (\d+): ([\d, ]+\d)", line).groups()
    assert (int(count), tuple(map(int, numbers.split(", ")))) == (len(ms), ms)


def test_the_page_has_the_architectures_that_are_built_without_a_database():
    (line,) = (line for line in section("warmup").splitlines() if line.startswith("| `--arch LIST`"))
    assert ", ".join(ARCHITECTURES[capability] for capability in sorted(TYPICAL)) + ", and those of GPUs" in line
    assert capability_of("sm_90", TYPICAL) == capability_of("sm_90a", TYPICAL)


def test_every_page_with_notes_is_linked():
    linked = {
        (page.parent / path).resolve() for page in LINKED for path in re.findall(r"\]\(([^)#]+)", page.read_text())
    }
    assert set((ROOT / "docs").resolve().rglob("*.md")) <= linked


def test_the_readme_or_the_page_names_every_command():
    assert {f"nvfp4 {name}" for name in COMMANDS} <= set(re.findall(r"^## (nvfp4 \w+)", CLI_PAGE, flags=re.MULTILINE))


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_works_and_has_examples(run, name):
    done = run(*filter(None, [name]), "--help", columns=100)
    assert done.code == 0 and done.err == ""
    command = app.commands[name] if name else app
    assert all(option in done.out for option in options(command))
    if name:
        assert f"nvfp4 {name}" in done.out.split("Examples:")[1]


def command_lines():
    """Every `nvfp4 …` in the pages' consoles and in the help texts."""
    for page in PAGES:
        for block in blocks(page.relative_to(ROOT), "console"):
            yield from (line[2:] for line in block.splitlines() if line.startswith("$ nvfp4 "))
    for command in app.commands.values():
        yield from (line.strip() for line in command.help.splitlines() if line.strip().startswith("nvfp4 "))


@pytest.mark.parametrize("line", dict.fromkeys(command_lines()))
def test_every_command_line_parses(line):
    name, *arguments = shlex.split(line.split(" > ")[0])[1:]
    app.commands[name].make_context(name, arguments)


def test_version(run):
    import nvfp4

    assert run("--version").out.split()[-1] == nvfp4.__version__


def test_the_command_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "nvfp4", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("nvfp4")


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_the_readme_example_runs():
    (code,) = blocks("README.md", "python")
    names = {}
    exec(code, names)
    x, w, y = names["x"].double(), names["w"].double(), names["y"]
    assert y.shape == (16, 3072) and y.dtype == torch.bfloat16
    same = names["same"].double()  # on a GPU by other kernels: the packed weight is in another layout
    assert float((y.double() - same).norm() / same.norm()) < 2**-8
    assert float((y.double() - x @ w.t()).norm() / (x @ w.t()).norm()) < 0.15


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_the_examples_of_checkpoints_run(tmp_path):
    tensors = {}
    for part, n in (("q", 64), ("k", 32), ("v", 32)):
        tensors |= modelopt(f"model.layers.0.self_attn.{part}_proj", n, 64)
    names = {"folder": write_checkpoint(tmp_path / "m", tensors)}
    names["model"] = model = torch.nn.Module()
    for owner, name in (("", "model"), ("model", "layers"), ("model.layers", "0"), ("model.layers.0", "self_attn")):
        model.get_submodule(owner).add_module(name, torch.nn.Module())
    for part, n in (("q", 64), ("k", 32), ("v", 32)):
        linear = torch.nn.Linear(64, n, bias=False, device="meta")
        model.get_submodule("model.layers.0.self_attn").add_module(f"{part}_proj", linear)
    for code in blocks("docs/checkpoints.md", "python"):
        exec(code, names)
    assert names["packed"].out_features == 64 and names["packed"].in_features == 64
    assert len(names["nvfp4"].nn.weights(model)) == 3


def heading_ids(page):
    """What `#…` may name in a page: its headings, in lower case, with hyphens for spaces and without punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_the_examples_of_experts_run(tmp_path):
    layer = "model.layers.3.mlp.experts"
    tensors = {}
    for expert in range(8):
        for part, n, k in (("gate_proj", 32, 64), ("up_proj", 32, 64), ("down_proj", 64, 32)):
            tensors |= modelopt(f"{layer}.{expert}.{part}", n, k, seed=expert)
    names = {
        "folder": write_checkpoint(tmp_path / "m", tensors),
        "x": torch.randn(4, 64, dtype=torch.bfloat16),
        "ids": torch.stack([torch.randperm(8) for _ in range(4)]),
        "weights": torch.rand(4, 8),
    }
    op, module = blocks("docs/moe.md", "python")
    exec(op, names)
    y = names["y"]
    assert y.shape == (4, 64) and y.isfinite().all()
    exec(module, names)
    assert torch.equal(names["y"], y)


def test_the_cuda_example_compiles(tmp_path):
    from nvfp4.kernels.problem import Device

    _, build, *_ = blocks("docs/adding-a-kernel.md", "python")
    (tmp_path / "rows.cu").write_text(
        "struct Arguments { const void *x, *weight; void* out; int m, n; };\n"
        'extern "C" __global__ void gemm(const __grid_constant__ Arguments a) { *(int*)a.out = ROWS; }\n'
    )
    device = Device(kind="cuda", name="H200", capability=(9, 0), units=132, smem_bytes=232448)
    names = {"device": device, "config": SimpleNamespace(rows=64, smem_bytes=0), "__file__": str(tmp_path / "rows.py")}
    exec(build, names)
    assert names["compiled"].spill_bytes == 0 and names["launch"] is not None


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        to = page.parent / path if path else page
        assert to.exists(), target
        assert not heading or heading in heading_ids(to), target


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page):
    text = page.read_text()
    for path in re.findall(r"\b(?:bench|examples|tests|kernels|tuner|cache|dispatch)/[\w/.-]+\.\w+", text):
        assert (ROOT / path).exists(), path
    for result in re.findall(r"\b20\d\d-\d\d-\d\d-[\w-]+\.json", text):
        assert (ROOT / "bench" / "results" / result).exists(), result


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The kernel of the page in a folder of its own, where this process and its children import from."""
    kernel, *_, tests = blocks("docs/adding-a-kernel.md", "python")
    (tmp_path / "cpu_rows.py").write_text(kernel)
    (tmp_path / "test_cpu_rows.py").write_text(tests)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("NVFP4_DB", str(tmp_path / "t.db"))
    yield tmp_path
    sys.modules.pop("cpu_rows", None)
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.slow
def test_the_example_kernel_passes_its_tests(example):
    """As the page has them, with two of the sizes."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "test_cpu_rows.py"]
    command += ["-k", "exact or 100x80 or 352x80"]
    done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


@pytest.mark.slow
def test_the_example_kernel_is_found_tuned_and_explained(example, run, monkeypatch):
    monkeypatch.setenv("NVFP4_KERNELS", "cpu_rows")
    registry.refresh()
    (block,) = blocks("docs/adding-a-kernel.md", "console")
    inspect, tune, why = ([*shlex.split(line)[2:]] for line in block.splitlines() if line.startswith("$ nvfp4"))
    verdicts = run(*inspect)
    assert verdicts.code == 0 and re.search(r"cpu_rows +yes", verdicts.out)
    tuned = run(*tune, "--m", "1,64")
    assert tuned.code == 0, tuned.err
    assert re.search(r"rows=64 +(won|lost)", run(*why).out)


def test_the_example_kernel_is_found_as_an_entry_point(example, run):
    info = example / "cpu_rows-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-rows\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nvfp4.kernels]\ncpu_rows = cpu_rows:KERNEL\n")
    registry.refresh()
    assert re.search(r"cpu_rows +yes", run("inspect", "96x64", "--kernels").out)
