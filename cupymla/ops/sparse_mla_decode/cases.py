"""Problems of sparse_mla_decode; see `cupymla.ops.case`. Slots that no row selects hold NaN, entries that do not count
any integer, and bytes that no format reads what would show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case, all_on, spread
from ..mla_cache.latents import BF16, FORMATS, block_bytes, encode

OUTPUTS = ("out", "lse")
"""The output parameters, in the order in which the call returns them."""

_HOSTILE = (-1, -2, -(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase(Case):
    """One problem.

    Attributes:
        form: "bf16", "v32_fp8" or "v4_fp8", of the caches.
        batch, n, heads: B, n, h_q.
        d_qk: channels of a key.
        topk, extra: entries of a row, of each source; 0 for no second one.
        page, extra_page: slots of a block.
        dtype: of q, "bf16" or "fp16".
        lengths: None, "requests" ([B]) or "rows" ([B, n]).
        invalid: share of entries that are hostile.
        sink: whether there is one.
        spoiled: whether some rows select a NaN or an infinity.
        strided: gaps between rows, heads and blocks.
        large: whether a third of the rows have scales of 2^7 and more.
        sm_scale, lse_base, splits: options.
    """

    form: str
    batch: int
    n: int
    heads: int
    d_qk: int
    topk: int
    extra: int = 0
    page: int = 64
    extra_page: int = 64
    dtype: str = "bf16"
    lengths: str | None = None
    invalid: float = 0.0
    sink: bool = False
    spoiled: bool = False
    strided: bool = False
    large: bool = False
    sm_scale: float | None = None
    lse_base: str = "e"
    splits: int | None = None

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.batch * self.n


_D_QK = {"bf16": 576, "v32_fp8": 576, "v4_fp8": 512}


def _case(
    form: str, batch: int, n: int, heads: int, topk: int, name: str = "", intent: str = "shapes", **traits: Any
) -> DecodeCase:
    form = form if form == "bf16" else f"{form}_fp8"
    d_qk = traits.pop("d_qk", _D_QK[form])
    made = DecodeCase(name="", intent=intent, form=form, batch=batch, n=n, heads=heads, d_qk=d_qk, topk=topk, **traits)
    selected = f"k{topk}" + (f"+{made.extra}" if made.extra else "")
    size = f"{form.removesuffix('_fp8')}_d{d_qk}_h{heads}_b{batch}_n{n}_{selected}"
    fields = {name_: getattr(made, name_) for name_ in DecodeCase.__slots__} | {"intent": intent}
    return DecodeCase(**fields | {"name": "_".join([size, *([name] if name else [])])})


DEMO = _case("v32", 8, 1, 16, 1024)
"""A problem which takes the references a second or two."""

BENCH: tuple[DecodeCase, ...] = (
    *(_case("v32", batch, 1, heads, 2048, intent="speed") for batch in (1, 8, 32, 128) for heads in (128, 64, 16)),
    *(_case("v32", 128, 2, heads, 2048, intent="speed") for heads in (128, 64)),
    *(
        _case("v4", batch, 1, heads, 128, "sink", "speed", extra=512, sink=True)
        for heads in (64, 128)
        for batch in (1, 8, 128)
    ),
    *(_case("bf16", batch, 1, heads, 2048, intent="speed") for batch in (8, 128) for heads in (16, 128)),
)

_SPEED_SLOTS, _SPEED_POOL = 1 << 19, 1 << 12


def inputs(case: DecodeCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `sparse_mla_decode`, by parameter name; fp8 as bytes."""
    rng = np.random.default_rng(seed)
    dtype = BF16 if case.dtype == "bf16" else np.dtype(np.float16)
    q = rng.standard_normal((case.batch, case.n, case.heads, case.d_qk), dtype=np.float32).astype(dtype)
    arguments: dict[str, Any] = {"q": q}
    arguments["k_cache"], arguments["indices"], lengths = _source(rng, case, case.topk, case.page)
    arguments["cache_format"] = case.form
    if lengths is not None:
        arguments["topk_length"] = lengths
    if case.sink:
        sink = (4 * rng.standard_normal(case.heads)).astype(np.float32)
        sink[::7] = -np.inf
        arguments["attn_sink"] = sink
    if case.extra:
        arguments["extra_k_cache"], arguments["extra_indices"], lengths = _source(
            rng, case, case.extra, case.extra_page
        )
        if lengths is not None:
            arguments["extra_topk_length"] = lengths
    options = {"sm_scale": None, "lse_base": "e", "splits": None}
    arguments |= {name: getattr(case, name) for name, usual in options.items() if getattr(case, name) != usual}
    if case.strided:
        for name in ("q", "indices", "attn_sink", "topk_length", "extra_indices", "extra_topk_length"):
            if name in arguments:
                arguments[name] = _spread(arguments[name])
    return all_on(xp, arguments)


