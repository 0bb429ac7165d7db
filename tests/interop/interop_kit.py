"""Cases of all operators as the bridges are given them: NumPy arguments, and what the public function makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cupymla
from cupymla.interop.declaration import Declaration
from cupymla.interop.table import DECLARATIONS, declared
from cupymla.ops import registry
from cupymla.testing.operators import as_tuple
from cupymla_lab.subjects import Subject, cheapest


@dataclass(frozen=True)
class Problem:
    """One call.

    Attributes:
        name: for the test's id.
        declaration: of the function.
        inputs: its NumPy arguments, without outputs, with requests.
        contiguous: for frameworks without strides: the same arguments, batch axes first.
    """

    name: str
    declaration: Declaration
    inputs: Callable[[], dict[str, Any]]

    def expected(self, inputs: dict[str, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """What the public function returns, and what it writes where a request asks for it."""
        declaration = self.declaration
        arguments = dict(inputs)
        asked = {}
        for name in declaration.requests:
            if arguments.pop(f"return_{name}", False):
                facts = declaration.results(facts_of(declaration, inputs), {**defaults(declaration), **inputs})[name]
                asked[name] = arguments[name] = np.full(facts.shape, np.nan, facts.dtype)
        for name in declaration.updates:
            arguments[name] = arguments[name].copy()
        return (*as_tuple(declaration.function()(**arguments)), *asked.values())


def placed(array: Any, dtype: Any = None) -> Any:
    """An array of NumPy as one of JAX; jax.numpy.asarray compiles a copy for each shape and dtype, for 13 ms."""
    import jax

    return jax.device_put(np.asarray(array, dtype))


def defaults(declaration: Declaration) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in declaration.options.items()}


def facts_of(declaration: Declaration, inputs: dict[str, Any]) -> dict[str, Any]:
    from cupymla.interop.declaration import Facts

    return {n: Facts(a.shape, a.dtype.name) for n, a in inputs.items() if isinstance(a, np.ndarray)}


def operator_problems(per_intent: int) -> Iterator[Problem]:
    """The cheapest cases of each intent of every operator."""
    for entry in registry.OPERATORS:
        subject = Subject(entry.name)
        for case in cheapest(subject, per_intent):
            yield Problem(f"{entry.name}-{case.name}-{case.intent}", declared(entry.name), _inputs(subject, case))


def covering(problems: Iterable[Problem]) -> list[Problem]:
    """Those that show a bridge without strides anything that the ones before do not: an array with its rank and dtype,
    one without elements, the value of an option."""
    seen: set[object] = set()
    kept = []
    for problem in problems:
        shown: set[object] = set()
        for name, value in problem.inputs().items():
            what = (value.ndim, value.dtype.name, value.size > 0) if isinstance(value, np.ndarray) else repr(value)
            shown.add((problem.declaration.name, name, what))
        if not shown <= seen:
            kept.append(problem)
        seen |= shown
    return kept


def _inputs(subject: Subject, case: Any) -> Callable[[], dict[str, Any]]:
    return lambda: operator_inputs(subject, case, 0)


def operator_inputs(subject: Subject, case: Any, seed: int) -> dict[str, Any]:
    """A case's arguments without outputs, with requests."""
    declaration = declared(subject.name)
    made = {name: value for name, value in subject.cases.inputs(case, seed).items() if value is not None}
    requests = {f"return_{name}": True for name in declaration.requests if name in made}
    return {**{name: value for name, value in made.items() if name not in declaration.outputs}, **requests}


