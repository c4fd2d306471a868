"""A checkpoint, read as far as its headers: which modules hold NVFP4 weights, and whether the config agrees."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidInput, Nvfp4Error, Unsupported, message
from ...kernels.weights.codec import GROUP
from .config import QuantConfig, read_quant_config
from .files import TensorFiles, TensorInfo, listed
from .fused_experts import FusedExperts, fused_expert_leaves, fused_experts
from .modules import FLOATS, Broken, Foreign, LinearInfo, classify
from .names import aliases, expert_of, is_linear_name, is_of_mtp, layer_number, split
from .rules import NVFP4

__all__ = ["Checkpoint", "check_opened", "open_checkpoint"]

# Their tensors look like NVFP4, but are used in another way.
VARIANTS = ("NVFP4_SVD", "W4A8_NVFP4_FP8")
KV_SCALES = ("k_scale", "v_scale", "k_bias", "v_bias")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `open_checkpoint` found; weights are read from it one layer at a time.

    Attributes
    ----------
    linears
        NVFP4 layers by module name, those of experts left out.
    experts
        By the name of the module around them ("….mlp.experts"): expert -> projection -> NVFP4 layer.
    fused_experts
        The same for experts that are stored as 3-D tensors.
    foreign
        Modules that are quantised in another way, and how.
    broken
        Modules whose tensors make no weight, and why not.
    dense
        Names of the tensors that belong to none of these, KV-cache scales left out.
    kv_scales
        Names of the KV-cache scales, which linear layers never apply.
    """

    path: Path
    config: QuantConfig
    files: TensorFiles
    linears: Mapping[str, LinearInfo]
    experts: Mapping[str, Mapping[int, Mapping[str, LinearInfo]]]
    fused_experts: Mapping[str, FusedExperts]
    foreign: Mapping[str, str]
    broken: Mapping[str, str]
    dense: tuple[str, ...]
    kv_scales: tuple[str, ...]

    def linear(self, name: str) -> LinearInfo:
        """The NVFP4 layer of that name, in any of its spellings.

        Raises
        ------
        InvalidInput
            There is none; the message says what is there instead.
        Unsupported
            The layer is quantised in another way, which is named.
        """
        info = self.find(name)
        if info is None:
            raise self._why_not(name)
        self.refuse_variant(info.name)
        return info

    def find(self, name: str) -> LinearInfo | None:
        """The same, or None where there is none; whatever the config says."""
        for spelling in aliases(name):
            if spelling in self.linears:
                return self.linears[spelling]
            module, number, leaf = expert_of(spelling) or ("", 0, "")
            if leaf in (roles := self.experts.get(module, {}).get(number, {})):
                return roles[leaf]
        return None

    @property
    def names_variants(self) -> bool:
        """Whether the config names one of VARIANTS for any layer; asking it about every expert takes seconds."""
        return not self.config.rules.algos.isdisjoint(VARIANTS)

    def refuse_variant(self, name: str) -> None:
        """Raise where the config says that a layer is one of VARIANTS."""
        algo = self.config.answer(name).algo
        if algo in VARIANTS:
            raise Unsupported(message(f"layer {name} is quantised as {algo}", expected="NVFP4"))

    def _why_not(self, name: str) -> Nvfp4Error:
        for spelling in aliases(name):
            if spelling in self.broken:
                return InvalidInput(self.broken[spelling])
            if spelling in self.foreign:
                algo = self.config.answer(spelling).algo
                known = algo if algo not in ("", NVFP4) else self.foreign[spelling]
                return Unsupported(message(f"layer {spelling} is quantised as {known}", expected="NVFP4"))
            weight = self.files.infos.get(f"{spelling}.weight")
            if weight is not None:
                return InvalidInput(
                    message(
                        f"layer {spelling} is not quantised",
                        got=f"{spelling}.weight {weight}",
                        expected="a packed weight with scales",
                        do="use its dense weight; the config's ignore list should name it",
                    )
                )
        if split(name)[1] == "lm_head" and self.config.model.tie_word_embeddings:
            return InvalidInput(
                message(
                    f"{self.path} has no {name}",
                    got="tie_word_embeddings in config.json",
                    do="use the embedding's weight: it is dense",
                )
            )
        return InvalidInput(
            message(f"{self.path} has no layer {name}", expected=f"one like {listed(self.linears, 3) or 'none'}")
        )

    def is_extra(self, name: str) -> bool:
        """Whether a module belongs to no layer of the model proper: multi-token prediction, layers beyond the last."""
        layers, number = self.config.model.num_hidden_layers, layer_number(name)
        return is_of_mtp(name) or (layers is not None and number is not None and number >= layers)

    def check(self) -> None:
        """Raise InvalidInput for the first broken modules, with how many there are."""
        if self.broken:
            problems = list(self.broken.values())
            more = f" (and {len(problems) - 3} more modules)" if len(problems) > 3 else ""
            raise InvalidInput(f"{self.path}: " + " | ".join(problems[:3]) + more)


