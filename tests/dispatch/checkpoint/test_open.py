"""Checkpoints that are opened: where config and tensors disagree, which layers there are, and files that are wrong."""

import json
import warnings

import pytest
import torch
from nvfp4.dispatch.checkpoint import load_linear, open_checkpoint
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import as_compressed_tensors as as_ct
from nvfp4.testing.checkpoints import dense, modelopt

from .layers import MLP, same, value


def test_a_config_and_tensors_that_agree_are_no_warning(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32) | {"lm_head.weight": torch.zeros(64, 32, dtype=torch.bfloat16)}
    tensors |= {"model.norm.weight": torch.ones(32), f"{MLP}.gate.weight": torch.ones(4, 32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = open_checkpoint(write(tensors))
    assert set(checkpoint.dense) == {"lm_head.weight", "model.norm.weight", f"{MLP}.gate.weight"}


def test_without_a_config_the_tensors_decide(write):
    with pytest.warns(UserWarning, match="no quantisation config"):
        checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), hf=None))
    assert load_linear(checkpoint, f"{MLP}.up_proj").weight.shape == (16, 16)


def test_lm_head_may_be_quantised_whatever_the_config_says(write):
    tensors = modelopt("lm_head", 64, 32)
    with pytest.warns(UserWarning, match=r"does not call these layers NVFP4, but their tensors are.*: lm_head"):
        checkpoint = open_checkpoint(write(tensors))
    assert same(tensors, "lm_head", load_linear(checkpoint, "lm_head"))


def test_a_dense_layer_that_the_config_calls_nvfp4_is_a_warning_and_no_weight(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32) | {
        f"{MLP}.down_proj.weight": torch.zeros(32, 16, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
    }
    with pytest.warns(UserWarning, match=r"their weights are dense, so they are left dense: [\w.]*down_proj$"):
        checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.mlp\.down_proj is not quantised; got .*BF16 \(32, 16\).*ignore"
    ):
        load_linear(checkpoint, f"{MLP}.down_proj")


def test_names_of_another_dialect_than_the_config_count(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32, factor=2.0**-9)
    with pytest.warns(UserWarning, match=r"is of modelopt, but the tensors are named and scaled as by compressed-tens"):
        checkpoint = open_checkpoint(write(as_ct(tensors)))
    assert torch.equal(value(load_linear(checkpoint, f"{MLP}.up_proj")), dense(tensors, f"{MLP}.up_proj"))


def test_another_group_size_in_the_config_is_a_warning(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 64)
    with pytest.warns(UserWarning, match=r"says group size 32, but the tensors have 16: .*up_proj"):
        checkpoint = open_checkpoint(write(tensors, hf={"quant_algo": "NVFP4", "group_size": 32}))
    assert same(tensors, f"{MLP}.up_proj", load_linear(checkpoint, f"{MLP}.up_proj"))


def test_a_tied_lm_head_is_the_embedding(write):
    checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), config={"tie_word_embeddings": True}))
    with pytest.raises(InvalidInput, match=r"no lm_head; got tie_word_embeddings.*use the embedding"):
        load_linear(checkpoint, "lm_head")


def test_prediction_layers_and_those_beyond_the_last_are_extra(write):
    checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), config={"num_hidden_layers": 4}))
    assert [
        checkpoint.is_extra(name)
        for name in ("model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "lm_head")
    ] == [False, True, True, False]
    assert not checkpoint.is_extra("model.layers.².mlp.up_proj")  # a digit, but no number


def test_a_folder_without_tensors_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"no \*\.safetensors there"):
        open_checkpoint(tmp_path)
    with pytest.raises(InvalidInput, match=r"no such folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_file_that_is_cut_short_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"model\.safetensors cannot be read.*cut short"):
        open_checkpoint(path)


def test_a_file_that_is_missing_is_named_with_its_tensors(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"no model-00002-of-00003\.safetensors.*up_proj\.weight_scale"):
        open_checkpoint(path)


def test_an_index_with_a_name_that_no_file_has_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], 300 * "x")
    file.write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="is incomplete; got no xxx"):
        open_checkpoint(path)


def test_an_index_that_does_not_fit_names_the_tensors(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    moved = index["weight_map"].pop(f"{MLP}.up_proj.weight_scale")
    index["weight_map"]["model.nothing"] = moved
    file.write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"where it says: model\.nothing; not in it: .*up_proj\.weight_scale"):
        open_checkpoint(path)


def test_a_tensor_in_two_files_without_an_index_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32))
    (path / "a.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors").rename(path / "b.safetensors")
    with pytest.raises(InvalidInput, match=r"up_proj\.\w+ is in two files; got a\.safetensors and b\.safetensors"):
        open_checkpoint(path)