def _source(rng: np.random.Generator, case: DecodeCase, topk: int, page: int) -> tuple[Any, Any, Any]:
    """A cache, the slots that rows select from it, and how many of them count."""
    slots = _SPEED_SLOTS if case.intent == "speed" else max(1, case.rows * topk * 2 // 3)
    blocks = -(-slots // page)
    slots = blocks * page
    indices = rng.integers(0, slots, (case.batch, case.n, topk), dtype=np.int32)
    hostile = rng.random(indices.shape) < case.invalid
    indices[hostile] = rng.choice(np.array([*_HOSTILE, slots], np.int32), int(hostile.sum()))
    lengths, counted = None, np.ones(indices.shape, bool)
    if case.lengths is not None:
        shape = (case.batch,) if case.lengths == "requests" else (case.batch, case.n)
        lengths = rng.integers(0, topk + 1, shape, dtype=np.int32)
        # None, more than there are, fewer than none, one.
        edges = np.array([0, topk + 7, -3, 1], np.int32)
        lengths.reshape(-1)[: len(edges)] = edges[: lengths.size]
        ends = lengths if lengths.ndim == 2 else lengths[:, None]
        counted = np.arange(topk) < ends[..., None]
    if case.intent == "speed":
        # The same 4096 latents again and again, in places of their own.
        pool = _cache(rng, case, _SPEED_POOL // page, page, np.arange(_SPEED_POOL))
        return np.tile(pool, (slots // _SPEED_POOL, 1, 1)), indices, lengths
    selected = np.unique(indices[counted & (indices >= 0) & (indices < slots)])
    return _cache(rng, case, blocks, page, selected), indices, lengths


def _cache(rng: np.random.Generator, case: DecodeCase, blocks: int, page: int, selected: Any) -> Any:
    """A cache [blocks, page, n]: latents in the selected slots, bytes of NaN everywhere else."""
    layout = FORMATS[case.form]
    row_bytes = layout.token_bytes(case.d_qk)
    gap = 48 if case.strided else 0
    memory = np.full((blocks, page * row_bytes + gap), 0xFF, np.uint8)
    shape, strides = (blocks, page, row_bytes), (memory.strides[0], row_bytes, 1)
    cache = np.lib.stride_tricks.as_strided(memory, shape, strides)
    if selected.size:
        _fill(rng, case, cache, selected)
    return cache if layout.codes else cache.view(BF16)


def _fill(rng: np.random.Generator, case: DecodeCase, cache: Any, selected: Any) -> None:
    """Put latents into the selected slots of a cache of bytes."""
    layout, page = FORMATS[case.form], cache.shape[1]
    groups = layout.codes // layout.group if layout.codes else 0
    made = _latents(rng, case, len(selected), layout.codes, groups)
    data, scales = encode(*made[:2], layout, made[2])
    if case.spoiled:
        _spoil(rng, data, layout.codes)
    block, place = np.divmod(selected.astype(np.int64), page)
    flat = block_bytes(cache)
    width = data.shape[1]
    for first in range(0, len(selected), 1 << 16):
        part = slice(first, first + (1 << 16))
        flat[block[part, None], place[part, None] * width + np.arange(width)] = data[part]
        if layout.name == "v4_fp8":
            columns = page * width + place[part, None] * layout.scale_bytes + np.arange(layout.scale_bytes)
            flat[block[part, None], columns] = scales[part]


def _latents(rng: np.random.Generator, case: DecodeCase, count: int, codes: int, groups: int) -> tuple[Any, Any, Any]:
    """Channels that become codes, the others, and scales: of groups of very different magnitudes."""
    latents = rng.standard_normal((count, codes), dtype=np.float32)
    rest = rng.standard_normal((count, case.d_qk - codes), dtype=np.float32)
    if not groups:
        return latents, rest, np.zeros((count, 0), np.float32)
    latents = latents.reshape(count, groups, codes // groups) * np.exp2(rng.integers(-4, 2, (count, groups, 1))).astype(
        np.float32
    )
    if case.large:
        latents[rng.random(count) < 1 / 3] *= np.float32(2**17)
    amax = np.abs(latents).max(axis=-1, initial=1e-4)
    scales = (amax / np.float32(448)).astype(np.float32)
    if case.form == "v4_fp8":
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    return latents.reshape(count, codes), rest, scales


def _spoil(rng: np.random.Generator, data: Any, codes: int) -> None:
    """Some rows get a NaN, which is a code or a bf16, some an infinity, of bf16."""
    for number, row in enumerate(range(3, len(data), max(61, len(data) // 2))):
        wide = data[row, -128:].view(np.uint16)
        if codes and number % 3 == 0:
            data[row, rng.integers(codes)] = (0x7F, 0xFF)[number // 3 % 2]
        else:
            wide[rng.integers(64)] = (0x7FC0, 0x7F80, 0xFF80)[number % 3]


def _spread(array: Any) -> Any:
    """Rows of q stay multiples of 16 bytes, indices contiguous."""
    return spread(array, array.ndim == 4 or (array.ndim == 3 and array.dtype == np.int32), gap=16)


def flops(case: DecodeCase) -> float:
    """Scores and values of all entries."""
    return 2.0 * case.rows * (case.topk + case.extra) * case.heads * (case.d_qk + 512)


def bytes_moved(case: DecodeCase) -> float:
    """Each selected row read once, q read, out and lse written."""
    token = FORMATS[case.form].token_bytes(case.d_qk) + 4
    per_head = 2 * case.d_qk + 2 * 512 + 4
    return float(case.rows * ((case.topk + case.extra) * token + case.heads * per_head))
