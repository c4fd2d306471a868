"""vLLM's names of the activations of experts, and its constants, as `nvfp4::moe` has them."""

from __future__ import annotations

from typing import Any

__all__ = ["ACTIVATIONS", "call_of"]

# Not here: `swigluoai`, whose gate and up rows vLLM has interleaved; `relu2` with a gate; silu and gelu without one.
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "swigluoai_uninterleave": "swigluoai",
    "swiglustep": "swiglustep",
    "situ": "situ",
    "relu2_no_mul": "relu2",
}
STEP_LIMIT = 7.0  # what vLLM's swiglustep takes, whatever the config says


def call_of(name: str, config: Any) -> tuple[str, dict[str, float]]:
    """The activation's name and constants for the op.

    Parameters
    ----------
    name
        vLLM's, one of ACTIVATIONS.
    config
        vLLM's ApplyMoEActivationConfig, or its FusedMoEConfig, whose constants have other names.

    Raises
    ------
    ValueError
        Constants with which the op would compute something else.
    """
    limit = _first(config, "clamp_limit", "swiglu_limit")
    alpha, beta = _first(config, "alpha", "swiglu_alpha"), _first(config, "beta", "swiglu_beta")
    constants: dict[str, float] = {}
    if name in ("silu", "swigluoai_uninterleave"):
        if limit is not None and not limit > 0:
            raise ValueError(f"a limit of {limit}")  # means none for the op, and a clamp for vLLM
        if limit is not None:
            constants["limit"] = limit
    if name == "swigluoai_uninterleave":
        if limit is None:
            raise ValueError("swigluoai_uninterleave without a limit")
        constants["alpha"] = 1.0 if alpha is None else alpha
        constants["beta"] = 0.0 if beta is None else beta
    elif name == "swiglustep":
        constants["limit"] = STEP_LIMIT
    elif name == "situ":
        bound = config.activation_situ_beta
        if bound is None or not bound > 0:
            raise ValueError(f"a beta of {bound}")
        linear = config.activation_situ_linear_beta
        constants = {"beta": bound, "limit": 0.0 if linear is None else linear}  # 0 or less: none, as in vLLM
    return ACTIVATIONS[name], constants


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)
