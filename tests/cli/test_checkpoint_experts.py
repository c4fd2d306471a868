"""`--checkpoint` and expert layers: their problems are those that the layers ask for when they run."""

import importlib
import json
import re

import msgspec
import nvfp4
import pytest
import torch
from nvfp4.cache.fingerprint import environment
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import ROUTINGS, Measurement
from nvfp4.cache.store import Store
from nvfp4.cli.checkpoint import problems_of_checkpoint
from nvfp4.cli.coverage import Coverage
from nvfp4.dispatch import table
from nvfp4.dispatch.checkpoint import Shard, expert_range, load_experts, open_checkpoint
from nvfp4.dispatch.checkpoint.files import TensorFiles
from nvfp4.errors import InvalidInput
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import family, first_layout
from nvfp4.testing.checkpoints import as_compressed_tensors, experts, modelopt, stacked_experts, write_checkpoint

HIDDEN, INTER, EXPERTS, TOP_K = 64, 32, 4, 2
CONFIG = {"num_hidden_layers": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_act": "silu",
          "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "dtype": "float16"}  # fmt: skip
RELU2 = CONFIG | {"hidden_act": None, "mlp_hidden_act": "relu2"}
NAME = "model.layers.{}.mlp.experts"
DENSE = modelopt("model.layers.0.mlp.up_proj", 40, 64)
GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


def layer(number=0, *, name=NAME, count=EXPERTS, inter=INTER, **options):
    return experts(name.format(number), count, HIDDEN, inter, **options)


def moe(**changes):
    fields = {"n": INTER, "k": HIDDEN, "dtype": "float16", "experts": EXPERTS, "top_k": TOP_K, "activation": "swiglu"}
    return Problem(op="moe", **fields | changes)


@pytest.fixture
def write(tmp_path):
    def make(tensors, *, config=CONFIG, **options):
        return write_checkpoint(tmp_path / "m", tensors, config=config, **options)

    return make


@pytest.fixture
def asked_for(monkeypatch):
    """A function that makes a call and says which problems it looked up."""
    asked, bind = [], table.bind

    def noting(device, problem, *rest):
        asked.append(problem)
        return bind(device, problem, *rest)

    monkeypatch.setattr(table, "bind", noting)

    def run(function, *arguments, **options):
        table.clear()  # a call like an earlier one looks nothing up
        asked.clear()
        function(*arguments, **options)
        return list(asked)

    return run


def call(dtype):
    x = torch.randn(3, HIDDEN, dtype=dtype)
    return x, torch.randint(EXPERTS, (3, TOP_K)), torch.rand(3, TOP_K)


WAYS = {
    "modelopt": (layer(), CONFIG, "swiglu"),
    "compressed-tensors": (as_compressed_tensors(layer()), CONFIG, "swiglu"),
    "w1 w3 w2": (layer(name="model.layers.{}.block_sparse_moe.experts", roles=("w1", "w3", "w2")), CONFIG, "swiglu"),
    "relu2": (layer(roles=PLAIN), RELU2, "relu2"),
    "relu2 compressed-tensors": (as_compressed_tensors(layer(roles=PLAIN)), RELU2, "relu2"),
    "stacked": (stacked_experts(layer(), NAME.format(0)), CONFIG, "swiglu"),
    "stacked, interleaved": (
        stacked_experts(layer(), NAME.format(0), interleaved=True), CONFIG | {"model_type": "gpt_oss"}, "swigluoai",
    ),
    "stacked relu2": (stacked_experts(layer(roles=PLAIN), NAME.format(0), transposed=False), RELU2, "relu2"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is of modelopt, but", "ignore::nvfp4.UntunedWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_layer_asks_for_the_problem_when_it_runs(write, asked_for, way, dtype):
    tensors, config, activation = WAYS[way]
    path = write(tensors, config=config)
    spelled = str(dtype).removeprefix("torch.")
    (problem,) = problems_of_checkpoint(path, dtype=spelled)
    assert problem == moe(activation=activation, dtype=spelled)
    checkpoint = open_checkpoint(path)
    (name,) = {*checkpoint.experts, *checkpoint.fused_experts}
    made = nvfp4.nn.FusedMoE.from_checkpoint(checkpoint, name, activation=activation, dtype=dtype)
    assert asked_for(made, *call(dtype)) == [problem]
    e = load_experts(checkpoint, name)
    x, *routed = call(dtype)
    stacks = e.w13, e.w13_scale, e.w13_scale_2, e.w2, e.w2_scale, e.w2_scale_2
    assert asked_for(nvfp4.moe, x, *stacks, *routed, activation=activation) == [problem]


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
@pytest.mark.parametrize("way", ["modelopt", "relu2", "stacked"])
def test_a_rank_of_tensor_parallelism_asks_for_its_share(write, asked_for, way):
    tensors, config, activation = WAYS[way]
    path = write(tensors, config=config)
    (problem,) = problems_of_checkpoint(path, tp=2)
    assert problem == moe(n=INTER // 2, activation=activation)
    checkpoint = open_checkpoint(path)
    for rank in range(2):
        read = load_experts(checkpoint, NAME.format(0), shard=Shard(rank=rank, size=2, how="row"))
        made = nvfp4.nn.FusedMoE.from_experts(read, activation=activation, dtype=torch.float16)
        assert asked_for(made, *call(torch.float16)) == [problem]


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
@pytest.mark.parametrize("way", ["modelopt", "stacked"])
@pytest.mark.parametrize(("tp", "ep", "counts"), [(1, 2, [2, 2]), (2, 2, [2, 2]), (1, 3, [2, 1, 1])])
def test_a_rank_of_expert_parallelism_asks_for_its_experts(write, asked_for, way, tp, ep, counts):
    tensors, config, activation = WAYS[way]
    path = write(tensors, config=config)
    problems = problems_of_checkpoint(path, tp=tp, ep=ep)
    assert problems == list(dict.fromkeys(moe(experts=count, activation=activation) for count in counts))
    checkpoint = open_checkpoint(path)
    for rank, count in enumerate(counts):
        made = nvfp4.nn.FusedMoE.from_checkpoint(
            checkpoint, NAME.format(0), activation=activation, dtype=torch.float16,
            experts=expert_range(EXPERTS, rank, ep),
        )  # fmt: skip
        assert asked_for(made, *call(torch.float16)) == [moe(experts=count, activation=activation)]


def test_layers_are_taken_one_by_one(write):
    tensors = DENSE | layer(0) | layer(1) | layer(2, count=2, inter=48)  # the last is beyond the model's layers
    tensors |= experts("mtp.layers.0.mlp.experts", 6, HIDDEN, INTER)
    path = write(tensors, config=CONFIG | {"moe_intermediate_size": None, "num_local_experts": None})
    expected = [Problem(n=40, k=64, dtype="float16"), moe(), moe(n=48, experts=2), moe(experts=6)]
    assert problems_of_checkpoint(path) == expected
    path = write(layer(0) | layer(1) | layer(2), config=CONFIG | {"swiglu_limits": [0, 7.0, 0]})
    assert problems_of_checkpoint(path) == [moe(), moe(activation="swiglustep")]


def test_tensors_win_over_sizes_of_the_config(write):
    path = write(layer(0), config=CONFIG | {"moe_intermediate_size": 96, "hidden_size": 128, "num_local_experts": 2})
    with pytest.warns(UserWarning) as told:
        assert problems_of_checkpoint(path) == [moe()]
    words = [str(one.message) for one in told]
    assert len(words) == 3 and all(one.endswith("which count: model.layers.0.mlp.experts") for one in words)
    assert "config.json has experts a layer = 2, but these experts' tensors have 4" in words[0]
    assert "hidden = 128, but these experts' tensors have 64" in words[1]
    assert "inter = 96, but these experts' tensors have 32" in words[2]


@pytest.mark.parametrize(
    ("field", "words", "named"),
    [
        ("num_experts_per_tok", "does not say how many experts a token has; expected one of num_experts_per_tok, ",
         "top_k=...,hidden=64,inter=32,activation=swiglu"),
        ("hidden_act", "does not say what activation the experts have; expected one of mlp_hidden_act, hidden_act, ",
         "top_k=2,hidden=64,inter=32,activation=..."),
    ],
)  # fmt: skip
def test_without_top_k_or_activation_dense_layers_are_left(write, run, field, words, named):
    config = CONFIG | {field: None}
    path = write(DENSE | layer(0) | layer(1), config=config)
    with pytest.warns(UserWarning) as told:
        assert problems_of_checkpoint(path) == [Problem(n=40, k=64, dtype="float16")]
    (one,) = (str(one.message) for one in told)
    assert "2 expert layers are left out: model.layers.0.mlp.experts, model.layers.1.mlp.experts: config" in one
    assert words in one
    assert one.endswith(f"; or name it: --moe experts=4,{named} --dtype float16")
    done = run("tune", "--checkpoint", write(layer(0), config=config))
    assert done.code == 2 and words in done.err  # nothing else is there


def test_ranks_of_experts_that_are_left_out_leave_dense_layers(write, run, tmp_path):
    config = CONFIG | {"hidden_act": None, "vocab_size": 112, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = write(DENSE | layer(0), config=config)
    for options, count in (("--checkpoint", path), 1), (("--config", path), 3):
        done = run("warmup", *options, "--ep", "2", "--device", "cpu", "--json")
        assert done.code == 0 and "left out: " in done.err and "--moe experts=2,top_k=2" in done.err
        assert len(json.loads(done.out)) == count


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({}, 4, r"inner size cannot be divided over 4 ranks; got 32, or 8 a rank; .*--moe .*,top_k=2,.*inter=\."),
        ({"2.up_proj.weight": None, "2.up_proj.weight_scale": None, "2.up_proj.weight_scale_2": None}, 1,
         r"experts\.2 is incomplete; got no up"),
        ({"2.up_proj.weight": torch.zeros(INTER, HIDDEN).to(torch.float8_e4m3fn), "2.up_proj.weight_scale_2": None,
          "2.up_proj.weight_scale": torch.ones(())}, 1, r"experts\.2\.up_proj is quantised as FP8"),
        ({"2.up_proj.bias": torch.zeros(INTER)}, 1, r"a bias is missing; got none for .*experts\.0\.gate_proj"),
        ({"1.down_proj.pre_quant_scale": torch.ones(INTER)}, 1, r"a pre_quant_scale is missing; got none for .*0"),
        ({"3.up_proj.weight_scale_2": torch.ones(INTER)}, 1, r"3\.up_proj\.weight_scale_2 of an expert; got \(32,\)"),
        (modelopt("2.up_proj", 48, HIDDEN), 1, r"2\.up_proj has another size than its like; got \(48, 64\)"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_loaded_is_left_out(write, changes, tp, words):
    tensors = layer(0, inter=64) | layer(1) | {f"{NAME.format(1)}.{name}": one for name, one in changes.items()}
    path = write({name: one for name, one in tensors.items() if one is not None},
                 config=CONFIG | {"moe_intermediate_size": None})  # fmt: skip
    with pytest.warns(UserWarning, match=rf"1 expert layer is left out: model\.layers\.1\.mlp\.experts: .*{words}"):
        assert problems_of_checkpoint(path, tp=tp) == [moe(n=64 // tp)]


def test_variants_that_only_look_like_nvfp4_are_left_out(write):
    names = {NAME.format(0): {"quant_algo": "W4A8_NVFP4_FP8"}, NAME.format(1): {"quant_algo": "NVFP4"}}
    path = write(layer(0) | layer(1, inter=48), hf={"quant_algo": "MIXED_PRECISION", "quantized_layers": names},
                 config=CONFIG | {"moe_intermediate_size": None})  # fmt: skip
    with (
        pytest.warns(UserWarning, match="does not call these layers NVFP4"),
        pytest.warns(UserWarning, match=r"1 expert layer is left out: .*quantised as W4A8_NVFP4_FP8"),
    ):
        assert problems_of_checkpoint(path) == [moe(n=48)]


def test_only_headers_are_read(write, monkeypatch):
    path = write(layer(0) | stacked_experts(layer(1), NAME.format(1)))
    monkeypatch.setattr(TensorFiles, "read", lambda self, name: pytest.fail(f"read {name}"))
    monkeypatch.setattr(TensorFiles, "part", lambda self, name, *ranges: pytest.fail(f"read {name}"))
    assert problems_of_checkpoint(path) == [moe()]


@pytest.fixture
def planned(tmp_path):
    """A database with a plan of `moe()` on this CPU."""
    kernel, device = registry.get("cpu_moe"), describe("cpu")
    rows = [
        Measurement(
            device=device, environment=environment(), problem=moe(), kernel=kernel.name, layout="checkpoint",
            config=kernel.default_config(device, moe(), 16).to_json(), implementation=implementation_hash(kernel),
            m=16, status="ok", protocol="final", routing=routing, p20_us=9.0, p50_us=10.0, p80_us=11.0, samples=11,
        )
        for routing in ROUTINGS
    ]  # fmt: skip
    with Store.open(tmp_path / "t.db") as store:
        store.add(rows)
        store.save_plan(make_plan(device, moe(), rows, kernels={kernel.name: kernel}, environment=environment()))
    return tmp_path / "t.db"


def test_a_layer_with_a_plan_is_covered(write, run, planned):
    path = write(DENSE | layer(0) | layer(1) | layer(2, count=2), config=CONFIG | {"num_local_experts": None})
    found = run("inspect", "--checkpoint", path, "--db", planned, "--json")
    assert found.code == 0
    covered = msgspec.json.decode(found.out, type=Coverage)
    _, tuned, other = covered.problems
    assert (tuned.problem, tuned.status, tuned.kernels) == (moe(), "plan", "cpu_moe 1+")
    assert tuned.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts") and tuned.extra == 0
    assert (other.problem, other.status, other.extra) == (moe(experts=2), "default", 1)
    assert "nvfp4 tune --moe experts=2,top_k=2,hidden=64,inter=32,activation=swiglu --dtype float16" in other.reason
    assert (covered.planned_layers, covered.layers, covered.left_out) == (2, 4, {})
    assert covered.tune == f"nvfp4 tune --checkpoint {path}"
    stored = 9 * (40 * 64 + (2 * 4 + 2) * 3 * INTER * HIDDEN) // 16
    assert covered.bytes["checkpoint"] == covered.bytes["planned"] == stored


def test_a_layer_counts_once_where_ranks_differ(write, run, planned, columns):
    path = write(DENSE | layer(0, count=7) | layer(2), config=CONFIG | {"num_local_experts": None})
    options = ("inspect", "--checkpoint", path, "--ep", "2", "--db", planned)
    covered = msgspec.json.decode(run(*options, "--json").out, type=Coverage)
    experts = [(one.problem.experts, one.status, one.layers) for one in covered.problems[1:]]
    first, last = (NAME.format(0),), (NAME.format(2),)
    assert experts == [(4, "plan", first), (3, "default", first), (2, "default", last)]
    assert (covered.planned_layers, covered.layers, covered.extra, covered.ep) == (0, 3, 1, 2)
    assert covered.tune == f"nvfp4 tune --checkpoint {path} --ep 2"
    stored = 9 * (40 * 64 + (4 + 2) * 3 * INTER * HIDDEN) // 16  # of the first rank
    assert covered.bytes["checkpoint"] == stored
    words = " ".join(run(*options, columns=columns).out.split())
    assert ", 1 of 2 ranks" in words and "0 of 3 layers have a plan" in words
    assert "1 layer of these are for multi-token prediction" in words


@pytest.mark.parametrize(("roles", "config"), [(GATED, CONFIG), (PLAIN, RELU2)])
def test_bytes_by_layout_are_those_of_packed_experts(write, run, roles, config):
    path = write(layer(0, inter=48, roles=roles), config=config | {"moe_intermediate_size": 48})
    found = run("inspect", "--checkpoint", path, "--json")
    (one,) = msgspec.json.decode(found.out, type=Coverage).problems
    assert {"checkpoint", "fragment1-fp16"} <= set(one.layout_bytes)
    assert (one.layout, one.w13_layout) == ("checkpoint", "checkpoint")
    read = load_experts(open_checkpoint(path), NAME.format(0))
    for name, size in one.layout_bytes.items():
        assert family(name) == name
        first = nvfp4.pack(read.w13, read.w13_scale, read.w13_scale_2, layout=first_layout(name, one.problem))
        second = nvfp4.pack(read.w2, read.w2_scale, read.w2_scale_2, layout=name)
        tensors = [tensor for packed in (first, second) for tensor in (packed.data, packed.scale) if tensor is not None]
        assert size == sum(tensor.nbytes for tensor in tensors), name


def test_the_table_names_what_is_left_out(write, run, columns):
    path = write(DENSE | layer(0), config=CONFIG | {"hidden_act": None})
    done = run("inspect", "--checkpoint", path, "--tp", "2", "--dtype", "bfloat16", columns=columns)
    words = " ".join(done.out.split())
    assert done.code == 0 and done.err == ""
    assert "1 expert layer is left out: model.layers.0.mlp.experts: config.json does not say what activation" in words
    assert f"`nvfp4 tune --checkpoint {path} --tp 2 --dtype bfloat16`" in words
    done = run("inspect", "--checkpoint", write(layer(0), config={"dtype": "float16"}), columns=columns)
    assert done.code == 0 and "1 expert layer is left out" in done.out and "0 of 0" not in done.out


def test_tune_takes_experts(write, run, monkeypatch):
    def stop(problems, *rest, **options):
        raise InvalidInput(", ".join(problem.label for problem in problems))

    monkeypatch.setattr(importlib.import_module("nvfp4.cli.tune"), "run_tuning", stop)
    done = run("tune", "--checkpoint", write(DENSE | layer(0) | layer(1)), "--device", "cpu")
    assert done.err == "error: gemm 40x64 float16, moe 32x64 float16 E4 top2 swiglu\n"


def test_the_table_has_a_row_for_experts(write, run, columns):
    done = run("inspect", "--checkpoint", write(layer(0) | layer(1)), columns=columns)
    assert done.code == 0
    assert re.search(r"moe 32x64 fp16 E4 top2 swiglu.*default", " ".join(done.out.split()))
    assert "0 of 2 layers have a plan; 2 fall back to default kernels" in " ".join(done.out.split())


def test_warmup_takes_experts(write, run):
    done = run("warmup", "--checkpoint", write(DENSE | layer(0)), "--device", "cpu", "--json")
    assert done.code == 0
    assert [one["problem"]["op"] for one in json.loads(done.out)] == ["gemm", "moe"]


def test_a_tensor_parallel_size_that_makes_no_sense_is_refused(write):
    with pytest.raises(InvalidInput, match="tensor parallel size; got 0"):
        problems_of_checkpoint(write(layer(0)), tp=0)
