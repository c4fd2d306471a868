"""What `nvfp4.nn.FusedMoE` does with its stacks: their names in state dicts, loading, moving, refreshing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation as get_activation
from ..kernels.moe.activations import constants
from ..kernels.weights.codec import GROUP
from ..kernels.weights.weight import GLOBAL_SCALE_DTYPES
from .checkpoint.expert_sources import ROLES
from .checkpoint.modules import IGNORED, MODELOPT, REQUIRED
from .checkpoint.names import number_of
from .checkpoint.values import check_finite, check_pre_quant_scale, check_scale, global_factor, same_pre_quant_scale
from .checks import DTYPE_NAMES, check_dtype
from .derived import NAN, as_integers, check_loaded, into, loading_problems
from .expert_buffers import GLOBALS, STACKS, ExpertBuffers

__all__ = ["ExpertStacks"]

NAMES = {True: ("gate_proj", "up_proj", "down_proj"), False: ("up_proj", "down_proj")}


class ExpertStacks(ExpertBuffers):
    """Stacks of experts whose state dict has the names of a checkpoint; `FusedMoE` says more."""

    quantizes_activations = False  # x stays in 16 bits, whatever the checkpoint was made for

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inter: int,
        *,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        experts: range | None = None,
        bias: bool = False,
        pre_quant_scale: bool = False,
        w2_pre_quant_scale: bool = False,
        apply_router_weight_on_input: bool = False,
        names: Sequence[str] | None = None,
        dialect: str = MODELOPT,
        layout: str | None = None,
        keep_checkpoint: bool = True,
        top_k: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        kind = get_activation(activation)
        constants(activation, limit=limit, alpha=alpha, beta=beta)
        experts = range(num_experts if type(num_experts) is int else 0) if experts is None else experts
        _check(num_experts, hidden, inter, experts, dialect, dtype)
        self.names = tuple(names or NAMES[kind.gated])
        if tuple(ROLES.get(name) for name in self.names) != (("gate", "up", "down") if kind.gated else ("up", "down")):
            raise InvalidInput(
                message("wrong names of an expert's layers", got=self.names, expected=" or ".join(map(repr, ROLES)))
            )
        if pre_quant_scale and not kind.gated:
            raise InvalidInput(message("pre_quant_scale without a gate", got=f"activation {kind.name}"))
        self.num_experts, self.experts, self.hidden, self.inter = num_experts, experts, hidden, inter
        self.activation, self.limit, self.alpha, self.beta = kind.name, limit, alpha, beta
        self.gated, self.dialect, self.dtype = kind.gated, dialect, dtype
        self.apply_router_weight_on_input = apply_router_weight_on_input
        e, f = len(experts), inter * (2 if kind.gated else 1)
        for stack, n, k, parts in (("w13", f, hidden, len(self.names) - 1), ("w2", hidden, inter, 1)):
            # Until weights are loaded the scales are NaN, so that nothing of them can be used by mistake.
            scale = torch.full((e, n, k // GROUP), NAN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            self._put(stack, torch.zeros((e, n, k // 2), dtype=torch.uint8, device=device))
            self._put(f"{stack}_scale", scale)
            self._put(self._global_name(stack), torch.full((e, parts), float("nan"), device=device))
            self._put(f"{stack}_bias", torch.zeros((e, n), dtype=dtype, device=device) if bias else None)
        ones = torch.ones(hidden, dtype=dtype, device=device)
        self._put("pre_quant_scale", ones if pre_quant_scale else None)
        ones = torch.ones((e, inter), dtype=dtype, device=device)
        self._put("w2_pre_quant_scale", ones if w2_pre_quant_scale else None)
        self._put("expert_map", None)
        self._place_map()
        self._given: set[str] | None = set()  # what came of weights that are not all there yet; None: they are
        self._ask_for(layout, keep_checkpoint, top_k)

    def load_(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy tensors, called as in the state dict, into this layer.

        Raises
        ------
        InvalidInput
            Some are missing, unknown, misshaped or hold NaN.
        """
        problems = loading_problems(self, tensors)
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise InvalidInput("; ".join(problems[:3]) + more)
        return self

    def _begin(self) -> None:
        """Derive what kernels read, at the first use of what was loaded."""
        if not self._is_meta:
            lacking = set(self._views()) - self._given if self._given else ()
            check_loaded(lacking, self._get(self._global_name("w13")))
        self.refresh_()

    def refresh_(self) -> Self:
        """Check the stacks and derive what kernels read again, after a change in place. Waits for the device.

        What is derived keeps its addresses. Where the stacks were not kept, global scales, biases and pre_quant_scale
        are all that can have changed.

        Raises
        ------
        InvalidInput
            The stacks hold no weights: NaN in them, or a global scale that is not positive and finite.
        """
        if self._is_meta:
            raise InvalidInput(message("the layer has no values", got="meta tensors", do="load weights first"))
        for stack in STACKS if self._is_stored else ():
            check_scale(f"{stack}_scale", self._get(f"{stack}_scale").view(torch.uint8), repair_nan=False)
        for name in ("pre_quant_scale", "w2_pre_quant_scale"):
            if self._buffers[name] is not None:
                check_pre_quant_scale(name, self._get(name))
        for stack in STACKS:
            if self._buffers[f"{stack}_bias"] is not None:
                check_finite(f"{stack}_bias", self._get(f"{stack}_bias"))
        made = []
        with torch.inference_mode(False), torch.no_grad():  # what is made may have to change outside of that mode
            for stack in STACKS:
                name = self._global_name(stack)
                made.append(global_factor(name, self._get(name), self.dialect).reshape(self._get(name).shape))
            for stack, factor in zip(STACKS, made, strict=True):
                if factor.data_ptr() == self._get(self._global_name(stack)).data_ptr():
                    self._put(f"_{stack}_factor", factor)  # a multiplier is read where it is stored
                else:
                    old = self._buffers[f"_{stack}_factor"]
                    self._put(f"_{stack}_factor", into(self._spare.get(stack) if old is None else old, factor))
            self._derive()
        self._given = None
        return self

    def _place_map(self) -> None:
        """The map follows from the range, so it needs no place in a state dict."""
        if len(self.experts) < self.num_experts:
            local = torch.full((self.num_experts,), -1, dtype=torch.int32)
            local[self.experts.start : self.experts.stop] = torch.arange(len(self.experts), dtype=torch.int32)
            self._put("expert_map", local.to(self._device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_ready = self._w13_factor is not None
        probe = fn(torch.empty(0, dtype=self.dtype, device=self._device))
        x_dtype = probe.dtype if probe.dtype in DTYPE_NAMES else self.dtype
        if (probe.device, x_dtype) != (self._device, self.dtype) and not probe.is_meta:
            self._store()
            self._drop()  # another layout may suit the device or the dtype
        self._forget()
        blobs = {name: blob for stack in STACKS if (blob := self._buffers[name := f"_{stack}_data"]) is not None}
        for name, blob in blobs.items():
            self._buffers[name] = blob.view(-1)  # channels_last reorders what has four dimensions
        try:
            with as_integers(self, ("w13_scale", "w2_scale", *GLOBALS[self.dialect])):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, blob in blobs.items():
                self._buffers[name] = self._get(name).view(blob.shape)
        self.dtype = x_dtype
        self._place_map()  # to_empty: what was moved there is no map
        if was_ready and not self._is_meta:
            try:
                self.refresh_()
            except InvalidInput:  # to_empty: what is to be loaded is not there yet
                self._forget()
                self._given = set()
        return self

    def _pieces(self) -> Iterator[tuple[str, str, int, slice, int]]:
        """Name ("3.up_proj"), stack, local expert, rows and column of the global scale."""
        for local, number in enumerate(self.experts):
            for part, name in enumerate(self.names[:-1]):
                yield f"{number}.{name}", "w13", local, slice(part * self.inter, (part + 1) * self.inter), part
            yield f"{number}.{self.names[-1]}", "w2", local, slice(0, self.hidden), 0

    def _views(self) -> dict[str, Tensor]:
        """The stored tensors by the names of the state dict, without pre_quant_scale of x; or decoded ones."""
        weight_name, scale_name, global_name = REQUIRED[self.dialect]
        found, stacks = {}, self._stacks()
        for name, stack, local, rows, part in self._pieces():
            factor = self._get(self._global_name(stack))[local]
            found[f"{name}.{weight_name}"] = stacks[stack][local, rows]
            found[f"{name}.{scale_name}"] = stacks[f"{stack}_scale"][local, rows]
            found[f"{name}.{global_name}"] = factor[part] if self.dialect == MODELOPT else factor[part : part + 1]
            if self._buffers[f"{stack}_bias"] is not None:
                found[f"{name}.bias"] = self._get(f"{stack}_bias")[local, rows]
            if stack == "w2" and self.w2_pre_quant_scale is not None:
                found[f"{name}.pre_quant_scale"] = self.w2_pre_quant_scale[local]
        return found

    def _vector_names(self) -> list[str]:
        """Where the state dict has the pre_quant_scale of x: at gate and up of every expert."""
        return [f"{name}.pre_quant_scale" for name, stack, *_ in self._pieces() if stack == "w13"]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, view in self._views().items():
            destination[prefix + name] = view if keep_vars else view.detach()
        if self.pre_quant_scale is not None:
            for name in self._vector_names():
                destination[prefix + name] = self.pre_quant_scale.detach().clone()  # files must not hold shared memory

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
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, [], [], error_msgs)  # runs hooks
        given, unknown = self._own_names(state_dict, prefix)
        if strict:
            unexpected_keys += unknown
        if not given and not self._is_stored and not self._is_meta:  # a state dict of other layers
            if strict:
                missing_keys += [prefix + name for name in self._views()]
            return
        self._store()
        if self._is_meta:
            if not local_metadata.get("assign_to_params_buffers"):
                if given:
                    warnings.warn(f"{prefix}: on the meta device nothing is loaded without assign=True", stacklevel=2)
                return
            self.to_empty(device=next((t.device for t in given.values() if isinstance(t, Tensor)), "meta"))
            for stack in STACKS:
                self._get(f"{stack}_scale").view(torch.uint8).fill_(NAN)
        vectors = set(self._vector_names())
        if self.w2_pre_quant_scale is None and any(
            name.endswith(".pre_quant_scale") and name not in vectors for name in given
        ):
            ones = torch.ones((len(self.experts), self.inter), dtype=self.dtype, device=self._device)
            self._put("w2_pre_quant_scale", ones)
        problems, missing = self._copy_vector(given)
        for name, place in self._views().items():
            if name not in given:
                missing.append(name)
            else:
                is_global = name.endswith(f".{REQUIRED[self.dialect][2]}")
                problem = _copy(place, given[name], GLOBAL_SCALE_DTYPES if is_global else ())
                problems += [f"{prefix}{name}: {problem}"] if problem else []
        if strict:
            missing_keys += [prefix + name for name in missing]
        error_msgs += problems
        if self._given is not None:
            self._given.update(given)
        if problems or missing:
            self._forget()
            return
        try:
            self.refresh_()
        except InvalidInput as error:
            self._forget()
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}" if prefix else str(error))

    def _own_names(self, state_dict: Mapping[str, Any], prefix: str) -> tuple[dict[str, Tensor], list[str]]:
        """What this rank's experts are given, by this module's names; and keys that mean nothing here."""
        own = dict(zip(("gate", "up", "down") if self.gated else ("up", "down"), self.names, strict=True))
        given, unknown = {}, []
        leaves = {*REQUIRED[self.dialect], "pre_quant_scale"} | ({"bias"} if self.w13_bias is not None else set())
        for key, tensor in state_dict.items():
            if not key.startswith(prefix):
                continue
            number, _, rest = key.removeprefix(prefix).partition(".")
            name, _, leaf = rest.partition(".")
            expert = number_of(number)
            known = expert is not None and expert < self.num_experts and ROLES.get(name) in own
            own_name = f"{number}.{own[ROLES[name]]}.{leaf}" if known else ""
            if known and leaf in leaves and own_name not in given:  # by one of its names
                if expert in self.experts:
                    given[own_name] = tensor
            elif not known or leaf not in IGNORED:  # scales of activations are no part of the weight
                unknown.append(key)
        return given, unknown

    def _copy_vector(self, given: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Load the pre_quant_scale of x; problems, and what is missing."""
        names = self._vector_names()
        vectors = [vector.reshape(-1) if isinstance(vector := given.get(name), Tensor) else None for name in names]
        if all(vector is None for vector in vectors):
            return [], ([] if self.pre_quant_scale is None else names)
        if not self.gated:
            return [f"{names[0]}: pre_quant_scale without a gate"], []
        try:
            shared = same_pre_quant_scale([name.rpartition(".")[0] for name in names], vectors, "experts")
        except InvalidInput as error:
            return [str(error)], []
        assert shared is not None and vectors[1] is not None
        if shared.numel() != self.hidden:
            return [f"{names[0]}: got {shared.numel()} elements; expected {self.hidden}"], []
        if self.pre_quant_scale is None:
            self._put("pre_quant_scale", torch.ones(self.hidden, dtype=self.dtype, device=self._device))
        self._get("pre_quant_scale").copy_(torch.maximum(shared, vectors[1]))  # equal but for rounding
        return [], []

    def extra_repr(self) -> str:
        """For print(model)."""
        part = f", experts {self.experts.start} to {self.experts.stop - 1}" if self.expert_map is not None else ""
        state = "" if self._w13_factor is not None else ", not loaded"
        return (
            f"num_experts={self.num_experts}{part}, hidden={self.hidden}, inter={self.inter}, {self.activation}, "
            f"bias={self.w13_bias is not None}, {self.dialect}, layout={self.layout}{state}"
        )


def _copy(place: Tensor, given: object, dtypes: tuple[torch.dtype, ...]) -> str:
    """Copy a tensor of a state dict to its place, or say what is wrong with it; no dtypes: any that can be cast."""
    if not isinstance(given, Tensor):
        return f"got {type(given).__name__}; expected a tensor"
    if dtypes and given.dtype not in dtypes:
        return f"got {given.dtype}; expected {' or '.join(map(str, dtypes))}"
    exact = place.dtype in (torch.uint8, torch.float8_e4m3fn)
    if place.dtype == torch.float8_e4m3fn and given.dtype == torch.uint8:
        given = given.view(torch.float8_e4m3fn)
    if given.ndim == place.ndim + 1 and given.shape[0] == 1:
        given = given[0]
    if place.ndim < 2 and given.numel() == place.numel():
        given = given.reshape(place.shape)
    if given.shape != place.shape or (exact and given.dtype != place.dtype):
        return f"got {given.dtype} {tuple(given.shape)}; expected {place.dtype} {tuple(place.shape)}"
    with torch.inference_mode():  # where both kinds of tensors may be written
        place.copy_(given)
    return ""


def _check(num_experts: int, hidden: int, inter: int, experts: range, dialect: str, dtype: torch.dtype) -> None:
    sizes = (num_experts, hidden, inter)
    if (
        any(type(size) is not int for size in sizes)
        or num_experts < 1
        or any(s < GROUP or s % GROUP for s in sizes[1:])
    ):
        raise InvalidInput(
            message(
                "wrong size of a FusedMoE",
                got=f"num_experts={num_experts!r}, hidden={hidden!r}, inter={inter!r}",
                expected=f"num_experts at least 1, hidden and inter multiples of {GROUP}",
            )
        )
    if not isinstance(experts, range) or experts.step != 1 or not 0 <= experts.start < experts.stop <= num_experts:
        raise InvalidInput(
            message("wrong experts", got=experts, expected=f"a part of range({num_experts}), in its order")
        )
    if dialect not in GLOBALS:
        raise InvalidInput(message("wrong dialect", got=repr(dialect), expected=" or ".join(map(repr, GLOBALS))))
    check_dtype(dtype)
