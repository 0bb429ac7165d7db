"""Programs that end while XLA still computes for them: its threads must not ask for Python when that is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

_PRELUDE = """
import atexit, sys, threading
atexit.register(lambda: call())  # runs last of all handlers, when JAX has dropped its devices
import jax, jax.numpy as jnp
from cupymla.interop import jax as mla

@jax.jit
def slowly(x):  # a quarter of a second on any CPU, and too much for XLA to do it at once
    return jax.lax.fori_loop(0, 20_000_000, lambda i, y: jnp.sin(y), (x @ x)[0, 0])

select = jax.jit(lambda scores: mla.topk(scores, 8))

def call():
    return select(scores + slowly(square))

square, scores = jnp.ones((64, 64)), jnp.ones((4, 4096))
jax.block_until_ready(call())
"""


def _require_end(program: str, **environment: str) -> None:
    given = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    run = subprocess.run([sys.executable, "-c", _PRELUDE + program], env=given, check=False, timeout=120)
    assert run.returncode == 0


def test_a_program_ends_whose_handlers_and_last_call_nobody_waits_for() -> None:
    """It crashed or hung, as the calls of three began behind Python's end."""
    _require_end("atexit.register(call)\ncall()")


def test_a_program_ends_whose_thread_keeps_a_result() -> None:
    """XLA orders programs by the thread that began them: what another one keeps is known as a live array."""
    program = """
kept = []
thread = threading.Thread(target=lambda: kept.append(call()))
thread.start()
thread.join()
"""
    _require_end(program)


def test_a_program_over_several_devices_ends_whose_last_call_nobody_waits_for() -> None:
    """Programs that join devices are in no order with those on one of them."""
    program = """
mesh = jax.make_mesh((2,), ("d",))
parts = jax.sharding.NamedSharding(mesh, jax.P("d"))
total = jax.jit(
    jax.shard_map(
        lambda x, y: mla.topk(jax.lax.psum(x, "d") + y, 8)[0],
        mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"),
    )
)
one, many = jax.device_put(square, jax.sharding.NamedSharding(mesh, jax.P())), jax.device_put(scores, parts)
total(many, slowly(one)).block_until_ready()
total(many, slowly(one + slowly(one + slowly(one + slowly(one)))))
"""
    _require_end(program, XLA_FLAGS="--xla_force_host_platform_device_count=2")
