"""`nvfp4.convert_` on blocks of a router and linear experts: fused, or left with their code and linear layers."""

import nvfp4
import pytest
import torch
from nvfp4.dispatch.convert_experts import FusedBlock
from nvfp4.testing.checkpoints import write_checkpoint
from torch import nn

from .moe_models import (
    HIDDEN,
    INTER,
    MIXTRAL,
    QWEN,
    Expert,
    ListBlock,
    X,
    assert_alike,
    block_of,
    check_against_dense,
    decoded,
    fused,
    list_model,
    model_of,
    router,
    separate,
    with_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


@pytest.mark.parametrize("names", [QWEN, MIXTRAL])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_blocks_of_linear_experts_are_fused(tmp_path, names, renormalize, logits):
    options = {"names": names, "renormalize": renormalize, "logits": logits}
    path = write_checkpoint(tmp_path / "c", separate(names) | router())
    model = list_model(device="meta", **options)
    check_against_dense(model, list_model(**options), path)
    block = block_of(model)
    assert isinstance(block, FusedBlock) and block.renormalize is renormalize and not block.training
    assert set(model.state_dict()) == set(separate(names) | router())
    here = list_model(**options)
    nvfp4.convert_(here)
    twin = with_weights(list_model(**options), *decoded(block_of(here).experts))
    with torch.inference_mode():
        y, ref = block_of(here)(X), block_of(twin)(X)
    assert type(y) is type(ref)
    assert_alike(y[0] if logits else y, ref[0] if logits else ref)


def test_biases_of_linear_experts_come_along():
    model = list_model(bias=True)
    dense = torch.stack([expert.down_proj.bias.detach().clone() for expert in block_of(model).experts])
    nvfp4.convert_(model)
    assert torch.equal(block_of(model).experts.w2_bias, dense)


BLOCKS = {
    "another scoring": lambda: ListBlock(scoring=lambda logits, dim: torch.sigmoid(logits)),
    "a factor": lambda: ListBlock(factor=2.5),
}


@pytest.mark.filterwarnings("ignore:.*experts stay linear layers")
@pytest.mark.parametrize("kind", [*BLOCKS, "shared expert", "experts differ", "refused", "not wanted"])
def test_other_blocks_keep_their_code_and_their_experts_become_linears(kind):
    torch.manual_seed(0)
    block = BLOCKS.get(kind, ListBlock)()
    options = {"fuse_experts": False} if kind == "not wanted" else {}
    if kind == "shared expert":
        block.shared_expert = Expert(QWEN)
    if kind == "experts differ":
        block.experts[1].up_proj = nn.Linear(HIDDEN, INTER, bias=True)
    if kind == "refused":
        options["filter_fn"] = lambda module, name: "up_proj" in name
    model = model_of(block)
    nvfp4.convert_(model, **options)
    assert type(block_of(model)) is ListBlock and not fused(model)
    assert isinstance(block_of(model).experts[2].up_proj, nvfp4.nn.Linear)
    assert isinstance(block_of(model).experts[2].down_proj, nn.Linear) is (kind == "refused")


def test_experts_of_which_some_are_dense_stay_linears(tmp_path):
    stored = separate() | router()
    name = "model.layers.0.mlp.experts.1.up_proj"
    stored = {key: t for key, t in stored.items() if not key.startswith(name)}
    stored[f"{name}.weight"] = torch.ones(INTER, HIDDEN).bfloat16()
    path = write_checkpoint(tmp_path / "c", stored, hf={"quant_algo": "NVFP4", "exclude_modules": [name]})
    model = nvfp4.convert_(list_model(device="meta"), checkpoint=path)
    assert not fused(model) and type(model.get_submodule(name)) is nn.Linear
    assert isinstance(model.get_submodule(name.replace("up", "down")), nvfp4.nn.Linear)


def test_a_block_in_two_places_stays_one():
    model = list_model()
    model.model.layers.append(model.model.layers[0])
    model.again = block_of(model)
    nvfp4.convert_(model)
    assert model.again is block_of(model) and isinstance(model.again, FusedBlock)
