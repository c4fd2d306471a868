"""`--config`: the layers of a mixture of experts, from the fields that real configs have."""

import json
import warnings

import pytest
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.shard import expert_range
from nvfp4.tuner.workload import problems_of_config, problems_of_model

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "hidden_act": "silu",
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "hidden_act": "silu",
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
}  # fmt: skip
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 129280, "hidden_act": "silu", "swiglu_limit": 10.0,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "hidden_act": "silu",
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "hidden_act": "silu",
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 6, "hybrid_override_pattern": "MEMEM*",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "vocab_size": 131072,
    "intermediate_size": 1856, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "moe_latent_size": None,
}  # fmt: skip
LATENT = NEMOTRON | {
    "hidden_size": 4096, "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "hybrid_override_pattern": None,
    "layers_block_type": ["mamba", "moe", "attention"],
}  # fmt: skip
MINIMAX = {
    "text_config": {
        "hidden_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 3072, "shared_intermediate_size": 3072, "n_shared_experts": 1,
        "dense_intermediate_size": 12288, "moe_layer_freq": [0, 0, 0, 1, 1, 1], "vocab_size": 200064,
        "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_act": "swigluoai",
    },
}  # fmt: skip
GEMMA = {
    "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "global_head_dim": 512,
    "intermediate_size": 2112, "moe_intermediate_size": 704, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262144,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "n_routed_experts": None, "num_experts": 896, "num_experts_per_tok": None, "num_experts_per_token": 16,
    "num_shared_experts": 2, "n_shared_experts": None, "routed_expert_hidden_size": 3584, "hidden_act": "situ",
    "moe_intermediate_size": 3072, "intermediate_size": 33792, "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
LLAMA4 = {
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "hidden_act": "silu",
        "vocab_size": 202048,
    },
}  # fmt: skip


@pytest.fixture
def derive(tmp_path):
    """A function that writes a config and derives its problems; what is left out is a warning."""

    def run(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return problems_of_config(tmp_path, **options)

    return run


def moe(n, k, **fields):
    return Problem(op="moe", n=n, k=k, **{"activation": "swiglu"} | fields)


def of_experts(problems):
    return [problem for problem in problems if problem.op == "moe"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "config"), [("Qwen3-30B-A3B", QWEN3), ("gpt-oss-20b", GPT_OSS), ("Mixtral-8x7B", MIXTRAL)]
)
def test_the_problems_are_those_of_the_shipped_model(derive, name, config, tp):
    assert derive(config, tp=tp) == problems_of_model(name, tp=tp)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    ("name", "config", "kinds", "dense"),
    [
        ("DeepSeek-V3", DEEPSEEK, "multi-head latent attention", ["mlp", "shared_expert", "lm_head"]),
        ("DeepSeek-V4-Flash", DEEPSEEK_V4, "multi-head latent attention", ["shared_expert", "lm_head"]),
        ("Nemotron-3-Nano-30B-A3B", NEMOTRON, "state space layers", ["shared_expert", "lm_head"]),
        ("Nemotron-3-Super-120B-A12B", LATENT, "state space layers", ["shared_expert", "latent", "lm_head"]),
        ("Gemma-4-26B-A4B", GEMMA, "two kinds of attention heads", ["mlp", "lm_head"]),
        ("Kimi-K3", KIMI, "multi-head latent attention", ["mlp", "shared_expert", "latent", "lm_head"]),
    ],
)
def test_without_attention_the_rest_is_that_of_the_shipped_model(derive, name, config, kinds, dense, tp):
    with pytest.warns(UserWarning) as told:
        found = derive(config, tp=tp)
    shipped = problems_of_model(name, tp=tp)
    assert set(found) <= set(shipped) and of_experts(found) == of_experts(shipped)
    assert len(found) == len(of_experts(found)) + sum(1 if one == "lm_head" else 2 for one in dense)
    assert f"describes {kinds}: linears outside MLPs, experts and the head are left out" in str(told[0].message)


def test_a_config_with_everything_about_attention_and_experts_warns_of_nothing(derive):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(derive(MINIMAX)) == set(problems_of_model("MiniMax-M3"))


def test_llama_4_has_a_shared_expert_that_no_field_tells(derive):
    attention = [Problem(n=7168, k=5120), Problem(n=5120, k=5120)]
    shared = [Problem(n=16384, k=5120), Problem(n=5120, k=8192)]
    dense = [Problem(n=32768, k=5120), Problem(n=5120, k=16384)]
    head, experts = Problem(n=202048, k=5120), moe(8192, 5120, experts=16, top_k=1)
    assert derive(LLAMA4) == [*attention, *shared, head, experts]
    every_second = {"text_config": LLAMA4["text_config"] | {"interleave_moe_layer_step": 2}}
    assert derive(every_second) == [*attention, *dense, *shared, head, experts]
    none_dense = {"text_config": every_second["text_config"] | {"moe_layers": list(range(48))}}
    assert derive(none_dense) == derive(LLAMA4)


