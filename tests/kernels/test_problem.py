"""A Problem that no gemm can have is refused when it is made, by hand or from a database."""

import msgspec
import pytest
from nvfp4 import InvalidInput
from nvfp4.kernels.problem import DTYPES, Problem


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": -1}, "n=-1, k=64"),
        ({"n": "4"}, "n='4'"),
        ({"n": True}, "n=True"),
        ({"k": 0}, "k=0"),
        ({"k": 64.0}, "k=64.0"),
        ({"k": None}, "k=None"),
        ({"dtype": "float32"}, "got 'float32'; expected bfloat16 or float16"),
        ({"dtype": None}, "got None"),
        ({"op": "conv"}, "wrong op of a Problem; got 'conv'; expected gemm or grouped_gemm or moe"),
        ({"experts": 8}, "wrong experts of a Problem; got 8 for gemm; expected 0"),
        ({"top_k": 2}, "wrong top_k of a Problem; got 2 for gemm"),
        ({"activation": "swiglu"}, "wrong activation of a Problem; got 'swiglu'; expected none"),
        ({"n": 1 << 31}, r"wrong size of a Problem; got n=2147483648, k=64; .* below 2\^31"),
        ({"k": 1 << 70}, "wrong size of a Problem"),
        ({"op": "grouped_gemm", "experts": 1 << 31}, "wrong experts of a Problem; .* below 2"),
        ({"op": "grouped_gemm"}, "wrong experts of a Problem; got 0 for grouped_gemm; expected an int, at least 1"),
        ({"op": "grouped_gemm", "experts": 2, "top_k": 2}, "wrong top_k"),
        ({"op": "moe", "experts": 2, "activation": "swiglu"}, "wrong top_k of a Problem; got 0 for moe"),
        ({"op": "moe", "experts": True, "top_k": 1, "activation": "swiglu"}, "got True for moe"),
        ({"op": "moe", "experts": 2, "top_k": 1}, "unknown activation; got ''"),
        ({"op": "moe", "experts": 2, "top_k": 1, "activation": "silu"}, "got 'silu'; expected swiglu"),
        ({"op": "moe", "experts": 2, "top_k": 1, "activation": "swish"}, "unknown activation; got 'swish'"),
    ],
)
def test_wrong_fields(fields, text):
    fields = {"n": 32, "k": 64, **fields}
    with pytest.raises(InvalidInput, match=text):
        Problem(**fields)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_fields(dtype):
    problem = Problem(n=1, k=1, dtype=dtype)
    assert msgspec.json.decode(msgspec.json.encode(problem), type=Problem) == problem


def test_a_layer_of_experts():
    moe = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
    assert moe.label == "moe 768x2048 bfloat16 E128 top8 swiglu"
    assert moe.gated and moe.weight_bytes == 128 * 3 * 768 * 2048 * 9 // 16
    up_only = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="relu2")
    assert not up_only.gated and up_only.weight_bytes == 128 * 2 * 768 * 2048 * 9 // 16
    grouped = Problem(op="grouped_gemm", n=64, k=128, experts=4)
    assert grouped.label == "grouped_gemm 64x128 bfloat16 E4" and not grouped.gated
    assert grouped.weight_bytes == 4 * 64 * 128 * 9 // 16
    assert msgspec.json.decode(msgspec.json.encode(moe), type=Problem) == moe