def check_opened(checkpoint: object) -> None:
    """Raise InvalidInput for anything but a Checkpoint, such as the path of one."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInput(
            message("this is no open checkpoint", got=repr(checkpoint), do="pass what open_checkpoint(folder) returns")
        )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers and configs of a checkpoint; no weight is read.

    Where the config and the tensors disagree about a layer, the tensors count and one warning names the layers.

    Parameters
    ----------
    path
        The folder with config.json, hf_quant_config.json and safetensors files, or one safetensors file.

    Raises
    ------
    InvalidInput
        Files are missing, damaged, or contradict each other.
    Unsupported
        The config names an algorithm that is not NVFP4.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInput(
            message("this names no checkpoint", got=type(path).__name__, expected="the path of a folder or a file")
        )
    path = Path(path)
    files = TensorFiles(path)
    config = read_quant_config(path if path.is_dir() else path.parent)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in files.infos.items():
        module, leaf = split(name)
        modules.setdefault(module, {})[leaf] = info
    linears: dict[str, LinearInfo] = {}
    experts: dict[str, dict[int, dict[str, LinearInfo]]] = {}
    fused: dict[str, FusedExperts] = {}
    foreign: dict[str, str] = {}
    broken: dict[str, str] = {}
    dense: list[str] = []
    for module, leaves in modules.items():
        stacked = fused_expert_leaves(leaves)
        found = fused_experts(module, stacked) if stacked else None
        if isinstance(found, FusedExperts):
            fused[module] = found
            leaves = {leaf: info for leaf, info in leaves.items() if leaf not in stacked}
        one = found if isinstance(found, Broken) else classify(module, leaves)
        if isinstance(one, Broken):
            broken[module] = one.problem
        elif isinstance(one, Foreign):
            foreign[module] = one.algo
        elif isinstance(one, LinearInfo):
            expert = expert_of(module)
            if expert is None:
                linears[module] = one
            else:
                experts.setdefault(expert[0], {}).setdefault(expert[1], {})[expert[2]] = one
        else:
            dense += [info.name for leaf, info in leaves.items() if leaf not in KV_SCALES]
    checkpoint = Checkpoint(
        path=path,
        config=config,
        files=files,
        linears=linears,
        experts=experts,
        fused_experts=fused,
        foreign=foreign,
        broken=broken,
        dense=tuple(dense),
        kv_scales=tuple(name for name in files.infos if split(name)[1] in KV_SCALES),
    )
    _warn_contradictions(checkpoint)
    return checkpoint


def _warn_contradictions(checkpoint: Checkpoint) -> None:
    if not checkpoint.config.is_there:
        if checkpoint.linears or checkpoint.experts or checkpoint.fused_experts:
            _warn(f"{checkpoint.path} has no quantisation config: its tensors alone say what is quantised")
        return
    packed = [*checkpoint.linears, *checkpoint.experts, *checkpoint.fused_experts]
    dialects = {info.dialect for info in checkpoint.linears.values()}
    said = checkpoint.config.dialect
    if dialects and said not in dialects:
        _warn(
            f"{checkpoint.path}: {checkpoint.config.source} is of {said}, but the tensors are named and scaled as by "
            f"{dialects.pop()}, and are read so"
        )
    said_dense = [name for name in packed if not _called_nvfp4(checkpoint.config, name)]
    if said_dense:
        _warn(
            f"{checkpoint.path}: {checkpoint.config.source} does not call these layers NVFP4, but their tensors are, "
            f"so they are loaded as NVFP4: {listed(said_dense)}"
        )
    sizes = {name: checkpoint.config.answer(name).group_size for name in checkpoint.linears if name not in said_dense}
    said_size = [name for name, size in sizes.items() if size not in (0, GROUP)]
    if said_size:
        _warn(
            f"{checkpoint.path}: {checkpoint.config.source} says group size {sizes[said_size[0]]}, but the tensors "
            f"have {GROUP}: {listed(said_size)}"
        )
    said_packed = [name for name in _dense_linears(checkpoint) if _called_nvfp4(checkpoint.config, name)]
    if said_packed:
        _warn(
            f"{checkpoint.path}: {checkpoint.config.source} calls these layers NVFP4, but their weights are dense, so "
            f"they are left dense: {listed(said_packed)}"
        )


def _called_nvfp4(config: QuantConfig, name: str) -> bool:
    try:
        return config.answer(name).quantized
    except InvalidInput:  # it contradicts itself, about the parts of a layer that is stored as one
        return False


def _dense_linears(checkpoint: Checkpoint) -> Iterable[str]:
    for name in checkpoint.dense:
        module, leaf = split(name)
        info = checkpoint.files.infos[name]
        if leaf == "weight" and len(info.shape) == 2 and info.dtype in FLOATS and is_linear_name(module):
            yield module


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
