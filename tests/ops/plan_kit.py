"""What the tests of plans share: parameter records as device files declare them, an MLA problem, queries of CTAs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Protocol

from cupymla.ops.mla import MlaProblem, SoftmaxOptions

CUDA = Path(__file__).resolve().parents[2] / "cuda"
C_TYPES = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}

MLA: MlaProblem[Any] = MlaProblem(
    batch=None, s_q=4, s_kv=8, h_q=128, d_qk=576, topk=8, dtype="bfloat16", options=SoftmaxOptions(sm_scale=0.1),
    has_topk_length=False, has_sink=False, q_strides=(0, 73728, 576), kv_strides=(0, 576),
    indices_strides=(0, 8), topk_length_strides=(0, 0),
)  # fmt: skip


def record_fields(file: Path, record: str, **records: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Name and type of each member of a record in a device file, in order; `records`: what members may be, too."""
    text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
    body = re.search(rf"struct {record} \{{(.*?)\}};", text, flags=re.S)
    assert body is not None
    fields: list[tuple[str, Any]] = []
    for statement in body[1].split(";")[:-1]:
        declared = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (.+)", statement, flags=re.S)
        assert declared is not None, statement
        kind: Any = ctypes.c_void_p if declared[2] else (C_TYPES | records)[declared[1]]
        for name in declared[3].split(","):
            counted = re.fullmatch(r"\s*(\w+)(?:\[(\d+)\])?\s*", name)
            assert counted is not None, name
            fields.append((counted[1], kind * int(counted[2]) if counted[2] else kind))
    return fields


def require_mirrored(
    mirrored: type[ctypes.Structure], file: str, record: str = "Parameters", **records: type[ctypes.Structure]
) -> None:
    """A record in Python has the members of the one in `file`, a path below cuda/.

    Swapped or retyped fields of equal size would pass the comparison of sizes that a binding makes.
    """
    assert [(field[0], field[1]) for field in mirrored._fields_] == record_fields(CUDA / file, record, **records)


class Assigned(Protocol):
    """Queries assigned to CTAs: first those that take several each, then those that take one."""

    @property
    def groups(self) -> int: ...

    @property
    def group_tokens(self) -> int: ...


def queries_of(assigned: Assigned, index: int) -> range:
    """What the CTA of that number takes; as `QueryRange` in sparse_query.cuh."""
    grouped = index < assigned.groups
    first = index * assigned.group_tokens if grouped else assigned.groups * (assigned.group_tokens - 1) + index
    return range(first, first + (assigned.group_tokens if grouped else 1))
