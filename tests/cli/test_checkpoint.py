"""`--checkpoint` of tune, warmup and inspect: the problems of a checkpoint, and how far the plans cover them."""

import json
import re

import msgspec
import pytest
import torch
from nvfp4.cli.checkpoint import layers_of, problems_of_checkpoint
from nvfp4.cli.coverage import Coverage
from nvfp4.dispatch.checkpoint import open_checkpoint
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt, write_checkpoint
from nvfp4.tuner.workload import _models

pytestmark = pytest.mark.usefixtures("fakes")

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float16"}
SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def layers(*numbers, **options):
    tensors = {}
    for number in numbers:
        for name, (n, k) in SIZES.items():
            tensors |= modelopt(f"model.layers.{number}.{name}", n, k, **options)
    return tensors


@pytest.fixture
def write(tmp_path):
    def make(tensors=None, **options):
        return write_checkpoint(
            tmp_path / "m", layers(0, 1) if tensors is None else tensors, **{"config": CONFIG} | options
        )

    return make


def problems(*sizes, dtype="float16"):
    return [Problem(n=n, k=k, dtype=dtype) for n, k in sizes]


@pytest.mark.filterwarnings("ignore:.*named and scaled as by")
@pytest.mark.parametrize("convert", [dict, as_compressed_tensors])
def test_every_layer_is_a_problem_as_it_is_stored(write, convert):
    path = write(convert(layers(0, 1)))
    assert problems_of_checkpoint(path) == problems((64, 96), (96, 64), (32, 64), (64, 64))  # down, gate, k, o


def test_fused_layers_stand_for_their_parts(write):
    path = write()
    assert problems_of_checkpoint(path, fused=True) == problems((64, 96), (192, 64), (128, 64), (64, 64))
    assert problems_of_checkpoint(path, fused=True, dtype="bfloat16")[0] == Problem(n=64, k=96)


def test_ranks_divide_rows_or_columns_and_share_heads(write):
    path = write()
    assert problems_of_checkpoint(path, tp=2) == problems((64, 48), (48, 64), (16, 64), (64, 32), (32, 64))
    attention = {name: tensor for name, tensor in layers(0).items() if "attn" in name and "o_proj" not in name}
    # two key and value heads of 16 rows over four ranks: each rank has 16 rows of q, one head of k and one of v
    (qkv,) = problems_of_checkpoint(write(attention), tp=4, fused=True)
    assert qkv == Problem(n=48, k=64, dtype="float16")
    path = write(layers(0))
    with pytest.raises(InvalidInput, match=r"mlp\.down_proj cannot be split over 4 ranks: in_features; got 96"):
        problems_of_checkpoint(path, tp=4)


