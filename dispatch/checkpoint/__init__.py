"""Real checkpoints: what their configs say, what their tensors are, and one layer at a time from them."""

from ...kernels.weights.shard import Shard, expert_range, shard_range
from .checkpoint import Checkpoint, open_checkpoint
from .experts import ExpertTensors, load_experts
from .linear import LinearTensors, load_linear

__all__ = [
    "Checkpoint",
    "ExpertTensors",
    "LinearTensors",
    "Shard",
    "expert_range",
    "load_experts",
    "load_linear",
    "open_checkpoint",
    "shard_range",
]
