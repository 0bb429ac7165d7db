"""The model and its training step in torch: as model_jax.py, part by part."""

from __future__ import annotations

import copy
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


def rms(x: Any, scale: Any = 1.0) -> Any:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def rotary(x: Any) -> Any:
    """Rotary positions on the last axis, position along axis 1."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
    angles = angles.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def causal(length: int, device: Any) -> Any:
    """Which token a query may see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def dense_attention(q: Any, kv: Any, scale: float) -> tuple[Any, Any]:
    """(out, lse) of attention to every token so far, by torch alone: what sparse attention is measured against."""
    scores = torch.einsum("bshc,btc->bhst", q.float(), kv.float()) * scale
    scores = scores.masked_fill(~causal(q.shape[1], q.device), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(kv.dtype)
    return torch.einsum("bhst,btc->bshc", weights, kv[..., :D_LATENT]), lse.transpose(1, 2)


def index_scores(q: Any, k: Any, weights: Any) -> Any:
    """The indexer's score of every token for every query, [batch, s, s], to learn from; -inf on tokens to come."""
    products = torch.einsum("bshe,bte->bsth", q, k).relu()
    scores = torch.einsum("bsth,bsh->bst", products, weights)
    return scores.masked_fill(~causal(q.shape[1], q.device), -math.inf)


def indexed(q: Any, k: Any, weights: Any, topk: int) -> Any:
    """The tokens that the indexer selects, [batch, s, topk] int32; -1 where a query has fewer. It has no gradient."""
    topk = min(topk, k.shape[1])
    q, k, weights = (part.detach() for part in (q, k, weights))
    return mla.indexer_topk(q.bfloat16(), k.bfloat16(), weights, topk, causal=True)[0]


def selected(scores: Any, topk: int) -> Any:
    """The tokens of largest score, [batch, s, topk] int32; -1 where a query has fewer."""
    values, indices = scores.topk(min(topk, scores.shape[-1]))
    return torch.where(values > -math.inf, indices, -1).int()


def divergence(target: Any, scores: Any, indices: Any) -> Any:
    """KL divergence between the attention distribution and the indexer's softmax, over each query's tokens."""
    chosen = scores.gather(-1, indices.clamp(min=0).long())
    log_index = chosen.masked_fill(indices < 0, -math.inf).log_softmax(-1)
    term = target * (target.clamp(min=1e-20).log() - log_index)
    return torch.where(target > 0, term, 0.0).sum(-1).mean()


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
        """The indexer's queries [batch, s, heads, channels], keys [batch, s, channels], weights [batch, s, heads]."""
        q = rotary(rms(torch.einsum("bsd,dhe->bshe", x, self.index_q)))
        return q, rotary(rms(x @ self.index_k)), x @ self.index_w * q.shape[-1] ** -0.5

    def recall(self, q: Any, kv: Any, chosen: Any) -> Any:
        """How many of a query's topk most attended tokens the indexer selects, over queries that have to choose."""
        s = self.setting
        lse = dense_attention(q, kv, s.sm_scale)[1]
        everything = torch.arange(q.shape[1], dtype=torch.int32, device=q.device).expand(*q.shape[:2], -1).contiguous()
        attended = mla.attn_dist(q, kv, everything, lse, sm_scale=s.sm_scale, causal=True)
        wanted = selected(attended.masked_fill(~causal(q.shape[1], q.device), -math.inf), s.topk)
        hit = (wanted[..., :, None] == chosen[..., None, :]).any(-1)
        return hit[:, s.topk :].float().mean()

    def attention(self, x: Any, kind: str, measure: bool) -> tuple[Any, Any, Any]:
        """The layer's update of x, the indexer's loss, and its recall where that is asked for."""
        s = self.setting
        q, kv = self.absorbed(x)
        indexer = self.projected(x.detach())
        scores = index_scores(*indexer)
        seen = causal(x.shape[1], x.device)
        if kind == "dense":
            tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
            indices = torch.where(seen, tokens, -1).int().expand(x.shape[0], -1, -1).contiguous()
            out, lse = dense_attention(q, kv, s.sm_scale)
        else:
            if kind == "random":
                indices = selected(torch.rand_like(scores).masked_fill(~seen, -math.inf), s.topk)
            else:
                indices = indexed(*indexer, s.topk)
            out, _, lse = mla.sparse_mla_fwd(q, kv, indices, sm_scale=s.sm_scale)
        still = [tensor.detach() for tensor in (q, kv, indices, lse)]
        target = mla.attn_dist(*still, sm_scale=s.sm_scale, normalize="l1")
        values = torch.einsum("bshc,hce->bshe", out.float(), self.up_v)
        found = self.recall(still[0], still[1], indexed(*indexer, s.topk)) if measure else torch.zeros(())
        return torch.einsum("bshe,hed->bsd", values, self.out), divergence(target, scores, indices), found

    def forward(self, x: Any, kind: str, measure: bool) -> tuple[Any, Any, Any]:
        """x after this layer, the indexer's loss, and its recall."""
        update, divergent, hit = self.attention(rms(x, self.norms[0]), kind, measure)
        x = x + update
        hidden = functional.gelu(rms(x, self.norms[1]) @ self.up, approximate="tanh")
        return x + hidden @ self.down, divergent, hit


class Transformer(nn.Module):
    """The language model."""

    def __init__(self, s: Setting) -> None:
        super().__init__()
        self.setting = s
        self.embed = matrix(s.vocabulary, s.width, fan=1)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.width))
        self.head = matrix(s.width, s.vocabulary, fan=s.width)

    def forward(self, batch: Any, kind: str, measure: bool = False) -> dict[str, Any]:
        """The loss, the indexer's loss, and its recall."""
        x = rms(self.embed[batch[:, :-1]])
        kl, found = 0.0, 0.0
        for layer in self.layers:
            x, divergent, hit = layer(x, kind, measure)
            kl, found = kl + divergent / self.setting.layers, found + hit / self.setting.layers
        logits = rms(x, self.norm) @ self.head
        entropy = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())
        return {"loss": entropy, "kl": kl, "recall": found}


class Model:
    """Parameters in training, for train_dsa.py."""

    def __init__(self, setting: Setting, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._setting = setting
        self._device = device
        self._network = Transformer(setting).to(device)
        weights = self._network.parameters()
        self._optimizer = torch.optim.AdamW(weights, setting.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._count = 0

    def copy(self) -> Model:
        """A model that goes on from here on its own."""
        return copy.deepcopy(self)

    def step(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, float]:
        """Learn from a batch with "dense", "indexer" or "random" attention."""
        self._count += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._setting.rate * min(1, self._count / 20)
        # A random selection is of the step, whatever an evaluation drew before it.
        torch.manual_seed(self._count)
        parts = self._network(torch.from_numpy(batch).to(self._device), kind)
        self._optimizer.zero_grad()
        (parts["loss"] + self._setting.kl_weight * parts["kl"]).backward()
        self._optimizer.step()
        return {name: float(parts[name].detach()) for name in ("loss", "kl")}

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, float]:
        """Loss on a batch, and the indexer's recall."""
        torch.manual_seed(0)
        parts = self._network(torch.from_numpy(batch).to(self._device), kind, True)
        return {name: float(parts[name]) for name in ("loss", "recall")}
