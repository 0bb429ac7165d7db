"""The sm_100f kernels of sparse_mla_bwd on the host emulator: their own plan and binding meet the accuracy criterion.

Compiles, needs no GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_kit import case_parameters, check, check_inputs, settings
from sass_kit import machine_code, require_single_issuers
from variants_kit import compiled

from cupymla import build
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla_lab.emulate import MODES
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("sparse_mla_bwd")


@pytest.mark.parametrize(("case", "mode"), list(case_parameters(SUBJECT)))
def test_kernel_meets_the_accuracy_criterion(case: MlaCase, mode: str) -> None:
    check(SUBJECT, case, mode)


# The grid's small cases have few heads; each option once more with many, in rotating modes.
MANY_HEADS = (
    (sized(65, 512, 65, 3, 200, "_fp16", "options", dtype="float16", selection="duplicates"), "random"),
    (sized(96, 512, 65, 3, 200, "_causal", "options", causal=True, q_start=24, layout="strided"), "eager"),
    (sized(128, 576, 130, 2, 200, "_batch", "options", batch=2, lengths="hostile"), "lazy"),
    (sized(100, 576, 1, 3, 300, "_fp32", "options", sink="mixed", dkv_dtype="float32"), "random"),
)


@pytest.mark.parametrize(("case", "mode"), MANY_HEADS, ids=lambda value: getattr(value, "name", value))
def test_kernel_for_many_heads_meets_the_accuracy_criterion(case: MlaCase, mode: str) -> None:
    check(SUBJECT, case, mode)


FP16 = "float16"
# Blocks have 128 entries where heads are few, else 64.
SEVERAL_BLOCKS = (
    sized(64, 576, 700, 3, 900, "_blocks", "masks", lengths="hostile", sink="finite", wants_dist=True),
    sized(33, 512, 700, 3, 900, "_blocks", "masks", lengths="hostile", sink="finite", dkv_dtype="float32"),
    sized(128, 576, 350, 2, 500, "_blocks", "masks", lengths="hostile", sink="finite", wants_dist=True),
    sized(70, 512, 350, 2, 500, "_blocks", "masks", lengths="hostile", sink="finite", deterministic=True, dtype=FP16),
)


@pytest.mark.parametrize(
    ("case", "mode"),
    zip(SEVERAL_BLOCKS, (*MODES, "random"), strict=True),
    ids=lambda value: getattr(value, "name", value),
)
def test_several_blocks(case: MlaCase, mode: str) -> None:
    """The places of dKV's parts and the sets of tokens are gone through again and again."""
    check(SUBJECT, case, mode, seed=2)