def without_requests(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that references and public functions take."""
    return {name: value for name, value in inputs.items() if not name.startswith("return_")}


def contents(subject: Subject, count: int) -> list[dict[str, Any]]:
    """Arguments of an operator's cheapest case that differ in what arrays hold, and in nothing else. Several heads: the
    similarity of a single lse that is next to zero says nothing."""
    (case, *_) = cheapest(subject, 1, lambda case: getattr(case, "heads", 2) > 1)
    first, *others = (operator_inputs(subject, case, seed) for seed in range(count))
    options = {name: value for name, value in first.items() if not isinstance(value, np.ndarray)}
    return [first, *({**inputs, **options} for inputs in others)]


def related_problems() -> Iterator[Problem]:
    """Every related function, plain and with options."""

    def problem(name: str, tag: str, **inputs: Any) -> Problem:
        return Problem(f"{name}-{tag}", declared(name), lambda: dict(inputs))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 64), dtype=np.float32)
    batched = rng.standard_normal((3, 5, 64), dtype=np.float32)
    packed, scales = cupymla.quantize_nvfp4(x)
    yield problem("quantize_nvfp4", "plain", x=x)
    yield problem("quantize_nvfp4", "batch", x=batched, batch_axis=0, scale_layout="128x4", global_scale=2.0)
    yield problem("quantize_nvfp4", "mxfp4", x=x.astype(ml_dtypes.bfloat16), format="mxfp4")
    yield problem("quantize_nvfp4", "scale", x=x, global_scale=np.array([3.0], np.float32))
    yield problem("dequantize_nvfp4", "plain", packed=packed, scales=scales)
    yield problem("dequantize_nvfp4", "dtype", packed=packed, scales=scales, out_dtype="float16", global_scale=2.0)
    yield problem("swizzle_scales", "plain", scales=scales)
    yield problem("swizzle_scales", "batch", scales=np.stack([scales] * 2), batch_axis=0)
    swizzled = cupymla.swizzle_scales(scales)
    yield problem("unswizzle_scales", "plain", swizzled=swizzled, rows=5, columns=4)
    yield problem("unswizzle_scales", "flat", swizzled=swizzled.reshape(-1), rows=5, columns=4)
    batch = np.stack([swizzled] * 2)
    yield problem("unswizzle_scales", "batch", swizzled=batch, rows=5, columns=4, batch_axis=0)
    flat = batch.reshape(2, -1)
    yield problem("unswizzle_scales", "flat_batch", swizzled=flat, rows=5, columns=4, batch_axis=0)
    keys = rng.standard_normal((4, 2, 32), dtype=np.float32)
    k_cache, v_cache = np.zeros((3, 2, 8, 16, 4), np.float32), np.zeros((3, 2, 32, 16), np.float32)
    cache = {"key": keys, "value": keys + 1, "k_cache": k_cache, "v_cache": v_cache}
    yield problem("reshape_and_cache", "plain", **cache, slot_mapping=np.array([5, -1, 40, 0], np.int32))
    narrow = {name: array.astype(ml_dtypes.float8_e4m3fn) for name, array in cache.items() if "cache" in name}
    narrow["k_cache"] = np.zeros((3, 2, 2, 16, 16), ml_dtypes.float8_e4m3fn)
    slots = np.array([5, -1, 40, 0], np.int32)
    scale = np.array([2.0, 0.5], np.float32)
    yield problem("reshape_and_cache", "fp8", **{**cache, **narrow}, slot_mapping=slots, k_scale=scale, v_scale=0.25)
    as_bytes = {name: array.view(np.uint8) for name, array in narrow.items()}
    coded = {**cache, **as_bytes, "kv_dtype": "float8_e4m3fn"}
    yield problem("reshape_and_cache", "fp8_bytes", **coded, slot_mapping=slots, v_scale=0.25)
    filled = {name: rng.standard_normal(cache[name].shape, dtype=np.float32) for name in ("k_cache", "v_cache")}
    yield problem("copy_blocks", "plain", **filled, mapping=np.array([[0, 2], [1, 9]], np.int32))
    codes, factors = cupymla.quantize_fp8(batched, group=32)
    yield problem("dequantize_fp8", "plain", codes=codes, scales=factors, group=32)
    yield problem("dequantize_fp8", "bytes", codes=codes[0].view(np.uint8), scales=factors[0], group=32)
    k = rng.standard_normal((4, 128), dtype=np.float32)
    pages = rng.integers(0, 256, (3, 2, 132), np.uint8)
    yield problem("indexer_k_quant_and_cache", "plain", k=k, cache=pages, slot_mapping=slots)
    deep = pages[:, :, None].view(ml_dtypes.float8_e4m3fn)
    rounded = k.astype(ml_dtypes.bfloat16)
    yield problem("indexer_k_quant_and_cache", "fp8", k=rounded, cache=deep, slot_mapping=slots, scale_rule="pow2")
    finite = np.zeros_like(pages)
    cupymla.indexer_k_quant_and_cache(k, finite, slots)
    yield problem("gather_indexer_cache", "slots", cache=finite, slots=slots)
    tables, cu_lens = np.array([[2, 0], [9, 1]], np.int32), np.array([0, 3, 6], np.int32)
    yield problem("gather_indexer_cache", "tables", cache=finite, block_tables=tables, cu_lens=cu_lens, rows=8)
    latents: dict[str, Any] = {
        "kv_c": rng.standard_normal((4, 448), dtype=np.float32),
        "k_pe": k[:, :64],
        "slot_mapping": slots,
    }
    stored = np.zeros((3, 2, 584), np.uint8)
    yield problem("concat_and_cache_mla", "v4_fp8", **latents, cache=stored, cache_format="v4_fp8")
    alone = {"kv_c": rng.standard_normal((4, 512), dtype=np.float32), "slot_mapping": slots, "k_pe": None}
    wide = rng.standard_normal((3, 2, 512)).astype(ml_dtypes.bfloat16)
    yield problem("concat_and_cache_mla", "latents_alone", **alone, cache=wide, cache_format="bf16")
    read = stored.copy()
    cupymla.concat_and_cache_mla(**latents, cache=read, cache_format="v4_fp8")
    yield problem("gather_mla_cache", "slots", cache=read, slots=slots, cache_format="v4_fp8")
    requests = {"block_tables": tables, "cu_lens": cu_lens, "rows": 8}
    yield problem("gather_mla_cache", "tables", cache=read, cache_format="v4_fp8", **requests)
    paged = {
        **{"q": rng.standard_normal((2, 3, 8, 64)).astype(ml_dtypes.bfloat16), "block_tables": tables},
        **{"k_cache": rng.standard_normal((3, 2, 64)).astype(ml_dtypes.bfloat16)},
        **{"weights": rng.standard_normal((2, 3, 8), dtype=np.float32), "context_lens": np.array([4, 3], np.int32)},
    }
    yield problem("paged_indexer_logits", "plain", **paged)
    yield problem("paged_indexer_logits", "bound", **paged, max_context=3, relu=False)
    yield problem("hadamard", "plain", x=batched)
    yield problem("hadamard", "bf16", x=rounded)
    yield problem("rel_shift", "plain", x=rng.standard_normal((2, 3, 5), dtype=np.float32))
    query = rng.standard_normal((4, 2, 32), dtype=np.float32)
    bias = {"query": query, "pos_emb": rng.standard_normal((6, 2, 32), dtype=np.float32)}
    lens = np.array([0, 3, 9, 12], np.int32)
    yield problem("matrix_bd", "plain", **bias, context_lens=lens, max_context=12)
    yield problem(
        "matrix_bd", "offset", **bias, context_lens=lens, max_context=9, pos_bias_v=query[0], rel_extend="clamp"
    )


def batch_first(problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for a framework without strides: nvfp4_gemv's batch axis in front, where rows are contiguous."""
    if problem.declaration.name != "nvfp4_gemv" or inputs["batch_axis"] == 0 or inputs["a"].ndim == 2:
        return inputs
    moved = {n: np.moveaxis(a, -1, 0) if getattr(a, "ndim", 0) > 1 else a for n, a in inputs.items()}
    return {**moved, "batch_axis": 0}


def bits(array: Any) -> np.ndarray[Any, Any]:
    """An array's bytes: NaN equals NaN, and -0 is not 0."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def require_same(names: tuple[str, ...], got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Same count, shapes, dtypes and bits."""
    assert len(got) == len(expected), names
    for place, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        assert mine.shape == wanted.shape, (place, mine.shape, wanted.shape)
        assert mine.dtype == wanted.dtype, (place, mine.dtype, wanted.dtype)
        np.testing.assert_array_equal(bits(mine), bits(wanted), err_msg=f"result {place}")


# Options -------------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[object, ...]] = {
    "int": (False, True, np.False_, np.True_, 1.0, np.float32(1), "1", None),
    "bool": (0, 1, np.int64(1), 1.0, "yes", None),
    "float | None": (False, True, np.True_, "1"),
}
"""What is none, by an option's annotation."""

RIGHT: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "int": (np.int64, np.int32),
    "bool": (np.bool_,),
    "float | None": (np.float32,),
}
"""What does as Python's own do."""


def numbers_and_flags() -> list[tuple[str, str, str]]:
    """(function, option, annotation) of all options that bridges take as numbers or as flags."""
    found = [(entry.name, name, p.annotation) for entry in DECLARATIONS for name, p in entry.options.items()]
    return [row for row in found if row[2] in WRONG]