SMALL = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512, "vocab_size": 1000,
    "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
MLP, EXPERTS = Problem(n=1024, k=256), moe(64, 256, experts=8, top_k=2)


@pytest.mark.parametrize(
    ("fields", "has"),
    [
        ({}, "experts"),
        ({"first_k_dense_replace": 1}, "both"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "both"),
        ({"first_k_dense_replace": 4}, "dense"),
        ({"num_dense_layers": 2}, "both"),
        ({"mlp_only_layers": [3]}, "both"),
        ({"mlp_only_layers": [7], "decoder_sparse_step": 1}, "experts"),
        ({"decoder_sparse_step": 2}, "both"),
        ({"moe_layer_freq": [1, 1, 1, 1]}, "experts"),
        ({"moe_layer_freq": [0, 1, 1, 1]}, "both"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": 0}, "both"),
        ({"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}, "experts"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}, "both"),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 2}, "both"),
        ({"moe_layer_start_index": [1, 1], "moe_layer_end_index": [3, 3]}, "both"),
        ({"is_moe_layer": [False, True, True, True]}, "both"),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1}, "experts"),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, "both"),
        ({"expert_layer_period": 2, "layers_block_type": ["mamba", "attention", "mamba", "attention"]}, "both"),
        ({"moe_layers_enum": "1,2,3"}, "both"),
        ({"hybrid_override_pattern": "ME*E"}, "experts"),
        ({"hybrid_override_pattern": "ME*-"}, "both"),
        ({"num_experts": 0}, "dense"),
        ({"num_experts": 1}, "dense"),
    ],
)
def test_which_layers_have_experts(derive, fields, has):
    found = derive(SMALL | fields)
    assert (MLP in found, EXPERTS in found) == (has != "experts", has != "dense")


@pytest.mark.parametrize(
    ("fields", "inter"),
    [
        ({"shared_expert_intermediate_size": 128}, 128),
        ({"n_shared_experts": 2}, 128),
        ({"share_expert_dim": 48}, 48),
        ({"num_shared_expert": [1, 1, 1, 1]}, 64),
        ({"shared_intermediate_size": 0, "num_shared_experts": None}, 0),
        ({"moe_shared_expert_intermediate_size": 96, "num_shared_experts": 2}, 192),
        ({"n_shared_experts": 2, "first_k_dense_replace": 4}, 0),
        ({"n_shared_experts": 1, "hidden_act": "relu2"}, -64),
    ],
)
def test_shared_experts_are_dense_layers(derive, fields, inter):
    found = {(problem.n, problem.k) for problem in derive(SMALL | fields) if problem.op == "gemm"}
    rows = 2 * inter if inter > 0 else -inter  # -: without a gate
    mlps = {(1024, 256), (256, 512)} if "first_k_dense_replace" in fields else set()
    shared = {(rows, 256), (256, abs(inter))} if inter else set()
    assert found == {(768, 256), (256, 256), (1000, 256)} | shared | mlps


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"num_attention_groups": 2}, "attention of Step models"),
        ({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, "convolution layers"),
        ({"attn_type_list": [0, 0, 0, 1]}, "linear attention layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers called linear_attention"),
        ({"head_dim": 32, "v_head_dim": 16}, "values of another size than keys"),
        ({"head_dim": 32, "v_head_dim": 16, "swa_num_key_value_heads": 4}, "two kinds of attention heads"),
        ({"v_head_dim": 128, "kv_lora_rank": 512}, "multi-head latent attention"),
    ],
)
def test_attention_that_only_looks_like_llamas_is_left_out(derive, fields, kinds):
    with pytest.warns(UserWarning, match=f"describes {kinds}: linears outside MLPs"):
        assert derive(SMALL | {"first_k_dense_replace": 2} | fields) == [
            MLP,
            Problem(n=256, k=512),
            Problem(n=1000, k=256),
            EXPERTS,
        ]


def test_attention_like_llamas_may_look_at_parts_of_a_text(derive):
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "attn_type_list": [1, 1, 1, 1]}
    assert derive(SMALL | kinds | {"head_dim": 32, "v_head_dim": 32}) == derive(SMALL)


@pytest.mark.parametrize("fields", [{"hidden_act": "relu2"}, {"model_type": "apertus", "hidden_act": "xielu"}])
def test_a_dense_mlp_without_a_gate(derive, fields):
    found = derive(SMALL | {"num_experts": 0} | fields)
    assert Problem(n=512, k=256) in found and MLP not in found


def test_layers_with_values_of_their_own(derive):
    found = of_experts(derive(SMALL | {"num_experts_per_tok": [2, 2, 4, 4], "first_k_dense_replace": 1}))
    assert found == [EXPERTS, moe(64, 256, experts=8, top_k=4)]


