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
from dsa_kit import gradients, random_layer
from interop_kit import placed

from cupymla.interop.jax import dsa

TOKENS, TOPK, PAGE = 20, 6, 4
CHUNKS = (9, 1, 1, 9)
"""Of the tokens: a first one, single ones up to a page's end, and one over several pages; two programs."""
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
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
    """A module of transformers in float32 and in bfloat16, with bfloat16's weights, and the same as JAX arrays."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if not hasattr(transformers.models, family):
        pytest.skip(f"this transformers has no {family}")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": TOPK,
    }
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
    more = {"pad_token_id": 0} if family == "hy_v4" else {}
    config = transformers.AutoConfig.for_model(
        family, **sizes, **more, mlp_layer_types=["dense"], first_k_dense_replace=1, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().model
    module, embedding = model.layers[0].self_attn, model.rotary_emb
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Keys that differ much, so that bfloat16 and float32 select the same ones.
            parameter.mul_(4 if parameter.ndim > 1 else 1)
            if name == "sinks":
                parameter.copy_(torch.tensor([0.5, -1.0]))
            parameter.copy_(parameter.bfloat16())
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, TOKENS, 64, generator=generator).bfloat16()
    slope = torch.randn(2, TOKENS, 64, generator=generator).bfloat16()
    positions = torch.arange(TOKENS)[None].expand(2, -1)
    found = dsa.conventions(family, topk=TOPK, scale=module.scaling, index_epsilon=module.indexer.k_norm.eps)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None].expand(2, 1, -1, -1)

    scores: list[Any] = []
    select = torch.Tensor.topk

    def run(dtype: Any, selection: Any = None) -> tuple[Any, dict[str, Any], Any]:
        """Output, gradients and selection of the module itself, or with the selection given."""
        module.to(dtype)
        module.zero_grad()
        given = hidden.detach().clone().to(dtype).requires_grad_()
        selected: list[Any] = []
        scores.clear()
        hook = module.indexer.register_forward_hook(lambda m, i, o: keep(selected, o, selection))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", lambda x, *a, **k: keep(scores, x, select(x, *a, **k)))
            out = module(given, embedding(given, positions), mask.to(dtype), position_ids=positions)[0]
        hook.remove()
        out.backward(slope.to(dtype))
        grads = {n: p.grad.float().numpy() for n, p in module.named_parameters() if p.grad is not None}
        return out.detach().float().numpy(), {**grads, "hidden": given.grad.float().numpy()}, selected[0]

    exact = run(torch.float32)
    exact_scores = scores[0].numpy()
    coarse = run(torch.bfloat16, exact[2])
    params = {n: array(p.bfloat16() if p.ndim > 1 else p) for n, p in module.state_dict().items()}
    rotary = dsa.rotary(positions.numpy(), embedding.inv_freq.numpy(), embedding.attention_scaling)
    made = SimpleNamespace(params=params, hidden=array(hidden), slope=array(slope), rotary=rotary, conventions=found)
    made.coarse, made.exact, made.scores = coarse, (*exact[:2], exact[2].numpy()), exact_scores
    return made


def error(found: Any, exact: Any) -> float:
    difference = np.asarray(found, np.float32) - np.asarray(exact, np.float32)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(exact, np.float32)))


def sets(indices: Any) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in np.asarray(indices).reshape(-1, indices.shape[-1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_are_those_of_transformers(family: str) -> None:
    """With the float32 selection, the error against float32 is at most twice that of transformers' bfloat16."""
    given = problem(family)
    seen = np.where(given.exact[2] <= np.arange(TOKENS)[:, None], given.exact[2], -1).astype(np.int32)
    layer = functools.partial(dsa.layer, conventions=given.conventions, indices=jnp.asarray(seen))
    (out, _), (grads, d_hidden) = gradients(given, layer)
    assert error(out, given.exact[0]) <= 2 * error(given.coarse[0], given.exact[0])
    found = {**grads, "hidden": d_hidden}
    assert {name for name in found if not name.startswith(INDEXER)} == set(given.exact[1])
    for name, exact in given.exact[1].items():
        assert error(found[name], exact) <= 2 * error(given.coarse[1][name], exact), name


