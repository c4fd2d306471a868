"""Layers for models made of torch modules: `Linear` and `FusedMoE`, and the `weights` of a model."""

from .dispatch.nn import FusedMoE, Linear, weights

__all__ = ["FusedMoE", "Linear", "weights"]