@pytest.mark.parametrize(
    ("fields", "tp", "words", "known"),
    [
        ({"num_experts_per_tok": None}, 1, "does not say how many experts a token has",
         "experts=8,top_k=...,hidden=256,inter=64,activation=swiglu"),
        ({"hidden_act": None}, 2, "does not say what activation the experts have",
         "experts=8,top_k=2,hidden=256,inter=32,activation=..."),
        ({"hidden_act": "tanh"}, 1, "unknown activation; got 'tanh'",
         "experts=8,top_k=2,hidden=256,inter=64,activation=..."),
        ({"moe_intermediate_size": [64, 32, 64, 64]}, 1, "does not say the inner size of its experts",
         "experts=8,top_k=2,hidden=256,inter=...,activation=swiglu"),
        ({"moe_intermediate_size": 72}, 1, "inner size cannot be divided over blocks of 16; got 72",
         "experts=8,top_k=2,hidden=256,inter=...,activation=swiglu"),
        ({}, 8, "inner size cannot be divided over 8 ranks; got 64, or 8 a rank; expected a multiple of 8 x 16",
         "experts=8,top_k=2,hidden=256,inter=...,activation=swiglu"),
        ({"moe_latent_size": [64, 128]}, 1, "does not say the hidden size of its experts",
         "experts=8,top_k=2,hidden=...,inter=64,activation=swiglu"),
    ],
)  # fmt: skip
def test_experts_that_are_not_told_are_left_out_with_what_is_known(derive, fields, tp, words, known):
    fields = {"torch_dtype": "float16", "num_key_value_heads": 8, "vocab_size": 1024, **fields}
    with pytest.warns(UserWarning) as told:
        found = derive(SMALL | fields, tp=tp)
    assert found and not of_experts(found)
    (warning,) = (str(one.message) for one in told)
    assert "its experts are left out: " in warning and words in warning
    assert warning.endswith(f"; or name it: --moe {known} --dtype float16")


def test_a_config_of_which_all_is_left_out_is_refused(derive):
    hidden = {"kv_lora_rank": 64, "tie_word_embeddings": True, "hidden_act": None}
    with pytest.raises(InvalidInput, match=r"describes multi-head .*--shape N,K; .*its experts are left out: .*--moe"):
        derive(SMALL | hidden)


def test_some_layers_are_left_out(derive):
    with pytest.warns(UserWarning, match="its experts in 1 of 4 layers are left out: .*for layer 3"):
        assert of_experts(derive(SMALL | {"num_experts_per_tok": [2, 2, 4]}))


def test_a_number_of_layers_is_needed(derive):
    for count in (None, 1 << 40):
        with pytest.raises(InvalidInput, match=r"num_hidden_layers; .*expected a number of layers, 10000 at most"):
            derive(SMALL | {"num_hidden_layers": count})


@pytest.mark.parametrize(
    ("tp", "ep", "counts", "inter"),
    [(1, 1, [128], 768), (2, 1, [128], 384), (1, 8, [16], 768), (8, 8, [16], 768), (4, 12, [11, 10], 768)],
)
def test_experts_are_divided_or_cut(derive, tp, ep, counts, inter):
    expected = [moe(inter, 2048, experts=count, top_k=8) for count in counts]
    found = derive(QWEN3 | {"num_key_value_heads": 8}, tp=tp, ep=ep)
    assert of_experts(found) == of_experts(problems_of_model("Qwen3-30B-A3B", tp=tp, ep=ep)) == expected
    dense = derive(QWEN3 | {"num_key_value_heads": 8}, tp=tp)
    assert [one for one in found if one.op == "gemm"] == [one for one in dense if one.op == "gemm"]


def test_every_rank_has_one_of_the_problems(derive):
    held = {len(expert_range(8, rank, 3)) for rank in range(3)}
    assert {problem.experts for problem in of_experts(derive(SMALL, ep=3))} == held


def test_experts_that_cannot_be_cut_can_be_divided(derive):
    assert of_experts(derive(GPT_OSS, tp=4, ep=4)) == [
        moe(2880, 2880, experts=8, top_k=4, activation="swigluoai"),
    ]


def test_of_uneven_ranks_every_part_is_named(derive):
    with pytest.warns(UserWarning) as told:
        derive(SMALL | {"hidden_act": None}, ep=3)
    rest = "top_k=2,hidden=256,inter=64,activation=..."
    assert str(told[0].message).endswith(f"; or name it: --moe experts=3,{rest} --moe experts=2,{rest}")


@pytest.mark.parametrize("ep", [0, 9])
def test_more_ranks_than_experts_or_none_are_refused(derive, ep):
    for config in (SMALL, SMALL | {"hidden_act": None}):
        with pytest.raises(InvalidInput, match=f"expert parallel size; got {ep}; expected 1 to 8, the number of"):
            derive(config, ep=ep)
