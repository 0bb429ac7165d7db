"""JAX functions made from declarations: the custom call, its batching rule, its gradient, and the public face."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import InputError, UnsupportedError
from ..batching import Mapped
from ..call import Call, Plain, label_of
from ..declaration import Declaration, Facts, Gradient
from ..table import declared
from .handler import Handler

TARGETS = {True: "cupymla_call", False: "cupymla_call_unrecorded"}
"""Names of the custom call in XLA programs, by whether it may be recorded into a command buffer."""

_PLATFORMS = {"cpu": False, "CUDA": True}

Names: TypeAlias = tuple[str, ...]
Options: TypeAlias = tuple[tuple[str, Plain], ...]
Flat: TypeAlias = Callable[..., tuple[Any, ...]]
"""Arrays in, results out, both in the order of a declaration and without those that are not there."""

_REMEMBERED = 1024
"""So many layouts of calls each function remembers."""

_lock = threading.Lock()
_handlers: list[Handler] = []


def register() -> None:
    """Make the custom call known to XLA in this process.

    The functions do it themselves; a process that runs an exported program without calling any of them has to.
    """
    with _lock:
        if _handlers:
            return
        for replayable, target in TARGETS.items():
            for platform, on_gpu in _PLATFORMS.items():
                handler = Handler(on_gpu, replayable)
                jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.address), platform=platform)
                _handlers.append(handler)
        atexit.register(_Ending())


class _Ending:
    """Waits, while Python ends, for what may still call it: XLA's threads crash or hang where they do so later.

    Called by `atexit`, it waits while arrays and clients are there. Deleted, it waits for what other handlers began:
    `atexit` alone refers to it, and forgets its handlers behind the last of them, when Python still runs. A forked
    process has no threads of XLA's to wait for.
    """

    def __init__(self) -> None:
        self._cpus: list[list[Any]] = []
        self._process = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._process:
            return
        for array in jax.live_arrays():
            with contextlib.suppress(Exception):  # of a computation that failed, which nobody asks for any more
                array.block_until_ready()
        self._wait()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._wait()

    def _wait(self) -> None:
        """Wait for all that this thread has asked the CPU to compute, results that were dropped among it.

        XLA begins programs of a thread on a device of the CPU behind the end of those before, and those that join
        devices behind the end of other such programs. JAX makes its devices anew for calls behind a handler of its own.
        """
        with contextlib.suppress(Exception):  # where there is no CPU to compute on, nothing has to be waited for
            cpus = jax.local_devices(backend="cpu")
            if cpus not in self._cpus:
                self._cpus.append(cpus)
            for cpus in self._cpus:
                for cpu in cpus:
                    jnp.add(jax.device_put(np.int32(0), cpu), 1).block_until_ready()
                if len(cpus) > 1:
                    parts = jax.sharding.NamedSharding(jax.sharding.Mesh(cpus, "cpu"), jax.P("cpu"))
                    jnp.sum(jax.device_put(np.zeros(len(cpus), np.int32), parts)).block_until_ready()


def export_checks() -> list[Any]:
    """What `jax.export.export` wants as `disabled_checks` to let our custom call pass.

    The call's text is stable: a program that was exported by one version runs in another or is refused in words.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS.values()]


# The custom call -----------------------------------------------------------------------------------------------------


def facts_of(declaration: Declaration, name: str, array: Any) -> Facts:
    """An array without its contents. Raises InputError for a dtype that has no label."""
    return Facts(tuple(array.shape), label_of(array.dtype, declaration.name, name))


def varying(arrays: Iterable[Any]) -> frozenset[Any]:
    """The mesh axes along which any of the arrays differs between devices, inside `shard_map`."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def _result(facts: Facts, like: Any) -> Any:
    """A result's type. Inside `shard_map` it differs between the same devices as all arrays do (see `_compiled`)."""
    axes = jax.typeof(like).manual_axis_type
    if not axes.varying:
        return jax.ShapeDtypeStruct(facts.shape, jnp.dtype(facts.dtype))
    here = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
    return jax.ShapeDtypeStruct(facts.shape, jnp.dtype(facts.dtype), sharding=here, manual_axis_type=axes)


