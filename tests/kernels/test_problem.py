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
