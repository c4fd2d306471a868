"""A measurement for databases that tests make."""

from nvfp4.cache.fingerprint import environment
from nvfp4.cache.records import Measurement
from nvfp4.kernels import registry
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.problem import Problem


def row(device):
    problem = Problem(n=40, k=64)
    kernel = registry.get("fake_good")
    config = kernel.default_config(device, problem, 1)
    return Measurement(
        device=device,
        environment=environment(),
        problem=problem,
        kernel=kernel.name,
        config=config.to_json(),
        layout="checkpoint",
        implementation=implementation_hash(kernel),
        m=1,
        status="ok",
        p50_us=7.5,
    )
