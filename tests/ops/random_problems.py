"""Problems of the MLA operators as Hypothesis draws them, and shrinks those that fail: sizes around the kernels' tiles,
and options in combinations that nobody wrote down."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.mla_reference import select

OPERATORS = ("sparse_mla_fwd", "attn_dist", "sparse_mla_bwd")

_HEADS = (1, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 160)
_TOPKS = (1, 2, 7, 31, 63, 64, 65, 100, 127, 128, 129, 192, 250, 320)
_TOKENS = (1, 3, 20, 64, 100, 300, 700, 5000)
_LARGEST = 2**30  # of q_start and k_stride


@st.composite
def problems(draw: st.DrawFn, operator: str, most_flops: float) -> MlaCase:
    """A problem of an operator of which a product takes at most so many operations, unless one query takes more."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    h_q, topk, d_qk = pick(*_HEADS), pick(*_TOPKS), pick(576, 512)
    per_query = 2 * h_q * topk * d_qk
    batch = pick(None, None, 1, 3)
    s_q = draw(st.integers(1, max(1, min(17, int(most_flops / per_query / (batch or 1))))))
    s_kv = pick(*_TOKENS)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options |= {"causal": True, "q_start": pick(0, -5, s_kv // 2, s_kv, 10 * s_kv, _LARGEST)}
        options["k_stride"] = pick(1, 2, 4, 7, _LARGEST)
    options |= pick({}, {}, {"sm_scale": 0.5}, {"sm_scale": -0.1}, {"lse_base": "2"})
    traits: dict[str, Any] = {
        "dtype": pick("bfloat16", "float16"),
        "layout": pick("contiguous", "strided", "singleton"),
        "lengths": pick("none", "hostile"),
        "selection": pick("hostile", "full", "duplicates", "empty", "nothing", "few", "sorted"),
    }
    if operator == "sparse_mla_fwd":
        traits["sink"] = pick("none", "finite", "infinite")
    if operator == "attn_dist":
        options |= pick({}, {"normalize": "l1"})
    if operator == "sparse_mla_bwd":
        # No sink: of few queries the error of d_sink is a matter of luck, on both sides of the comparison.
        traits["wants_dist"] = draw(st.booleans())
        options |= pick({}, {"deterministic": True})
        options |= pick({}, {"dkv_dtype": "float32"})
    sizes: dict[str, Any] = {"s_q": s_q, "s_kv": s_kv, "h_q": h_q, "topk": topk, "d_qk": d_qk, "batch": batch}
    return MlaCase(name="random", intent="options", options=options, **sizes, **traits)


def attends_to_several(case: MlaCase, inputs: dict[str, Any]) -> bool:
    """Whether some query attends to two tokens, or none to any.

    If not, softmax is uniform, and gradients of scores are nothing but rounding errors: whether a few equal numbers are
    nearer to the exact one than the reference's is luck.
    """
    masks = case.softmax
    rows = inputs["kv"], inputs["indices"], case.batch is not None, inputs.get("topk_length")
    _, selection = select(*rows, masks.causal, masks.q_start, masks.k_stride)
    most = 0
    for entry in range(case.batch or 1):
        valid = selection.valid(entry, slice(0, case.s_q))
        for query in range(case.s_q):
            most = max(most, len(set(selection.indices[entry, query, valid[query]].tolist())))
    return most != 1
