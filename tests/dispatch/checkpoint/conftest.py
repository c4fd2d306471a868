"""A folder to write tiny checkpoints into, and the layers of one."""

import pytest
from nvfp4.testing.checkpoints import HF_QUANT, modelopt, write_checkpoint

from .layers import ATTN


@pytest.fixture
def write(tmp_path):
    def make(tensors, *, folder="checkpoint", hf=HF_QUANT, **options):
        return write_checkpoint(tmp_path / folder, tensors, hf=hf, **options)

    return make


@pytest.fixture
def qkv():
    """q, k and v with a global scale each."""
    return {
        **modelopt(f"{ATTN}.q_proj", 64, 32, 1, factor=1e-3),
        **modelopt(f"{ATTN}.k_proj", 32, 32, 2, factor=2e-3),
        **modelopt(f"{ATTN}.v_proj", 32, 32, 3, factor=5e-4),
    }
