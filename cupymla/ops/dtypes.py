"""What an error says of an array's dtype."""

from __future__ import annotations

from collections.abc import Sequence

from ..tensor import View

_AS_INT32 = {
    "torch": "pass {}.to(torch.int32)",
    "jax": "pass {}.astype(jax.numpy.int32)",
    "cupy": "pass {}.astype(cupy.int32)",
    "numpy": "pass {}.astype(numpy.int32)",
    "raw": "pass {0}.to(torch.int32) or {0}.astype(jax.numpy.int32)",
}
_OTHER_INTEGERS = frozenset({"int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"})


def dtype_got(seen: View, argument: str, wanted: Sequence[str]) -> str:
    """What an error says came where an array of the dtypes `wanted` was expected.

    Frameworks give int64 for ids of rows (`torch.topk`, `numpy.argsort`) where int32 is wanted: the text says how the
    array's framework converts it. "raw" stands for arrays of both bridges.
    """
    if "int32" not in wanted or seen.dtype not in _OTHER_INTEGERS:
        return seen.dtype
    return f"{seen.dtype}: {_AS_INT32.get(seen.framework, 'convert {} to int32').format(argument)}"