@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_several_passes_over_several_blocks(mode: str) -> None:
    """Every barrier is met again and again, past a query without an entry; sink and distribution go over
    head_blocks."""
    case = sized(
        200,
        576,
        140,
        3,
        150,
        "_passes",
        "masks",
        lengths="hostile",
        sink="finite",
        wants_dist=True,
        dkv_dtype="float32",
    )
    check(SUBJECT, case, mode, seed=3)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (sized(16, 576, 65, 4, 80, "_dist", "options", wants_dist=True, selection="empty"), "lazy"),
        (sized(40, 576, 260, 2, 300, "_dist", "options", wants_dist=True, selection="full"), "random"),
        (
            sized(200, 512, 140, 3, 150, "_dist", "options", wants_dist=True, lengths="hostile", sink="infinite"),
            "random",
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_distribution_is_summed_over_all_heads(case: MlaCase, mode: str) -> None:
    """Over two CTAs, or four warps and two head blocks, without the sink; 0 in entries that do not count."""
    assert "attn_dist" in check_inputs(SUBJECT, SUBJECT.cases.inputs(case, 6), mode, seed=3)


@pytest.mark.parametrize(("heads", "d_qk", "dtype"), [(50, 576, "bfloat16"), (130, 512, FP16)])
def test_deterministic_results_have_the_same_bits_in_every_order(heads: int, d_qk: int, dtype: str) -> None:
    """Two queries that name three tokens, in two orders of threads, copies and products."""
    given = {"deterministic": True, "selection": "duplicates", "wants_dist": True, "dtype": dtype}
    case = sized(heads, d_qk, 140, 2, 3, "_det", "options", **given)
    inputs = SUBJECT.cases.inputs(case, 3)
    found = []
    for mode, seed in (("random", 1), ("lazy", 2)):
        with emulated("sm_100f", 2, settings(mode, seed)) as machine:
            results = machine.results(SUBJECT, inputs)
        found.append({name: array.tobytes() for name, array in results.items()})
    assert "attn_dist" in found[0] and found[0] == found[1]


@pytest.mark.parametrize("heads", [3, 67])
def test_values_of_padded_heads_and_other_entries_stay_out(heads: int) -> None:
    """A NaN in a row that one query names reaches that row of dkv and that query's dq, and nothing else."""
    case = sized(heads, 512, 66, 2, 140, "_nan", "masks", selection="full")
    inputs = SUBJECT.cases.inputs(case, 4)
    kv = np.random.default_rng(4).standard_normal((140, 512), np.float32).astype(inputs["kv"].dtype)
    inputs["kv"], inputs["indices"] = kv, np.arange(132, dtype=np.int32).reshape(2, 66)
    clean = check_inputs(SUBJECT, inputs, "random", seed=2)
    inputs["kv"] = kv.copy()
    inputs["kv"][131, 5] = np.nan
    with emulated("sm_100f", 2, settings("random", 2)) as machine:
        dq, dkv = machine.run(SUBJECT, inputs)
    np.testing.assert_array_equal(dq[0], clean["dq"][0])
    np.testing.assert_array_equal(dkv[:66], clean["dkv"][:66])
    assert np.isnan(dq[1].astype(np.float32)).any() and np.isnan(dkv[131].astype(np.float32)).all()
    assert not np.isnan(np.delete(dkv, range(66, 132), axis=0).astype(np.float32)).any()


ATTENTION = [
    source for source in compiled("cupymla.ops.sparse_mla_bwd") if source.path.endswith("/sm100/sparse_mla_bwd.cu")
]


@pytest.mark.parametrize("source", ATTENTION, ids=str)
def test_machine_code_has_the_intended_instructions(source: build.KernelSource, tmp_path: Path) -> None:
    """Products, gathers, loads from Tensor Memory, and one reduction or store for each entry and channel of a
    thread."""
    made = build.cubin(source, fail_on_spill=True)
    text = machine_code(made, tmp_path)
    require_single_issuers(text)
    # Reductions are a loop over parts of dKV: where heads are many the last 16 entries of the part before, then 48, and
    # behind the loop 16 again. One more adds to the distribution.
    found = Counter(re.findall(r"\b(UTC\w*MMA\S*|UTMALDG\S*|LDTM\S*|REDG\S*)", text))
    defines: dict[str, Any] = dict(source.defines)
    has_rope, is_few = defines["CUPYMLA_D_QK"] == 576, defines["CUPYMLA_HEADS"] == 64
    reductions = found["REDG.E.ADD.F32.FTZ.RN.STRONG.GPU"]
    assert not [name for name in found if name.startswith("UTC") and name != "UTCHMMA"]
    assert found["LDTM.x16"] == 4 and made.facts["tmem_columns"] == 512
    # Fences of the GPU stand at the cluster's barriers and once behind delta, not in the loop over blocks.
    assert text.count("MEMBAR.ALL.GPU") == (3 if is_few else 6) and text.count("STAS.128") == 12
    assert made.resources.registers <= 128
    if is_few:
        # Of S and dP the tiles are a loop's, of dQ halves may be. dKV is a loop over its parts.
        assert found["UTCHMMA"] >= 4 + 4 + 8 + 4 + 4 + (8 if has_rope else 0)
        assert found["UTMALDG.2D.GATHER4"] == (5 if has_rope else 4)
        assert found["LDTM.x32"] == 2 + 2 + (2 if has_rope else 0)
        assert reductions == (1 if defines["CUPYMLA_PARTIALS"] else 64 + 1)
    else:
        # Of S and dP the tiles are a loop's; dQ has one product of 256 columns a step, parts 0 and 1 may be a loop's.
        assert found["UTCHMMA"] >= 4 + 4 + 4 + 16 + (4 + 8 if has_rope else 0)
        assert found["UTMALDG.2D.GATHER4"] == (3 if has_rope else 2)
        assert found["LDTM.x32"] >= 3
        # In partials, a first head block stores and later ones add.
        assert reductions == 80 + 1