@pytest.mark.parametrize("family", FAMILIES)
def test_selection_is_that_of_transformers_but_for_near_ties(family: str) -> None:
    """Queries and keys in bfloat16 move a score by some units of 2**-8 of the row's largest one, no more."""
    given = problem(family)
    (_, indices), (grads, _) = gradients(given, functools.partial(dsa.layer, conventions=given.conventions))
    scores, equal = given.scores.reshape(-1, TOKENS), 0
    for query, (ours, theirs) in enumerate(zip(sets(indices), sets(given.exact[2]), strict=True)):
        seen = set(range(query % TOKENS + 1))
        assert ours <= seen and len(ours) == min(TOPK, len(seen)), f"query {query}"
        equal += ours == theirs & seen
        row = scores[query]
        for key in ours - theirs:
            margin = min(row[list(theirs & seen)]) - row[key]
            assert margin <= 4 * 2**-8 * np.abs(row[list(seen)]).max(), f"query {query}, key {key}"
    assert equal >= 0.9 * len(scores)
    assert all(not np.asarray(grads[name]).any() for name in grads if name.startswith(INDEXER))


def decoded(given: Any, conventions: Any, index: str, steps: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Outputs and selections, as tokens, of a loop over chunks of so many tokens, in pages out of order."""
    width = TOKENS // PAGE
    tables = placed(np.random.default_rng(5).permutation(2 * width).reshape(2, width), jnp.int32)
    cache = dsa.empty_cache(2 * width, PAGE, index=index)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(hidden: Any, rotary: Any, cache: Any, lens: Any) -> Any:
        return dsa.layer(given.params, hidden, rotary, conventions, cache=cache, block_tables=tables, context_lens=lens)

    outs, selections, at = [], [], 0
    place = np.full(2 * width * PAGE + 1, -1)
    for request in np.asarray(tables):
        for block, page in enumerate(request):
            place[page * PAGE : (page + 1) * PAGE] = block * PAGE + np.arange(PAGE)
    for count in steps:
        part = slice(at, at + count)
        at += count
        rotary = tuple(x[:, part] for x in given.rotary)
        out, slots, cache = step(given.hidden[:, part], rotary, cache, jnp.full(2, at, jnp.int32))
        outs.append(out)
        selections.append(place[np.asarray(slots)])
    return jnp.concatenate(outs, 1), np.concatenate(selections, 1), cache


@pytest.mark.parametrize(
    ("family", "index"), [("deepseek_v32", "fp8"), ("glm_moe_dsa", "bfloat16"), ("hy_v4", "bfloat16")]
)
def test_decode_is_prefill(family: str, index: str) -> None:
    """A chunk, token by token, and a chunk again: the same selections, and outputs but for the order of sums."""
    given = random_layer(TOKENS, family=family)
    conventions = dataclasses.replace(given.conventions, index_fp8=index == "fp8")
    out, indices, _ = jax.jit(lambda h: dsa.layer(given.params, h, given.rotary, conventions))(given.hidden)
    steps, selected, _ = decoded(given, conventions, index, CHUNKS)
    assert sets(selected) == sets(indices)
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
    given = random_layer(TOKENS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), given.params)
    layer = functools.partial(dsa.layer, rotary=given.rotary, conventions=given.conventions)

    def scanned(params: Any) -> Any:
        body = jax.checkpoint(lambda hidden, p: (hidden + layer(p, hidden)[0], None))
        return (jax.lax.scan(body, given.hidden, params)[0].astype(jnp.float32) * given.slope).sum()

    def looped(params: Any) -> Any:
        hidden = given.hidden
        for i in range(2):
            hidden = hidden + layer({n: p[i] for n, p in params.items()}, hidden)[0]
        return (hidden.astype(jnp.float32) * given.slope).sum()

    found, expected = jax.jit(jax.grad(scanned))(stacked), jax.jit(jax.grad(looped))(stacked)
    for name, gradient in expected.items():
        if name.startswith(INDEXER):
            assert not np.asarray(found[name]).any()
        else:
            assert error(found[name], gradient) <= 2**-7, name


def test_a_layer_that_shares_a_selection_needs_no_indexer() -> None:
    given = random_layer(TOKENS)
    layer = jax.jit(functools.partial(dsa.layer, conventions=given.conventions))
    out, indices, _ = layer(given.params, given.hidden, given.rotary)
    own = {n: p for n, p in given.params.items() if not n.startswith(INDEXER)}
    shared, same, _ = layer(own, given.hidden, given.rotary, indices=indices)
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
    with pytest.raises(UnsupportedError, match="glm5_next"):
        dsa.conventions("glm5_next", topk=4, scale=1.0)


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
        out, indices, _ = jax.jit(lambda h, c=conventions: dsa.layer(moved.params, h, moved.rotary, c))(moved.hidden)
        steps, selected, _ = decoded(moved, conventions, index, CHUNKS)
        same = [ours == theirs for ours, theirs in zip(sets(selected), sets(indices), strict=True)]
        assert np.mean(same) >= 0.9, index
        rows = np.asarray(same).reshape(2, TOKENS)
        assert error(np.asarray(steps, np.float32)[rows], np.asarray(out, np.float32)[rows]) <= 2**-6, index
