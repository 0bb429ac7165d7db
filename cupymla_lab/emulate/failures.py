"""What the model reports, in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cupymla.errors import CupymlaError

from .translate import Site

# By the number in cupymla_lab/emulate/model/failure.cuh; {0} to {3} are the values it reports with.
SENTENCES: Mapping[int, str] = MappingProxyType(
    {
        1: "the grid has {0} CTAs, state was made for {1}",
        2: "waits for the mbarrier at shared address {0:#x} of CTA rank {1}, and nothing moves any more",
        3: "waits at named barrier {0}, where {1} of {2} threads have arrived, and nothing moves any more",
        4: "waits at the cluster barrier, where {0} of {1} threads have arrived, and nothing moves any more",
        5: "{0} columns cannot be allocated; it takes a power of two from 32 to 512",
        6: "allocates after the CTA has relinquished the permit to",
        7: "waits for {0} free columns of Tensor Memory, and nothing moves any more",
        8: "names .cta_group::{1} in a kernel that has used .cta_group::{0}",
        9: "frees {1} columns at {0:#x}, where no allocation begins",
        10: "frees {0} columns of an allocation of {1}",
        11: "the CTA ends with {0} allocations of Tensor Memory that were not freed",
        12: "uses columns {0} to {0}+{1} of Tensor Memory, which are not all allocated",
        13: "reaches lane {0}; this warp's lanes begin at {1}",
        14: "the threads of the warp name different addresses, one of them {0:#x}",
        15: "the matrix descriptor {0:#018x} has reserved bits set, or not the fixed ones",
        16: "the matrix descriptor {0:#018x} names a swizzle that does not exist for this operand",
        17: "the matrix descriptor {0:#018x} has an absolute leading dimension, which sm_100a does not have",
        18: "the instruction descriptor {0:#010x} has reserved bits set",
        19: "the instruction descriptor {0:#010x} names element types that this kind does not have",
        20: "the instruction descriptor {0:#010x} names an M, N or K that this kind and .cta_group::{2} do not have",
        21: "the instruction descriptor {0:#010x} transposes what this kind or operand cannot transpose",
        22: "the instruction descriptor {0:#010x} names scale factor bytes that this vector size does not have",
        23: "the instruction descriptor {0:#010x} is for sparse A in a dense instruction, or the other way round",
        24: "scale-input-d, which only kinds f16 and tf32 have",
        25: "the mbarrier at shared address {0:#x} was not initialised",
        26: "the mbarrier at shared address {0:#x} was initialised by thread {1} without fence.mbarrier_init or "
        "fence.proxy.async since",
        27: "column {0} of Tensor Memory was used by thread {1}, without tcgen05.fence::before_thread_sync or a commit "
        "since",
        28: "column {0} of Tensor Memory was used by thread {1}, and this thread has had no "
        "tcgen05.fence::after_thread_sync since",
        29: "column {0} of Tensor Memory was loaded without tcgen05.wait::ld since",
        30: "reads shared address {0:#x}, which thread {1} wrote without fence.proxy.async since",
        31: "the CTA ends before this copy of thread {0} was waited for",
        32: "the CTA ends before this bulk store of thread {0} was waited for",
        33: "the CTA ends before this operation of thread {0} was completed: it has no commit that was waited for",
        34: "the CTA's peer has ended",
        35: "lane {0} of Tensor Memory does not begin a matrix of {1} rows",
        36: "the two CTAs of the pair have allocated different columns",
        37: "more than {0} operations are waiting, and nothing moves any more",
        38: ".cta_group::2 in a cluster of {0} CTAs, which is not made of pairs",
        40: "copies by a tensor map that the launch was not told of; it knows {0}",
        41: "uses global memory before its griddepcontrol.wait, in a dependent launch",
        42: "reads B from collector buffer b{0}, which no tcgen05.mma.ws has filled since its content was given up",
        43: "reads B from collector buffer b{0}, which was filled with another matrix (its descriptor is {1:#018x}, "
        "here {2:#018x})",
        44: "the zero-column mask {0:#018x} has reserved bits set",
        45: "the zero-column mask shifts B by {0} columns; for {2} rows and by the instruction descriptor, at most {1}",
        46: "gathers or scatters four rows by a tensor map of {0} dimensions with {1} rows to a box; it takes 2 and 1",
        47: "asks for another cluster to be cancelled after this CTA has seen a request fail",
        48: "asks an answer of clusterlaunchcontrol.try_cancel that has not arrived; its first word is {0:#x}",
        49: ".ashift with an M of {0}; it takes 128 or 256",
        50: "a sparse A of {0} rows in .cta_group::{1}; the model knows metadata of 128 rows per CTA",
        51: "sparsity selector {0}; the model knows 0 and 1 of kinds f16 and tf32, 0 of the others",
        52: "metadata at {0:#x}, which is no even column of lane 0",
        53: "metadata {0:#x} for row {1} and elements from {2} on, which means nothing",
        54: "reads B by collector buffer b{0}, but B in shared memory is not what the buffer was filled with",
        39: "the model is in a state that it should not reach ({0})",
    }
)


class EmulationError(CupymlaError, RuntimeError):
    """A translated kernel did what Blackwell does not allow, or stood still.

    Attributes:
        code: which kind of failure, a key of `SENTENCES`; 0 when the grid never ended and left no message.
        cta: the CTA, counted through the grid, x first.
        thread: the thread in its CTA.
        line: of the instruction in the PTX that was translated; 0 when no instruction is to blame.
        instruction: as it stands there.
        place: "file:line" of the CUDA source, with its callers where it was inlined, or "".
    """

    def __init__(
        self, code: int, values: tuple[int, ...] = (), cta: int = 0, thread: int = 0, site: Site | None = None
    ) -> None:
        self.code = code
        self.cta = cta
        self.thread = thread
        self.line = site.line if site else 0
        self.instruction = site.text if site else ""
        self.place = site.place if site else ""
        sentence = SENTENCES.get(code, "the grid did not end and left no message").format(*values)
        where = f"CTA {cta}, thread {thread}"
        at = f", PTX line {self.line}, {self.instruction}" if site else ""
        at += f" ({self.place})" if self.place else ""
        super().__init__(f"{where}{at}: {sentence}")


class HostError(CupymlaError, RuntimeError):
    """A kernel on the host's processor did what no GPU allows, such as an access outside shared memory, or never ended.

    Its words name the thread, its CTA and, for accesses, calls and traps, the line of the PTX that was translated.
    """
