"""What configs say about experts, from the fields that real ones have."""

import pytest
from nvfp4.errors import InvalidInput
from nvfp4.kernels.moe.model_config import MoeConfig, decode_config, language_fields, read_moe_config


@pytest.mark.parametrize(
    ("fields", "gated", "expected"),
    [
        ({"num_experts_per_tok": 8, "hidden_act": "silu"}, True, (8, "swiglu")),  # Qwen3-MoE, Mixtral, DeepSeek
        ({"num_experts_per_tok": 6, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}, False, (6, "relu2")),
        ({"num_experts_per_tok": 4, "hidden_act": "silu", "model_type": "gpt_oss"}, True, (4, "swigluoai")),
        ({"num_experts_per_tok": 4, "hidden_act": "swigluoai", "swiglu_alpha": 1.702}, True, (4, "swigluoai")),
        ({"num_experts_per_token": 16, "hidden_act": "situ"}, True, (16, "situ")),  # Kimi-K3
        ({"top_k_experts": 8, "hidden_activation": "gelu_pytorch_tanh"}, True, (8, "geglu_tanh")),  # Gemma-4
        ({"moe_k": 6, "hidden_act": "silu"}, True, (6, "swiglu")),  # ERNIE
        ({"num_experts_per_tok": 6, "hidden_act": "silu", "swiglu_limit": 10.0}, True, (6, "swiglu")),  # DeepSeek-V4
        ({"num_experts_per_tok": None, "moe_topk": [8, 8, 8], "hidden_act": "silu"}, True, (8, "swiglu")),  # Hunyuan
        ({"num_experts_per_tok": 2, "hidden_act": "gelu"}, True, (2, "geglu")),
    ],
)
def test_what_configs_say(fields, gated, expected):
    config = read_moe_config(fields)
    assert (config.top_k_of(0), config.activation_of(0, gated=gated)) == expected
    assert (config.top_k_of(None), config.activation_of(None, gated=gated)) == expected


def test_values_of_one_layer_each():
    config = read_moe_config({"moe_topk": [2, 2, 4], "moe_top_k": None, "swiglu_limits": [0, None, 7.0]})
    assert [config.top_k_of(layer) for layer in range(3)] == [2, 2, 4]
    names = [config.activation_of(layer, gated=True) for layer in range(3)]
    assert names == ["swiglu", "swiglu", "swiglustep"]  # Step names no activation
    for layer in (3, None):
        with pytest.raises(InvalidInput, match=rf"does not say how many experts a token has; got .* for layer {layer}"):
            config.top_k_of(layer)


def test_a_layer_without_a_value_keeps_its_place():
    config = read_moe_config({"num_experts_per_tok": [None, 2, "4", 8]})
    assert (config.top_k_of(1), config.top_k_of(3)) == (2, 8)
    for layer in (0, 2):
        with pytest.raises(InvalidInput, match=f"does not say how many experts a token has; got .* for layer {layer}"):
            config.top_k_of(layer)


def test_what_is_not_said_names_the_fields():
    for config in (MoeConfig(), read_moe_config({"num_experts_per_tok": "8", "hidden_act": ["silu"]})):
        with pytest.raises(InvalidInput, match="how many experts a token has; expected one of num_experts_per_tok, "):
            config.top_k_of(0)
        with pytest.raises(InvalidInput, match=r"what activation .*; expected one of mlp_hidden_act, hidden_act, "):
            config.activation_of(0, gated=True)
    with pytest.raises(InvalidInput, match="does not say how many"):
        read_moe_config({"num_experts_per_tok": 0}).top_k_of(0)


def test_activations_that_the_op_does_not_have_are_named():
    with pytest.raises(InvalidInput, match="unknown activation; got 'quick_gelu'"):
        read_moe_config({"hidden_act": "quick_gelu"}).activation_of(0, gated=True)
    with pytest.raises(InvalidInput, match="silu, does not suit its experts; got experts without a gate"):
        read_moe_config({"hidden_act": "silu"}).activation_of(0, gated=False)
    with pytest.raises(InvalidInput, match="relu2, does not suit its experts; got experts with a gate"):
        read_moe_config({"hidden_act": "relu2"}).activation_of(0, gated=True)


def test_files_have_what_python_writes():
    assert decode_config(b'{"time_step_limit": [0.0, Infinity], "hidden_size": 64}') == {
        "time_step_limit": [0.0, float("inf")], "hidden_size": 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_config(b'{"a":' * 100_000)


def test_the_language_models_fields_count():
    text = {"num_experts_per_tok": 8, "hidden_act": None, "moe_intermediate_size": 32}
    fields = language_fields({"hidden_act": "silu", "num_experts_per_tok": 1, "hidden_size": 64, "text_config": text})
    assert read_moe_config(fields) == MoeConfig(top_k=(8,), activation="silu", hidden=64, inter=32)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"hidden_size": 64, "moe_latent_size": 32, "intermediate_size": 96}, (32, 96)),
        ({"hidden_size": 64, "routed_expert_hidden_size": 48, "moe_intermediate_size": 16}, (48, 16)),
        ({"hidden_size": 64, "moe_intermediate_size": [16, 16], "intermediate_size": 96}, (64, 16)),
        ({"hidden_size": 64, "moe_intermediate_size": [16, 32], "intermediate_size": 96}, (64, 0)),
        ({"hidden_size": "64", "moe_intermediate_size": None, "intermediate_size": 96.0}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_sizes_that_a_config_claims(fields, sizes):
    config = read_moe_config(fields)
    assert (config.hidden, config.inter) == sizes


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"num_experts": 128}, 128),
        ({"num_local_experts": 8}, 8),
        ({"num_experts": None, "n_routed_experts": 256}, 256),
        ({"moe_num_experts": 64}, 64),
        ({"num_experts": [16, 16]}, 16),
        ({"num_local_experts": 0}, 0),
        ({"num_experts": 1 << 63}, 0),
        ({}, 0),
    ],
)
def test_the_number_of_experts_has_several_names(fields, experts):
    assert read_moe_config(fields).experts == experts
