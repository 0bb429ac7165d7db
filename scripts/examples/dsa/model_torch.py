"""The model and its training step in torch: as model_jax.py, part by part."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cupymla.interop import torch as mla

from .setting import D_LATENT, D_ROPE, Setting


def matrix(*shape: int, fan: int) -> nn.Parameter:
    """A fresh parameter."""
    return nn.Parameter(torch.randn(*shape) * fan**-0.5)


def rms(x: Any, scale: Any = None) -> Any:
    """Root-mean-square normalisation."""
    return functional.rms_norm(x, x.shape[-1:], scale, 1e-6)


@functools.cache
def rotations(length: int, half: int, device: Any) -> tuple[Any, Any]:
    """Cosines and sines [length, half] of rotary positions: a step asks for the same ones in each layer."""
    rates = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(length, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotary(x: Any) -> Any:
    """Rotary positions on the last axis, position along axis 1."""
    half = x.shape[-1] // 2
    shape = x.shape[1], *[1] * (x.ndim - 3), half
    cos, sin = (table.view(shape) for table in rotations(x.shape[1], half, x.device))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(length: int, device: Any) -> Any:
    """Which token a query may see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def dense_scores(q: Any, kv: Any, scale: float) -> Any:
    """Attention's scores [batch, s, heads, s] in float32, by torch alone; -inf on tokens to come."""
    _, length, heads, _ = q.shape
    mask = torch.zeros(length, length, device=q.device).masked_fill(~causal(length, q.device), -math.inf)
    mask = mask[:, None].expand(-1, heads, -1).reshape(1, length * heads, length)
    # Scale and mask go into the product: by themselves each reads and writes all scores once more, forward and back.
    scores = torch.baddbmm(mask, q.flatten(1, 2).float(), kv.float().mT, alpha=scale)
    return scores.unflatten(1, (length, heads))


def dense_attention(q: Any, kv: Any, scale: float) -> tuple[Any, Any]:
    """(out, lse [batch, s, heads]) of attention to every token so far: what sparse attention is measured by."""
    scores = dense_scores(q, kv, scale)
    # In float32: many CPUs have no products of bfloat16, and torch takes them one by one there.
    out = torch.einsum("bsht,btc->bshc", scores.softmax(-1), kv[..., :D_LATENT].float())
    return out, scores.detach().logsumexp(-1)


def indexed(q: Any, k: Any, weights: Any, topk: int) -> Any:
    """The tokens that the indexer selects, [batch, s, topk] int32; -1 where a query has fewer. It has no gradient."""
    q, k, weights = (part.detach() for part in (q, k, weights))
    return mla.indexer_topk(q, k, weights, min(topk, k.shape[1]), causal=True)[0]


def selected(scores: Any, topk: int) -> Any:
    """The tokens of largest score, [batch, s, topk] int32; -1 where a query has fewer."""
    values, indices = scores.topk(min(topk, scores.shape[-1]))
    return torch.where(values > -math.inf, indices, -1).int()


class Layer(nn.Module):
    """Attention with its indexer, and the feed-forward part."""

    def __init__(self, s: Setting) -> None:
        super().__init__()
        self.setting = s
        self.down_q = matrix(s.width, s.d_query, fan=s.width)
        self.up_q = matrix(s.d_query, s.heads, s.d_nope + D_ROPE, fan=s.d_query)
        self.absorb_k = matrix(s.heads, s.d_nope, D_LATENT, fan=D_LATENT)
        self.down_kv = matrix(s.width, D_LATENT, fan=s.width)
        self.rope_k = matrix(s.width, D_ROPE, fan=s.width)
        self.up_v = matrix(s.heads, D_LATENT, s.d_value, fan=D_LATENT)
        self.out = matrix(s.heads, s.d_value, s.width, fan=s.heads * s.d_value)
        self.up = matrix(s.width, 4 * s.width, fan=s.width)
        self.down = matrix(4 * s.width, s.width, fan=4 * s.width)
        self.norms = nn.Parameter(torch.ones(2, s.width))
        self.index_q = matrix(s.width, s.index_heads, s.d_index, fan=s.width)
        self.index_k = matrix(s.width, s.d_index, fan=s.width)
        self.index_w = matrix(s.width, s.index_heads, fan=s.width)

    def absorbed(self, x: Any) -> tuple[Any, Any]:
        """q [batch, s, heads, 576] and kv [batch, s, 576], bfloat16."""
        heads = torch.einsum("bsd,dhe->bshe", rms(x @ self.down_q), self.up_q)
        nope, rope = heads[..., : self.setting.d_nope], heads[..., self.setting.d_nope :]
        q = torch.cat([torch.einsum("bshe,hec->bshc", nope, self.absorb_k), rotary(rope)], -1)
        kv = torch.cat([rms(x @ self.down_kv), rotary(x @ self.rope_k)], -1)
        return q.bfloat16(), kv.bfloat16()

    def projected(self, x: Any) -> tuple[Any, Any, Any]:
        """The indexer's queries [batch, s, heads, channels] and keys [batch, s, channels], bfloat16, and its weights
        [batch, s, heads]."""
        q, k = rotary(rms(torch.einsum("bsd,dhe->bshe", x, self.index_q))), rotary(rms(x @ self.index_k))
        return q.bfloat16(), k.bfloat16(), x @ self.index_w * q.shape[-1] ** -0.5

    def overlap(self, q: Any, kv: Any, chosen: Any) -> Any:
        """How many of a query's topk most attended tokens are selected, over queries that have to choose."""
        s = self.setting
        attended = dense_scores(q, kv, s.sm_scale).softmax(-1).sum(2)
        wanted = selected(attended.masked_fill(~causal(q.shape[1], q.device), -math.inf), s.topk)
        hit = (wanted[..., :, None] == chosen[..., None, :]).any(-1)
        return hit[:, s.topk :].float().mean()

    def attention(self, x: Any, weight: Any, kind: str, measure: bool) -> tuple[Any, Any, Any]:
        """The layer's update of x, what the indexer adds to the loss, and the selection's overlap where it is asked."""
        s = self.setting
        q, kv = self.absorbed(x)
        constants = q.detach(), kv.detach()
        indexer = self.projected(x.detach())
        indices = None  # as where all tokens are attended to and nothing is measured
        if kind == "random":
            order = torch.rand(*x.shape[:2], x.shape[1], device=x.device)
            indices = selected(order.masked_fill(~causal(x.shape[1], x.device), -math.inf), s.topk)
        elif kind == "indexer" or measure:
            indices = indexed(*indexer, s.topk)
        if kind == "dense":
            out, lse = dense_attention(q, kv, s.sm_scale)
            options = {"mla_lse": lse, "sm_scale": s.sm_scale, "causal": True}
            added = weight * mla.indexer_loss_dense(*indexer, *constants, **options)[0].sum()
        else:
            options = {"loss_weight": weight, "sm_scale": s.sm_scale}
            out, _, aux = mla.dsa_attention(q, kv, *indexer, indices, **options)
            added = aux.sum()
        values = torch.einsum("bshc,hce->bshe", out.float(), self.up_v)
        found = self.overlap(*constants, indices) if measure else torch.zeros(())
        return torch.einsum("bshe,hed->bsd", values, self.out), added, found

    def forward(self, x: Any, weight: Any, kind: str, measure: bool) -> tuple[Any, Any, Any]:
        """x after this layer, what the indexer adds to the loss, and the overlap."""
        update, added, hit = self.attention(rms(x, self.norms[0]), weight, kind, measure)
        x = x + update
        hidden = functional.gelu(rms(x, self.norms[1]) @ self.up, approximate="tanh")
        return x + hidden @ self.down, added, hit


