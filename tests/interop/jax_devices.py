"""What test_parallel.py runs in a process whose JAX sees four CPU devices: sharded against whole."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dsa_kit import gradients, random_layer
from interop_kit import placed

from cupymla.interop import jax as mla
from cupymla.interop.jax import dsa, parallel

DEVICES = 4
UNIT = 2.0**-8
"""Half a unit in the last place of bfloat16, relative."""


def arguments(batch: tuple[int, ...] = ()) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "q": placed(rng.standard_normal((*batch, 32, 4, 576)), jnp.bfloat16),
        "kv": placed(rng.standard_normal((*batch, 64, 576)), jnp.bfloat16),
        "indices": placed(rng.integers(-3, 64, (*batch, 32, 9)), jnp.int32),
        "topk_length": placed(rng.integers(1, 12, (*batch, 32)), jnp.int32),
        "attn_sink": placed(rng.standard_normal(4), jnp.float32),
    }


def loss(attention: Any, arrays: dict[str, Any], slope: Any) -> Any:
    return (attention(**arrays)[0].astype(jnp.float32) * slope).sum()


def split(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those with a gradient, and the rest."""
    moving = {name: arrays[name] for name in ("q", "kv", "attn_sink")}
    return moving, {name: array for name, array in arrays.items() if name not in moving}


def compare(batch: tuple[int, ...], options: dict[str, Any]) -> None:
    """One device and four give the same queries' results to the bit; gradients of tokens are sums in another order."""
    arrays = arguments(batch)
    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = parallel.over_mesh(mesh, "context", batched=bool(batch))
    whole = jax.jit(lambda given: mla.sparse_mla_fwd(**given, **options))(arrays)
    sharded = jax.jit(lambda given: spread(**given, **options))(arrays)
    for one, four in zip(whole, sharded, strict=True):
        assert len(four.sharding.device_set) == DEVICES
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(four).view(np.uint8))
    moving, fixed = split(arrays)
    slope = placed(np.random.default_rng(4).standard_normal(whole[0].shape), jnp.float32)

    def gradients(attention: Any) -> Any:
        return jax.jit(jax.grad(lambda m: loss(attention, {**m, **fixed}, slope)))(moving)

    one = gradients(lambda **given: mla.sparse_mla_fwd(**given, **options))
    four = gradients(lambda **given: spread(**given, **options))
    np.testing.assert_array_equal(np.asarray(one["q"]).view(np.uint8), np.asarray(four["q"]).view(np.uint8))
    # Both sides round the same float32 sum, taken in two orders, once to bfloat16.
    largest = np.abs(np.asarray(one["kv"], np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(four["kv"], np.float32), np.asarray(one["kv"], np.float32), rtol=2 * UNIT, atol=1e-5 * largest
    )
    np.testing.assert_allclose(np.asarray(four["attn_sink"]), np.asarray(one["attn_sink"]), rtol=1e-4, atol=1e-4)


def distribution() -> None:
    arrays = arguments()
    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("context")
    q, kv, indices = (arrays[name] for name in ("q", "kv", "indices"))
    lse = mla.sparse_mla_fwd(q, kv, indices, causal=True, q_start=8)[2]

    def local(q: Any, kv: Any, indices: Any, lse: Any) -> Any:
        return parallel.attn_dist(q, kv, indices, lse, axis_name="context", causal=True, q_start=8)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows)(q, kv, indices, lse)
    whole = mla.attn_dist(q, kv, indices, lse, causal=True, q_start=8)
    np.testing.assert_array_equal(np.asarray(sharded), np.asarray(whole))


def replicated_operands() -> None:
    """Operands that all devices share beside sharded ones: their gradients are summed over the devices."""
    arrays = arguments()
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    q, kv, indices = (arrays[name] for name in ("q", "kv", "indices"))
    sharded = jax.shard_map(
        lambda q, kv, i: mla.sparse_mla_fwd(q, kv, i)[0],
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P(), jax.P("data")),
        out_specs=jax.P("data"),
    )
    whole = mla.sparse_mla_fwd(q, kv, indices)[0]
    np.testing.assert_array_equal(np.asarray(sharded(q, kv, indices)), np.asarray(whole))
    slope = placed(np.random.default_rng(4).standard_normal(whole.shape), jnp.float32)

    def gradient(attention: Any) -> np.ndarray[Any, Any]:
        made = jax.grad(lambda kv: (attention(q, kv, indices).astype(jnp.float32) * slope).sum())(kv)
        return np.asarray(made).astype(np.float32)

    one = gradient(lambda q, kv, i: mla.sparse_mla_fwd(q, kv, i)[0])
    # Four bfloat16 shares are added in bfloat16.
    np.testing.assert_allclose(gradient(sharded), one, rtol=8 * UNIT, atol=8 * UNIT * np.abs(one).max() / 4)


