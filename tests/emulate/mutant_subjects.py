"""Which kernels the survey of mutants takes, each on the smallest problem in which its rings come round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupymla.build import KernelSource
from cupymla.ops.case import Case
from cupymla.ops.mla_cases import sized
from cupymla_lab.subjects import Subject


@dataclass(frozen=True, slots=True)
class Kernel:
    """A variant of a kernel, and a call that runs it.

    Attributes:
        operator: what is called.
        arch: the target.
        case: the call's problem, or the name of one of the operator's.
        multiprocessors: of the machine, on which the plan depends.
        defines: definitions that tell the variant from others of the call, without their "CUPYMLA_".
        entry: the kernel, where the call has others with the same definitions.
        settings: constants of the operator's package, as `bench --set` takes them.
        lengths: topk_length, where the problem shall have some that are no random ones.
        most: mutants that are drawn; fewer of variants that share most of their code with another one.
    """

    operator: str
    arch: str
    case: Case | str
    multiprocessors: int
    defines: Mapping[str, int] = field(default_factory=dict)
    entry: str = ""
    settings: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    most: int = 40

    def is_of(self, source: KernelSource) -> bool:
        """Whether a source is the variant's."""
        known = dict(source.defines)
        wanted = {f"CUPYMLA_{name}": value for name, value in self.defines.items()}
        return (not self.entry or source.entry == self.entry) and all(known.get(n) == v for n, v in wanted.items())

    def problem(self) -> tuple[Subject, dict[str, Any]]:
        """The operator and its arguments."""
        subject = Subject(self.operator)
        case = self.case
        if isinstance(case, str):
            (case,) = subject.those(subject.cases.CASES, [case])
        inputs: dict[str, Any] = subject.cases.inputs(case, 0)
        if self.lengths:
            inputs["topk_length"] = np.array(self.lengths, np.int32)
        return subject, inputs

    @property
    def case_name(self) -> str:
        """What the problem is called."""
        return self.case if isinstance(self.case, str) else self.case.name


def _mla(h: int, k: int, q: int, kv: int, **traits: Any) -> Case:
    """A problem without invalid entries, so that blocks are as many as they can be."""
    return sized(h, 512, k, q, kv, "", "masks", **{"selection": "full", **traits})


_ORDER = ("plan._ORDER_GAIN=-1.0",)
_NO_ORDER = ("plan._ORDER_GAIN=1.0",)


def _forward() -> dict[str, Kernel]:
    few, hopper = "sparse_mla_fwd", "sm_90a"
    return {
        "fwd-small-head": Kernel(few, hopper, _mla(16, 200, 3, 250), 1, {"HEADS": 16, "SPLIT": 0}, settings=_NO_ORDER),
        "fwd-small-head-split": Kernel(
            few, hopper, _mla(16, 260, 1, 300), 4, {"HEADS": 16, "SPLIT": 1}, settings=_NO_ORDER
        ),
        "fwd-64": Kernel(few, hopper, _mla(64, 200, 2, 250), 1, {"HEADS": 64}, settings=_NO_ORDER),
        "fwd-order": Kernel(few, hopper, _mla(16, 70, 2, 90), 1, {}, "sparse_mla_fwd_order", settings=_ORDER),
    }


_BY_THEMSELVES = "paths.packed_queries._MARGIN=0.0"
_SINGLE = (_BY_THEMSELVES, "paths.two_phase._WHEN='never'", "paths.fixed_order.PACKS_ROWS_OF_SINGLE=False")
_TWO_PHASE = (_BY_THEMSELVES, "paths.two_phase._WHEN='always'")
_PACKED_QUERIES = ("paths.packed_queries._MARGIN=1e9",)
_SINGLE_IN_ORDER = (*_SINGLE, "paths.token_order._ORDER_GAIN=-1.0")