def test_heads_of_a_fused_layer_are_those_of_its_parts(write):
    # q with a gate: 4 heads of 2 x 16 rows; more ranks than the 2 key and value heads, which are not cut
    gated = modelopt("a.q_proj", 128, 64) | modelopt("a.k_proj", 32, 64) | modelopt("a.v_proj", 32, 64)
    assert problems_of_checkpoint(write(gated), tp=4, fused=True) == problems((128 // 4 + 16 + 16, 64))
    small_values = modelopt("a.q_proj", 64, 64) | modelopt("a.k_proj", 32, 64) | modelopt("a.v_proj", 16, 64)
    assert problems_of_checkpoint(write(small_values), tp=4, fused=True) == problems((64 // 4 + 16 + 8, 64))


def test_layers_are_divided_like_those_of_shipped_models(write):
    shards = {}
    for model in _models().values():
        shards |= {linear.name: linear.shard for linear in model.linears if not re.search(r"[(.]", linear.name)}
    shards |= {"indexer.wq_b": "replicated", "mlp.down_proj": "row", "mlp.gate_up_proj": "column"}
    tensors = {}
    for name in shards:
        tensors |= modelopt(f"model.layers.0.{name}", 96, 96)
    found = layers_of(open_checkpoint(write(tensors, hf={"quant_algo": "NVFP4"})), fused=False)
    assert {one.name.removeprefix("model.layers.0."): one.shard for one in found} == shards


def test_only_headers_are_read(write, monkeypatch):
    from nvfp4.dispatch.checkpoint.files import TensorFiles

    path = write()
    monkeypatch.setattr(TensorFiles, "read", lambda self, name: pytest.fail(f"read {name}"))
    monkeypatch.setattr(TensorFiles, "part", lambda self, name, *ranges: pytest.fail(f"read {name}"))
    assert len(problems_of_checkpoint(path)) == 4


def test_a_quantised_head_is_a_problem_too(write):
    path = write(layers(0) | modelopt("lm_head", 112, 64), hf={"quant_algo": "NVFP4"})
    assert problems_of_checkpoint(path)[0] == problems((112, 64))[0]


def tiny(write):
    return write(modelopt("model.layers.0.mlp.up_proj", 40, 64) | modelopt("model.layers.1.mlp.up_proj", 40, 64))


def test_tune_measures_its_problems_and_inspect_covers_them(write, run, tmp_path):
    path, db = tiny(write), tmp_path / "t.db"
    arguments = ("--m", "1", "--device", "cpu", "--quick", "--db", db, "--kernel", "fake_good")
    done = run("tune", "--checkpoint", path, *arguments)
    assert done.code == 0 and "[1/1] gemm 40x64 fp16" in done.err
    write(layers(0) | modelopt("model.layers.1.mlp.up_proj", 40, 64) | modelopt("model.layers.2.mlp.up_proj", 40, 64))
    found = run("inspect", "--checkpoint", path, "--db", db, "--json")
    assert found.code == 0 and found.err == ""
    covered = msgspec.json.decode(found.out, type=Coverage)
    by_size = {(one.problem.n, one.problem.k): one for one in covered.problems}
    assert by_size[40, 64].status == "plan" and by_size[40, 64].kernels == "fake_good 1+"
    assert by_size[40, 64].layers == ("model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj")
    assert by_size[40, 64].extra == 1  # config.json has two layers
    assert (
        by_size[64, 96].status == "default" and "`nvfp4 tune --shape 64,96 --dtype float16`" in by_size[64, 96].reason
    )
    assert (covered.planned_layers, covered.layers) == (2, 9)
    assert by_size[40, 64].layout_bytes["checkpoint"] == 40 * 64 * 9 // 16
    whole = 9 * (2 * 40 * 64 + sum(n * k for n, k in SIZES.values())) // 16
    assert covered.bytes["checkpoint"] == covered.bytes["planned"] == whole


def test_the_table_fits_and_says_what_falls_back(write, run, columns):
    tensors = layers(0) | modelopt("model.layers.2.mlp.up_proj", 96, 64)
    tensors |= {"model.layers.1.o_proj.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    path = write(tensors)
    done = run("inspect", "--checkpoint", path, columns=columns)
    assert done.code == 0
    words = " ".join(done.out.split())
    assert "database none" in words
    assert f"0 of 8 layers have a plan; 8 fall back to default kernels: `nvfp4 tune --checkpoint {path}`" in words
    assert "gemm 64x96 fp16" in words and "default" in words
    assert "1 layer of these are for multi-token prediction" in words
    assert "1 layer in other formats: model.layers.1.o_proj (FP8)" in words and "expert" not in words
    table = [line for line in done.out.splitlines() if line.startswith(("gemm", "problem"))]
    assert all(len(line.rstrip()) <= columns for line in table) and "…" not in done.out
    done = run("inspect", "--checkpoint", path, "--dtype", "bfloat16", columns=columns)
    assert f"`nvfp4 tune --checkpoint {path} --dtype bfloat16`" in " ".join(done.out.split())


def test_warmup_takes_a_checkpoint(write, run):
    done = run("warmup", "--checkpoint", tiny(write), "--device", "cpu", "--json")
    assert done.code == 0
    (one,) = json.loads(done.out)
    assert (one["problem"]["n"], one["problem"]["k"], one["problem"]["dtype"]) == (40, 64, "float16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "40x64", "--checkpoint", "PATH"), "neither a SHAPE nor"),
        (("inspect", "--checkpoint", "PATH", "--why", "fake_good"), "neither a SHAPE nor"),
        (("inspect", "--tp", "2"), "--fused, --tp and --ep are for --checkpoint"),
        (("inspect", "--ep", "2"), "--fused, --tp and --ep are for --checkpoint"),
        (("inspect", "--checkpoint", "PATH", "--tp", "0"), "--tp"),
        (("inspect", "--checkpoint", "PATH", "--ep", "0"), "--ep; got 0; expected at least 1"),
        (("inspect", "--checkpoint", "PATH", "--ep", "2"), "has no NVFP4 experts; got --ep 2"),
        (("tune", "--checkpoint", "PATH", "--ep", "2"), "--ep divides the routed experts of"),
        (("inspect", "--checkpoint", "PATH", "--tp", "3"), "cannot be split over 3 ranks"),
        (("inspect", "--checkpoint", "no/such/folder"), "no such folder"),
        (("tune", "--checkpoint", "no/such/folder"), "no such folder"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_code_2(write, run, arguments, words):
    path = str(tiny(write))
    done = run(*(path if argument == "PATH" else argument for argument in arguments))
    assert done.code == 2
    assert words in " ".join(done.err.replace("│", " ").split()) and done.out == ""


def test_a_checkpoint_with_a_broken_layer_names_it(write, run):
    tensors = layers(0)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    done = run("tune", "--checkpoint", write(tensors))
    assert done.code == 2
    assert "missing model.layers.0.mlp.up_proj.weight_scale" in done.err


def test_a_checkpoint_without_nvfp4_layers_says_what_it_has(write, run):
    done = run("tune", "--checkpoint", write({"model.norm.weight": torch.ones(4)}))
    assert done.code == 2 and "has no NVFP4 layers; got dense tensors" in done.err


def test_another_algorithm_is_named(write, run):
    done = run("tune", "--checkpoint", write(hf={"quant_algo": "FP8"}))
    assert done.code == 1 and "unsupported quant_algo; got 'FP8'" in done.err