def two_axes() -> None:
    """Sequences sharded over one axis of a mesh, queries and tokens over the other, the sink and the tokens of one
    sequence over none or one: gradients of what devices share are summed over them."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = arguments((2,))
    moving, fixed = split({name: array for name, array in arrays.items() if name != "topk_length"})
    slope = placed(np.random.default_rng(4).standard_normal((2, 32, 4, 512)), jnp.float32)
    rows, tokens = jax.P("data", "context"), jax.P("context")

    def local(q: Any, kv: Any, indices: Any, attn_sink: Any) -> Any:
        kv = jnp.broadcast_to(kv, (q.shape[0], *kv.shape)) if kv.ndim == 2 else kv
        return parallel.sparse_mla_fwd(q, kv, indices, attn_sink=attn_sink, axis_name="context")[0]

    def one(q: Any, kv: Any, indices: Any, attn_sink: Any) -> Any:
        # Sequence by sequence on each "data" row: q differs along both axes, kv along one, the sink along none.
        out = parallel.sparse_mla_fwd(q[0], kv, indices[0], attn_sink=attn_sink, axis_name="context")[0]
        return out[None]

    def gradients(attention: Any, moving: dict[str, Any]) -> Any:
        def loss(m: dict[str, Any]) -> Any:
            return (attention(m["q"], m["kv"], fixed["indices"], m["attn_sink"]).astype(jnp.float32) * slope).sum()

        return jax.jit(jax.grad(loss))(moving)

    def whole(q: Any, kv: Any, indices: Any, attn_sink: Any) -> Any:
        kv = jnp.broadcast_to(kv, (2, *kv.shape)) if kv.ndim == 2 else kv
        return mla.sparse_mla_fwd(q, kv, indices, attn_sink=attn_sink)[0]

    for body, kv, spec in ((local, moving["kv"], rows), (one, moving["kv"][0], tokens)):
        sharded = jax.shard_map(body, mesh=mesh, in_specs=(rows, spec, rows, jax.P()), out_specs=rows)
        given = {**moving, "kv": kv}
        expected, got = gradients(whole, given), gradients(sharded, given)
        np.testing.assert_array_equal(np.asarray(got["q"]).view(np.uint8), np.asarray(expected["q"]).view(np.uint8))
        largest = np.abs(np.asarray(expected["kv"], np.float32)).max()
        # Where sequences share tokens, the shares of each are rounded to bfloat16 before they are added.
        close = {"rtol": 8 * UNIT, "atol": 8 * UNIT * largest / 4}
        np.testing.assert_allclose(np.asarray(got["kv"], np.float32), np.asarray(expected["kv"], np.float32), **close)
        sinks = np.asarray(got["attn_sink"]), np.asarray(expected["attn_sink"])
        np.testing.assert_allclose(*sinks, rtol=1e-4, atol=1e-4)


def explicit() -> None:
    """A mesh as `jax.make_mesh` makes it, whose axes are Explicit: arrays that are not sharded yet, and plain calls on
    arrays that are."""
    mesh = jax.make_mesh((DEVICES,), ("context",))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    arrays = arguments()
    spread = parallel.over_mesh(mesh, "context")
    whole = mla.sparse_mla_fwd(**arrays)
    for made in (spread(**arrays), jax.jit(lambda given: spread(**given))(arrays)):
        for one, four in zip(whole, made, strict=True):
            assert len(four.sharding.device_set) == DEVICES
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(four).view(np.uint8))
    slope = placed(np.random.default_rng(4).standard_normal(whole[0].shape), jnp.float32)

    def gradients(arrays: dict[str, Any]) -> Any:
        moving, fixed = split(arrays)
        return jax.jit(jax.grad(lambda m: loss(mla.sparse_mla_fwd, {**m, **fixed}, slope)))(moving)

    expected = gradients(arrays)
    with jax.set_mesh(mesh):
        sharded = {n: a if n == "attn_sink" else jax.reshard(a, jax.P("context")) for n, a in arrays.items()}
        got = gradients(sharded)
    for name, gradient in got.items():
        assert jax.typeof(gradient).sharding.spec == jax.typeof(sharded[name]).sharding.spec
        np.testing.assert_array_equal(np.asarray(gradient).view(np.uint8), np.asarray(expected[name]).view(np.uint8))


def explicit_problems() -> None:
    """Gradients of many problems, whose axis is sharded along one axis of a mesh of two, and a key that all share."""
    mesh = jax.make_mesh((2, DEVICES // 2), ("data", "other"))
    batch = arguments((2,))
    one = arguments()

    def many(names: tuple[str, ...], arrays: dict[str, Any]) -> Any:
        moving, fixed = split(arrays)
        axes = [{name: 0 if name in names else None for name in part} for part in (moving, fixed)]

        def each(moving: Any, fixed: Any) -> Any:
            return mla.sparse_mla_fwd(**moving, **fixed)[0].astype(jnp.float32).sum()

        return jax.grad(lambda m: jax.vmap(each, axes)(m, fixed).sum())(moving)

    for names in (("q", "kv", "indices", "topk_length"), ("q", "indices", "topk_length")):
        arrays = {name: batch[name] if name in names else one[name] for name in one}
        expected = jax.jit(functools.partial(many, names))(arrays)
        with jax.set_mesh(mesh):
            sharded = {name: jax.reshard(a, jax.P("data")) if name in names else a for name, a in arrays.items()}
            for got in (many(names, sharded), jax.jit(functools.partial(many, names))(sharded)):
                for name, gradient in got.items():
                    assert jax.typeof(gradient).sharding.spec == jax.typeof(sharded[name]).sharding.spec, name
                    np.testing.assert_allclose(
                        np.asarray(gradient, np.float32),
                        np.asarray(expected[name], np.float32),
                        rtol=2 * UNIT,
                        atol=1e-4,
                    )


def explicit_outside() -> None:
    """Arrays on a mesh whose axes are Explicit, where no `jax.set_mesh` says so: their own types do."""
    mesh = jax.make_mesh((DEVICES,), ("context",))

    def put(array: Any, *axes: str) -> Any:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.P(*axes)))

    arrays, batch = arguments(), arguments((DEVICES,))
    sharded = {n: put(a) if n in ("kv", "attn_sink") else put(a, "context") for n, a in arrays.items()}
    many = {n: put(a) if n == "attn_sink" else put(a, "context") for n, a in batch.items()}
    axes = {name: None if name == "attn_sink" else 0 for name in batch}

    def gradients(arrays: dict[str, Any]) -> Any:
        moving, fixed = split(arrays)
        return tuple(jax.grad(lambda m: loss(mla.sparse_mla_fwd, {**m, **fixed}, 1.0))(moving).values())

    def mapped(arrays: dict[str, Any]) -> Any:
        return jax.vmap(lambda given: mla.sparse_mla_fwd(**given), (axes,))(arrays)

    for function, whole, parts in (
        (lambda given: mla.sparse_mla_fwd(**given), arrays, sharded),
        (gradients, arrays, sharded),
        (mapped, batch, many),
    ):
        # JAX takes a gradient of such arrays inside of `jit` alone.
        for run in (jax.jit(function), *(() if function is gradients else (function,))):
            for expected, got in zip(function(whole), run(parts), strict=True):
                np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8))


def forward_on_gpus() -> None:
    """Every GPU there is against one of them."""
    arrays = {name: array for name, array in arguments().items() if name != "topk_length"}
    mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    choices: tuple[dict[str, Any], ...] = ({}, {"causal": True, "q_start": 16})
    for options in choices:
        whole = mla.sparse_mla_fwd(**arrays, **options)
        sharded = jax.jit(lambda given, o=options: parallel.over_mesh(mesh, "context")(**given, **o))(arrays)
        for pair in zip(whole, sharded, strict=True):
            one, many = (np.asarray(array, np.float32) for array in pair)
            np.testing.assert_allclose(many, one, rtol=2 * UNIT, atol=2 * UNIT)


def scaling() -> None:
    """The measurement itself, on devices whose times mean nothing."""
    from cupymla_lab import scaling as measure

    measure.REPEATS, measure.WARM_UP, measure.INNER = 1, 0, 1
    small = measure.Layer(tokens=8, hidden=32, q_rank=16, heads=2, channels=16, index_heads=2, topk=3)
    problem = measure.Problem(s_q=4, s_kv=8, h_q=2, topk=3)
    rows = measure.rows(problem, small, [1, 2], ["jax"])
    assert [row["devices"] for row in rows] == [1, 2] and rows[0]["speedup"] == 1
    for row in measure.rows(problem, small, [2], ["jax_layer", "jax_layer_loss", "jax_layer_heads"]):
        assert row["efficiency"] == 1, "of one row there is no other to compare with"


def dsa_layer() -> None:
    """Outputs and gradients of a DSA layer whose tokens, or tokens and attention heads, are spread over four devices;
    with both it trains its indexer."""
    given = random_layer(16, heads=DEVICES, topk=5)

    def layer(params: Any, hidden: Any, angles: Any, **options: Any) -> Any:
        return dsa.layer(params, hidden, angles, given.conventions, **options)._replace(latents=None)

    (out, indices), grads = gradients(given, functools.partial(layer, loss_weight=0.5))
    first, last = jax.P("heads"), jax.P(None, "heads")
    by_head = {"q_b_proj.weight": first, "kv_b_proj.weight": first, "sinks": first, "o_proj.weight": last}
    choices: tuple[tuple[dict[str, int], float | None], ...] = (
        ({"context": DEVICES}, None),
        ({"context": 2, "heads": DEVICES // 2}, 0.5),
    )
    for extents, loss_weight in choices:
        axes = {f"{axis}_axis": axis for axis in extents}
        mesh = jax.make_mesh((*extents.values(),), (*extents,), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
        spec = {name: by_head.get(name, jax.P()) if "heads" in extents else jax.P() for name in given.params}
        rows = jax.P(None, "context") if "context" in extents else jax.P()
        body = functools.partial(layer, loss_weight=loss_weight, **axes)
        made = dsa.Output(rows, rows, None, None, None if loss_weight is None else rows)
        spread = jax.shard_map(body, mesh=mesh, in_specs=(spec, rows, rows), out_specs=made)
        (out_4, indices_4), grads_4 = gradients(given, spread)
        np.testing.assert_array_equal(np.asarray(indices_4), np.asarray(indices))
        # Shares of each device are rounded to bfloat16 before they are added.
        pairs = {name: (grads_4[0][name], gradient) for name, gradient in grads[0].items()}
        for name, (many, whole) in {**pairs, "hidden": (grads_4[1], grads[1]), "out": (out_4, out)}.items():
            four, one = np.asarray(many, np.float32), np.asarray(whole, np.float32)
            if name.startswith("indexer.") and loss_weight is None:
                assert not four.any(), (axes, name)
            else:
                assert np.linalg.norm(four - one) <= 4 * UNIT * np.linalg.norm(one), (axes, name)


def pools() -> None:
    """Selections of an indexer that ranks pools, which do not end with a device's tokens."""
    rng = np.random.default_rng(6)
    shapes = {"query": (2, 16, 4, 128), "states": (2, 16, 256), "weights": (2, 16, 4)}
    index = tuple(placed(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes.values())
    bias = placed(rng.standard_normal((3, 128)), jnp.float32)
    conventions = dsa.conventions("glm5_next", topk=6, scale=1.0)
    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, "context")
    spread = jax.shard_map(
        lambda index, bias: dsa._select(index, bias, conventions, "context"),
        mesh=mesh,
        in_specs=((rows,) * 3, jax.P()),
        out_specs=rows,
    )
    found, expected = jax.jit(spread)(index, bias), dsa._select(index, bias, conventions, None)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def dsa_attention(devices: int = DEVICES) -> None:
    """MLA heads over some devices and all of the indexer on each: outputs and gradients of one device. Rows whose
    selection differs between devices are told, and no others. Then queries and tokens are split, under a mask."""
    names = ("q", "kv", "iq", "ik", "iw", "attn_sink", "loss_weight")
    arrays = {name: array for name, array in arguments().items() if name != "topk_length"}
    rng = np.random.default_rng(5)
    arrays["iq"] = placed(rng.standard_normal((32, 2, 64)), jnp.bfloat16)
    arrays["ik"] = placed(rng.standard_normal((64, 64)), jnp.bfloat16)
    arrays["iw"] = placed(rng.standard_normal((32, 2)), jnp.float32)
    arrays["loss_weight"] = placed(rng.random(32), jnp.float32)
    chosen, auto = jax.devices()[:devices], (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("heads",), axis_types=auto, devices=chosen)
    heads = jax.P(None, "heads")
    specs = {**dict.fromkeys(arrays, jax.P()), "q": heads, "attn_sink": jax.P("heads")}
    slope = placed(rng.standard_normal((32, 4, 512)), jnp.float32)

    def gradients(attention: Any, arrays: dict[str, Any]) -> Any:
        def total(moving: dict[str, Any]) -> Any:
            out, lse, aux = attention({**arrays, **moving})
            return (out.astype(jnp.float32) * slope).sum() + aux.sum(), (out, lse)

        return jax.jit(jax.grad(total, has_aux=True))({name: arrays[name] for name in names})

    def local(given: dict[str, Any]) -> Any:
        return mla.dsa_attention(**given, axis_name="heads", check_ranks=True)

    def compared(attention: Any, spread: Any, exact: Sequence[str], tolerance: Callable[[str], Any]) -> None:
        """Bit by bit what is exact; `tolerance` of the rest by name: of each element, and of the largest one."""
        (one, results), (four, results_4) = (gradients(function, arrays) for function in (attention, spread))
        pairs = {name: (one[name], four[name]) for name in names}
        pairs |= {name: (results[place], results_4[place]) for place, name in enumerate(("out", "lse"))}
        for name, pair in pairs.items():
            whole, parts = (np.asarray(array, np.float32) for array in pair)
            if chosen[0].platform == "gpu":  # as test_dsa_attention.py: fewer heads or rows may be other kernels
                there = np.isfinite(whole)
                np.testing.assert_array_equal(np.isfinite(parts), there, err_msg=name)
                assert np.linalg.norm((parts - whole)[there]) <= 4 * UNIT * np.linalg.norm(whole[there]), name
            elif name in exact:
                np.testing.assert_array_equal(parts, whole, err_msg=name)
            else:
                each, largest = tolerance(name)
                np.testing.assert_allclose(parts, whole, rtol=each, atol=largest * np.abs(whole).max(), err_msg=name)

    def of_heads(name: str) -> Any:
        """Distributions are float32 sums in another order; of kv four bfloat16 shares are added in bfloat16."""
        unit = {"kv": 8 * UNIT, "iq": UNIT, "ik": UNIT}.get(name, 2.0**-16)
        return unit, unit / 4

    spread = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(heads, heads, jax.P()))
    compared(lambda given: mla.dsa_attention(**given), spread, ("q", "attn_sink", "out", "lse"), of_heads)

    def on_device(given: dict[str, Any]) -> Any:
        return mla.dsa_attention(**given, context_axis="context", causal=True, q_start=20)

    def of_tokens(name: str) -> Any:
        """Both sides round the same float32 sum, taken in two orders, once."""
        return 2 * UNIT if name in ("kv", "ik", "iq") else 1e-4, 1e-5

    mesh_of_tokens = jax.make_mesh((devices,), ("context",), axis_types=auto, devices=chosen)
    rows = {**dict.fromkeys(arrays, jax.P("context")), "attn_sink": jax.P()}
    spread = jax.shard_map(on_device, mesh=mesh_of_tokens, in_specs=(rows,), out_specs=(jax.P("context"),) * 3)
    whole = functools.partial(mla.dsa_attention, causal=True, q_start=20)
    compared(lambda given: whole(**given), spread, ("q", "out", "lse"), of_tokens)

    def differing(given: dict[str, Any]) -> Any:
        other = given["indices"].at[3, 2].add(jax.lax.axis_index("heads"))
        weights = jax.lax.pcast(given["loss_weight"], "heads", to="varying")

        def total(loss_weight: Any) -> Any:
            return local({**given, "indices": other, "loss_weight": loss_weight})[2].sum()

        return jax.grad(total)(weights)

    losses = jax.shard_map(differing, mesh=mesh, in_specs=(specs,), out_specs=jax.P("heads"))(arrays)
    np.testing.assert_array_equal(np.isnan(np.asarray(losses).reshape(devices, -1)), [np.arange(32) == 3] * devices)


