"""The buffers of `nvfp4.nn.FusedMoE`: stacks as a checkpoint has them, and what kernels read of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, message
from ..kernels.problem import Problem
from ..kernels.weights.codec import GROUP
from ..kernels.weights.layouts import first_layout
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.weight import Weight
from .checkpoint.modules import CT, MODELOPT
from .checks import DTYPE_NAMES
from .derived import into
from .layout import fragment_layout, planned_experts_layout, planned_layout

__all__ = ["GLOBALS", "STACKS", "ExpertBuffers"]

STACKS = ("w13", "w2")
STORED = ("w13", "w13_scale", "w2", "w2_scale")
GLOBALS = {MODELOPT: ("w13_scale_2", "w2_scale_2"), CT: ("w13_global_scale", "w2_global_scale")}


class ExpertBuffers(nn.Module):
    """Stacks and what is derived from them, all of it non-persistent: the state dict has names of its own."""

    w13: Tensor | None  # this and the three below are None once another layout holds them
    w13_scale: Tensor | None
    w2: Tensor | None
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    pre_quant_scale: Tensor | None  # [hidden]
    w2_pre_quant_scale: Tensor | None  # [E, inter]
    expert_map: Tensor | None  # int32 [num_experts], on a rank that has a part of them
    _w13_data: Tensor | None  # blobs; None in the layout of the checkpoint
    _w2_data: Tensor | None
    _w13_factor: Tensor | None  # what kernels read; None until weights were loaded
    _w2_factor: Tensor | None
    _spare: dict[str, Tensor]  # by stack, the memory of derived factors while there are none
    _layout: str  # "" until weights were loaded
    _w13_layout: str

    hidden: int
    inter: int
    experts: range
    activation: str
    gated: bool
    dialect: str
    dtype: torch.dtype

    def _ask_for(self, layout: str | None, keep_checkpoint: bool, top_k: int | None) -> None:
        """Note the options of the constructor."""
        if layout not in (None, "fragment"):
            wanted = get_layout(layout)
            if not wanted.experts or wanted.gated:
                raise InvalidInput(message("wrong layout of experts", got=repr(layout), expected="that of w2, or None"))
        self._wanted_layout, self._keeps, self._top_k = layout, keep_checkpoint, top_k
        self._drop()

    @property
    def layout(self) -> str:
        """Id of the layout that w2 is in; w13 is in its -glu form if there is one and there is a gate."""
        return self._layout or "checkpoint"

    def problem(self, top_k: int) -> Problem:
        """What `nvfp4.warmup` takes for this layer, with `layout` if it was asked for."""
        return Problem(
            op="moe",
            n=self.inter,
            k=self.hidden,
            dtype=DTYPE_NAMES[self.dtype],
            experts=len(self.experts),
            top_k=top_k,
            activation=self.activation,
        )

    def _put(self, name: str, tensor: Tensor | None) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def _get(self, name: str) -> Tensor:
        stored = self._buffers[name]
        assert stored is not None, name
        return stored

    def _global_name(self, stack: str) -> str:
        return GLOBALS[self.dialect][STACKS.index(stack)]

    def _factor(self, stack: str) -> Tensor:
        derived = self._buffers[f"_{stack}_factor"]
        return self._get(self._global_name(stack)) if derived is None else derived

    @property
    def _device(self) -> torch.device:
        return self._get(self._global_name("w13")).device

    @property
    def _is_meta(self) -> bool:
        return self._device.type == "meta"

    @property
    def _is_stored(self) -> bool:
        return self._buffers["w13"] is not None

    def _sizes(self, stack: str) -> tuple[int, int]:
        """N and K of an expert."""
        return (self.inter * (2 if self.gated else 1), self.hidden) if stack == "w13" else (self.hidden, self.inter)

    def _weights(self) -> tuple[Weight, Weight]:
        """w13 and w2 as kernels read them."""
        layouts = self._w13_layout, self.layout
        first, second = (
            Weight(
                data=self._get(stack if self.layout == "checkpoint" else f"_{stack}_data"),
                scale=self._get(f"{stack}_scale").view(torch.uint8) if self.layout == "checkpoint" else None,
                global_scale=self._factor(stack),
                layout=layout,
                out_features=self._sizes(stack)[0],
                in_features=self._sizes(stack)[1],
            )
            for stack, layout in zip(STACKS, layouts, strict=True)
        )
        return first, second

    def _stacks(self) -> dict[str, Tensor]:
        """Weights and block scales as the checkpoint has them: those that are stored, or decoded ones."""
        if self._is_stored:
            return {name: self._get(name) for name in STORED}
        found: dict[str, Tensor] = {}
        for stack, packed in zip(STACKS, self._weights(), strict=True):
            if self._is_meta:
                experts, (n, k) = len(self.experts), self._sizes(stack)
                weight = torch.empty((experts, n, k // 2), dtype=torch.uint8, device="meta")
                scale = torch.empty((experts, n, k // GROUP), dtype=torch.float8_e4m3fn, device="meta")
            else:
                weight, scale, _ = packed.to_checkpoint()
            found |= {stack: weight, f"{stack}_scale": scale}
        return found

    def _store(self) -> None:
        """Have the stacks stored (again)."""
        for name, tensor in self._stacks().items():
            self._put(name, tensor)

    def _derive(self) -> None:
        """Pack what is stored, in the memory that held it before; drop the stacks if they are not to be kept."""
        if not self._is_stored:
            return
        if not self._layout:
            self._layout = self._chosen_layout()
            self._w13_layout = first_layout(self._layout, self.problem(1))
        if self._layout == "checkpoint":
            return
        for stack, layout in zip(STACKS, (self._w13_layout, self._layout), strict=True):
            scale = self._get(f"{stack}_scale").view(torch.uint8)
            made = get_layout(layout).pack(self._get(stack), scale, self._factor(stack))
            self._put(f"_{stack}_data", into(self._buffers[f"_{stack}_data"], made.data))
            del made
            if not self._keeps:
                self._put(stack, None)
                self._put(f"{stack}_scale", None)

    def _chosen_layout(self) -> str:
        wanted, device = self._wanted_layout, self._device
        if wanted == "fragment":
            return fragment_layout(device, DTYPE_NAMES[self.dtype])
        if wanted is not None:
            return wanted
        if self._top_k is not None:
            return planned_layout(device, self.problem(self._top_k))
        return planned_experts_layout(device, self.problem(1))

    def _forget(self) -> None:
        """Weights are to be checked before they are used again; what is derived then takes the memory that it had."""
        for stack in STACKS:
            old = self._buffers[f"_{stack}_factor"]
            if old is not None and self.dialect != MODELOPT:  # whose factors are the stored tensors
                self._spare[stack] = old
            self._put(f"_{stack}_factor", None)

    def _drop(self) -> None:
        """Forget the layout too, and what is packed."""
        for stack in STACKS:
            self._put(f"_{stack}_factor", None)
            self._put(f"_{stack}_data", None)
        self._spare = {}
        self._layout, self._w13_layout = "", "checkpoint"
