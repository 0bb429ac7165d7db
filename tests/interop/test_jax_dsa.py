"""The DSA layer in JAX is that of transformers with the same weights: outputs, gradients, decode."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupymla import InputError, UnsupportedError

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from dsa_kit import NOPE, error, gradients, random_layer
from interop_kit import placed

from cupymla.interop.jax import dsa

TOKENS, TOPK, PAGE, HEADS = 20, 6, 4, 8
CHUNKS = (9, 1, 1, 9)
"""Of the tokens: a first one, single ones up to a page's end, and one over several pages; two programs."""
MODULES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", (0,), {}),
    "glm_moe_dsa": ("glm_moe_dsa", (0,), {}),
    "hy_v4": ("hy_v4", (0,), {}),
    # Without RoPE; with it; one that shares keys and selects its own.
    "mistral_large4": ("mistral_large4_text", (0, 1, 2), {"indexer_types": ["full"] * 3}),
    "dots3_note": ("dots3_note_text", (1,), {}),
    # One that ranks pools, which do not end with pages or tokens; one that shares its selection.
    "glm5_next": ("glm5_next_text", (1, 2), {"index_kpool": 3}),
}
"""The small model of each family in transformers_kit, and which layers of it, with options."""
FAMILIES = tuple(MODULES)
NEWER = ("mistral_large4", "dots3_note", "glm5_next")
"""Families whose parameters random_layer does not make."""
INDEXER = "indexer."


def array(tensor: Any) -> jax.Array:
    """Of bfloat16 or float32, exactly."""
    return placed(tensor.detach().float().numpy(), jnp.bfloat16 if "bfloat16" in str(tensor.dtype) else None)


def keep(kept: list[Any], value: Any, result: Any) -> Any:
    """The result, with the value kept."""
    kept.append(value)
    return result


