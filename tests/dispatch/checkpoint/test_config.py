"""What quantisation configs answer for module names; the configs are written as the exporters write them."""

import json
import re
import warnings

import pytest
from nvfp4.dispatch.checkpoint.config import read_quant_config
from nvfp4.errors import InvalidInput, Unsupported

CT_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16}


@pytest.fixture
def read(tmp_path):
    def make(hf=None, inner=None, **model):
        if hf is not None:
            (tmp_path / "hf_quant_config.json").write_text(
                json.dumps({"producer": {"name": "modelopt", "version": "0.44"}, "quantization": hf})
            )
        if inner is not None or model:
            (tmp_path / "config.json").write_text(json.dumps(model | ({"quantization_config": inner} if inner else {})))
        return read_quant_config(tmp_path)

    return make


def ct(*groups, ignore=(), **more):
    groups = groups or ({"targets": ["Linear"], "weights": CT_WEIGHTS, "input_activations": None},)
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    } | more


def algos(config, *names):
    return [config.answer(name).algo for name in names]


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_ARC", "nvfp4"])
def test_every_nvfp4_algorithm_is_one_answer(read, algo):
    config = read(
        hf={"quant_algo": algo, "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    )
    answer = config.answer("model.layers.0.mlp.down_proj")
    assert (answer.quantized, answer.group_size, config.dialect) == (True, 16, "modelopt")
    assert not config.answer("lm_head").quantized
    assert config.source == "hf_quant_config.json"


def test_the_group_size_of_awq_is_not_that_of_the_block_scales(read):
    config = read(hf={"quant_algo": "NVFP4_AWQ", "group_size": 128})
    assert config.answer("model.layers.0.mlp.down_proj").group_size == 16


@pytest.mark.parametrize("algo", ["FP8", "MXFP8", "NVFP4_SVD", "W4A8_NVFP4_FP8", "FP8_PB_WO", "NVFP5"])
def test_another_algorithm_is_named(read, algo):
    with pytest.raises(Unsupported, match=rf"hf_quant_config.json: unsupported quant_algo; got '{algo}'.*W4A16_NVFP4"):
        read(hf={"quant_algo": algo})


def test_no_algorithm_is_named_as_such(read):
    with pytest.raises(Unsupported, match="names no quant_algo"):
        read(inner={"quant_method": "modelopt"})


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "fp8", None])
def test_another_method_is_named(read, method):
    with pytest.raises(Unsupported, match=rf"unsupported quant_method; got {method!r}"):
        read(inner={"quant_method": method})


