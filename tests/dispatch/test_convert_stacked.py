"""`nvfp4.convert_` on models whose experts are 3-D parameters: quantised, filled from checkpoints, or left alone."""

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import open_checkpoint
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.testing.checkpoints import as_compressed_tensors, stacked_experts, write_checkpoint
from torch import nn
from torch.nn.functional import gelu

from .moe_models import (
    EXPERTS,
    MIXTRAL,
    NAME,
    QWEN,
    Stacked,
    X,
    assert_alike,
    block_of,
    check_against_dense,
    decoded,
    fused,
    router,
    separate,
    stacked_model,
    with_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
OPTIONS = [
    {},
    {"act": gelu},
    {"limit": 0.5},
    {"transposed": True, "interleaved": True, "bias": True},
    {"transposed": True},
    {"bias": True},
    {"gated": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_3d_experts_that_are_there_are_quantised(options):
    model, twin = stacked_model(**options), stacked_model(**options)
    assert nvfp4.convert_(model) is model
    assert fused(model) == ["model.layers.0.mlp.experts"]
    made = block_of(model).experts
    assert not made.training and made.dtype == torch.bfloat16
    with torch.inference_mode():
        assert_alike(block_of(model)(X), block_of(with_weights(twin, *decoded(made)))(X))


@pytest.mark.filterwarnings("ignore:.*experts stay dense")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "odd", True), "something else than the activations"),
        (lambda m: setattr(m, "norm", nn.RMSNorm(8)), "weights of its own: norm"),
        (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))), "weights of its own: scale"),
        (lambda m: setattr(m, "down_proj", nn.Parameter(torch.ones(EXPERTS, 7, 9))), "do not fit"),
        (lambda m: setattr(m, "act", None), "its forward failed"),
    ],
)
def test_experts_that_compute_something_else_stay_and_a_checkpoint_for_them_is_refused(tmp_path, change, words):
    model = stacked_model()
    change(block_of(model).experts)
    nvfp4.convert_(model)
    assert not fused(model)
    path = write_checkpoint(tmp_path / "c", separate() | router())
    with pytest.raises(
        InvalidInput, match=rf"no Linear for .*experts\.0\.down_proj.*{words}.*FusedMoE.from_checkpoint"
    ):
        nvfp4.convert_(model, checkpoint=path)


@pytest.mark.filterwarnings("ignore:.*has no quantisation config")
@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("ct", [False, True])
def test_3d_modules_are_filled_from_experts_that_are_stored_one_by_one(tmp_path, device, ct):
    stored = separate()
    path = write_checkpoint(tmp_path / "c", (as_compressed_tensors(stored) if ct else stored) | router(), hf=None)
    model = stacked_model(device)
    nvfp4.convert_(model, checkpoint=path)
    state = {name.removeprefix("model.layers.0.mlp."): t for name, t in model.state_dict().items()}
    assert set(model.state_dict()) == set((as_compressed_tensors(stored) if ct else stored) | router())
    assert torch.equal(
        state[f"experts.3.up_proj.{'weight_packed' if ct else 'weight'}"],
        stored["model.layers.0.mlp.experts.3.up_proj.weight"],
    )
    if not ct:
        check_against_dense(stacked_model(device), stacked_model(), path)


def test_names_of_blocks_may_differ_between_model_and_checkpoint(tmp_path):
    name = "model.layers.0.block_sparse_moe"
    path = write_checkpoint(tmp_path / "c", separate(MIXTRAL, f"{name}.experts") | router(name))
    model = stacked_model("meta")
    check_against_dense(model, stacked_model(), path)
    assert block_of(model).experts.names == MIXTRAL


def stacked_files():
    """Transposed, with gate and up in turns, a global scale for all experts, and biases."""
    tensors = separate(bias=True)
    gate, up, down = (torch.stack([tensors[f"{NAME}.{e}.{role}.bias"] for e in range(EXPERTS)]) for role in QWEN)
    return stacked_experts(tensors, NAME, interleaved=True) | {
        f"{NAME}.gate_up_proj_weight_scale_2": torch.tensor(2.0**-9),
        f"{NAME}.down_proj_weight_scale_2": torch.tensor(2.0**-9),
        f"{NAME}.gate_up_proj_bias": torch.stack((gate, up), 2).flatten(1),
        f"{NAME}.down_proj_bias": down,
    }


def test_3d_modules_are_filled_from_3d_files_in_the_order_of_their_rows(tmp_path):
    path = write_checkpoint(tmp_path / "c", stacked_files() | router())
    options = {"transposed": True, "interleaved": True, "bias": True}
    model, twin = stacked_model("meta", **options), stacked_model(**options)
    stored = stacked_files()
    for leaf in ("gate_up_proj_bias", "down_proj_bias"):
        getattr(block_of(twin).experts, leaf).data.copy_(stored[f"{NAME}.{leaf}"])
    check_against_dense(model, twin, path)


def test_3d_files_need_a_module_that_can_be_replaced(tmp_path):
    path = write_checkpoint(tmp_path / "c", stacked_files() | router())
    model = nn.Module()
    with pytest.raises(
        Unsupported, match=r"experts as 3-D tensors.*got model\.layers\.0\.mlp\.experts;.*from_checkpoint"
    ):
        nvfp4.convert_(model, checkpoint=path)


def test_experts_of_another_size_are_named(tmp_path):
    stored = {name: t for name, t in separate().items() if ".3." not in name} | router()
    with pytest.raises(InvalidInput, match=r"experts model\.layers\.0\.mlp\.experts have another size.*got 3 experts"):
        nvfp4.convert_(stacked_model("meta"), checkpoint=write_checkpoint(tmp_path / "c", stored))


def test_a_missing_layer_of_an_expert_is_named(tmp_path):
    stored = {name: t for name, t in separate().items() if ".2.up_proj" not in name} | router()
    with pytest.raises(InvalidInput, match=r"model\.layers\.0\.mlp\.experts\.2 is incomplete; got no up"):
        nvfp4.convert_(stacked_model("meta"), checkpoint=write_checkpoint(tmp_path / "c", stored))


def test_a_filter_sees_modules_of_3d_experts(tmp_path):
    model, seen = stacked_model(), []
    nvfp4.convert_(model, lambda module, name: seen.append((type(module), name)))
    assert seen == [(Stacked, "model.layers.0.mlp.experts")] and not fused(model)
    path = write_checkpoint(tmp_path / "c", separate() | router())
    with pytest.raises(InvalidInput, match=r"filter_fn refuses model\.layers\.0\.mlp\.experts"):
        nvfp4.convert_(model, lambda module, name: False, checkpoint=open_checkpoint(path))
