"""The conformance checks fail kernels that are wrong in the ways that have been seen."""

import pytest
import torch
from nvfp4.kernels.gemm.cpu_blocked import CpuBlocked
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.weight import Weight
from nvfp4.testing import conformance

CPU = Device(kind="cpu", name="test", units=2, l2_bytes=32 << 20)
SEEDS = range(24)


class FromFragments(CpuBlocked):
    """A right kernel that takes a fragment layout, and nothing else."""

    def layout(self, device, problem):
        return "fragment1-fp16"

    def build(self, device, problem, config):
        launcher = super().build(device, problem, config)

        def launch(x, data, scale, gs, bias, pqs, out):
            assert scale is None and data.shape[-1] == 2304
            packed = Weight(
                data=data,
                scale=None,
                global_scale=gs,
                layout="fragment1-fp16",
                out_features=problem.n,
                in_features=problem.k,
            )
            weight, scale, _ = packed.to_checkpoint()
            launcher(x, weight, scale.view(torch.uint8), gs, bias, pqs, out)

        return launch


class Broken(CpuBlocked):
    """A right kernel whose launcher is wrapped: `change(arguments)` returns others, `after(arguments)` runs last."""

    def __init__(self, change=lambda *a: a, after=lambda *a: None):
        self.change, self.after = change, after

    def build(self, device, problem, config):
        launcher = super().build(device, problem, config)

        def launch(*arguments):
            launcher(*self.change(*arguments))
            self.after(*arguments)

        return launch


def check(kernel, seed, m=5):
    problem = Problem(n=40, k=64)
    config = kernel.default_config(CPU, problem, m)
    conformance.check(kernel, CPU, torch.device("cpu"), problem, config, m, seed=seed)


@pytest.mark.parametrize("seed", range(16))
def test_kernels_get_weights_in_their_own_layout(seed):
    check(FromFragments(), seed)


def test_exactness_is_checked_in_the_kernel_s_own_layout():
    conformance.check_exact(FromFragments(), CPU, torch.device("cpu"), "float16", rotations=2)


def fails_with_some_seed(kernel, match, m=5):
    caught = []
    for seed in SEEDS:
        try:
            check(kernel, seed, m)
        except AssertionError as error:
            caught.append(str(error))
    assert caught, "no seed notices"
    assert any(match in text for text in caught), caught


def flush_subnormal_scales(scale):
    return torch.where((scale & 0x7F) < 0x08, 0, scale)


def flush_subnormals(gs):
    return torch.where(gs < 2.0**-126, 0.0, gs)


CHANGES = {
    "drops bias": lambda x, w, s, g, b, p, o: (x, w, s, g, None, p, o),
    "drops pre_quant_scale": lambda x, w, s, g, b, p, o: (x, w, s, g, b, None, o),
    "one global scale for all rows": lambda x, w, s, g, b, p, o: (x, w, s, g[:1].clone(), b, p, o),
    "loses the sign of block scales": lambda x, w, s, g, b, p, o: (x, w, s & 0x7F, g, b, p, o),
    "flushes subnormal block scales": lambda x, w, s, g, b, p, o: (x, w, flush_subnormal_scales(s), g, b, p, o),
    "flushes a subnormal global scale": lambda x, w, s, g, b, p, o: (x, w, s, flush_subnormals(g), b, p, o),
    "swaps nibbles": lambda x, w, s, g, b, p, o: (x, (w << 4) | (w >> 4), s, g, b, p, o),
    "takes rows of x as dense": lambda x, w, s, g, b, p, o: (
        torch.as_strided(x, x.shape, (x.shape[1], 1)),
        w,
        s,
        g,
        b,
        p,
        o,
    ),
    "hides NaN of x": lambda x, w, s, g, b, p, o: (x.nan_to_num(), w, s, g, b, p, o),
    "rounds bias to 8 bits": lambda x, w, s, g, b, p, o: (
        x,
        w,
        s,
        g,
        None if b is None else b.to(torch.float8_e5m2).float(),
        p,
        o,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_values_are_seen(change):
    fails_with_some_seed(Broken(change), "seed")


def around(out, start, length):
    """Elements outside `out`, as a kernel that forgets a bound reaches them."""
    return torch.as_strided(out, (length,), (1,), out.storage_offset() + start)


AFTER = {
    "writes behind out": (lambda *a: around(a[-1], a[-1].numel(), 3).zero_(), "before or after out"),
    "writes before out": (lambda *a: around(a[-1], -3, 3).zero_(), "before or after out"),
    "leaves the last row": (lambda *a: a[-1][-1].fill_(float("nan")), "seed"),
    "changes x": (lambda *a: a[0][0].zero_(), "an input"),
    "changes the weight": (lambda *a: a[1][0].zero_(), "an input"),
    "is not deterministic": (lambda *a: a[-1].mul_(1 + 2.0**-7 * (torch.rand(()) < 0.5)), "two runs differ"),
}


@pytest.mark.parametrize(("after", "match"), AFTER.values(), ids=AFTER)
def test_wrong_writes_are_seen(after, match):
    fails_with_some_seed(Broken(after=after), match, m=1)


def test_the_kernel_itself_passes_with_all_seeds():
    for seed in SEEDS:
        check(CpuBlocked(), seed)


def test_exactness_check_names_the_product():
    def change(x, w, s, g, b, p, o):
        return x, w, torch.where(s == 0x03, 0x04, s), g, b, p, o

    with pytest.raises(AssertionError, match=r"14 of 2032 products .* scale byte 0x03 \* 1\.0"):
        conformance.check_exact(Broken(change), CPU, torch.device("cpu"), "float16", rotations=1)


def test_a_default_that_is_not_valid_is_seen():
    class Careless(CpuBlocked):
        def is_valid(self, device, problem, config, m):
            good = super().is_valid(device, problem, config, m)
            return good if config.lookup == "quad" else type(good).no("only quads")

    problem = Problem(n=64, k=64)
    with pytest.raises(AssertionError, match="only quads; but CpuBlockedConfig"):
        conformance.candidates(Careless(), CPU, problem, 1, sampled=2, seed=0)