def _backward() -> dict[str, Kernel]:
    def kernel(
        case: Case, settings: tuple[str, ...], word: str = "", multiprocessors: int = 2, most: int = 40, **defines: int
    ) -> Kernel:
        entry = f"sparse_mla_bwd{word and '_'}{word}"
        return Kernel("sparse_mla_bwd", "sm_90a", case, multiprocessors, defines, entry, settings, most=most)

    tiny = _mla(8, 65, 2, 80, sink="finite")
    fixed = _mla(8, 65, 2, 80, deterministic=True)
    pair, pair_fixed = _mla(66, 130, 1, 150), _mla(66, 130, 1, 150, deterministic=True)
    two_phase, two_phase_fixed = _mla(66, 200, 1, 220), _mla(66, 200, 1, 220, deterministic=True)
    listed = _mla(8, 65, 2, 80, wants_dist=True)
    four, two = _mla(16, 65, 4, 100, wants_dist=True), _mla(32, 65, 2, 100, sink="finite")
    return {
        "bwd-64": kernel(_mla(64, 130, 1, 150, wants_dist=True), _SINGLE, "", 1),
        "bwd-cluster": kernel(pair, _SINGLE, "cluster"),
        "bwd-p_ds": kernel(two_phase, _TWO_PHASE, "p_ds", 4),
        "bwd-dq_dkv": kernel(two_phase, _TWO_PHASE, "dq_dkv", 4),
        "bwd-packed-queries-4": kernel(four, _PACKED_QUERIES, "packed", 1),
        "bwd-packed-queries-2": kernel(two, _PACKED_QUERIES, "packed", 1, 20),
        "bwd-merge": kernel(four, _PACKED_QUERIES, "merge", 1),
        "bwd-stored": kernel(fixed, (), "stored", 1, 12),
        "bwd-64-stored": kernel(fixed, _SINGLE, "", 1, 12),
        "bwd-cluster-packed": kernel(pair_fixed, _SINGLE, "cluster", 2, 12),
        "bwd-dq_dkv-packed": kernel(two_phase_fixed, _TWO_PHASE, "dq_dkv", 4, 12),
        "bwd-zero": kernel(tiny, _SINGLE, "zero", 1),
        "bwd-round": kernel(tiny, _SINGLE, "round", 1),
        "bwd-sink": kernel(tiny, _SINGLE, "sink", 1),
        "bwd-list": kernel(fixed, _SINGLE, "list", 16),
        "bwd-sum": kernel(fixed, _SINGLE, "sum", 1),
        "bwd-sum-packed": kernel(two_phase_fixed, _TWO_PHASE, "cluster_sum", 4, 20),
        "bwd-sort": kernel(listed, _SINGLE_IN_ORDER, "sort", 1),
        "bwd-scatter": kernel(listed, _SINGLE_IN_ORDER, "scatter", 1),
    }


def _distribution() -> dict[str, Kernel]:
    def kernel(case: Case | str, multiprocessors: int, entry: str, margin: str, **defines: int) -> Kernel:
        settings = (f"plan._MARGIN={margin}",)
        return Kernel("attn_dist", "sm_90a", case, multiprocessors, defines, entry, settings)

    return {
        "dist-64": kernel(_mla(64, 130, 3, 200), 1, "attn_dist", "0.0", HEADS=64),
        "dist-128": kernel(_mla(128, 130, 2, 200), 1, "attn_dist", "0.0", HEADS=128),
        "dist-packed-queries": kernel(_mla(16, 65, 16, 100, normalize="l1"), 1, "attn_dist_packed", "1e9"),
    }


def _paged() -> dict[str, Kernel]:
    def kernel(case: str, arch: str, multiprocessors: int, gain: str, engine: int, most: int = 40) -> Kernel:
        return Kernel(
            "xl_paged_attention",
            arch,
            case,
            multiprocessors,
            {"ENGINE": engine},
            "",
            (f"plan._CLUSTER_GAIN={gain}",),
            (),
            most,
        )

    tensor, half = "gqa4-2x64_b4_c0-90_rel24_fp8_e4m3fn_vllm_number", "gqa4-2x64_b4_c0-90_dense_float16_vllm_zero"
    plain = "gqa4-2x64_b4_c0-90_float32_HND_zero"
    few = "gqa32-8x32_b1_c33_dense_cluster_vllm_bs16_float16_e4m3fn"
    return {
        "xl-tensor": kernel(half, "sm_80", 4, "-1e9", 2),
        "xl-tensor-fp8": kernel(tensor, "sm_80", 4, "-1e9", 2, 20),
        "xl-plain": kernel(plain, "sm_80", 4, "-1e9", 0),
        "xl-tensor-90": kernel(half, "sm_90a", 4, "-1e9", 2, 20),
        "xl-cluster": Kernel(
            "xl_paged_attention", "sm_90a", few, 8, {}, "xl_attention_cluster", ("plan._CLUSTER_GAIN=1e9",)
        ),
        "xl-tensor-100": kernel(half, "sm_100f", 4, "-1e9", 2),
        "xl-plain-100": kernel(plain, "sm_100f", 4, "-1e9", 0),
    }


