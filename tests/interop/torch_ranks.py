"""What test_parallel.py runs as the ranks of a group, forked from one process that has imported torch: sharded against
whole."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import checkpoint as checkpoints

from cupymla import InputError, UnsupportedError
from cupymla.interop import torch as mla
from cupymla.interop.torch import parallel

UNIT = 2.0**-8


def arguments(batch: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(*batch, 32, 4, 576).bfloat16(),
        "kv": torch.randn(*batch, 64, 576).bfloat16(),
        "indices": torch.randint(-3, 64, (*batch, 32, 9), dtype=torch.int32),
        "topk_length": torch.randint(1, 12, (*batch, 32), dtype=torch.int32),
        "attn_sink": torch.randn(4),
    }


def compare(batch: tuple[int, ...], options: dict[str, Any]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = arguments(batch)
    axis = len(batch)
    mine = {n: a if n == "attn_sink" else a.chunk(ranks, axis)[rank].clone() for n, a in whole.items()}
    for given in (whole, mine):
        for name in ("q", "kv", "attn_sink"):
            given[name] = given[name].detach().requires_grad_()
    expected = mla.sparse_mla_fwd(**whole, **options)
    results = parallel.sparse_mla_fwd(**mine, **options)
    for one, part in zip(expected, results, strict=True):
        assert torch.equal(one.chunk(ranks, axis)[rank], part)
    torch.manual_seed(1)
    slope = torch.randn(expected[0].shape)
    (expected[0].float() * slope).sum().backward()
    (results[0].float() * slope.chunk(ranks, axis)[rank]).sum().backward()
    assert torch.equal(whole["q"].grad.chunk(ranks, axis)[rank], mine["q"].grad)
    # Both sides round the same float32 sum, taken in two orders, once to bfloat16.
    dkv = whole["kv"].grad.chunk(ranks, axis)[rank].float()
    torch.testing.assert_close(mine["kv"].grad.float(), dkv, rtol=2 * UNIT, atol=1e-5 * float(dkv.abs().max()))
    again = parallel.sparse_mla_fwd(**mine, **options)[0]
    (first,) = torch.autograd.grad(again.float().sum(), mine["q"], create_graph=True)
    try:
        first.float().sum().backward()
    except UnsupportedError:
        pass
    else:
        raise AssertionError("a gradient of a gradient was left out")
    recomputed = checkpoints.checkpoint(
        lambda q: parallel.sparse_mla_fwd(**{**mine, "q": q}, **options)[0], mine["q"], use_reentrant=False
    )
    (dq,) = torch.autograd.grad((recomputed.float() * slope.chunk(ranks, axis)[rank]).sum(), mine["q"])
    assert torch.equal(dq, mine["q"].grad)
    plain = {name: array.detach() for name, array in mine.items()}

    def loss(q: Any, kv: Any, attn_sink: Any) -> Any:
        out = parallel.sparse_mla_fwd(**{**plain, "q": q, "kv": kv, "attn_sink": attn_sink}, **options)[0]
        return (out.float() * slope.chunk(ranks, axis)[rank]).sum()

    differentiable = ("q", "kv", "attn_sink")
    functional = torch.func.grad(loss, argnums=(0, 1, 2))(*(plain[name] for name in differentiable))
    assert all(torch.equal(made, mine[name].grad) for name, made in zip(differentiable, functional, strict=True))
    dist.all_reduce(mine["attn_sink"].grad)
    torch.testing.assert_close(mine["attn_sink"].grad, whole["attn_sink"].grad, rtol=1e-4, atol=1e-4)
    if not batch:
        dist_options = {name: value for name, value in options.items() if name in ("causal", "q_start", "k_stride")}
        lists = [*(whole[name].detach() for name in ("q", "kv", "indices")), expected[2].detach()]
        target = mla.attn_dist(*lists, **dist_options)
        parts = [array.chunk(ranks)[rank] for array in lists]
        assert torch.equal(parallel.attn_dist(*parts, **dist_options), target.chunk(ranks)[rank])


def dsa_attention(device: str = "cpu") -> None:
    """This rank's heads and all of the indexer: gradients of the whole. A selection of its own is refused."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = {name: array for name, array in arguments(()).items() if name != "topk_length"}
    whole |= {"iq": torch.randn(32, 2, 64).bfloat16(), "ik": torch.randn(64, 64).bfloat16()}
    whole |= {"iw": torch.randn(32, 2), "loss_weight": torch.rand(32)}
    whole = {name: array.to(device) for name, array in whole.items()}
    axes = {"q": 1, "attn_sink": 0}
    mine = {n: a.chunk(ranks, axes[n])[rank].clone() if n in axes else a.clone() for n, a in whole.items()}
    for given in (whole, mine):
        for name, array in given.items():
            array.requires_grad_(name != "indices")
    slope = torch.randn(32, 4, 512).to(device)

    def step(given: dict[str, Any], slope: Any, **options: Any) -> None:
        out, _, aux = mla.dsa_attention(**given, **options)
        ((out.float() * slope).sum() + aux.sum()).backward()

    step(whole, slope)
    own = {"group": dist.group.WORLD}
    # Compiled on the last rank alone, whose heads are not the first: compiling takes longer than all else here.
    last = torch.compile(step, backend="aot_eager") if rank == ranks - 1 else step
    for run in (step, last):
        for array in mine.values():
            array.grad = None
        run(mine, slope.chunk(ranks, 1)[rank], **own)
        shares = mine["kv"].grad.float()
        dist.all_reduce(shares)
        for name, array in whole.items():
            if name == "indices":
                continue
            grad = array.grad.chunk(ranks, axes[name])[rank] if name in axes else array.grad
            got = shares if name == "kv" else mine[name].grad.float()
            if device == "cpu":
                # Distributions are float32 sums in another order, results are rounded once; of kv each rank's share is.
                unit = 2.0**-16 if array.dtype == torch.float32 else 2 * UNIT
                torch.testing.assert_close(got, grad.float(), rtol=unit, atol=unit * float(grad.abs().max()) / 4)
            else:  # as test_dsa_attention.py: fewer heads may be other kernels, which round on the way
                assert (got - grad.float()).norm() <= 4 * UNIT * grad.float().norm(), name
    mla.dsa_attention(**mine, **own, check_ranks=True)
    other = {**mine, "indices": mine["indices"] + (torch.arange(9, device=device) == 4).int() * rank}
    try:
        mla.dsa_attention(**other, **own, check_ranks=True)
    except InputError as refused:
        assert refused.argument == "indices"
    else:
        raise AssertionError("another selection was not seen")


