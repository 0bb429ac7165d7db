"""dsa_attention gives the gradients of attention and of the indexer's KL loss, in JAX and in torch.

What is expected is torch's float64 autodiff of both, written out with masks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupymla import driver
from cupymla.errors import InputError, UnsupportedError

QUERIES, KEYS, TOPK, HEADS, INDEX_HEADS, CHANNELS = 7, 9, 6, 3, 2, 64
NAMES = ("q", "kv", "iq", "ik", "iw", "attn_sink", "loss_weight")
"""What there are gradients of."""
INDEXER = ("iq", "ik", "iw", "loss_weight")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": True},
    "sink in the distribution": {"sink": True, "attn_dist_sink": True},
    "sinks of any size": {"sink": (np.inf, -np.inf, 2.0), "attn_dist_sink": True, "lse_base": "2", "batch": 2},
    "length": {"length": True, "lse_base": "2", "sm_scale": 0.03},
    "causal": {"causal": True, "q_start": 3},
    "stride": {"causal": True, "q_start": 1, "k_stride": 2, "dtype": ml_dtypes.bfloat16},
    "batch": {"batch": 2, "causal": True, "sink": True},
    "no_relu": {"relu": False, "dtype": ml_dtypes.bfloat16},
}


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX computes here what is not for a GPU, by the references: with the same bits each time."""
    if request.node.get_closest_marker("gpu") or find_spec("jax") is None:
        yield
        return
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield


