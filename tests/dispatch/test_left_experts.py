"""`nvfp4.convert_` says once which experts stay linear layers, and why, where something can be done about it."""

import logging
import warnings

import nvfp4
import pytest
import torch
from nvfp4.errors import Unsupported
from nvfp4.testing.checkpoints import experts, stacked_experts, write_checkpoint
from torch import nn

from .moe_models import (
    EXPERTS,
    HIDDEN,
    INTER,
    NAME,
    QWEN,
    Expert,
    ListBlock,
    Stacked,
    StackedBlock,
    block_of,
    fused,
    list_model,
    model_of,
    router,
    separate,
)


class ConstantSize(ListBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states.reshape(-1, HIDDEN))[0].reshape(hidden_states.shape)


class TanhExpert(Expert):
    def forward(self, x):
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class ConstantStacked(Stacked):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states.reshape(-1, HIDDEN), top_k_index, top_k_weights)


def model_of_layers(*blocks, device=None):
    model = model_of(blocks[0], device=device)
    for block in blocks[1:]:
        model.model.layers.extend(model_of(block, device=device).model.layers)
    return model


def stored(layers):
    """A checkpoint's tensors: routers, and experts in NVFP4."""
    found = {}
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp"
        found |= separate(name=f"{mlp}.experts") | router(mlp)
    return found


def told(model, *args, **options):
    """What `convert_` warns of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nvfp4.convert_(model, *args, **options)
    assert all((one.category, one.filename) == (UserWarning, __file__) for one in seen)
    return [str(one.message) for one in seen]


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_one_warning_names_the_first_block_how_many_more_and_the_reason(tmp_path, from_checkpoint):
    model = model_of_layers(*(ConstantSize() for _ in range(3)), device="meta" if from_checkpoint else None)
    path = write_checkpoint(tmp_path / "c", stored(3)) if from_checkpoint else None
    made_by = "from_checkpoint" if from_checkpoint else "from_dense"
    assert told(model, checkpoint=path) == [
        "model.layers.0.mlp and 2 more: experts stay linear layers, run one by one, which is slow, and do not become "
        "nvfp4.nn.FusedMoE: called with small random weights (hidden 24, inter 16) and x [2, 8, 24], its forward "
        "failed (RuntimeError: mat1 and mat2 shapes cannot be multiplied (6x64 and 24x4)); sizes must be read from x "
        "and its layers, not be constants or attributes of its own. Change it, or call nvfp4.nn.FusedMoE, made by "
        f"{made_by}, in its place: docs/checkpoints.md says what is recognised. "
        "fuse_experts=False leaves experts so without a warning"
    ]
    assert not fused(model) and isinstance(block_of(model).experts[3].up_proj, nvfp4.nn.Linear)
    if not from_checkpoint:
        assert told(model) == []  # nothing is left to convert


def test_one_block_among_those_that_are_replaced_is_named_alone():
    model = model_of_layers(ListBlock(), ConstantSize(), StackedBlock())
    (words,) = told(model)
    assert words.startswith("model.layers.1.mlp: experts stay linear layers")
    assert fused(model) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


def test_the_result_that_differs_is_the_reason():
    (words,) = told(model_of(ListBlock(factor=2.5)))
    assert (
        "its result differs from that of nvfp4.moe behind a softmax over all experts, of which 2 count, by 150 %"
        in words
    )


class Dense(nn.Module):
    """MLPs in a list, beside a matrix with a row for each."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.ModuleList(Expert(QWEN) for _ in range(EXPERTS)))
        self.head = nn.Linear(HIDDEN, EXPERTS)


class NoRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert(QWEN) for _ in range(EXPERTS))


SILENT = {
    "replaced": (list_model, {}),
    "dense": (lambda: model_of(Expert(QWEN)), {}),
    "MLPs in a list": (lambda: model_of(Dense("layers")), {}),
    "no router": (lambda: model_of(NoRouter()), {}),
    "not wanted": (lambda: model_of(ConstantSize()), {"fuse_experts": False}),
    "3-D and not wanted": (lambda: model_of(StackedBlock(act=None)), {"fuse_experts": False}),
    "refused": (lambda: model_of(ConstantSize()), {"filter_fn": lambda module, name: "up_proj" in name}),
    "3-D and refused": (lambda: model_of(StackedBlock(act=None)), {"filter_fn": lambda module, name: False}),
}


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_said_where_nothing_is_left_or_it_is_meant(kind, caplog):
    make, options = SILENT[kind]
    with caplog.at_level(logging.INFO, "nvfp4.convert"):
        assert told(make(), **options) == []
    assert not caplog.records


