"""Problems of experts as text, and those of shipped models."""

import re
from dataclasses import replace

import pytest
import torch
from nvfp4.cache.words import shape_words
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.experts_workload import parse_grouped, parse_moe, parse_problem
from nvfp4.tuner.workload import problems_of_model

MOE = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)
CPU = torch.device("cpu")


def test_problems_as_text():
    assert parse_moe("experts=4,top_k=2,hidden=64,inter=48") == MOE
    assert parse_moe(" TOP_K=2, experts=4,inter=48,hidden=64,activation=silu", dtype="bfloat16") == MOE
    assert parse_grouped("experts=4,n=40,k=64", dtype="float16") == replace(GROUPED, dtype="float16")
    for problem in (MOE, GROUPED, Problem(n=40, k=64)):
        assert parse_problem(shape_words(problem)) == problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experts=4,top_k=2,hidden=64", "expected experts=8,top_k=2,hidden=256,inter=128,activation=swiglu"),
        ("experts=4,top_k=2,hidden=64,inter=48,inter=48", "expected experts=8"),
        ("experts=4,top_k=2,hidden=64,inter=48,limit=7", "expected experts=8"),
        ("4,2,64,48", "expected experts=8"),
        ("experts=0,top_k=2,hidden=64,inter=48", "experts; got '0'; expected a whole number above 0"),
        ("experts=4,top_k=2,hidden=64,inter=40", "inter; got 40; expected a multiple of 16"),
        ("experts=4,top_k=2,hidden=64,inter=48,activation=mish", "unknown activation; got 'mish'"),
    ],
)
def test_text_that_means_no_problem(text, words):
    with pytest.raises(InvalidInput, match=re.escape(words)):
        parse_moe(text)


def test_a_grouped_k_is_a_multiple_of_16():
    with pytest.raises(InvalidInput, match="k; got 40; expected a multiple of 16"):
        parse_problem("experts=4,n=40,k=40")


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("qwen3-30b-a3b", 1, Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")),
        ("qwen3-30b-a3b", 4, Problem(op="moe", n=192, k=2048, experts=128, top_k=8, activation="swiglu")),
        ("gpt-oss-20b", 2, Problem(op="moe", n=1440, k=2880, experts=32, top_k=4, activation="swigluoai")),
        ("gemma-4-26b-a4b", 1, Problem(op="moe", n=704, k=2816, experts=128, top_k=8, activation="geglu_tanh")),
        ("nemotron-3-nano-30b-a3b", 1, Problem(op="moe", n=1856, k=2688, experts=128, top_k=6, activation="relu2")),
        ("kimi-k3", 1, Problem(op="moe", n=3072, k=3584, experts=896, top_k=16, activation="situ")),
    ],
)
def test_a_model_brings_its_experts(name, tp, expected):
    assert [problem for problem in problems_of_model(name, tp=tp) if problem.op != "gemm"] == [expected]


def test_experts_that_do_not_divide_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="gpt-oss-20b: its experts are left out: the inner size cannot be divided"):
        assert all(problem.op == "gemm" for problem in problems_of_model("gpt-oss-20b", tp=8))
