"""A folder to write tiny checkpoints into."""

import pytest
from nvfp4.testing.checkpoints import HF_QUANT, write_checkpoint


@pytest.fixture
def write(tmp_path):
    def make(tensors, *, folder="checkpoint", hf=HF_QUANT, **options):
        return write_checkpoint(tmp_path / folder, tensors, hf=hf, **options)

    return make