@functools.cache
def problem(family: str) -> SimpleNamespace:
    """Attention modules of transformers in float32 and in bfloat16, with bfloat16's weights, and the same in JAX.

    Where there are several, all see the same hidden states; later ones may share what earlier ones made.
    """
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    import transformers_kit as kit

    name, places, options = MODULES[family]
    if name not in kit.HERE:
        pytest.skip(f"this transformers has no {family}")
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "v_head_dim": 48}
    model = kit.model_of(name, torch.float32, TOPK, **heads, **options)
    model = getattr(model, "model", model)
    modules = torch.nn.ModuleList([model.layers[place].self_attn for place in places])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in modules.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 or "kpool" in parameter_name:  # else ones and zeros, whose places could be mixed up
                parameter.add_(noise / 4)
            parameter.copy_(parameter.bfloat16())
    hidden, slope = (torch.randn(2, TOKENS, 64, generator=generator).bfloat16() for _ in range(2))
    positions = torch.arange(TOKENS)[None].expand(2, -1)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None].expand(2, 1, -1, -1)
    embedding, kinds = getattr(model, "rotary_emb", None), ("indexed_attention",) if family == "dots3_note" else ()
    indexers = [module.indexer for module in modules if module.indexer is not None]

    scores: list[Any] = []
    select = torch.Tensor.topk

    def attended(given: Any) -> Any:
        """The sum of all modules' outputs."""
        named: dict[str, Any] = {"attention_mask": mask.to(given.dtype), "position_ids": positions}
        named |= {"shared_kv_states": {}} if family == "mistral_large4" else {}
        named |= {} if embedding is None else {"position_embeddings": embedding(given, positions, *kinds)}
        if family == "glm5_next":
            named["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.bool)
        total, earlier = 0, None
        for module in modules:
            shared = {"prev_topk_indices": earlier} if module.indexer is None else {}
            out, *_, earlier = module(given, **named, **shared)
            total = total + out
        return total

    def run(dtype: Any, selections: Any = None) -> tuple[Any, dict[str, Any], list[Any]]:
        """Output, gradients and selections of the modules themselves, or with the selections given."""
        modules.to(dtype)
        modules.zero_grad()
        given = hidden.detach().clone().to(dtype).requires_grad_()
        selected: list[Any] = []
        scores.clear()
        hooks = [
            indexer.register_forward_hook(lambda m, i, o, at=at: keep(selected, o, selections and selections[at]))
            for at, indexer in enumerate(indexers)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", lambda x, *a, **k: keep(scores, x, select(x, *a, **k)))
            out = attended(given)
        for hook in hooks:
            hook.remove()
        out.backward(slope.to(dtype))
        grads = {n: p.grad.float().numpy() for n, p in modules.named_parameters() if p.grad is not None}
        return out.detach().float().numpy(), {**grads, "hidden": given.grad.float().numpy()}, selected

    exact = run(torch.float32)
    exact_scores = [each.numpy() for each in scores]
    coarse = run(torch.bfloat16, exact[2])
    one = modules[0]
    rotary = None
    if embedding is not None:
        frequencies, factor = (
            getattr(embedding, "_".join((*kinds, part))) for part in ("inv_freq", "attention_scaling")
        )
        frequencies = frequencies * getattr(embedding, "alpha", torch.zeros(1)).exp()
        rotary = dsa.rotary(positions.numpy(), frequencies.detach().float().numpy(), factor)
    found = dsa.conventions(
        family, topk=TOPK, scale=one.scaling, index_epsilon=indexers[0].k_norm.eps, head_dim=one.qk_head_dim
    )
    return SimpleNamespace(
        params=[{n: array(p.bfloat16() if p.ndim > 1 else p) for n, p in m.state_dict().items()} for m in modules],
        hidden=array(hidden),
        slope=array(slope),
        rotary=rotary,
        conventions=found,
        coarse=coarse,
        exact=(*exact[:2], [each.numpy() for each in exact[2]]),
        scores=exact_scores,
    )


def layers(params: Any, hidden: Any, rotary: Any, conventions: Any, selections: Any = None, **options: Any) -> Any:
    """(sum of outputs, selections, caches) of layers, which share what they have no parameters for."""
    total: Any = 0.0
    indices, latents = None, None
    made: list[Any] = []
    caches: list[Any] = []
    pages = options.pop("caches", [None] * len(params))
    options.setdefault("positions", jnp.arange(TOKENS)[None])
    for own, given in zip(params, pages, strict=True):
        stores, selects = "kv_a_proj_with_mqa.weight" in own, "indexer.wk.weight" in own
        if selects:
            indices = None if selections is None else selections[len(made)]
        shared: Any = None if stores or given is not None else latents
        cache = given if stores or given is None else given._replace(latents=caches[-1].latents)
        found = dsa.layer(own, hidden, rotary, conventions, indices=indices, latents=shared, cache=cache, **options)
        total, indices, latents = total + found.out, found.indices, found.latents
        made += [indices] if selects else []
        # What is shared belongs to one cache: it is donated once.
        caches.append(found.cache if stores or found.cache is None else found.cache._replace(latents=None))
    return total, made, caches


def sets(indices: Any) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in np.asarray(indices).reshape(-1, indices.shape[-1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_are_those_of_transformers(family: str) -> None:
    """With the float32 selection, the error against float32 is at most twice that of transformers' bfloat16.

    Gradients of a number for each head are judged together: of so few the errors fluctuate.
    """
    given = problem(family)
    seen = [jnp.where(ids <= jnp.arange(TOKENS)[:, None], ids, -1) for ids in given.exact[2]]
    run: Any = functools.partial(layers, conventions=given.conventions, selections=seen)
    (out, _), (grads, d_hidden) = gradients(given, run)
    assert error(out, given.exact[0]) <= 2 * error(given.coarse[0], given.exact[0])
    found = {f"{place}.{name}": grad for place, one in enumerate(grads) for name, grad in one.items()}
    found["hidden"] = d_hidden
    assert {name for name in found if INDEXER not in name} == set(given.exact[1])
    errors = {n: (error(found[n], exact), error(given.coarse[1][n], exact)) for n, exact in given.exact[1].items()}
    few = [name for name, exact in given.exact[1].items() if exact.size <= HEADS]
    for name in errors.keys() - set(few):
        assert errors[name][0] <= 2 * errors[name][1], name
    ours, theirs = (np.linalg.norm([errors[name][i] for name in few]) for i in (0, 1))
    assert ours <= 2 * theirs, few


@pytest.mark.parametrize("family", FAMILIES)
def test_selection_is_that_of_transformers_but_for_near_ties(family: str) -> None:
    """Queries and keys in bfloat16 move a score by some units of 2**-8 of the row's largest one, no more."""
    given = problem(family)
    run = jax.jit(
        lambda params, hidden, rotary: layers(params, hidden, rotary, given.conventions)[1]
    )  # the attention is not compiled
    selections = run(given.params, given.hidden, given.rotary)
    pool = MODULES[family][2].get("index_kpool", 1)
    for ours_all, theirs_all, of_pools in zip(selections, given.exact[2], given.scores, strict=True):
        equal, scores = 0, of_pools.repeat(pool, -1).reshape(2 * TOKENS, -1)
        for query, (ours, theirs) in enumerate(zip(sets(ours_all), sets(theirs_all), strict=True)):
            count = query % TOKENS + 1
            pooled, seen = set(range(count // pool * pool)), set(range(count))
            assert ours <= seen and len(ours) == min(TOPK, len(pooled)) + count % pool, f"query {query}"
            assert seen - pooled <= ours & theirs, "the tail"
            equal += ours == theirs & seen
            row = scores[query]
            for key in ours - theirs:
                margin = min(row[list(theirs & pooled)]) - row[key]
                assert margin <= 4 * 2**-8 * np.abs(row[list(pooled)]).max(), f"query {query}, key {key}"
        assert equal >= 0.9 * len(scores)


def decoded(given: Any, conventions: Any, index: str, steps: tuple[int, ...]) -> tuple[Any, Any]:
    """Outputs and selections, as tokens, of a loop over chunks of so many tokens, in pages out of order."""
    width = TOKENS // PAGE
    tables = placed(np.random.default_rng(5).permutation(2 * width).reshape(2, width), jnp.int32)
    caches = []
    for own in given.params:
        stored, selects = own.get("kv_a_proj_with_mqa.weight"), "indexer.wk.weight" in own
        rotated = 0 if stored is None else stored.shape[0] - 512
        cache = dsa.empty_cache(2 * width, PAGE, rotated=rotated, index=index if selects else None)
        caches.append(cache if stored is not None else cache._replace(latents=None))

    @functools.partial(jax.jit, donate_argnums=2)
    def step(hidden: Any, rotary: Any, caches: Any, lens: Any) -> Any:
        pages = {"caches": caches, "block_tables": tables, "context_lens": lens}
        positions = lens[:, None] - hidden.shape[1] + jnp.arange(hidden.shape[1])
        return layers(given.params, hidden, rotary, conventions, positions=positions, **pages)

    outs, selections, at = [], [], 0
    place = np.full(2 * width * PAGE + 1, -1)
    for request in np.asarray(tables):
        for block, page in enumerate(request):
            place[page * PAGE : (page + 1) * PAGE] = block * PAGE + np.arange(PAGE)
    for count in steps:
        part = slice(at, at + count)
        at += count
        rotary = jax.tree.map(lambda x, part=part: x[:, part], given.rotary)
        out, slots, caches = step(given.hidden[:, part], rotary, caches, jnp.full(2, at, jnp.int32))
        outs.append(out)
        selections.append([place[np.asarray(each)] for each in slots])
    return jnp.concatenate(outs, 1), [np.concatenate(each, 1) for each in zip(*selections, strict=True)]


def listed(given: Any) -> Any:
    """The same, with its layer as a list of one."""
    return SimpleNamespace(**{**vars(given), "params": [given.params]})


def pooled_layer(heads: int) -> Any:
    """A layer as of glm5_next, with random weights."""
    given = random_layer(TOKENS, heads=heads)
    rng, hidden = np.random.default_rng(8), given.hidden.shape[-1]
    sizes = {"q_b_proj.weight": (heads * NOPE, 32), "kv_a_proj_with_mqa.weight": (512, hidden)}
    sizes |= {"indexer.index_kpool_compress_ape": (3, 128), "indexer.index_kpool_compress_gate": (128, hidden)}
    given.params |= {n: placed(rng.standard_normal(s) * s[1] ** -0.5, jnp.bfloat16) for n, s in sizes.items()}
    given.rotary = None
    given.conventions = dsa.conventions("glm5_next", topk=TOPK, scale=NOPE**-0.5, head_dim=NOPE)
    return given


def whole(given: Any, conventions: Any) -> Any:
    """Outputs and selections of all tokens at once."""
    return jax.jit(functools.partial(layers, conventions=conventions))(given.params, given.hidden, given.rotary)[:2]


@pytest.mark.parametrize(
    ("family", "index"),
    [
        ("deepseek_v32", "fp8"),
        ("hy_v4", "bfloat16"),
        ("mistral_large4", "bfloat16"),
        ("dots3_note", "bfloat16"),
        ("glm5_next", "pools"),
    ],
)
def test_decode_is_prefill(family: str, index: str) -> None:
    """A chunk, token by token, and a chunk again: the same selections, and outputs but for the order of sums."""
    given = problem(family) if family in NEWER else listed(random_layer(TOKENS, family=family))
    given = SimpleNamespace(**{**vars(given), "params": given.params[-2:]})
    conventions = dataclasses.replace(given.conventions, index_fp8=index == "fp8")
    out, selections = whole(given, conventions)
    steps, selected = decoded(given, conventions, index, CHUNKS)
    for ours, theirs in zip(selected, selections, strict=True):
        assert sets(ours) == sets(theirs)
    assert error(steps, out) <= 2**-8


def test_a_request_of_no_tokens_writes_nothing_and_a_short_one_no_token_before_its_first() -> None:
    given = random_layer(TOKENS)
    cache = dsa.empty_cache(6, PAGE)
    tables = placed([[1, 2], [4, 5]], jnp.int32)
    layer = jax.jit(functools.partial(dsa.layer, conventions=given.conventions))
    lens = placed([0, 2], jnp.int32)
    rotary = tuple(x[:, :3] for x in given.rotary)
    new = layer(given.params, given.hidden[:, :3], rotary, cache=cache, block_tables=tables, context_lens=lens)[2]
    assert new is not None
    for pages in new:
        written = np.asarray(pages.astype(jnp.float32)).any(-1)
        assert np.argwhere(written).tolist() == [[4, 0], [4, 1]]


def test_scan_over_layers_with_remat_gives_the_gradients_of_a_loop() -> None:
    """Of the indexers' too, which learn, and the KL loss of each layer."""
    given = random_layer(TOKENS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), given.params)
    layer = functools.partial(dsa.layer, rotary=given.rotary, conventions=given.conventions)

    def following(hidden: Any, own: Any) -> Any:
        found = layer(own[0], hidden, loss_weight=own[1])
        return hidden + found.out, found.aux.sum()

    def objective(hidden: Any, aux: Any) -> Any:
        return (hidden.astype(jnp.float32) * given.slope).sum() + aux.sum()

    def scanned(params: Any, weights: Any) -> Any:
        return objective(*jax.lax.scan(jax.checkpoint(following), given.hidden, (params, weights)))

    def looped(params: Any, weights: Any) -> Any:
        hidden, losses = given.hidden, []
        for i in range(2):
            hidden, aux = following(hidden, ({n: p[i] for n, p in params.items()}, weights[i]))
            losses.append(aux)
        return objective(hidden, jnp.stack(losses))

    found, expected = (jax.jit(jax.grad(run, (0, 1)))(stacked, jnp.array([1.0, 0.5])) for run in (scanned, looped))
    for name, gradient in {**expected[0], "KL": expected[1]}.items():
        assert error({**found[0], "KL": found[1]}[name], gradient) <= 2**-7, name


def test_a_layer_that_shares_a_selection_needs_no_indexer() -> None:
    given = random_layer(TOKENS)
    layer = jax.jit(functools.partial(dsa.layer, conventions=given.conventions))
    out, indices, *_ = layer(given.params, given.hidden, given.rotary)
    own = {n: p for n, p in given.params.items() if not n.startswith(INDEXER)}
    shared, same, *_ = layer(own, given.hidden, given.rotary, indices=indices)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(indices))
    np.testing.assert_array_equal(np.asarray(shared, np.float32), np.asarray(out, np.float32))


def test_what_does_not_belong_together_is_refused() -> None:
    given = random_layer(TOKENS)
    layer = functools.partial(dsa.layer, conventions=given.conventions)
    call = functools.partial(jax.eval_shape, layer, given.params, given.hidden, given.rotary)
    lens = jnp.full(2, TOKENS, jnp.int32)
    with pytest.raises(InputError, match="context_lens"):
        call(context_lens=lens)
    with pytest.raises(InputError, match="block_tables"):
        call(cache=dsa.empty_cache(10, PAGE), context_lens=lens)
    tables = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    with pytest.raises(InputError, match=r"cache\.keys"):
        call(cache=dsa.empty_cache(10, PAGE, index="fp8"), context_lens=lens, block_tables=tables)
    with pytest.raises(InputError, match="loss_weight"):
        call(cache=dsa.empty_cache(10, PAGE), context_lens=lens, block_tables=tables, loss_weight=1.0)
    with pytest.raises(InputError, match="latents"):
        call(latents=given.hidden)
    with pytest.raises(UnsupportedError, match="deepseek_v3"):
        dsa.conventions("deepseek_v3", topk=4, scale=1.0)


def test_what_parameters_ask_for_is_needed_or_refused() -> None:
    """Of the parameters alone: each asks for an argument that is not there, or for what the layer does not do."""
    given = random_layer(TOKENS)
    own = {n: p for n, p in given.params.items() if not n.startswith(INDEXER)}
    no_keys = {n: p for n, p in given.params.items() if not n.startswith("kv_a")}
    pools = {**given.params, "indexer.index_kpool_compress_ape": jnp.zeros((3, 128))}
    narrow = {**given.params, "kv_b_proj.weight": given.params["kv_b_proj.weight"][:, :64]}

    def call(params: Any, **options: Any) -> None:
        conventions = options.pop("conventions", given.conventions)
        rotary = options.pop("rotary", given.rotary)
        layer = functools.partial(dsa.layer, conventions=conventions, rotary=rotary, **options)
        jax.eval_shape(layer, params, given.hidden)

    refused: Any = (
        (own, InputError, {"loss_weight": 1.0, "indices": jnp.zeros((2, TOKENS, 1), jnp.int32), "of": "loss_weight"}),
        (no_keys, InputError, {"of": "latents"}),
        ({**given.params, "softmax_scaling.scale": jnp.ones(2)}, InputError, {"of": "positions"}),
        (given.params, InputError, {"rotary": None, "of": "rotary"}),
        (own, UnsupportedError, {"of": "sliding window"}),
        (narrow, UnsupportedError, {"of": "kv_lora_rank=64"}),
        (pools, UnsupportedError, {"loss_weight": 1.0, "of": "training of an indexer that ranks pools"}),
        (pools, UnsupportedError, {"conventions": dataclasses.replace(given.conventions, index_fp8=True), "of": "fp8"}),
    )
    for params, raised, options in refused:
        with pytest.raises(raised, match=options.pop("of")):
            call(params, **options)


def test_arrays_that_do_not_fit_are_named() -> None:
    """Not the operators' own arguments, which nobody gave."""
    given = random_layer(TOKENS)
    cache = dsa.empty_cache(10, PAGE)
    pages = {"block_tables": jnp.arange(10, dtype=jnp.int32).reshape(2, 5), "context_lens": jnp.full(2, 20, jnp.int32)}
    without = {name: array for name, array in given.params.items() if name != "kv_b_proj.weight"}
    for name, got, options in (
        ("params['kv_b_proj.weight']", "None", {"params": without}),
        ("params['q_a_proj.weight']", "None", {"params": {f"self_attn.{n}": a for n, a in given.params.items()}}),
        ("params['q_a_proj.weight']", "[32, 48] bfloat16", {"hidden": given.hidden[..., :40]}),
        ("hidden", "[20, 48] bfloat16", {"hidden": given.hidden[0]}),
        ("hidden", "[2, 20, 48] float32", {"hidden": given.hidden.astype(jnp.float32)}),
        ("hidden", "[2, 20, 48] float16", {"hidden": given.hidden.astype(jnp.float16), "cache": cache, **pages}),
        ("rotary", "[2, 20, 64] float32", {"rotary": [jnp.tile(x, 2) for x in given.rotary]}),
        ("rotary", "[2, 7, 32] float32", {"rotary": [x[:, :7] for x in given.rotary]}),
        ("cache.latents", "[10, 4, 512] bfloat16", {"cache": dsa.empty_cache(10, PAGE, rotated=0), **pages}),
        ("cache.keys", "[5, 8, 128] bfloat16", {"cache": cache._replace(keys=dsa.empty_cache(5, 8).keys), **pages}),
        ("block_tables", "[10] int32", {"cache": cache, **pages, "block_tables": pages["block_tables"].reshape(-1)}),
        ("context_lens", "[] int", {"cache": cache, **pages, "context_lens": 20}),
    ):
        arguments = {"params": given.params, "hidden": given.hidden, "rotary": given.rotary} | options
        with pytest.raises(InputError) as raised:
            dsa.layer(conventions=given.conventions, **arguments)
        assert (raised.value.argument, raised.value.got) == (name, got)


def test_arrays_of_numpy_are_taken() -> None:
    given = random_layer(TOKENS)
    numpy = jax.tree.map(np.asarray, (given.params, given.hidden, given.rotary))
    found, expected = (
        dsa.layer(params, hidden, rotary, given.conventions).out
        for params, hidden, rotary in (numpy, (given.params, given.hidden, given.rotary))
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.gpu
def test_the_layer_on_a_gpu_is_that_of_the_cpu() -> None:
    """Sizes that kernels serve: 64 heads; the selection of the CPU, so that ties decide nothing."""
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    with jax.default_device(jax.devices("cpu")[0]):
        given = random_layer(TOKENS, heads=64)
        plain = functools.partial(dsa.layer, conventions=given.conventions)
        (out, indices), grads = gradients(given, plain)
    moved = SimpleNamespace(
        **jax.device_put({n: v for n, v in vars(given).items() if n != "conventions"}, jax.devices()[0])
    )
    moved.conventions = given.conventions
    fixed = jax.device_put(indices, jax.devices()[0])
    (out_gpu, _), grads_gpu = gradients(moved, functools.partial(plain, indices=fixed))
    (_, own), _ = gradients(moved, plain)
    same = [ours == theirs for ours, theirs in zip(sets(own), sets(indices), strict=True)]
    assert np.mean(same) >= 0.9
    for name, one in {**grads[0], "hidden": grads[1], "out": out}.items():
        if not name.startswith(INDEXER):
            found = {**grads_gpu[0], "hidden": grads_gpu[1], "out": out_gpu}[name]
            assert error(found, one) <= 2**-6, name
    for index in ("bfloat16", "fp8"):
        conventions = dataclasses.replace(moved.conventions, index_fp8=index == "fp8")
        out, (indices,) = whole(listed(moved), conventions)
        steps, (selected,) = decoded(listed(moved), conventions, index, CHUNKS)
        same = [ours == theirs for ours, theirs in zip(sets(selected), sets(indices), strict=True)]
        assert np.mean(same) >= 0.9, index
        rows = np.asarray(same).reshape(2, TOKENS)
        assert error(np.asarray(steps, np.float32)[rows], np.asarray(out, np.float32)[rows]) <= 2**-6, index


@pytest.mark.gpu
def test_a_layer_without_rope_that_ranks_pools_decodes_on_a_gpu() -> None:
    """Rows of 512 channels, and selections with -1 between ids."""
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    given = listed(pooled_layer(heads=64))
    out, (indices,) = whole(given, given.conventions)
    steps, (selected,) = decoded(given, given.conventions, "pools", CHUNKS)
    same = np.asarray([ours == theirs for ours, theirs in zip(sets(selected), sets(indices), strict=True)])
    assert same.mean() >= 0.9
    rows = same.reshape(2, TOKENS)
    assert error(np.asarray(steps, np.float32)[rows], np.asarray(out, np.float32)[rows]) <= 2**-6