@pytest.mark.filterwarnings("error")
def test_experts_that_a_checkpoint_has_dense_are_no_loss(tmp_path):
    dense = {
        name: tensor for name, tensor in ConstantSize().bfloat16().state_dict(prefix="model.layers.0.mlp.").items()
    }
    model = model_of(ConstantSize(), device="meta")
    model.linear = nn.Linear(HIDDEN, HIDDEN, bias=False, device="meta", dtype=torch.bfloat16)
    found = experts("linear", 1, HIDDEN, HIDDEN, roles=("one",))
    found = {name.replace("linear.0.one", "linear"): tensor for name, tensor in found.items()}
    options = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.0.mlp*"]}
    nvfp4.convert_(model, checkpoint=write_checkpoint(tmp_path / "c", dense | found, hf=options))
    assert isinstance(model.linear, nvfp4.nn.Linear) and type(block_of(model).experts[0].up_proj) is nn.Linear


def with_experts(kind):
    block = ListBlock()
    block.experts = nn.ModuleList(kind(QWEN) for _ in range(EXPERTS))
    return block


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_experts(TanhExpert), "linear layers, run one by one"),
        (lambda: StackedBlock(act=torch.tanh), "dense, as they are"),
    ],
)
def test_experts_that_moe_does_not_compute_are_logged_with_the_reason(caplog, make, words):
    with caplog.at_level(logging.INFO, "nvfp4.convert"):
        assert told(model_of_layers(make(), make())) == []
    (record,) = caplog.records
    assert record.levelno == logging.INFO and record.getMessage().startswith("model.layers.0.mlp")
    assert f" and 1 more: experts stay {words}" in record.getMessage()
    assert record.getMessage().endswith("it computes something else than the activations that nvfp4.moe has")


def test_experts_of_which_a_checkpoint_has_some_dense_are_logged_with_the_reason(tmp_path, caplog):
    name = f"{NAME}.1.up_proj"
    found = {key: t for key, t in stored(1).items() if not key.startswith(name)}
    found[f"{name}.weight"] = torch.ones(INTER, HIDDEN).bfloat16()
    path = write_checkpoint(tmp_path / "c", found, hf={"quant_algo": "NVFP4", "exclude_modules": [name]})
    with caplog.at_level(logging.INFO, "nvfp4.convert"):
        assert told(list_model(device="meta"), checkpoint=path) == []
    assert [record.getMessage().endswith("only some of its layers in NVFP4") for record in caplog.records] == [True]


def test_3d_experts_that_could_not_be_tried_stay_dense():
    block = StackedBlock()
    block.experts = ConstantStacked()
    model = model_of_layers(block, ListBlock(factor=2.0))
    (words,) = told(model)
    assert words.startswith("model.layers.0.mlp.experts and 1 more: experts stay dense, as they are, and do not become")
    assert "router weights, its forward failed (IndexError: " in words
    assert type(block_of(model).experts) is ConstantStacked


@pytest.mark.parametrize("make", [ListBlock, Stacked])
def test_a_model_that_is_a_block_itself_cannot_be_replaced(make):
    (words,) = told(make())
    assert words.startswith("the model: experts stay")
    assert "it is the whole model, which cannot be replaced in place: convert a module around it" in words


def test_a_router_may_be_beside_the_block():
    layer = nn.Module()
    layer.gate, layer.moe = nn.Linear(HIDDEN, EXPERTS, bias=False), NoRouter()
    (words,) = told(model_of(layer))
    assert words.startswith("model.layers.0.mlp.moe: ") and "no router called gate" in words


def test_sizes_that_cannot_be_quantised_whole_are_the_reason():
    block = ListBlock()
    for expert in block.experts:
        expert.gate_proj = nn.Linear(HIDDEN, 24, bias=False)
        expert.up_proj = nn.Linear(HIDDEN, 24, bias=False)
        expert.down_proj = nn.Linear(24, HIDDEN, bias=False)
    (words,) = told(model_of(block))
    assert "hidden 64 and inter 24 are not both multiples of 16" in words


def test_3d_tensors_for_a_block_that_could_not_be_replaced_are_refused_with_the_reason(tmp_path):
    found = stacked_experts(separate(), NAME) | router()
    path = write_checkpoint(tmp_path / "c", found)
    assert fused(nvfp4.convert_(list_model(device="meta"), checkpoint=path))
    with pytest.raises(
        Unsupported, match=r"experts as 3-D tensors.*model\.layers\.0\.mlp: called .*its forward failed"
    ):
        nvfp4.convert_(model_of(ConstantSize(), device="meta"), checkpoint=path)
