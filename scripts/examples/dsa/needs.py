"""What examples ask of the machine before they compute anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec


def missing_packages(*names: str) -> list[str]:
    """What is not installed."""
    return [f"the package {name}" for name in names if find_spec(name) is None]


def missing_on_gpu(framework: str, operators: Sequence[str]) -> list[str]:
    """What these operators would want of this machine's GPU and do not find."""
    from cupymla import driver
    from cupymla.ops import registry
    from cupymla.testing.operators import kernels_for

    if not driver.available():
        return ["a CUDA GPU"]
    capability = driver.compute_capability(0)
    lacking = [name for name in operators if not kernels_for(registry.named(name), capability)]
    if lacking:
        return [f"a kernel of {name} for {driver.device_name(0)}" for name in lacking]
    return [] if sees_gpu(framework) else [f"a {framework} that sees the GPU"]


def sees_gpu(framework: str) -> bool:
    """Whether a framework that is installed was built for CUDA and finds a GPU."""
    if framework == "cupy":
        import cupy

        return bool(cupy.cuda.is_available())
    if framework == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def seed_of(text: str) -> int:
    """A seed that NumPy, JAX and torch all take. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to 2147483647, got {text}")
    return int(text)