def indexer_training() -> None:
    """Two sequences, mapped, whose queries are over four devices and whose keys are on each: losses and gradients of
    one device and a batch axis, those of keys once they are summed; and so where JAX differentiates the losses."""
    rng = np.random.default_rng(6)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return placed(rng.standard_normal((2, *shape)), dtype)

    rows = {"q": normal(32, 3, 64), "weights": normal(32, 3, dtype=jnp.float32), "mla_q": normal(32, 2, 512)}
    rows["indices"] = placed(rng.integers(-3, 64, (2, 32, 9)), jnp.int32)
    rows["target"] = placed(rng.random((2, 32, 9)), jnp.float32)
    keys = {"k": normal(64, 64), "mla_kv": normal(64, 512)}

    def losses(rows: dict[str, Any], keys: dict[str, Any], q_start: Any) -> Any:
        scored, options = (rows["q"], keys["k"], rows["weights"]), {"causal": True, "q_start": q_start}
        sparse = mla.indexer_loss(*scored, rows["indices"], rows["target"], **options)
        options |= {"dk_dtype": "float32"}
        gradients = mla.indexer_bwd(*scored, sparse[1], rows["indices"], deterministic=True, **options)
        dense = mla.indexer_loss_dense(*scored, rows["mla_q"], keys["mla_kv"], **options)
        by_row = {"loss": sparse[0], "slope": sparse[1], "dq": gradients[0], "dweights": gradients[2]}
        by_row |= {"dense loss": dense[0], "dense dq": dense[1], "dense dweights": dense[3]}
        return by_row, {"dk": gradients[1], "dense dk": dense[2]}

    def local(rows: dict[str, Any], keys: dict[str, Any]) -> Any:
        first = 16 + jax.lax.axis_index("context") * rows["q"].shape[1]
        return jax.vmap(losses, (0, 0, None))(rows, keys, first)

    def summed(rows: dict[str, Any], keys: dict[str, Any]) -> Any:
        by_row, by_key = local(rows, keys)
        return by_row, jax.lax.psum(by_key, "context")

    def near(got: Any, wanted: Any, unit: float, name: str) -> None:
        four, one = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        assert one.any(), name
        np.testing.assert_allclose(four, one, rtol=unit, atol=unit * np.abs(one).max() / 4, err_msg=name)

    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    split_rows = jax.P(None, "context")
    spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=(split_rows, jax.P()))
    by_row, by_key = losses(rows, keys, 16)
    made_by_row, made_by_key = jax.jit(spread(summed, out_specs=(split_rows, jax.P())))(rows, keys)
    for name, whole in {**by_row, **by_key}.items():
        # Each result is rounded once; sums of keys are float32 in another order.
        unit = 2 * UNIT if whole.dtype == jnp.bfloat16 else 2.0**-20
        near({**made_by_row, **made_by_key}[name], whole, unit, name)
    for prefix in ("", "dense "):
        spread_loss = spread(lambda rows, keys, p=prefix: local(rows, keys)[0][p + "loss"], out_specs=split_rows)

        def total(q: Any, k: Any, weights: Any, loss: Any = spread_loss) -> Any:
            return loss({**rows, "q": q, "weights": weights}, {**keys, "k": k}).sum()

        grads = jax.jit(jax.grad(total, (0, 1, 2)))(rows["q"], keys["k"], rows["weights"])
        near(grads[0], by_row[prefix + "dq"], 2 * UNIT, prefix + "dq")
        near(grads[1], by_key[prefix + "dk"], 8 * UNIT, prefix + "dk")  # four bfloat16 shares, added in bfloat16
        near(grads[2], by_row[prefix + "dweights"], 2.0**-20, prefix + "dweights")


CHECKS: dict[str, Callable[[], None]] = {
    "plain": lambda: compare((), {}),
    "causal": lambda: compare((), {"causal": True, "q_start": 16, "k_stride": 2}),
    "batch": lambda: compare((2,), {"causal": True, "q_start": 16}),
    "distribution": distribution,
    "replicated": replicated_operands,
    "two_axes": two_axes,
    "explicit": explicit,
    "explicit_problems": explicit_problems,
    "explicit_outside": explicit_outside,
    "scaling": scaling,
    "dsa_layer": dsa_layer,
    "pools": pools,
    "dsa_attention": dsa_attention,
    "indexer_training": indexer_training,
    "gpus": forward_on_gpus,
    "gpus dsa_attention": lambda: dsa_attention(2),
}


def main(names: Sequence[str]) -> None:
    """Look at one after the other, also where one is wrong."""
    for name in names:
        try:
            CHECKS[name]()
        except Exception:
            print(f"wrong: {name}", file=sys.stderr)
            traceback.print_exc()
        else:
            print(f"right: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
