"""Which kernels a call of sparse_mla_bwd launches: what docs/streams_and_graphs.md says of them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from backward_plan_kit import PROBLEM, planned

from cupymla import arch
from cupymla.bench import machine
from cupymla.ops.sparse_mla_bwd import spec
from cupymla.ops.sparse_mla_bwd.launches import STAGES

EVERY = {"zero", "attention", "round", "sink"}
LISTS = {"list", "sum"}
ORDERS = {"merge", "sort", "scatter"}
TWO_PHASE = {"p_ds", "dq_dkv"}
assert set(STAGES) == EVERY | LISTS | ORDERS | TWO_PHASE

CHUNK = "(merge |sort )?(attention |p_ds dq_dkv )"
LISTED = f"list ({CHUNK}sum )"
PACKED = "(merge (attention sum )+)+"  # queries that need no lists
ENDS = "(round )?(sink )?"
PLAIN = re.compile(f"zero (sink_lse )?(({CHUNK})|(sort )(attention |p_ds dq_dkv )(scatter ))+{ENDS}")
DETERMINISTIC = {
    "sm_90a": re.compile(f"zero (sink_lse )?({PACKED}|({LISTED}+)+){ENDS}"),
    "sm_100f": re.compile(f"zero (sink_lse )?({LISTED})+{ENDS}"),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_a_call_launches_what_the_page_says(target: str, deterministic: bool) -> None:
    seen: set[str] = set()
    sizes = itertools.product((16, 64, 128), (4096, 32768, 131072), (False, True), (False, True))
    for heads, s_kv, has_dist, has_sink in sizes:
        shared = {"h_q": heads, "s_q": 4096, "s_kv": s_kv, "topk": 2048, "has_sink": has_sink}
        chosen = planned(
            replace(PROBLEM, has_attn_dist=has_dist, dkv_shape=(s_kv, 576)),
            arch.named(target),
            options=spec.Options(deterministic=deterministic, attn_dist_sink=has_sink),
            **shared,
        )
        launched = "".join(f"{launch.stage} " for launch in chosen.launches())
        expected = DETERMINISTIC[target] if deterministic else PLAIN
        assert expected.fullmatch(launched), launched
        assert ("sink_lse " in launched) == (has_dist and has_sink)
        seen |= set(launched.split())
    lists, orders = (LISTS, {"merge"}) if deterministic else (set(), ORDERS)
    assert seen == EVERY | {"sink_lse"} | lists | (TWO_PHASE | orders if target == "sm_90a" else set())
    (row,) = [
        line
        for line in (machine.ROOT / "docs" / "streams_and_graphs.md").read_text().splitlines()
        if line.startswith("| `sparse_mla_bwd` |")
    ]
    assert seen <= set(re.findall(r"`(\w+)`", row))
