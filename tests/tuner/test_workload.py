import json
import math
import re
import warnings

import pytest
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.workload import (
    ANCHORS,
    QUICK_ANCHORS,
    Linear,
    model_names,
    parse_ms,
    parse_shape,
    problems_of_config,
    problems_of_linears,
    problems_of_model,
)


def sizes(problems):
    return [(problem.n, problem.k) for problem in problems]


def test_a_model_has_its_fused_linears_once():
    assert sizes(problems_of_model("Llama-3.1-8B")) == [
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (128256, 4096),
    ]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "LLAMA-3.1-8"])
def test_names_ignore_case_and_organisation_and_may_be_a_unique_prefix(name):
    assert problems_of_model(name) == problems_of_model("Llama-3.1-8B")


def test_a_unique_suffix_is_a_name_too():
    dense = [Problem(n=n, k=k) for n, k in [(6144, 4096), (4096, 4096), (32000, 4096)]]
    experts = Problem(op="moe", n=14336, k=4096, experts=8, top_k=2, activation="swiglu")
    assert problems_of_model("8x7b") == [*dense, experts]


def test_an_unknown_name_lists_close_ones():
    with pytest.raises(InvalidInput, match=r"Llama-3\.1-8B"):
        problems_of_model("Llamma-3.1-8B")


def test_an_ambiguous_prefix_lists_what_it_fits():
    with pytest.raises(InvalidInput, match=r"not unique.*Llama-3\.1-70B"):
        problems_of_model("llama")


def test_a_model_whose_dense_layers_are_unknown_says_so():
    with pytest.raises(InvalidInput, match=r"dense layers of Qwen3\.8-2400B are unknown"):
        problems_of_model("Qwen3.8-2400B")


def test_model_names_can_be_typed_and_are_unique():
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+", name) for name in model_names())
    assert len({name.lower() for name in model_names()}) == len(model_names())


def test_every_model_gives_valid_problems():
    for name in model_names():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                problems = problems_of_model(name)
            except InvalidInput as error:
                assert "are unknown" in str(error)
                continue
        assert problems and len(set(problems)) == len(problems)
        assert all(problem.k % 16 == 0 and problem.n > 0 for problem in problems)


def test_tensor_parallel_divides_columns_rows_and_replicates_kv_heads():
    # 32 query heads and 8 kv heads of 128: on 16 ranks each kv head lives on two ranks.
    assert sizes(problems_of_model("Llama-3.1-8B", tp=2)) == [
        (3072, 4096),
        (4096, 2048),
        (14336, 4096),
        (4096, 7168),
        (64128, 4096),
    ]
    qkv = Linear(name="qkv_proj", n=6144, k=4096, shard="column", kv_heads=8, head_dim=128)
    assert sizes(problems_of_linears([qkv], tp=16)) == [(4096 // 16 + 2 * 128, 4096)]
    alone = Linear(name="k_proj", n=1024, k=4096, shard="column", kv_heads=8, head_dim=128)
    assert sizes(problems_of_linears([alone], tp=16)) == [(128, 4096)]


@pytest.mark.parametrize(("k", "tp"), [(1856, 8), (704, 8), (2880, 8)])
def test_a_row_parallel_layer_is_cut_on_block_scales_or_refused_by_name(k, tp):
    down = Linear(name="mlp.down_proj", n=2048, k=k, shard="row")
    with pytest.raises(InvalidInput, match=r"mlp\.down_proj.*multiple of 8 x 16"):
        problems_of_linears([down], tp=tp)
    assert sizes(problems_of_linears([down], tp=1)) == [(2048, k)]


def test_halves_of_gate_up_are_cut_separately():
    fused = Linear(name="mlp.gate_up_proj", n=12, k=64, shard="column")
    assert sizes(problems_of_linears([fused], tp=2)) == [(6, 64)]
    with pytest.raises(InvalidInput, match="gate_up_proj"):
        problems_of_linears([fused], tp=4)


def test_kv_heads_that_fit_no_number_of_ranks_are_refused():
    qkv = Linear(name="qkv_proj", n=7 * 64, k=64, shard="column", kv_heads=2, head_dim=64)
    with pytest.raises(InvalidInput, match="qkv_proj has 2 key/value heads"):
        problems_of_linears([qkv], tp=3)


def test_replicated_layers_and_duplicates():
    linears = [Linear(name=name, n=128, k=256, shard="replicated") for name in ("wk", "wq")]
    assert sizes(problems_of_linears(linears, tp=8)) == [(128, 256)]


@pytest.mark.parametrize("kwargs", [{"tp": 0}, {"dtype": "float32"}])
def test_bad_options_are_refused(kwargs):
    with pytest.raises(InvalidInput):
        problems_of_model("Llama-3.1-8B", **kwargs)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "torch_dtype": "float16",
}


def write(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return tmp_path


def test_a_dense_config(tmp_path):
    problems = problems_of_config(write(tmp_path))
    assert sizes(problems) == [((8 + 4) * 32, 256), (256, 256), (1024, 256), (256, 512), (1000, 256)]
    assert {problem.dtype for problem in problems} == {"float16"}
    assert problems_of_config(tmp_path / "config.json") == problems


def test_a_tied_lm_head_is_no_quantised_layer(tmp_path):
    assert (1000, 256) not in sizes(problems_of_config(write(tmp_path, tie_word_embeddings=True)))


def test_the_text_part_of_a_multimodal_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA, "vision_config": {"hidden_size": 8}}))
    assert len(problems_of_config(tmp_path)) == 5