@pytest.mark.parametrize("method", ["nvfp4", "modelopt_fp4"])
def test_some_methods_imply_the_algorithm(read, method):
    assert read(inner={"quant_method": method, "ignore": ["lm_head"]}).answer("model.layers.0.mlp.up_proj").quantized


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 column 2"),
        ("[]", "object"),
        ('{"quantization": {"quant_algo": 4}}', "quant_algo"),
        ('{"quantization": {"quant_algo": "\xff"}}', "utf-8"),
        (r'{"quantization": {"quant_algo": "NVFP4", "ignore": "\ud800"}}', "surrogate"),
    ],
)
def test_a_file_that_is_no_config_is_named(read, tmp_path, text, words):
    (tmp_path / "hf_quant_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match=rf"(?i)hf_quant_config\.json.*{words}"):
        read()


def test_half_a_character_in_a_field_of_config_json_is_named(read):
    with pytest.raises(InvalidInput, match=r"config\.json is not what a checkpoint has there; got .*surrogate"):
        read(inner={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "\ud800"})


def test_without_a_config_nothing_is_said(read):
    config = read()
    assert not config.is_there and algos(config, "model.layers.0.mlp.up_proj") == [""]


def test_globs_cover_whole_names_and_plain_patterns_whole_parts(read):
    config = read(
        hf={
            "quant_algo": "NVFP4",
            "exclude_modules": ["model.layers.0*", "model.layers.1.*", "model.layers.2", "*.router", "q_a_proj"],
        }
    )
    excluded = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj")
    assert algos(config, *excluded, "model.layers.5.mlp.router", "model.layers.5.self_attn.q_a_proj") == [""] * 5
    # a substring would also take layers 10 to 29
    kept = ("model.layers.10.mlp.up_proj", "model.layers.12.mlp.up_proj", "model.layers.20.mlp.up_proj")
    assert algos(config, *kept, "model.layers.5.mlp.router2.up_proj") == ["NVFP4"] * 4


def test_prefixes_of_multimodal_models_are_one_name(read):
    config = read(
        hf={"quant_algo": "NVFP4", "exclude_modules": ["model.language_model.layers.3.self_attn*", "lm_head"]}
    )
    spellings = ("model.layers.3.self_attn.o_proj", "language_model.model.layers.3.self_attn.o_proj")
    assert algos(config, *spellings, "language_model.lm_head") == ["", "", ""]
    assert algos(config, "model.layers.4.self_attn.o_proj") == ["NVFP4"]


def test_fused_names_answer_for_their_parts(read):
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    config = read(hf={"quant_algo": "NVFP4", "exclude_modules": [*attention, "model.layers.1.self_attn.q_proj"]})
    assert algos(config, "model.layers.0.self_attn.qkv_proj", "model.layers.2.self_attn.qkv_proj") == ["", "NVFP4"]
    with pytest.raises(InvalidInput, match=r"layers\.1\.self_attn\.qkv_proj.*q_proj: not quantised.*k_proj: NVFP4"):
        config.answer("model.layers.1.self_attn.qkv_proj")


def test_a_part_follows_the_fused_name(read):
    config = read(hf={"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0.self_attn.qkv_proj"]})
    assert algos(config, "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj") == ["", "NVFP4"]


def test_mixed_precision_is_an_answer_per_layer(read):
    config = read(
        hf={
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.language_model.layers.0.self_attn.k_proj": {"quant_algo": "FP8"},
                "model.language_model.layers.0.self_attn.v_proj": {"quant_algo": "FP8"},
                "model.language_model.layers.1.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.language_model.layers.1.mlp.up_proj": {"quant_algo": "FP8"},
                "backbone.layers.1.mixer.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "backbone.layers.1.mixer.experts.0.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
        }
    )
    assert algos(config, "model.layers.0.mlp.experts", "model.layers.0.mlp.experts.7.up_proj") == ["NVFP4"] * 2
    assert algos(config, "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj") == ["FP8", ""]
    assert algos(config, "backbone.layers.1.mixer.experts", "language_model.lm_head") == ["NVFP4"] * 2
    assert algos(config, "model.layers.0.mlp.gate", "backbone.layers.10.mixer.experts") == ["", ""]
    with pytest.raises(InvalidInput, match=r"layers\.1\.mlp\.gate_up_proj.*gate_proj: NVFP4.*up_proj: FP8"):
        config.answer("model.language_model.layers.1.mlp.gate_up_proj")


