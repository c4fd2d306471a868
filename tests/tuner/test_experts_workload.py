"""Problems of experts as text, and those of shipped models."""

import re
from dataclasses import replace

import pytest
import torch
from nvfp4.cache.words import shape_words
from nvfp4.cli.words import problem_words
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import DTYPES, Problem
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
        ("experts=4", "--moe lacks top_k, hidden, inter; got 'experts=4'; expected experts=8"),
        ("expert=4,top_k=2,hidden=64,inter=48", "--moe has an unknown key expert and lacks experts; got"),
        ("experts=4,top_k=2,hidden=64,inter=48,inter=48", "--moe has more than once inter; got"),
        ("experts=4,top_k=2,hidden=64,inter=48,limit=7", "--moe has an unknown key limit; got"),
        ("4,2,64,48", "--moe cannot be read; got '4,2,64,48'; expected experts=8"),
        ("experts=0,top_k=2,hidden=64,inter=48", "experts; got '0'; expected a whole number above 0"),
        ("experts=4,top_k=2,hidden=64,inter=40", "inter; got 40; expected a multiple of 16"),
        ("experts=4,top_k=2,hidden=64,inter=48,activation=mish", "unknown activation; got 'mish'"),
    ],
)
def test_text_that_means_no_problem(text, words):
    with pytest.raises(InvalidInput, match=re.escape(words)):
        parse_moe(text)


PROBLEMS = (
    *(replace(one, dtype=dtype) for one in (MOE, GROUPED, Problem(n=40, k=64)) for dtype in DTYPES),
    replace(MOE, activation="geglu_tanh"),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_a_problem_is_read_from_its_name_as_records_and_tables_have_it(problem):
    for name in (problem.label, problem_words(problem), f" {problem.label.upper()} "):
        assert parse_problem(name) == parse_problem(name, dtype=problem.dtype) == problem


def test_a_name_without_a_dtype_has_that_of_the_option():
    assert parse_problem("grouped_gemm 40x64 E4") == GROUPED
    assert parse_problem("moe 48x64 E4 top2 swiglu", dtype="float16") == replace(MOE, dtype="float16")


def test_a_name_with_another_dtype_than_the_option_is_refused():
    with pytest.raises(InvalidInput, match=r"another dtype; got 'gemm 40x64 bf16'; expected float16"):
        parse_problem("gemm 40x64 bf16", dtype="float16")


@pytest.mark.parametrize(
    "text",
    ["", "40", "40,64,3", "40x", "-1,64", "gemm", "gemm 40x64 int8", "gemm 40x64 bf16 E8", "grouped_gemm 40x64 bf16",
     "moe 48x64 bf16 E4", "moe 48x64 bf16 top2 swiglu", "conv 40x64 bf16", "experts=8"],
)  # fmt: skip
def test_what_names_no_problem_is_told_every_form(text):
    with pytest.raises(InvalidInput, match=re.escape(f"this names no problem; got {text!r}; expected ")) as caught:
        parse_problem(text)
    words = str(caught.value)
    assert "N,K such as 4096,14336" in words and "experts=8,n=256,k=128" in words and '"gemm 4096x14336 bf16"' in words
    assert "experts=8,top_k=2,hidden=256,inter=128,activation=swiglu" in words


def test_a_name_with_sizes_that_cannot_be_says_what_is_wrong():
    with pytest.raises(InvalidInput, match=r"K a positive multiple of 16"):
        parse_problem("gemm 40x63 bf16")
    with pytest.raises(InvalidInput, match=r"unknown activation; got 'mish'"):
        parse_problem("moe 48x64 bf16 E4 top2 mish")


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