def forward_on_gpu() -> None:
    """This rank's GPU has its share; the whole is computed on it as well."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = {name: array.cuda(rank) for name, array in arguments(()).items()}
    mine = {n: a if n == "attn_sink" else a.chunk(ranks)[rank].clone() for n, a in whole.items()}
    choices: tuple[dict[str, Any], ...] = ({}, {"causal": True, "q_start": 16})
    for options in choices:
        expected = mla.sparse_mla_fwd(**whole, **options)
        results = parallel.sparse_mla_fwd(**mine, **options)
        for one, part in zip(expected, results, strict=True):
            torch.testing.assert_close(part, one.chunk(ranks)[rank], rtol=2 * UNIT, atol=2 * UNIT)


CHECKS: dict[str, Callable[[], None]] = {
    "plain": lambda: compare((), {}),
    "causal": lambda: compare((), {"causal": True, "q_start": 16}),
    "batch": lambda: compare((2,), {"causal": True, "q_start": 16}),
    "dsa_attention": dsa_attention,
    "gpu": forward_on_gpu,
    "gpu dsa_attention": lambda: dsa_attention("cuda"),
}


def look(rank: int, ranks: int, rendezvous: str, names: Sequence[str]) -> None:
    """Look at one after the other. What is wrong ends it: ranks that go on would wait for this one."""
    on_gpus = names[0].startswith("gpu")
    if on_gpus:
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for name in names:
        CHECKS[name]()
        dist.barrier()
        os.write(1, f"right: {name}\n".encode())  # whole, whatever other ranks write
    dist.destroy_process_group()


def forked(rank: int, ranks: int, rendezvous: str, names: Sequence[str]) -> int:
    """A rank's process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            look(rank, ranks, rendezvous, names)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    return child


def main(ranks: int, rendezvous: str, names: Sequence[str]) -> int:
    """All ranks; none goes on when one has failed."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports more than the ranks do otherwise
    running = {forked(rank, ranks, rendezvous, names) for rank in range(ranks)}
    status = 0
    while running:
        child, ended = os.wait()
        running.discard(child)
        if ended and not status:
            status = 1
            for other in running:
                os.kill(other, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