def arrays_of(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by argument, and options. Query 1 has no valid entry; 2 attends to one token of its row as good as alone,
    so that targets underflow; 3 names a token twice, and ids of any size."""
    case = dict(case)
    dtype, batch = case.pop("dtype", np.float16), (case.pop("batch", None),)
    lead = () if batch == (None,) else batch
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal((*lead, *shape)).astype(dtype)

    indices = rng.integers(-1, KEYS, (*lead, QUERIES, TOPK)).astype(np.int32)
    indices[..., 1, :] = -1
    indices[..., 2, :] = np.arange(TOPK)
    indices[..., 3, :] = (4, 4, KEYS, -(2**31), 2**31 - 1, 0)
    arrays = {
        "q": normal(QUERIES, HEADS, 576),
        "kv": normal(KEYS, 576),
        "iq": normal(QUERIES, INDEX_HEADS, CHANNELS),
        "ik": normal(KEYS, CHANNELS),
        "iw": rng.standard_normal((*lead, QUERIES, INDEX_HEADS)).astype(np.float32) / 8,
        "indices": indices,
        "loss_weight": rng.random((*lead, QUERIES), np.float32),
    }
    arrays["q"][..., 2, :, :] = arrays["kv"][..., :1, :] * np.float32(8)
    if sink := case.pop("sink", False):
        arrays["attn_sink"] = np.asarray(rng.standard_normal(HEADS) if sink is True else sink, np.float32)
    if case.pop("length", False):
        arrays["topk_length"] = np.array([6, 6, 6, 6, 0, 3, -1], np.int32)
    return arrays, case


def slope_of(arrays: dict[str, Any]) -> Any:
    """By which `out` counts: numbers that 16 bits hold, as a gradient of `out` is in."""
    return np.random.default_rng(1).integers(-8, 9, (*arrays["q"].shape[:-1], 512)).astype(np.float32) / 8


AUX = 0.5
"""By which `aux` counts."""


def expected(arrays: dict[str, Any], options: dict[str, Any], slope: Any) -> dict[str, Any]:
    """Gradients, out and lse in float64; but for the rounding of `out`, nothing of it is cupymla's."""
    torch = pytest.importorskip("torch")
    if arrays["q"].ndim == 4:
        shared = {name: arrays[name] for name in ("attn_sink",) if name in arrays}
        each = [
            expected({n: a if n in shared else a[b] for n, a in arrays.items()}, options, slope[b])
            for b in range(len(arrays["q"]))
        ]
        return {n: sum(e[n] for e in each) if n in shared else np.stack([e[n] for e in each]) for n in each[0]}
    moving = {n: torch.from_numpy(arrays[n].astype(np.float64)).requires_grad_() for n in NAMES if n in arrays}
    indices = torch.from_numpy(arrays["indices"].astype(np.int64))
    valid = (indices >= 0) & (indices < KEYS)
    if "topk_length" in arrays:
        valid &= torch.arange(TOPK) < torch.from_numpy(arrays["topk_length"])[:, None]
    scored = valid
    if options.get("causal"):
        seen = (options.get("q_start", 0) + torch.arange(QUERIES) + 1)[:, None] // options.get("k_stride", 1)
        scored = valid & (indices < seen)
        valid = valid & (indices < seen.clip(min=1))  # a query's first key it always sees
    at = torch.where(valid, indices, 0)
    some, keys = valid.any(-1), moving["kv"][at]
    scores = torch.einsum("thd,tsd->ths", moving["q"], keys) * options.get("sm_scale", 576**-0.5)
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    safe = torch.where(some[:, None], lse, 0)
    p = (scores - safe[..., None]).exp()
    whole = torch.logaddexp(safe, moving["attn_sink"].expand(safe.shape)) if "attn_sink" in moving else safe
    out = torch.einsum("ths,tsd->thd", p * (safe - whole).exp()[..., None], keys[..., :512])
    share = (safe - whole).exp()[..., None] if options.get("attn_dist_sink") else 1.0
    target = (p * share).sum(1).detach()
    target = torch.where(scored, target, 0)
    target = target / target.sum(-1, keepdim=True).clip(min=1e-10)
    products = torch.einsum("thd,tsd->ths", moving["iq"], moving["ik"][at])
    products = products if options.get("relu") is False else products.relu()
    index_scores = torch.einsum("th,ths->ts", moving["iw"], products).masked_fill(~scored, -torch.inf)
    index_scores = torch.where(scored.any(-1, keepdim=True), index_scores, 0)
    log_softmax = index_scores.log_softmax(-1).masked_fill(~scored, 0)
    kl = (torch.special.xlogy(target, target) - target * log_softmax).sum(-1)
    slope = torch.from_numpy(slope)
    # The backward is given out as the forward has rounded it, and takes the row sums of out * slope from that.
    rounded = torch.from_numpy(out.detach().numpy().astype(arrays["q"].dtype).astype(np.float64))
    delta = ((rounded - out.detach()) * slope).sum(-1)
    ((out * slope).sum() - (delta * whole).sum() + AUX * (moving["loss_weight"] * kl).sum()).backward()
    found = {name: tensor.grad.numpy() for name, tensor in moving.items()}
    base = np.log(2) if options.get("lse_base") == "2" else 1
    return {**found, "out": out.detach().numpy(), "lse": np.where(some[:, None], lse.detach() / base, np.inf)}


def in_torch(
    arrays: dict[str, Any], options: dict[str, Any], wrap: Callable[..., Any] = lambda f: f, device: str = "cpu"
) -> dict[str, Any]:
    """Gradients and results by argument, as NumPy's."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    def tensor(array: Any) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array.copy()).to(device)

    given = {name: tensor(array) for name, array in arrays.items()}
    moving = {name: given[name].requires_grad_() for name in NAMES if name in given}
    slope = tensor(slope_of(arrays))

    def results(moving: dict[str, Any]) -> Any:
        return mla.dsa_attention(**{**given, **moving}, **options)

    out, lse, aux = wrap(results)(moving)
    ((out.float() * slope).sum() + AUX * aux.sum()).backward()
    assert not lse.requires_grad
    found = {name: tensor.grad for name, tensor in moving.items()} | {"out": out, "lse": lse, "aux": aux}
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}


def in_jax(
    arrays: dict[str, Any], options: dict[str, Any], wrap: Callable[..., Any] = lambda f: f, device: str = "cpu"
) -> dict[str, Any]:
    """Likewise."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from cupymla.interop import jax as mla

    place = jax.devices(device)[0]
    moving = {name: jax.device_put(arrays[name], place) for name in NAMES if name in arrays}
    given = {name: array for name, array in arrays.items() if name not in moving}

    def results(moving: dict[str, Any]) -> Any:
        return mla.dsa_attention(**given, **moving, **options)

    def total(moving: dict[str, Any]) -> Any:
        out, lse, aux = wrap(results)(moving)
        return (out.astype(jnp.float32) * slope_of(arrays)).sum() + AUX * aux.sum(), (out, lse, aux)

    grads, made = jax.jit(jax.grad(total, has_aux=True))(moving)
    found = {**grads, **dict(zip(("out", "lse", "aux"), made, strict=True))}
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


RUNS = {"torch": in_torch, "jax": in_jax}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", RUNS)
def test_gradients_are_those_of_the_objective(framework: str, case: str) -> None:
    """Each result is rounded once."""
    arrays, options = arrays_of(CASES[case])
    found, wanted = RUNS[framework](arrays, options), expected(arrays, options, slope_of(arrays))
    assert not found.pop("aux").any()
    unit = 2.0**-8 if arrays["q"].dtype == ml_dtypes.bfloat16 else 2.0**-11
    for name, exact in wanted.items():
        rounding = unit if name in ("q", "kv", "iq", "ik", "out") else 2.0**-20
        assert name == "lse" or np.isfinite(exact).all()
        largest = np.abs(exact[np.isfinite(exact)]).max()
        np.testing.assert_allclose(found[name], exact, rtol=rounding, atol=2.0**-18 * largest, err_msg=name)


def require_gpu(framework: str) -> None:
    """Skips the test without a GPU that has the kernels, for this framework."""
    module = pytest.importorskip(framework)
    if driver.compute_capability(0) != (9, 0):
        pytest.skip("the indexer's kernels are for Hopper")
    if not (module.cuda.is_available() if framework == "torch" else module.default_backend() == "gpu"):
        pytest.skip(f"this {framework} has no GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", RUNS)
def test_gradients_on_a_gpu(framework: str, case: str) -> None:
    """P and its gradient are rounded to 16 bits on the way, so a result is off by some units of these."""
    require_gpu(framework)
    arrays, options = arrays_of(CASES[case])
    found = RUNS[framework](arrays, options, device="cuda")
    wanted = expected(arrays, options, slope_of(arrays))
    assert not found.pop("aux").any()
    for name, exact in wanted.items():
        there = np.isfinite(exact)
        np.testing.assert_array_equal(np.isfinite(found[name]), there, err_msg=name)
        error = np.linalg.norm(found[name][there] - exact[there])
        assert error <= 2.0**-6 * np.linalg.norm(exact[there]), name


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results torch makes once more in the backward."""
    from torch.utils import checkpoint

    return lambda moving: checkpoint.checkpoint(function, moving, use_reentrant=False)


def wrapped(how: str, backend: str = "inductor") -> Callable[..., Any]:
    """What makes a function of torch a compiled one, one that is recomputed, or both."""
    import torch

    def compiled(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend=backend, fullgraph=True)

    ways = {"compile": compiled, "checkpoint": recomputed, "both": lambda function: compiled(recomputed(function))}
    return ways[how]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["compile", "checkpoint", "both"])
def test_torch_transforms_change_no_bit_on_a_gpu(how: str) -> None:
    require_gpu("torch")
    arrays, options = arrays_of(CASES["sink"])
    options["deterministic"] = True
    plain = in_torch(arrays, options, device="cuda")
    for name, array in in_torch(arrays, options, wrapped(how), device="cuda").items():
        np.testing.assert_array_equal(array, plain[name], err_msg=name)


@pytest.mark.gpu
def test_what_jax_recomputes_has_the_same_bits_on_a_gpu() -> None:
    """In a compiled step."""
    require_gpu("jax")
    import jax

    arrays, options = arrays_of(CASES["sink"])
    options["deterministic"] = True
    plain = in_jax(arrays, options, device="cuda")
    for name, array in in_jax(arrays, options, jax.checkpoint, device="cuda").items():
        np.testing.assert_array_equal(array, plain[name], err_msg=name)


@pytest.mark.parametrize("how", ["compile", "checkpoint", "both", "func", "vmap"])
def test_torch_transforms_change_no_bit(how: str) -> None:
    torch = pytest.importorskip("torch")
    arrays, options = arrays_of(CASES["sink"])
    plain = in_torch(arrays, options)
    if how not in ("func", "vmap"):
        found = in_torch(arrays, options, wrapped(how, "aot_eager"))
        for name, array in plain.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        return
    from cupymla.interop import torch as mla

    indices, slope = torch.from_numpy(arrays["indices"]), torch.from_numpy(slope_of(arrays))

    def total(*moving: Any) -> Any:
        out, _, aux = mla.dsa_attention(indices=indices, **dict(zip(NAMES, moving, strict=True)))
        return (out.float() * slope).sum() + AUX * aux.sum()

    gradient = torch.func.grad(total, argnums=tuple(range(len(NAMES))))
    moving = [torch.from_numpy(arrays[name]) for name in NAMES]
    if how == "vmap":
        several = [torch.stack([array, array.flip(0)]) for array in moving]
        made = [array[0] for array in torch.func.vmap(gradient)(*several)]
    else:
        made = gradient(*moving)
    for name, array in zip(NAMES, made, strict=True):
        np.testing.assert_array_equal(array.float(), plain[name], err_msg=name)


@pytest.mark.parametrize("how", ["checkpoint", "traced start"])
def test_jax_transforms_change_no_bit(how: str) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from cupymla.interop import jax as mla

    arrays, options = arrays_of(CASES["stride"])
    plain = in_jax(arrays, options)
    if how == "checkpoint":
        found = in_jax(arrays, options, jax.checkpoint)
    else:
        del options["q_start"]
        indices = arrays.pop("indices")

        def wrap(_: Any) -> Any:
            return lambda moving: mla.dsa_attention(indices=indices, **moving, **options, q_start=jnp.int32(1))

        found = in_jax({**arrays, "indices": indices}, options, wrap)
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def moving_layers(names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two layers' arrays of these names, and what they share."""
    arrays, _ = arrays_of(CASES["plain"])
    fixed = {name: array for name, array in arrays.items() if name not in names}
    return {name: np.stack([arrays[name], arrays[name][::-1]]) for name in names}, fixed


LAYERS = [INDEXER, ("loss_weight",), ("q", "kv", "iq")]


@pytest.mark.parametrize("names", LAYERS)
def test_torch_gives_each_mapped_layer_its_own_gradient(names: tuple[str, ...]) -> None:
    """Also where none of a layer's arrays but one is mapped: `aux` is zeros for all of them."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    stacked, fixed = moving_layers(names)
    fixed = {name: torch.from_numpy(array) for name, array in fixed.items()}
    moving = {name: torch.from_numpy(array).requires_grad_() for name, array in stacked.items()}

    def one(layer: Any) -> Any:
        out, _, aux = mla.dsa_attention(**fixed, **layer)
        return out.float().sum() + aux.sum()

    torch.func.vmap(one)(moving).sum().backward()
    for number in range(2):
        alone = {name: torch.from_numpy(array[number].copy()).requires_grad_() for name, array in stacked.items()}
        one(alone).backward()
        for name, array in alone.items():
            np.testing.assert_array_equal(moving[name].grad[number], array.grad, err_msg=name)


@pytest.mark.parametrize("names", LAYERS)
def test_jax_gives_each_mapped_or_scanned_layer_its_own_gradient(names: tuple[str, ...]) -> None:
    """Likewise."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from cupymla.interop import jax as mla

    moving, fixed = moving_layers(names)

    def one(layer: Any) -> Any:
        out, _, aux = mla.dsa_attention(**fixed, **layer)
        return out.astype(jnp.float32).sum() + aux.sum()

    def scanned(moving: Any) -> Any:
        return jax.lax.scan(lambda total, layer: (total + one(layer), None), 0.0, moving)[0]

    mapped = jax.jit(jax.grad(lambda moving: jax.vmap(one)(moving).sum()))(moving)
    looped = jax.jit(jax.grad(scanned))(moving)
    for number in range(2):
        alone = jax.grad(one)({name: array[number] for name, array in moving.items()})
        for name, array in alone.items():
            np.testing.assert_array_equal(mapped[name][number], array, err_msg=name)
            np.testing.assert_array_equal(looped[name][number], array, err_msg=name)


STEPS = {
    "step": (True, NAMES, ["sparse_mla_bwd", "indexer_loss", "indexer_bwd"]),
    "frozen model": (True, INDEXER, ["attn_dist", "indexer_loss", "indexer_bwd"]),
    "aux is dropped": (False, NAMES, ["sparse_mla_bwd"]),
    "frozen indexer": (False, ("q", "kv"), ["sparse_mla_bwd"]),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_in_torch_runs_each_kernel_once(step: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    from cupymla.interop import torch as mla

    has_aux, names, wanted = STEPS[step]
    arrays, _ = arrays_of(CASES["sink"])
    given = {name: torch.from_numpy(array).requires_grad_(name in names) for name, array in arrays.items()}
    ran: list[str] = []

    class Noted(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.namespace == "cupymla":
                ran.append(operator.name().partition("::")[2])
            return operator(*args, **(kwargs or {}))

    with Noted():
        out, _, aux = mla.dsa_attention(**given)
        # A layer behind it learns in any case, so that out has a gradient.
        (out.float().sum() + (aux.sum() if has_aux else 0)).backward()
    assert ran == ["sparse_mla_fwd", *wanted]
    assert all(given[name].grad is not None for name in names if has_aux or name not in INDEXER)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_in_jax_runs_each_kernel_once(step: str) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from cupymla.interop import jax as mla

    has_aux, names, wanted = STEPS[step]
    arrays, _ = arrays_of(CASES["sink"])
    fixed = {name: array for name, array in arrays.items() if name not in names}

    def total(moving: Any) -> Any:
        out, _, aux = mla.dsa_attention(**fixed, **moving)
        out = jax.lax.stop_gradient(out) if step == "frozen model" else out
        return out.astype(jnp.float32).sum() + (aux.sum() if has_aux else 0)

    text = jax.jit(jax.grad(total)).lower({name: arrays[name] for name in names}).as_text()
    ran = re.findall(r"\\22name\\22:\\22(\w+)\\22", text)
    assert sorted(ran) == sorted(["sparse_mla_fwd", *wanted])


@pytest.mark.parametrize("framework", RUNS)
def test_neither_loss_reaches_the_other_side(framework: str) -> None:
    """Bit by bit: the attention's gradients are those of `sparse_mla_fwd`, the indexer's those of `indexer_loss`."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    arrays, options = arrays_of(CASES["sink"])
    found = RUNS[framework](arrays, options)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name in NAMES:
        given[name].requires_grad_()
    out, _, lse = mla.sparse_mla_fwd(given["q"], given["kv"], given["indices"], attn_sink=given["attn_sink"])
    (out.float() * torch.from_numpy(slope_of(arrays))).sum().backward()
    target = mla.attn_dist(given["q"], given["kv"], given["indices"], lse)
    loss, _ = mla.indexer_loss(given["iq"], given["ik"], given["iw"], given["indices"], target)
    (AUX * given["loss_weight"] * loss).sum().backward()
    np.testing.assert_array_equal(found["out"], out.detach().float())
    for name in NAMES:
        np.testing.assert_allclose(found[name], given[name].grad.float(), rtol=2**-20, atol=0, err_msg=name)


@pytest.mark.parametrize("framework", RUNS)
def test_no_gradient_is_left_out_in_silence(framework: str) -> None:
    arrays, _ = arrays_of(CASES["plain"])
    mla: Any = pytest.importorskip(framework) and import_module(f"cupymla.interop.{framework}")
    if framework == "torch":
        import torch

        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given["iq"].requires_grad_()
        aux = mla.dsa_attention(**given)[2]
        (first,) = torch.autograd.grad(aux.sum(), given["iq"], create_graph=True)
        with pytest.raises(UnsupportedError, match="dsa_attention: a gradient of its gradient"):
            first.float().sum().backward()
        return
    import jax

    def result(iq: Any, place: int) -> Any:
        return mla.dsa_attention(**{**arrays, "iq": iq})[place].astype(np.float32).sum()

    def once(iq: Any) -> Any:
        return jax.grad(result)(iq, 2).astype(np.float32).sum()

    with pytest.raises(UnsupportedError, match="dsa_attention: a gradient of its gradient"):
        jax.grad(once)(arrays["iq"])
    with pytest.raises(UnsupportedError, match="a gradient through 'lse'"):
        jax.grad(result)(arrays["iq"], 1)


WRONG: dict[str, tuple[str, Any]] = {
    "no sink": ("attn_dist_sink", lambda a: True),
    "no ranks": ("check_ranks", lambda a: True),
    "no flag": ("relu", lambda a: 1),
    "fewer keys": ("ik", lambda a: a[:-1]),
    "another row": ("iw", lambda a: a[:-1]),
    "channels": ("iq", lambda a: a[..., :32]),
    "dtype": ("ik", lambda a: a.astype(np.float32)),
    "weights": ("loss_weight", lambda a: a[:-1]),
    "a word": ("loss_weight", lambda a: "much"),
    "indices": ("indices", lambda a: a.astype(np.int16)),
    "tokens": ("kv", lambda a: a[:, :500]),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("framework", RUNS)
def test_bad_input_is_refused_in_the_forward_by_its_own_name(framework: str, wrong: str) -> None:
    """The indexer's arrays are first used in the backward."""
    mla: Any = pytest.importorskip(framework) and import_module(f"cupymla.interop.{framework}")
    arrays, _ = arrays_of(CASES["plain"])
    name, change = WRONG[wrong]
    arrays[name] = change(arrays.get(name))
    if framework == "torch":
        import torch

        arrays = {n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for n, a in arrays.items()}
    with pytest.raises(InputError) as refused:
        mla.dsa_attention(**arrays)
    assert refused.value.argument == name


@pytest.mark.parametrize("framework", RUNS)
def test_a_number_weighs_all_queries(framework: str) -> None:
    arrays, options = arrays_of(CASES["plain"])
    arrays["loss_weight"] = np.full_like(arrays["loss_weight"], 0.25)
    plain = RUNS[framework](arrays, options)
    del arrays["loss_weight"]
    found = RUNS[framework](arrays, {**options, "loss_weight": 0.25})
    for name, array in found.items():
        np.testing.assert_array_equal(array, plain[name], err_msg=name)
