"""What the paths of the backward have in common: `Path`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from ....build.source import KernelSource
from ...mla import DTYPES
from ...units import Unit
from .. import sizes, units
from ..launches import Launch, Stage, Workspace
from ..layout import workspace
from ..sizes import all_query_groups, all_tokens, fitting, list_bytes, partial_bytes
from ..spec import Problem
from . import fixed_order, token_order
from .fixed_order import Rows

BLOCK_HEADS = (64, 128)
"""Query heads that the CTAs of a query may take at a time; the kernel says the same of itself, which is compared when a
call is bound. The CTAs of a cluster have half of the channels of all of them each."""

CTA_HEADS = 64
"""Query heads whose P and dS a CTA makes on sm_90a. One copy of q or dout brings in as many, but for a cluster."""

DKV_DTYPES = (*DTYPES, "float32")
"""By their CUPYMLA_FP16."""

_PARTIALS: Mapping[Rows, int] = {"added": 0, "float32": 1, "packed": 2}  # their CUPYMLA_PARTIALS


class Held(NamedTuple):
    """Something that is stored for a chunk of queries, or of query groups.

    Attributes:
        each_bytes: of one.
        limit_bytes: of a chunk's; one has room all the same.
    """

    each_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Path:
    """One way to compute the gradients: a class by the kernels of the attention, a value by what these differ in.

    Attributes:
        rows: what becomes of the rows that entries add.
        in_order: whether queries take their rows in the order of tokens, not of entries.
        queries: how many neighbouring ones are packed; 1 where each takes its own rows.
        block_heads: query heads that are taken at a time.
    """

    rows: Rows = "added"
    in_order: bool = False
    queries: int = 1
    block_heads: int = BLOCK_HEADS[0]

    title: ClassVar[str]
    """As measurements call it."""

    arch_name: ClassVar[str] = "sm_90a"
    """The target that has its kernels."""

    heads: ClassVar[range]
    """How many heads a query may have."""

    cluster: ClassVar[int] = 1
    """CTAs of its attention that share a query, or query group."""

    row_ctas: ClassVar[int] = 1
    """CTAs that go over a query's rows at the same time."""

    attends_in_clusters: ClassVar[bool] = False
    """Whether a 2-CTA cluster on sm_90a has its attention."""

    sums_in_runs: ClassVar[bool] = True
    """Whether sums have spare rows, and their columns in the order of cuda/sparse_mla_bwd/sm90/runs.cuh."""

    gathers: ClassVar[bool] = False
    """Whether it gathers rows of kv by TMA."""

    attention_stages: ClassVar[tuple[Stage, ...]] = ("attention",)
    """The stages of its attention."""

    own_units: ClassVar[Mapping[str, Unit]] = {}
    """What it has in the place of `units.SINGLE`."""

    packed_units: ClassVar[Mapping[str, Unit]] = {}
    """What it has in the place of either where rows are packed."""

    @classmethod
    def every(cls) -> Iterator[Self]:
        """Every one of the class that has kernels."""
        yield from (cls(), cls(in_order=True), cls("float32"), cls("packed"))

    @classmethod
    def ways(cls, problem: Problem) -> Iterator[Self]:
        """Those whose kernels can compute a problem, in the order in which `pays` is asked."""
        if problem.shared.h_q in cls.heads:
            if token_order.can_sort(problem):
                yield cls(in_order=True)
            yield from (cls(rows) for rows in fixed_order.rows(problem))

    def pays(self, problem: Problem, multiprocessors: int) -> bool:
        """Whether a problem that it can compute is not better left to a later one, on a GPU with that many
        multiprocessors."""
        return not self.in_order or self.is_better_in_order(problem, multiprocessors)

    def is_better_in_order(self, problem: Problem, multiprocessors: int) -> bool:
        """Whether queries had better take their rows in the order of tokens."""
        return token_order.takes_rows_in_order(problem, max(1, multiprocessors // self.row_ctas))

    def pays_somewhere(self, problem: Problem) -> bool:
        """Whether that may be so on some GPU; queries in order find the more rows the more of them are under way."""
        in_order = token_order.takes_rows_in_order(problem, all_tokens(problem))
        return self.rows == fixed_order.rows(problem)[0] and (in_order or not self.in_order)

    def require(self, problem: Problem) -> None:
        """Raise UnsupportedError for a problem that is too large for it, and for every other path."""

    @property
    def name(self) -> str:
        """Its title, and in which of its forms it is."""
        order = ["token order"] if self.in_order else []
        rows = [] if self.rows == "added" else [f"{self.rows} rows"]
        return ", ".join([self.title, *self.forms, *order, *rows])

    @property
    def forms(self) -> tuple[str, ...]:
        """What the class has besides, in words."""
        return ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What it may launch."""
        listing: tuple[Stage, ...] = ()
        if self.queries > 1:
            listing = ("merge",)
        elif self.in_order:
            listing = token_order.ORDER_STAGES
        elif self.rows != "added":
            listing = ("list",)
        sums: tuple[Stage, ...] = () if self.rows == "added" else ("sum",)
        return ("zero", "sink_lse", *listing, *self.attention_stages, *sums, "round", "sink")

    def attention(self, problem: Problem, first: int, last: int) -> Iterator[Launch]:
        """The launches that attend to these queries, or query groups."""
        yield Launch("attention", (last - first) * self.cluster, first, last)

    def source(self, stage: str, d_qk: int, dtype: str) -> KernelSource:
        """What to compile for a stage; `dtype` is that of the arrays, and of dkv for the stage `round`."""
        packed = self.packed_units if self.rows == "packed" else {}
        unit = {**units.SINGLE, **self.own_units, **packed}[stage]
        values = {
            "D_QK": d_qk,
            "FP16": DKV_DTYPES.index(dtype),
            "HEADS": self.block_heads,
            "PARTIALS": _PARTIALS[self.rows],
            "QUERIES": self.queries,
            "FIXED_ORDER": int(self.rows == "packed"),
        }
        return unit.source(self.arch_name, values)

    def wave(self, multiprocessors: int) -> int:
        """Queries, or query groups, that are attended to at the same time."""
        return max(1, multiprocessors // self.cluster)

    def held(self, problem: Problem) -> tuple[Held, ...]:
        """What is stored for a chunk."""
        found = []
        if self.rows != "added":
            found.append(Held(partial_bytes(problem, self.rows == "packed", self.queries), fixed_order.PARTIAL_BYTES))
        if self.queries > 1 or self.in_order:
            each = fixed_order.list_bytes_of_group if self.rows != "added" else list_bytes
            found.append(Held(each(problem, self.queries), sizes.LIST_BYTES))
        return tuple(found)

    def chunk(self, problem: Problem, wave: int) -> int:
        """Queries, or query groups, of one launch of the attention: in whole waves where there is no room for all."""
        chunk = max(1, all_query_groups(problem, self.queries))
        for each_bytes, limit_bytes in self.held(problem):
            chunk = fitting(chunk, each_bytes, limit_bytes, wave)
        return chunk

    def lists(self, problem: Problem, chunk: int) -> int:
        """Of how many chunks rows are listed at a time for sums in a fixed order; 1 without them."""
        return fixed_order.lists(problem, chunk, self.queries, self.arch_name)

    def workspace(self, problem: Problem, chunk: int, lists: int) -> Workspace:
        """What is allocated beside the outputs."""
        return workspace(
            problem,
            chunk,
            self.queries,
            self.in_order,
            in_runs=self.sums_in_runs,
            packed=self.rows == "packed",
            lists=lists,
            p_ds_bytes=self.p_ds_bytes(problem),
        )

    def p_ds_bytes(self, problem: Problem) -> int:
        """Of P and dS of one query; 0 where they are not stored."""
        return 0

    def workspace_limit(self, problem: Problem) -> int:
        """Bytes of workspace that are enough on every GPU."""
        one = self.workspace(problem, self.chunk(problem, 1), 1).bytes
        # Whole waves have half of the room at least.
        rooms = (max(1, limit_bytes // max(each_bytes, 1) // 2) for each_bytes, limit_bytes in self.held(problem))
        smallest = min(rooms, default=1)
        return one + fixed_order.further_lists_limit(problem, smallest, self.queries, self.arch_name)