def _bind(declaration: Declaration, names: Names, options: Options, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The custom call itself; mapped, it makes one call after the other."""
    facts = {name: facts_of(declaration, name, array) for name, array in zip(names, arrays, strict=True)}
    call = Call.of(declaration, facts, dict(options))
    call.check()
    results = [_result(result, arrays[0]) for result in call.results.values()]
    aliases = {names.index(name): place for place, name in enumerate(call.results) if name in declaration.updates}
    # What works in its buffers alone; see `Declaration.replayable`.
    target = TARGETS[declaration.replayable or "workspace" in call.results]
    made = jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=aliases)
    return tuple(made(*arrays, call=call.text()))[: len(call.results.keys() - {"workspace"})]


# Batching ------------------------------------------------------------------------------------------------------------


def _flat(declaration: Declaration, names: Names, options: Options) -> Flat:
    """The call as a function that `vmap` maps by the operator's own batch axis where that is possible."""

    def one(*arrays: Any) -> tuple[Any, ...]:
        return _bind(declaration, names, options, arrays)

    if declaration.batching is None:
        return one
    many = jax.custom_batching.custom_vmap(one)

    def rule(axis_size: int, in_batched: list[bool], *sharded: Any) -> tuple[Any, Any]:
        arrays = [on_every_device(array) for array in sharded]
        mapped = Mapped(
            declaration,
            dict(options),
            axis_size,
            dict(zip(names, arrays, strict=True)),
            dict(zip(names, in_batched, strict=True)),
            label=lambda name, array: label_of(array.dtype, declaration.name, name),
            spread=lambda array, extent: jnp.broadcast_to(array, (extent, *array.shape)),
            run=lambda given, chosen: _flat(declaration, tuple(given), tuple(chosen.items()))(*given.values()),
        )
        results = mapped.as_one()
        if results is None:
            axes = [0 if batched else None for batched in in_batched]
            results = jax.vmap(one, in_axes=axes, axis_size=axis_size)(*arrays)
        lead = next(array for array, batched in zip(sharded, in_batched, strict=True) if batched)
        return tuple(_led(result, lead) for result in results), (True,) * len(results)

    many.def_vmap(rule)
    flat: Flat = many
    return flat


# Gradients -----------------------------------------------------------------------------------------------------------


def _differentiable(declaration: Declaration, names: Names, options: Options, gradient: Gradient) -> Flat:
    """The call with its gradient, which is another declared function of arguments, results and cotangents."""
    flat = _flat(declaration, names, options)
    differentiable = jax.custom_vjp(flat)
    # What a gradient of the gradient would have to pass through.
    first = _once(flat, declaration)
    kept = [name for name in declaration.outputs if name in declared(gradient.backward).arrays]
    if gradient.may_scale(names):
        kept += gradient.own.values()

    def forward(*primals: Any) -> tuple[Any, Any]:
        moving = [name for name, primal in zip(names, primals, strict=True) if primal.perturbed]
        arrays = tuple(primal.value for primal in primals)
        floats = {name for name, a in zip(names, arrays, strict=True) if jnp.issubdtype(a.dtype, jnp.floating)}
        gradient.require_known(declaration.name, (name for name in moving if name in floats))
        results = first(*arrays)
        made = dict(zip(declaration.outputs, results, strict=True))
        return results, {**dict(zip(names, arrays, strict=True)), **{name: made[name] for name in kept}}

    def backward(saved: dict[str, Any], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        slopes = dict(zip(declaration.outputs, cotangents, strict=True))
        grads = _gradients(declaration, gradient, dict(options), saved, slopes)
        return tuple(grads.get(name) for name in names)

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    made: Flat = differentiable
    return made


def constant(flat: Flat, refused: str, instead: str) -> Flat:
    """The call as one whose results are constants; a gradient that needs one of them raises UnsupportedError.

    Args:
        flat: the call.
        refused: the gradient, in the error's words.
        instead: what there is.
    """
    constant = jax.custom_vjp(flat)

    def forward(*primals: Any) -> tuple[Any, None]:
        return flat(*(primal.value for primal in primals)), None

    def backward(saved: None, cotangents: tuple[Any, ...]) -> NoReturn:
        raise UnsupportedError(refused, "every device", instead)

    constant.defvjp(forward, backward, symbolic_zeros=True)
    made: Flat = constant
    return made


def _once(flat: Flat, declaration: Declaration) -> Flat:
    """A part of a first gradient, which has no gradient of its own."""
    return constant(flat, f"{declaration.name}: a gradient of its gradient", "first gradients")


def _gradients(
    declaration: Declaration,
    gradient: Gradient,
    options: dict[str, Plain],
    saved: Mapping[str, Any],
    slopes: Mapping[str, Any],
) -> dict[str, Any]:
    """Gradients by argument, from saved arguments and results; those that are missing are zero."""
    live = {name for name, slope in slopes.items() if not isinstance(slope, jax.custom_derivatives.SymbolicZero)}
    for name in sorted(live - set(gradient.through)):
        raise UnsupportedError(
            f"{declaration.name}: a gradient through '{name}'",
            "every device",
            f"gradients through {', '.join(gradient.through)} (pass '{name}' through jax.lax.stop_gradient)",
        )
    if not live:
        return {}
    if not gradient.may_scale(saved):
        return _gradients_anew(declaration, gradient, options, saved, slopes, live)
    (name,) = live
    slope = slopes[name]
    first = slope.reshape(-1)[:1]

    def scaled() -> dict[str, Any]:
        """Of a slope that is the same everywhere, as of a sum or a mean."""
        return {name: (saved[own] * first.sum()).astype(saved[name].dtype) for name, own in gradient.own.items()}

    def anew() -> dict[str, Any]:
        return _gradients_anew(declaration, gradient, options, saved, slopes, live)

    made: dict[str, Any] = jax.lax.cond(jnp.all(slope == first), scaled, anew)
    return made


def _gradients_anew(
    declaration: Declaration,
    gradient: Gradient,
    options: dict[str, Plain],
    saved: Mapping[str, Any],
    slopes: Mapping[str, Any],
    live: Collection[str],
) -> dict[str, Any]:
    """The same by the gradient's function, through the results in `live`."""
    known = {**saved, **{argument: slopes[name] for name, argument in gradient.cotangents.items() if name in live}}
    known |= {name: saved[name] * slopes[by][..., None] for name, by in gradient.scaled.items()}
    backward = declared(gradient.backward)
    given = {name: known[name] for name in backward.arrays if name in known}
    chosen = tuple(declaration.for_backward(backward, options).items())
    made = _once(_flat(backward, tuple(given), chosen), declaration)(*given.values())
    facts = {name: facts_of(backward, name, array) for name, array in given.items()}
    by_result = dict(zip(backward.results(facts, dict(chosen)), made, strict=True))
    return {
        name: by_result[result].astype(saved[name].dtype)
        for name, result in gradient.results.items()
        if result in by_result
    }


# The public face -----------------------------------------------------------------------------------------------------


def causal_indices(indices: Any, q_start: Any = 0, k_stride: Any = 1, *, query_axis: int = 0) -> Any:
    """Indices with -1, which no operator follows, in the place of those that `causal=True` would mask.

    For a `q_start` that is known only when the program runs, such as one that depends on the device within `shard_map`.

    Args:
        indices: int32, query s along `query_axis`, its top-k entries along the last axis.
        q_start: position of query 0, a number or a traced integer.
        k_stride: positions per key.
        query_axis: 1 where there is a batch axis.

    Returns:
        int32, of the shape of `indices`.
    """
    shape = [1] * indices.ndim
    shape[query_axis] = -1
    position = q_start + jnp.arange(indices.shape[query_axis], dtype=jnp.int32)
    # As C divides, and as the operators do: toward zero.
    limit = jax.lax.div(position + (1 - k_stride), jnp.asarray(k_stride, position.dtype)).reshape(shape)
    return jnp.where(indices <= limit, indices, jnp.asarray(-1, indices.dtype))


@functools.cache
def public(declaration: Declaration) -> Callable[..., Any]:
    """The declared function for JAX arrays."""

    known: dict[object, tuple[Flat, tuple[int, ...]]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        key = _layouts(len(args), tuple(kwargs), values)
        found = known.get(key) if key is not None else None
        if found is None:
            found, values = prepared(key, args, kwargs, values)
        flat, places = found
        results = flat(*[values[place] for place in places])
        return results[0] if len(results) == 1 else results

    def prepared(key: object, args: Any, kwargs: Any, values: Any) -> tuple[tuple[Flat, tuple[int, ...]], Any]:
        """The jitted call, and which of the values it takes; other values where these are not as JAX takes them."""
        arrays, options = traceable(declaration, *declaration.split(args, kwargs))
        register()
        plain = tuple([(n, _one_nan(value)) for n, value in _call(declaration, arrays, options).options.items()])
        flat = _compiled(declaration, tuple(arrays), plain, tuple([exactly(value) for _, value in plain]))
        names = (*itertools.islice(declaration.signature.parameters, len(args)), *kwargs)
        given = dict(zip(names, values, strict=True))
        if key is None or any(given.get(name) is not array for name, array in arrays.items()):
            return (flat, tuple(range(len(arrays)))), tuple(arrays.values())
        found = flat, tuple(names.index(name) for name in arrays)
        with _lock:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[key] = found
        return found, values

    call.__name__ = call.__qualname__ = declaration.name
    call.__module__ = __name__.rpartition(".")[0]
    call.__doc__ = _documented(declaration)
    setattr(call, "__signature__", declaration.signature)  # noqa: B010 - what inspect and help() read
    return call


def _layouts(positional: int, names: tuple[str, ...], values: Sequence[Any]) -> object:
    """What a call's checks and its jitted function depend on; None where there is no telling."""
    key: list[object] = [positional, names]
    for value in values:
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            key.append((value.shape, value.dtype))
        elif value is None or type(value) in (bool, int, float, str):
            key.append(exactly(value))
        else:
            return None
    return tuple(key)


def exactly(value: Plain) -> object:
    """What tells an option from all others: True equals 1 and 1.0, 0.0 equals -0.0, and NaN not itself."""
    return value.hex() if isinstance(value, float) else (type(value), value)


def _one_nan(value: Plain) -> Plain:
    """One NaN for all, which is found again, as it is itself."""
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _documented(declaration: Declaration) -> str:
    summary = (declaration.function().__doc__ or "").partition("\n")[0]
    lines = [summary, "", f"`cupymla.{declaration.name}` for JAX arrays, traced or not; see there for the arguments."]
    if declaration.updates:
        lines += ["", f"Returns new {' and '.join(declaration.updates)}; the old ones are not changed."]
    if declaration.gradient:
        lines += ["", f"Differentiable in {', '.join(declaration.gradient.results)}."]
    return "\n".join([*lines, *declaration.notes()])


def _causal_ends(arrays: Mapping[str, Any], q_start: Any, k_stride: int) -> Any:
    """The index operators' causal limit as their `ends`: keys that are complete at each query's position."""
    rows, keys = arrays["q"].shape[:-2], arrays["k"].shape[-2]
    limit = jnp.floor_divide(q_start + jnp.arange(1, rows[-1] + 1, dtype=jnp.int32), k_stride)
    ends = jnp.broadcast_to(jnp.clip(limit, 0, keys).astype(jnp.int32), rows)
    return jnp.minimum(ends, arrays["ends"]) if "ends" in arrays else ends


def traceable(
    declaration: Declaration, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays as JAX has them, and options that are plain. Raises InputError."""
    for name in declaration.required:
        if name not in arrays:
            raise InputError(name, "a JAX or NumPy array", "None", operator=declaration.name)
    for name, array in arrays.items():
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            raise InputError(name, "a JAX or NumPy array", type(array).__name__, operator=declaration.name)
    kept = {name: jnp.asarray(array) for name, array in arrays.items() if not isinstance(array, jax.Array)}
    for name, array in kept.items():
        if array.dtype != arrays[name].dtype:
            _refuse_dtype(declaration, arrays, options, name, array.dtype.name)
    arrays |= kept
    for name in declaration.pairs:
        if name in arrays and arrays[name].dtype == jnp.float4_e2m1fn:
            _refuse_codes(declaration, name)
    if jax.export.is_symbolic_dim(options.get("q_start")):
        options["q_start"] = jnp.asarray(options["q_start"], jnp.int32)
    if isinstance(options.get("q_start"), jax.Array):
        # A start that only the run knows cannot be written into the program; a mask of the indices, or of keys, can.
        _require_integer(declaration, options["q_start"])
        _call(declaration, arrays, {**options, "q_start": 0}).check()
        start, stride = options.pop("q_start"), options.pop("k_stride")
        if options.pop("causal"):
            batched = arrays["q"].ndim == 4
            if "indices" in arrays:
                arrays["indices"] = causal_indices(arrays["indices"], start, stride, query_axis=int(batched))
            else:
                arrays["ends"] = _causal_ends(arrays, start, stride)
        options |= {"causal": False, "q_start": 0, "k_stride": 1}
    for name, value in options.items():
        if isinstance(value, jax.Array):
            expected, got = "a Python value, which is part of the compiled program", "a JAX array"
            if isinstance(value, jax.core.Tracer):
                expected, got = f"{expected} (jax.jit: static_argnames={name!r})", "a traced JAX array"
            raise InputError(name, expected, got, operator=declaration.name)
    return arrays, options


def _refuse_dtype(
    declaration: Declaration, arrays: Mapping[str, Any], options: Mapping[str, Any], name: str, kept: str
) -> NoReturn:
    """Raise InputError for an array whose dtype JAX would change: by the operator's own checks, or in JAX's name.

    An operator that wants int32 is no reason to make JAX keep 64 bits.
    """
    if not any(isinstance(value, jax.Array) for value in options.values()):
        _call(declaration, arrays, options).check()
    expected = f"a dtype that JAX keeps: {kept}, or set jax_enable_x64"
    raise InputError(name, expected, arrays[name].dtype.name, operator=declaration.name)


def _refuse_codes(declaration: Declaration, name: str) -> NoReturn:
    """Raise InputError for an array of 4-bit floats, and say how to make bytes of it.

    How these lie in memory is XLA's affair: on the CPU two share a byte, the first one in the low nibble, but older
    versions had them the other way round, and no document promises either. The cure that is named depends on no layout.
    It is left to the caller, as it passes over the whole array.
    """
    codes = f"c = jax.lax.bitcast_convert_type({name}, jnp.uint4).astype(jnp.uint8)"
    expected = f"dtype uint8, two codes per byte: c[..., ::2] | c[..., 1::2] << 4 of {codes}"
    raise InputError(name, expected, "dtype float4_e2m1fn", operator=declaration.name)


def _call(declaration: Declaration, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    return Call.of(declaration, {n: facts_of(declaration, n, array) for n, array in arrays.items()}, options)


def _require_integer(declaration: Declaration, start: Any) -> None:
    if start.ndim or not jnp.issubdtype(start.dtype, jnp.integer):
        got = f"{start.dtype.name} of shape {list(start.shape)}"
        raise InputError("q_start", "an integer, traced or not", got, operator=declaration.name)


@functools.lru_cache(maxsize=_REMEMBERED)
def _compiled(declaration: Declaration, names: Names, options: Options, exactly: tuple[object, ...]) -> Flat:
    """The call as one jitted function, so that calls outside of `jit` are dispatched quickly.

    `exactly` is but a part of what is remembered: the operator may refuse one option and take another that equals it.
    """
    gradient = declaration.gradient
    if gradient is None:
        refused = f"{declaration.name}: a gradient"
        flat = constant(_flat(declaration, names, options), refused, "jax.lax.stop_gradient of what it returns")
    else:
        flat = _differentiable(declaration, names, options, gradient)

    def run(*arrays: Any) -> tuple[Any, ...]:
        axes = varying(arrays)
        # Outside of the gradient rule, so that JAX sums the gradients of what all devices share, and shards them again.
        return flat(*(made_varying(on_every_device(array), axes) for array in arrays))

    run.__name__ = declaration.name
    jitted: Flat = jax.jit(run)
    return jitted


def on_every_device(array: Any) -> Any:
    """The array on every device where its type says how it is sharded: results are typed as made from whole arrays."""
    mesh = jax.typeof(array).sharding.mesh
    return _resharded(array, mesh, jax.P()) if jax.sharding.AxisType.Explicit in mesh.axis_types else array


def _led(result: Any, like: Any) -> Any:
    """The result with its first axis sharded as that of another array, where that array's type says how."""
    sharding = jax.typeof(like).sharding
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types or sharding.spec[0] is None:
        return result
    return _resharded(result, sharding.mesh, jax.P(sharding.spec[0]))


def _resharded(array: Any, mesh: Any, spec: Any) -> Any:
    """The array, sharded so over the mesh of a type, which need not be the one that `jax.set_mesh` set."""
    return jax.reshard(array, jax.sharding.NamedSharding(mesh, spec))


def made_varying(array: Any, axes: frozenset[Any]) -> Any:
    """The array, typed as one that differs between devices along these mesh axes."""
    missing = tuple(axes - varying((array,)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
