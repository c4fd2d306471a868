"""No plans: the kernels are those of an untuned machine."""

import pytest


@pytest.fixture(scope="module")
def untuned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_DB", str(tmp_path_factory.mktemp("no") / "tuning.db"))
        yield
