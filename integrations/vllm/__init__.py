"""The plug-in for vLLM: NVFP4 layers that it would run weight-only run on the kernels of this package.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). Without `NVFP4_VLLM=1`
nothing happens. `docs/vllm.md` says which layers are taken and what was tried.
"""

from __future__ import annotations

import os
import warnings

from ...errors import message

__all__ = ["RELEASE", "VARIABLE", "register"]

RELEASE = "0.33.0"  # the one whose source this was written against: it uses classes that no interface protects
VARIABLE = "NVFP4_VLLM"


def register() -> None:
    """Put this package's quantization configs in the place of vLLM's, if the user asks for it and the release fits.

    May be called more than once. Another release gets one warning, and stays as it is.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    if asked != "1":
        _warn(f"{VARIABLE}={asked}", f"{VARIABLE}=1")
        return
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        _warn("no vLLM in this environment", f"vLLM {RELEASE}")
        return
    if vllm.__version__.partition("+")[0] != RELEASE:
        _warn(f"vLLM {vllm.__version__}", f"vLLM {RELEASE}")
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .configs import CONFIGS

    for name, config in CONFIGS.items():
        register_quantization_config(name)(config)


def _warn(got: str, expected: str) -> None:
    text = message(
        "nvfp4 is not plugged into vLLM",
        got=got,
        expected=expected,
        do=f"vLLM's own kernels run; unset {VARIABLE} to silence this",
    )
    warnings.warn(text, RuntimeWarning, stacklevel=3)