def test_infinity_in_a_config(tmp_path):
    assert sizes(problems_of_config(write(tmp_path, time_step_limit=[0.0, math.inf])))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"{", "no model description"),
        (b"\xff\xfe", "no model description"),
        (b"[]", "no model description"),
        (b'{"a":' * 100_000, "no model description"),
        (b"{}", "hidden_size"),
        (json.dumps({**LLAMA, "hidden_size": "big"}).encode(), "hidden_size"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}).encode(), "expected positive numbers"),
        (json.dumps({**LLAMA, "intermediate_size": None}).encode(), "intermediate_size"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path, text, match):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InvalidInput, match=match):
        problems_of_config(tmp_path)


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"/nowhere cannot be read: there is no such file; name a config\.json or its folder$"
    ):
        problems_of_config(tmp_path / "nowhere")


def test_shapes():
    assert parse_shape("4096,14336") == Problem(n=4096, k=14336)
    assert parse_shape(" 7 x 16 ", dtype="float16") == Problem(n=7, k=16, dtype="float16")


@pytest.mark.parametrize("text", ["", "4096", "1,2,3", "a,16", "-1,16", "0,16", "16,8", "16,24", "1e3,16", "²,16"])
def test_bad_shapes(text):
    with pytest.raises(InvalidInput):
        parse_shape(text)


def test_values_of_m():
    assert parse_ms("1,8,64-512") == (1, 8, 64, 96, 128, 192, 256, 384, 512)
    assert parse_ms("100-130") == (100, 128, 130)
    assert parse_ms("5,5, 3") == (3, 5)
    assert parse_ms("1-8192") == ANCHORS


@pytest.mark.parametrize("text", ["", "0", "8-4", "1,,2", "1-2-3", "x", "-5", "99999999"])
def test_bad_values_of_m(text):
    with pytest.raises(InvalidInput):
        parse_ms(text)


def test_the_quick_anchors_are_some_of_all():
    assert set(QUICK_ANCHORS) < set(ANCHORS)
    assert tuple(sorted(ANCHORS)) == ANCHORS


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_shape, "4096", "this is no shape of a layer; got '4096'; expected N,K such as 4096,14336"),
        (parse_ms, "8-1", "these are no values of M; got '8-1'"),
        (problems_of_model, "xyzzy", "no shipped model has this name; got 'xyzzy'; see `nvfp4 tune --list-models`"),
    ],
)
def test_wrong_text_is_answered_in_a_sentence(parse, text, words):
    with pytest.raises(InvalidInput) as error:
        parse(text)
    assert str(error.value).startswith(words) and len(str(error.value)) < 300