class Transformer(nn.Module):
    """The language model."""

    def __init__(self, s: Setting) -> None:
        super().__init__()
        self.setting = s
        self.embed = matrix(s.vocabulary, s.width, fan=1)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.width))
        self.head = matrix(s.width, s.vocabulary, fan=s.width)

    def forward(self, batch: Any, weights: Any, kind: str, measure: bool = False) -> tuple[Any, dict[str, Any]]:
        """What is differentiated, and the loss and the overlap; `weights` [layers] of the KL loss."""
        # By an index, its gradient would add the rows of a frequent byte one after the other.
        x = rms(functional.embedding(batch[:, :-1], self.embed))
        total, found = 0.0, 0.0
        for layer, weight in zip(self.layers, weights, strict=True):
            x, added, hit = layer(x, weight, kind, measure)
            total, found = total + added, found + hit / self.setting.layers
        logits = rms(x, self.norm) @ self.head
        entropy = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())
        return entropy + total, {"loss": entropy, "overlap": found}


def loss_weights(s: Setting, device: str) -> Any:
    """Weights of the KL loss of each layer's queries, [layers]: those of all queries are `kl_weight` together."""
    return torch.full((s.layers,), s.kl_weight / s.queries, device=device, requires_grad=True)


class Model:
    """Parameters in training, for train_dsa.py."""

    def __init__(self, setting: Setting, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        if device == "cuda":  # TF32 for products in float32, as JAX has them on a GPU
            torch.set_float32_matmul_precision("high")
        self._setting = setting
        self._device = device
        self._network = Transformer(setting).to(device)
        self._begin()

    def _begin(self) -> None:
        options = {"betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True}
        self._optimizer = torch.optim.AdamW(self._network.parameters(), self._setting.rate, **options)
        self._count = 0

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """All that a model needs to go on from here."""
        made = {"count": np.asarray(self._count)}
        for name, parameter in self._network.named_parameters():
            made[name] = parameter.detach().cpu().numpy().copy()
            for part, tensor in self._optimizer.state[parameter].items():
                made[f"{name}/{part}"] = tensor.cpu().numpy().copy()
        return made

    def load(self, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Go on from a state."""
        self._begin()
        self._count = int(state["count"])
        for name, parameter in self._network.named_parameters():
            parameter.data.copy_(torch.from_numpy(state[name]))
            parts = {key.rpartition("/")[2]: array for key, array in state.items() if key.startswith(f"{name}/")}
            for part, array in parts.items():
                self._optimizer.state[parameter][part] = torch.tensor(array, device=self._device)

    def step(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
        """Learn from a batch with "dense", "indexer" or "random" attention; losses that a GPU may still be at."""
        self._count += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._setting.rate * min(1, self._count / 20)
        # A random selection is of the step, whatever an evaluation drew before it.
        torch.manual_seed(self._count)
        weights = loss_weights(self._setting, self._device)
        total, parts = self._network(torch.from_numpy(batch).to(self._device), weights, kind)
        self._optimizer.zero_grad()
        total.backward()
        self._optimizer.step()
        return {"loss": parts["loss"].detach(), "kl": weights.grad.sum() / self._setting.queries}

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
        """Loss on a batch, and the selection's overlap; a GPU may still be at them."""
        torch.manual_seed(0)
        weights = loss_weights(self._setting, self._device)
        found: dict[str, Any] = self._network(torch.from_numpy(batch).to(self._device), weights, kind, True)[1]
        return found