def test_entries_may_lack_what_their_algorithm_implies(read):
    layers = {
        "a.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "a.k_proj": {"quant_algo": "w4a16_nvfp4"},
        "a.v_proj": {"quant_algo": "NVFP4_AWQ", "group_size": 128},
        "a.o_proj": {"quant_algo": "FP8"},
        "b.q_proj": {"quant_algo": None},
        "b.k_proj": {"quant_algo": "none"},
        "b.v_proj": {},
    }
    config = read(hf={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert (config.answer("a.qkv_proj").algo, config.answer("a.qkv_proj").group_size) == ("NVFP4", 16)
    assert (config.answer("a.o_proj").algo, config.answer("a.o_proj").group_size) == ("FP8", 0)
    assert config.answer("b.qkv_proj").algo == config.answer("b.k_proj").algo == ""


def test_mixed_precision_without_layers_is_refused(read):
    with pytest.raises(InvalidInput, match="MIXED_PRECISION; got no quantized_layers"):
        read(hf={"quant_algo": "MIXED_PRECISION"})


def test_quantized_layers_beat_config_groups(read):
    config = read(
        inner={
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": {"group_1": {"targets": ["model.layers.0.mlp.up_proj"], "weights": {"num_bits": 8}}},
            "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        }
    )
    assert config.answer("model.layers.0.mlp.up_proj").quantized


@pytest.mark.parametrize("field", ["exclude_modules", "ignore"])
def test_quantized_layers_beat_patterns_of_what_is_not_quantised(read, field):
    config = read(
        hf={
            "quant_algo": "MIXED_PRECISION",
            field: ["model.layers.0*", "lm_head"],
            "quantized_layers": {name: {"quant_algo": "NVFP4"} for name in ("model.layers.0.mlp.up_proj", "lm_head")},
        }
    )
    names = ("model.layers.0.mlp.up_proj", "lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj")
    assert algos(config, *names) == ["NVFP4", "NVFP4", "", ""]


def test_experts_alone_may_be_nvfp4(read):
    config = read(inner={"quant_method": "fp8", "moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", "mtp.*"]})
    assert algos(config, "layers.0.ffn.experts.3.w1", "layers.0.ffn.experts") == ["NVFP4"] * 2
    dense = ("layers.0.attn.wq", "layers.0.ffn.shared_experts.w1", "mtp.0.ffn.experts.3.w1", "mtp.0.ffn.experts")
    assert algos(config, *dense) == [""] * 4


def test_when_both_files_differ_a_warning_names_the_one_that_counts(read):
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    with pytest.warns(UserWarning, match=r"differ about what is quantised; config\.json counts"):
        config = read(
            hf={"quant_algo": "NVFP4"},
            inner={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
        )
    assert algos(config, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj") == ["NVFP4", ""]


def test_the_file_with_an_answer_per_layer_counts_in_either_place(read):
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    other = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
    for inner in ({"quant_algo": "NVFP4"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": other}):
        with pytest.warns(UserWarning, match=r"differ about what is quantised; hf_quant_config\.json counts"):
            config = read(hf=mixed, inner={"quant_method": "modelopt"} | inner)
        assert config.source == "hf_quant_config.json" and algos(config, *names) == ["NVFP4", ""]


def test_the_part_of_hf_quant_config_may_be_in_config_json(read):
    config = read(
        inner={"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "ignore": ["lm_head"]}}
    )
    assert algos(config, "model.layers.0.mlp.up_proj", "lm_head") == ["NVFP4", ""]
    with pytest.raises(Unsupported, match="unsupported quant_method; got 'gptq'"):
        read(inner={"quant_method": "gptq", "quantization": {"quant_algo": "NVFP4"}})


def test_two_files_that_say_the_same_are_no_warning(read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read(
            hf={"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "a*"]},
            inner={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a*", "lm_head"]},
        )
    assert config.source == "hf_quant_config.json"


def test_the_config_may_be_inside_that_of_the_language_model(read):
    config = read(
        text_config={"num_hidden_layers": 3, "quantization_config": {"quant_method": "nvfp4"}}, model_type="m"
    )
    assert config.answer("model.layers.0.mlp.up_proj").quantized
    assert (config.model.num_hidden_layers, config.model.model_type) == (3, "m")


def test_fields_of_the_model_that_are_of_another_type_are_not_known(read):
    config = read(
        num_hidden_layers=2, num_key_value_heads=[1, 2], dtype={}, tie_word_embeddings=True, quantization_config=None
    )
    assert (config.model.num_hidden_layers, config.model.num_key_value_heads, config.model.dtype) == (2, None, None)
    assert config.model.tie_word_embeddings and not config.is_there


def test_infinity_is_no_error(read):
    config = read({"quant_algo": "NVFP4", "group_size": 16}, time_step_limit=[0.0, float("inf")], num_hidden_layers=2)
    assert config.model.num_hidden_layers == 2


def test_compressed_tensors_by_class_name_and_pattern(read):
    config = read(inner=ct(ignore=["lm_head", "re:.*mlp[.]gate$", "re:model[.]layers[.]0[.]"]))
    assert algos(config, "lm_head", "model.layers.3.mlp.gate", "model.layers.0.mlp.up_proj") == ["", "", ""]
    assert algos(config, "model.layers.3.mlp.gate_proj", "language_model.model.layers.0.mlp.up_proj") == ["NVFP4", ""]
    assert config.answer("model.layers.3.mlp.gate_proj").group_size == 16
    assert config.dialect == "compressed-tensors"


def test_names_come_before_patterns_and_patterns_before_classes(read):
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config = read(
        inner=ct(
            {"targets": ["Linear"], "weights": fp8, "format": "float-quantized"},
            {"targets": ["re:.*self_attn.*"], "weights": CT_WEIGHTS, "format": "nvfp4-pack-quantized"},
            {"targets": ["model.layers.0.self_attn.o_proj"], "weights": fp8, "format": "float-quantized"},
            format="mixed-precision",
        )
    )
    names = ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.up_proj")
    assert algos(config, *(f"model.layers.0.{name}" for name in names)) == ["FP8", "NVFP4", "FP8"]


def test_parts_of_a_fused_linear_must_agree_in_compressed_tensors_too(read):
    config = read(inner=ct(ignore=["model.layers.0.mlp.gate_proj"]))
    with pytest.raises(InvalidInput, match=r"gate_up_proj.*gate_proj: not quantised"):
        config.answer("model.layers.0.mlp.gate_up_proj")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (CT_WEIGHTS | {"strategy": "group", "group_size": 32}, "MXFP4"),
        (CT_WEIGHTS | {"strategy": "group"}, "strategy 'group', group size 16"),
        (CT_WEIGHTS | {"group_size": 32}, "strategy 'tensor_group', group size 32"),
        (CT_WEIGHTS | {"type": "int"}, "4-bit int"),
        (CT_WEIGHTS | {"num_bits": 8}, "FP8"),
        (None, "no weights"),
    ],
)
def test_weights_that_are_not_nvfp4_are_named(read, weights, words):
    with pytest.raises(Unsupported, match=rf"no NVFP4 weights; got group_0: .*{words}"):
        read(inner=ct({"targets": ["Linear"], "weights": weights}))


def test_nvfp4_weights_in_another_format_are_named(read):
    with pytest.raises(Unsupported, match="float-quantized"):
        read(inner=ct(format="float-quantized"))


def test_a_preset_is_its_name_with_targets(read):
    config = read(inner=ct() | {"config_groups": {"NVFP4A16": ["Linear"]}})
    assert config.answer("model.layers.0.mlp.up_proj").quantized


@pytest.mark.parametrize("field", ["transform_config", "sparsity_config"])
def test_what_would_change_the_results_is_refused(read, field):
    assert read(inner=ct(**{field: {}})).answer("model.layers.0.mlp.up_proj").quantized
    with pytest.raises(Unsupported, match=rf"unsupported {field}; got .*hadamard"):
        read(inner=ct(**{field: {"config_groups": {"u": {"type": "hadamard"}}}}))


@pytest.mark.parametrize("pattern", ["re:[", "re:(", "re:*", "re:(?P<a>b)(?P<a>c)"])
@pytest.mark.parametrize("where", ["targets", "ignore"])
def test_a_pattern_that_is_none_is_named(read, pattern, where):
    group = {"targets": ["Linear"], "weights": CT_WEIGHTS}
    inner = ct(group | {"targets": [pattern]}) if where == "targets" else ct(group, ignore=[pattern])
    with pytest.raises(InvalidInput, match=f"config.json: this is no pattern; got '{re.escape(pattern)}': "):
        read(inner=inner)


def test_what_is_said_about_experts_is_read_from_the_language_model(read):
    text = {"num_experts_per_tok": 8, "num_experts": 4}
    found = read(hidden_act="silu", num_experts_per_tok=1, text_config=text).model.moe
    assert (found.top_k, found.activation, found.experts) == ((8,), "silu", 4)
