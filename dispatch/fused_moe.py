"""`nvfp4.nn.FusedMoE`: the experts of a layer as one module, for models made of torch modules."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation as get_activation
from ..kernels.weights.codec import quantize
from ..kernels.weights.weight import Weight, check_tensors, is_aligned
from .checkpoint import Checkpoint, ExpertTensors, Shard, load_experts
from .checkpoint.checkpoint import check_opened
from .checkpoint.expert_sources import ROLES, expert_source, part_of
from .checkpoint.modules import MODELOPT
from .checkpoint.names import aliases
from .checks import DTYPE_NAMES
from .expert_buffers import STACKS
from .expert_ops import moe
from .expert_stacks import ExpertStacks

__all__ = ["FusedMoE"]


class FusedMoE(ExpertStacks):
    """x [..., hidden] through the experts that a router chose; docs/moe.md has the formula. For inference.

    The experts are stacks: `w13` uint8 [E, F, hidden/2] (gate rows, then up rows), `w13_scale` float8_e4m3fn, the
    global scales [E, 2] (gate, up) as the dialect has them, and the same of `w2` [E, hidden, inter/2]. The state dict
    has the names of a checkpoint that stores experts one by one, with their numbers in the whole layer:
    "3.gate_proj.weight", "3.gate_proj.weight_scale", …; its values are views of the stacks, but for `pre_quant_scale`.
    Loading takes "w1", "w3", "w2" for gate, up and down as well, and passes over experts of other ranks.

    What kernels read is derived from the stacks: non-persistent buffers, or the same memory where the layout is the
    checkpoint's. Loading a state dict, moving the module and `refresh_` keep the memory that is already there if the
    module stays on its device: a captured CUDA graph then runs with the new weights. Casting the module (`half`, `to`)
    casts biases and pre_quant_scale only.

    Parameters
    ----------
    num_experts
        Of the whole layer.
    hidden, inter
        Multiples of 16.
    activation, limit, alpha, beta
        As for `nvfp4.moe`.
    experts
        Those of one rank of expert parallelism, consecutive; None takes all. With a part of them, ids are still those
        of the whole layer: `expert_map` skips the others, and the ranks' results have to be added up.
    bias
        Whether both products have one.
    pre_quant_scale, w2_pre_quant_scale
        Whether there is a scale per channel of x, and of every expert's activations; loading a state dict that has one
        adds it.
    apply_router_weight_on_input
        As for `nvfp4.moe`.
    names
        Of gate, up and down in the state dict; ("gate_proj", "up_proj", "down_proj") by default, without the gate if
        the activation has none.
    dialect
        "modelopt" or "compressed-tensors": the names of tensors, and whether global scales multiply or divide.
    layout
        Weight layout of w2, which w13 follows: "checkpoint", "fragment" or an id. None takes what the plan of this
        problem marks, and on an untuned GPU the fragment layout if kernels read it. One for `dtype` refuses x of the
        other.
    keep_checkpoint
        Keep the stacks beside another layout. Without them the layer needs half the memory, cannot be changed in place,
        and its state dict is decoded from the layout: the same values, and the same bytes unless a block scale was
        negative or zero.
    top_k
        Experts per token, to find the plan; None takes the first plan that there is for any.
    dtype
        Of x, biases and pre_quant_scale: torch.bfloat16 or torch.float16.
    """

    @classmethod
    def from_experts(cls, tensors: ExpertTensors, *, num_experts: int | None = None, **options: Any) -> Self:
        """Take over what `load_experts` read; nothing is copied that need not be.

        Parameters
        ----------
        num_experts
            Of the whole layer; None takes those that are there to be all of it, up to the last.
        options
            Those of the constructor: activation and its constants, names, dtype, layout, keep_checkpoint, top_k,
            apply_router_weight_on_input. The state dict is called as ModelOpt's, for factors are what `load_experts`
            gives.

        Raises
        ------
        InvalidInput
            The activation has a gate and the experts have none, or the other way round; an option is wrong.
        """
        t = tensors
        kind = get_activation(options.get("activation", "swiglu"))
        if kind.gated != t.gated:
            raise InvalidInput(
                message(
                    f"activation {kind.name} does not suit these experts",
                    got=f"experts {'with' if t.gated else 'without'} a gate",
                    expected=f"{'with' if kind.gated else 'without'} one",
                )
            )
        count = t.experts.stop if num_experts is None else num_experts
        hidden, inter = t.w2.shape[1], 2 * t.w2.shape[2]
        made = cls(count, hidden, inter, experts=t.experts, dialect=MODELOPT, device="meta", **options)
        for stack in STACKS:
            for name in (stack, f"{stack}_scale"):
                made._put(name, _own(getattr(t, name)))
            made._put(f"{stack}_scale_2", _own(getattr(t, f"{stack}_scale_2").reshape(len(t.experts), -1).float()))
            bias = getattr(t, f"{stack}_bias")
            made._put(f"{stack}_bias", None if bias is None else _own(bias.to(made.dtype)))
        for name in ("pre_quant_scale", "w2_pre_quant_scale"):
            vector = getattr(t, name)
            made._put(name, None if vector is None else _own(vector.to(made.dtype)))
        made._place_map()
        return made.refresh_()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        name: str,
        *,
        experts: range | None = None,
        shard: Shard | None = None,
        gate_up: str | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Self:
        """Read the experts of one layer.

        Stored one by one they keep their dialect, names and bytes in the state dict. Read from 3-D tensors or divided
        by `shard` they are called as ModelOpt calls single experts.

        Parameters
        ----------
        name, experts, shard, gate_up, device
            As for `load_experts`.
        options
            Those of `from_experts`; of experts that keep their names, not `names`.

        Raises
        ------
        InvalidInput, Unsupported
            As `load_experts` does.
        """
        check_opened(checkpoint)
        stored = next((checkpoint.experts[one] for one in aliases(name) if one in checkpoint.experts), None)
        if stored is None or shard is not None:
            read = load_experts(checkpoint, name, experts=experts, shard=shard, gate_up=gate_up, device=device)
            return cls.from_experts(read, num_experts=expert_source(checkpoint, name, gate_up).count, **options)
        source = expert_source(checkpoint, name, gate_up)  # refuses other uses of such tensors
        wanted = part_of(source, experts)  # before there is memory for as many as are named
        infos = stored[min(stored)]
        by_role = {ROLES[leaf]: leaf for leaf in infos if leaf in ROLES}
        first = infos[by_role.get("up", next(iter(infos)))]
        kind = get_activation(options.get("activation", "swiglu"))
        made = cls(
            source.count,
            first.k,
            first.n,
            experts=wanted,
            bias="bias" in first.tensors,
            names=[by_role.get(role, role) for role in (("gate", "up", "down") if kind.gated else ("up", "down"))],
            dialect=first.dialect,
            device=device,
            **options,
        )
        tensors = {
            f"{number}.{leaf}.{role}": checkpoint.files.read(found.name)
            for number in made.experts
            for leaf, info in stored.get(number, {}).items()
            for role, found in info.tensors.items()
        }
        try:
            return made.load_(tensors)
        except InvalidInput as error:
            raise InvalidInput(f"experts {name}: {error}") from error

    @classmethod
    def from_dense(
        cls,
        w13: Tensor,
        w2: Tensor,
        *,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Quantise dense experts by `nvfp4.quantize`, gate and up apart; on the meta device only shapes are taken.

        Parameters
        ----------
        w13, w2
            Floating point [E, F, hidden] (gate rows, then up rows; up alone without a gate) and [E, hidden, inter].
        w13_bias, w2_bias
            [E, F] and [E, hidden], both or none.
        options
            Those of the constructor but device; experts and num_experts say which experts of a layer these are.

        Raises
        ------
        InvalidInput
            Shapes do not fit, sizes are no multiples of 16, or a weight is not finite.
        """
        check_tensors(w13=w13, w2=w2)
        kind = get_activation(options.get("activation", "swiglu"))
        parts = 2 if kind.gated else 1
        shapes = [tuple(t.shape) for t in (w13, w2, w13_bias, w2_bias) if t is not None]
        e, f, hidden = w13.shape if w13.ndim == 3 else (0, 0, 0)
        vectors = [] if w13_bias is None and w2_bias is None else [(e, f), (e, hidden)]
        if shapes != [(e, f, hidden), (e, hidden, f // parts), *vectors]:
            raise InvalidInput(
                message(
                    f"wrong shapes of dense experts for activation {kind.name}",
                    got=shapes,
                    expected="w13 [E, F, hidden], w2 [E, hidden, inter], both biases [E, F] and [E, hidden] or none; "
                    f"F = {parts} * inter",
                )
            )
        dtype = options.pop("dtype", w13.dtype if w13.dtype in DTYPE_NAMES else torch.bfloat16)
        count = options.pop("num_experts", None) or e
        made = cls(count, hidden, f // parts, bias=bool(vectors), device=w13.device, dtype=dtype, **options)
        if len(made.experts) != e:
            raise InvalidInput(message("wrong experts", got=made.experts, expected=f"{e} of them, as w13 has"))
        if w13.is_meta:
            return made
        for stack, dense, own, bias in (("w13", w13, parts, w13_bias), ("w2", w2, 1, w2_bias)):
            rows = dense.shape[1] // own
            for expert in range(e):
                for part in range(own):
                    place = slice(part * rows, (part + 1) * rows)
                    weight, scale, factor = quantize(dense[expert, place].detach())
                    made._get(stack)[expert, place] = weight
                    made._get(f"{stack}_scale")[expert, place] = scale
                    divides = made.dialect != MODELOPT
                    made._get(made._global_name(stack))[expert, part] = factor.reciprocal() if divides else factor
            if bias is not None:
                made._get(f"{stack}_bias").copy_(bias.detach())
        return made.refresh_()

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden], in x's dtype.

        Parameters
        ----------
        topk_ids
            int32 or int64 [..., top_k], numbers of experts in the whole layer; those outside of it are skipped.
        topk_weights
            [..., top_k] floating point, widened to float32.
        """
        held = self._buffers  # looking them up as attributes takes a microsecond each
        if held["_w13_factor"] is None and not self._is_meta:
            self._begin()
        plain = self.layout == "checkpoint"
        w13, w2 = (held["w13"], held["w2"]) if plain else (held["_w13_data"], held["_w2_data"])
        assert w13 is not None and w2 is not None, "the layout tells where weights are"
        s13, s2 = (held["w13_scale"], held["w2_scale"]) if plain else (None, None)
        return moe(
            x, w13, s13, self._factor("w13"), w2, s2, self._factor("w2"), topk_ids,
            topk_weights if topk_weights.dtype == torch.float32 else topk_weights.float(), activation=self.activation,
            inter=self.inter, pre_quant_scale=held["pre_quant_scale"], w2_pre_quant_scale=held["w2_pre_quant_scale"],
            expert_map=held["expert_map"], apply_router_weight_on_input=self.apply_router_weight_on_input,
            limit=self.limit, alpha=self.alpha, beta=self.beta, w13_bias=held["w13_bias"], w2_bias=held["w2_bias"],
            w13_layout=self._w13_layout, w2_layout=self.layout,
        )  # fmt: skip

    @property
    def packed(self) -> tuple[Weight, Weight]:
        """w13 and w2 as `nvfp4.moe` takes them; in this module's memory."""
        if self._w13_factor is None:
            self._begin()
        return self._weights()


def _own(tensor: Tensor) -> Tensor:
    """A tensor that kernels can read."""
    return (
        tensor if tensor.is_contiguous() and is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
    )
