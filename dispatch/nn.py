"""`nvfp4.nn`: `Linear`, a linear layer with an NVFP4 weight, for models made of torch modules; and `FusedMoE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, message
from ..kernels.weights.codec import GROUP, quantize
from ..kernels.weights.layouts import family
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.weight import GLOBAL_SCALE_DTYPES, Weight
from .checkpoint.modules import IGNORED, MODELOPT, REQUIRED
from .checkpoint.values import check_finite, check_pre_quant_scale, check_scale, global_factor
from .checks import DTYPE_NAMES, check_dtype
from .derived import NAN, as_integers, check_loaded, into, loading_problems
from .fused_moe import FusedMoE
from .ops import gemm
from .pack import pack

__all__ = ["FusedMoE", "Linear", "weights"]

DERIVED = ("_data", "_scale", "_factor")
NOTHING = torch.empty(0)  # in the place of what a state dict does not have


class Linear(nn.Module):
    """x [..., in_features] times the transposed NVFP4 weight, plus bias. For inference.

    The state dict has the names and bytes of a checkpoint: `weight` uint8 [N, K/2], `weight_scale` float8_e4m3fn
    [N, K/16] and `weight_scale_2` float32 of ModelOpt, or `weight_packed`, `weight_scale` and `weight_global_scale` of
    compressed-tensors; `pre_quant_scale` [K] and `bias` [N] where there are any. What kernels read is derived from
    them: non-persistent buffers, or the same memory where the layout is the checkpoint's.

    Loading a state dict, moving the module and `refresh_` derive again, into the memory that is already there if the
    module stays on its device: a captured CUDA graph then runs with the new weight. Casting the module (`half`, `to`)
    casts bias and pre_quant_scale only. The tensors may come in several state dicts, loaded with strict=False.

    Parameters
    ----------
    in_features, out_features
        K, a multiple of 16, and N.
    bias
        Whether there is one.
    pre_quant_scale
        Whether there is a scale per input channel; loading a state dict that has one adds it.
    dialect
        "modelopt" or "compressed-tensors".
    layout
        Weight layout of the kernels; None takes what `nvfp4.pack` takes: what the plan marks, and on an untuned GPU the
        fragment layout. One for `dtype` refuses x of the other, as under an autocast to it; "checkpoint" takes both.
    keep_checkpoint
        Keep the checkpoint's weight and weight_scale beside another layout. Without them the layer needs half the
        memory, cannot be changed in place, and its state dict is decoded from the layout: the same values, and the same
        bytes unless a block scale was negative or zero.
    dtype
        Of x, bias and pre_quant_scale: torch.bfloat16 or torch.float16.
    """

    quantizes_activations = False  # x stays in 16 bits, whatever the checkpoint was made for

    weight_scale: Tensor | None  # this and the weight are None once another layout holds them
    pre_quant_scale: Tensor | None
    bias: nn.Parameter | None
    _data: Tensor | None  # what kernels read; None until a weight was loaded
    _scale: Tensor | None
    _factor: Tensor | None
    _layout: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        pre_quant_scale: bool = False,
        dialect: str = MODELOPT,
        layout: str | None = None,
        keep_checkpoint: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        whole = type(in_features) is int and type(out_features) is int
        if not whole or in_features < GROUP or in_features % GROUP or out_features < 1:
            raise InvalidInput(
                message(
                    "wrong size of a Linear",
                    got=f"in_features={in_features!r}, out_features={out_features!r}",
                    expected=f"in_features a multiple of {GROUP}, out_features at least 1",
                )
            )
        if dialect not in REQUIRED:
            raise InvalidInput(message("wrong dialect", got=repr(dialect), expected=" or ".join(map(repr, REQUIRED))))
        check_dtype(dtype)
        if layout not in (None, "fragment") and get_layout(layout).gated:
            raise InvalidInput(message("wrong layout of a Linear", got=repr(layout), expected=repr(family(layout))))
        self.in_features, self.out_features, self.dialect, self.dtype = in_features, out_features, dialect, dtype
        self._wanted_layout, self._keeps = layout, keep_checkpoint
        self._given: set[str] = set()  # what came of a weight that is not all there yet
        self._required = REQUIRED[dialect]
        self._weight_name, _, self._global_name = self._required
        n, k = out_features, in_features
        # Until a weight is loaded the scales are NaN, so that nothing of it can be used by mistake.
        scale = torch.full((n, k // GROUP), NAN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self._one: tuple[int, ...] = () if dialect == MODELOPT else (1,)  # shape of a lone global scale
        self.register_buffer(self._weight_name, torch.zeros((n, k // 2), dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", scale)
        self.register_buffer(self._global_name, torch.full(self._one, float("nan"), device=device))
        vector = torch.ones(k, dtype=dtype, device=device) if pre_quant_scale else None
        self.register_buffer("pre_quant_scale", vector)
        values = torch.zeros(n, dtype=dtype, device=device)
        self.bias = nn.Parameter(values, requires_grad=False) if bias else None
        self._forget()

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, layout: str | None = None, keep_checkpoint: bool = True) -> Linear:
        """Quantise a dense layer (by `nvfp4.quantize`); on the meta device only the shapes are taken.

        Raises
        ------
        InvalidInput
            in_features is no multiple of 16, or the weight is not finite.
        """
        weight = linear.weight.detach()
        dtype = weight.dtype if weight.dtype in DTYPE_NAMES else torch.bfloat16
        made = cls(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            layout=layout,
            keep_checkpoint=keep_checkpoint,
            device=weight.device,
            dtype=dtype,
        )
        if not weight.is_meta:
            packed, scale, global_scale = quantize(weight)
            tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": global_scale}
            made.load_(tensors if linear.bias is None else tensors | {"bias": linear.bias.detach()})
        made.train(linear.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        if self._data is None:
            weight, scale = self._stored()
            if weight.is_meta:
                return gemm(x, weight, scale, self._global.float(), bias=self.bias)
            self._begin()
            assert self._data is not None
        return gemm(
            x,
            self._data,
            self._scale,
            self._factor,
            bias=self.bias,
            pre_quant_scale=self.pre_quant_scale,
            layout=self._layout,
            out_features=None if self._layout == "checkpoint" else self.out_features,
        )

    def load_(self, tensors: Mapping[str, Tensor]) -> Linear:
        """Copy a checkpoint's tensors, by the last part of their names, into this layer.

        Raises
        ------
        InvalidInput
            Some are missing, unknown, misshaped or hold NaN.
        """
        problems = loading_problems(self, tensors)
        if problems:
            raise InvalidInput("; ".join(problems))
        return self

    def refresh_(self) -> Linear:
        """Derive what kernels read from the checkpoint's tensors, after these were changed in place or replaced.

        The derived tensors keep their addresses. Waits for the device.

        Raises
        ------
        InvalidInput
            The tensors hold no weight: NaN in them, or a global scale that is not positive and finite.
        """
        if self._global.is_meta:
            raise InvalidInput(message("the layer has no values", got="meta tensors", do="load a weight first"))
        weight, scale = self._stored()  # where it has to be decoded, the global scale may have changed all the same
        check_scale("weight_scale", scale.view(torch.uint8), repair_nan=False)
        factor = global_factor(self._global_name, self._global, self.dialect)
        if self.pre_quant_scale is not None:
            check_pre_quant_scale("pre_quant_scale", self.pre_quant_scale)
        if self.bias is not None:
            check_finite("bias", self.bias)
        layout = self._wanted_layout if self._data is None else self._layout
        with torch.inference_mode(False), torch.no_grad():  # what is made may have to change outside of that mode
            made = pack(weight, scale, factor, dtype=self.dtype, layout=layout)
        self._layout = made.layout
        self._data = _derived(self._data, made.data, weight)
        self._scale = None if made.scale is None else _derived(self._scale, made.scale, scale)
        self._factor = _derived(self._factor, made.global_scale, self._global)
        # Half of one weight and half of another survive no layout: zeros and signs of scales move into the codes.
        if not self._keeps and not self._given and made.layout != "checkpoint":
            self._buffers[self._weight_name] = self._buffers["weight_scale"] = None
        return self

    @property
    def packed(self) -> Weight:
        """What `nvfp4.gemm` and `nvfp4.warmup` take; in this module's memory."""
        if self._data is None:
            self._begin()
        assert self._data is not None and self._factor is not None
        return Weight(
            data=self._data,
            scale=self._scale,
            global_scale=self._factor,
            layout=self._layout,
            out_features=self.out_features,
            in_features=self.in_features,
        )

    def _begin(self) -> None:
        """Derive what kernels read, at the first use of what was loaded."""
        if not self._global.is_meta:
            check_loaded(set(self._required) - self._given if self._given else (), self._global)
        self.refresh_()

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Weight and block scales as the checkpoint has them: those that are stored, or decoded ones."""
        weight, scale = self._buffers[self._weight_name], self._buffers["weight_scale"]
        if weight is None or scale is None:
            weight, scale, _ = self.packed.to_checkpoint()
        return weight, scale

    def _store(self) -> None:
        """Have them stored (again)."""
        self._buffers[self._weight_name], self._buffers["weight_scale"] = self._stored()

    @property
    def _global(self) -> Tensor:
        stored = self._buffers[self._global_name]
        assert stored is not None
        return stored

    def _forget(self) -> None:
        """Drop what is derived."""
        for name in DERIVED:
            self.register_buffer(name, None, persistent=False)
        self._layout = "checkpoint"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        was_ready = self._data is not None
        layout, before = self._layout, {name: self._buffers[name] for name in DERIVED}
        self._store()
        self._forget()
        with as_integers(self, ("weight_scale", self._global_name)):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        x_dtype = fn(torch.empty(0, dtype=self.dtype, device=self._global.device)).dtype
        self.dtype = x_dtype if x_dtype in DTYPE_NAMES else self.dtype
        if was_ready and not self._global.is_meta:
            try:
                self.refresh_()
            except InvalidInput:  # to_empty: what is to be loaded is not there yet
                self._forget()
            else:
                if self._layout == layout:
                    self._reuse(before)
        return self

    def _reuse(self, before: Mapping[str, Tensor | None]) -> None:
        """Put what is derived into the memory that held it before, where it fits and is not a stored tensor's own."""
        stored = {tensor.data_ptr() for name in self._required if (tensor := self._buffers[name]) is not None}
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.data_ptr() not in stored:
                self._buffers[name] = into(old, new)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_scale is None:
            destination[f"{prefix}{self._weight_name}"], destination[f"{prefix}weight_scale"] = self._stored()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wrong = self._wrong_types(state_dict, prefix)
        if wrong:  # copying would cast them
            error_msgs += wrong
            return
        here = {name for name in (*self._required, "bias", "pre_quant_scale") if f"{prefix}{name}" in state_dict}
        if here:
            self._store()
        given = dict(state_dict)
        scale = given.get(f"{prefix}weight_scale")
        if scale is not None and scale.dtype == torch.uint8:
            scale = given[f"{prefix}weight_scale"] = scale.view(torch.float8_e4m3fn)
        if scale is not None and scale.ndim == 3 and scale.shape[0] == 1:
            given[f"{prefix}weight_scale"] = scale[0]
        stored = self._global
        factor = given.get(f"{prefix}{self._global_name}")
        if isinstance(factor, Tensor) and factor.numel() == stored.numel():
            given[f"{prefix}{self._global_name}"] = factor.reshape(stored.shape)
        elif isinstance(factor, Tensor) and factor.numel() in (1, self.out_features):
            factor = given[f"{prefix}{self._global_name}"] = factor.reshape(self._one if factor.numel() == 1 else (-1,))
            self._buffers[self._global_name] = torch.empty_like(factor, device=stored.device)
        vector = given.get(f"{prefix}pre_quant_scale")
        if vector is not None:
            given[f"{prefix}pre_quant_scale"] = vector.reshape(-1)
            if self.pre_quant_scale is None:
                self.pre_quant_scale = torch.ones(self.in_features, dtype=self.dtype, device=stored.device)
        problems = len(error_msgs)
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # Scales of activations and of the KV cache are no part of the weight.
        unexpected_keys[:] = [key for key in unexpected_keys if key.removeprefix(prefix) not in IGNORED]
        if not here and self.weight_scale is None:  # a state dict of other layers
            missing_keys += [f"{prefix}{name}" for name in (self._weight_name, "weight_scale")]
        if not here or len(error_msgs) > problems or self._global.is_meta:
            return
        self._given |= here.intersection(self._required)
        whole = len(self._given) == len(self._required)
        if whole:
            self._given.clear()
        if whole or self._data is not None:
            try:
                self.refresh_()
            except InvalidInput as error:
                error_msgs.append(f"{prefix.removesuffix('.')}: {error}" if prefix else str(error))

    def _wrong_types(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """What to say about what is no tensor, and about tensors whose bits mean something else than this layer's."""
        allowed: dict[str, tuple[torch.dtype, ...]] = {
            self._weight_name: (torch.uint8,),
            "weight_scale": (torch.float8_e4m3fn, torch.uint8),
            self._global_name: GLOBAL_SCALE_DTYPES,
        }
        problems = []
        for name in (*allowed, "bias", "pre_quant_scale"):
            given = state_dict.get(f"{prefix}{name}", NOTHING)
            if not isinstance(given, Tensor):
                problems.append(message(f"{prefix}{name} is no tensor", got=type(given).__name__, expected="a tensor"))
            elif given is not NOTHING and given.dtype not in allowed.get(name, (given.dtype,)):
                expected = " or ".join(map(str, allowed[name]))
                problems.append(message(f"wrong dtype of {prefix}{name}", got=given.dtype, expected=expected))
        return problems

    def extra_repr(self) -> str:
        """For print(model)."""
        layout = self._layout if self._data is not None else "not loaded"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.dialect}, layout={layout}"
        )


def _derived(old: Tensor | None, new: Tensor, stored: Tensor) -> Tensor:
    """`new`, in the memory of `old` where that fits; as it is where it is the stored tensor's own memory."""
    return new if new.data_ptr() == stored.data_ptr() else into(old, new)


def weights(model: nn.Module) -> list[Weight]:
    """The weights of all `nvfp4.nn.Linear` in a model, for `nvfp4.warmup`; of a FusedMoE it takes `problem(top_k)`."""
    return [module.packed for module in model.modules() if isinstance(module, Linear)]