def _gemv() -> dict[str, Kernel]:
    def kernel(case: str, arch: str, most: int = 40, **defines: int) -> Kernel:
        return Kernel("nvfp4_gemv", arch, case, 2, defines, "nvfp4_gemv", ("model.MARGIN=1.0",), (), most)

    any_shape, whole = "m128_k64_l2_n3_128x4", "m140_k768_l1_n1_mxfp4_128x4"
    tensor = "m66_k288_l2_n3_tma_scalar_rows"
    return {
        "gemv": kernel(any_shape, "sm_80", WHOLE=0),
        "gemv-whole": kernel(whole, "sm_80"),
        "gemv-whole-90": kernel(whole, "sm_90", 20),
        "gemv-100": kernel(any_shape, "sm_100f", WHOLE=0),
        "gemv-whole-100": kernel(whole, "sm_100f", 20),
        "gemv-tcgen05": Kernel("nvfp4_gemv", "sm_100f", tensor, 2, {}, "nvfp4_gemv_tcgen05", ("model.MARGIN=-1e9",)),
    }


def _blackwell() -> dict[str, Kernel]:
    def kernel(
        operator: str, case: Case, multiprocessors: int, lengths: tuple[int, ...] = (), most: int = 40, **defines: int
    ) -> Kernel:
        return Kernel(operator, "sm_100f", case, multiprocessors, defines, "", (), lengths, most)

    def sliced(h: int, d: int, entries: int, lengths: tuple[int, ...], kv: int, **traits: Any) -> Case:
        return sized(h, d, entries, len(lengths), kv, "", "masks", **{"selection": "full", **traits})

    forward, backward, phase1 = "sparse_mla_fwd", "sparse_mla_bwd", "sparse_mla_bwd_phase1"
    few, many = (66, 250, 195, 66, 0, 250, 3, 60), (130, 500, 390, 130, 0, 500, 3, 120)
    # Behind the last four, the producers wait for the end of the passes, for which the planner waits for the epilogue.
    short, long = (150, 3, 150, 1, 141, 5, 0, 0, 0, 3), (300, 3, 300, 1, 291, 5, 0, 0, 0, 3)
    queries = (500, 390, 0, 500, 3, 130, 1, 500)
    six_of_64 = sliced(64, 576, 650, (641,), 1300, wants_dist=True)  # blocks
    six_of_128 = sliced(128, 576, 350, (341,), 700, wants_dist=True)
    scores = {"sm_scale": 0.25}  # so far apart that blocks move the base, and with it the output, many times
    return {
        "fwd-64-100": kernel(forward, sliced(64, 576, 250, few, 600, **scores), 1, few, HEADS=64, SPLIT=0),
        "fwd-128-100": kernel(forward, sliced(128, 576, 500, many, 600, **scores), 2, many, HEADS=128, SPLIT=0),
        "fwd-split-100": kernel(forward, _mla(64, 700, 1, 800), 4, SPLIT=1),
        "bwd-64-100": kernel(backward, six_of_64, 2, (641,), HEADS=64),
        "bwd-128-100": kernel(backward, six_of_128, 2, (341,), HEADS=128),
        "bwd-stored-100": kernel(backward, _mla(128, 130, 2, 300, deterministic=True), 2, (), 20, HEADS=128),
        "bwd-sum-100": Kernel(
            backward, "sm_100f", _mla(8, 65, 2, 80, deterministic=True), 2, {}, "sparse_mla_bwd_sum", most=20
        ),
        "bwd-round-100": Kernel(
            backward, "sm_100f", _mla(8, 65, 2, 80, sink="finite"), 2, {}, "sparse_mla_bwd_round", most=20
        ),
        "phase1-100": kernel(phase1, sliced(128, 512, 500, queries, 600), 2, queries),
        "dist-64-100": kernel("attn_dist", sliced(64, 512, 150, short, 400, normalize="l1"), 1, short, HEADS=64),
        "dist-128-100": kernel("attn_dist", sliced(128, 512, 300, long, 400, normalize="l1"), 2, long, HEADS=128),
    }


KERNELS: Mapping[str, Kernel] = {
    **_forward(), **_backward(), **_distribution(), **_paged(), **_gemv(), **_blackwell(),
}  # fmt: skip
