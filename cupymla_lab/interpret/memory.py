"""Memory as a kernel sees it: registered buffers, shared memory of a CTA, local memory of its threads.

Every access is checked: inside its buffer, aligned, not to a read-only buffer, and of bytes that something has written.
Generic addresses of shared, local and parameter memory lie in windows that no host address falls into; within their
own state space, shared addresses begin at SHARED_START, so that a null pointer is no address.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .shadow import Shadow
from .traps import Trap
from .types import Array, DType

SHARED_WINDOW = 0x7FF0_0000_0000_0000
LOCAL_WINDOW = 0x7FE0_0000_0000_0000
PARAMETER_WINDOW = 0x7FD0_0000_0000_0000
PARAMETER_STRIDE = 1 << 16

SHARED_START = 1024
RANK_SHIFT = 24
"""A shared::cluster address holds its CTA's rank + 1 from this bit on; 0 there means the CTA that uses it."""

_GRANULE_BITS = 4


class Bytes:
    """Bytes with views of them as other types."""

    def __init__(self, content: Array) -> None:
        self.content = content
        self._views: dict[DType, Array] = {}

    def typed(self, dtype: DType) -> Array:
        """All of it as elements of a type; a rest that makes no element is left out."""
        found = self._views.get(dtype)
        if found is None:
            whole = len(self.content) // dtype.itemsize * dtype.itemsize
            found = self._views[dtype] = self.content[:whole].view(dtype)
        return found


def span_bytes(array: Array) -> tuple[int, int]:
    """The address of an array's first byte and the bytes up to its last, whatever its strides."""
    low = array.ctypes.data
    if not array.size:
        return low, 0
    reach = [(extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)]
    low += sum(r for r in reach if r < 0)
    return low, sum(abs(r) for r in reach) + array.itemsize


class Buffer(Bytes):
    """Memory that a kernel may use.

    Attributes:
        name: for messages.
        base: address of its first byte.
        size: in bytes.
        writable: whether the kernel may write to it.
        written: for each byte whether it has been written; None when all of it has.
    """

    def __init__(self, name: str, base: int, size: int, writable: bool, initialised: bool) -> None:
        super().__init__(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base)))
        self.name = name
        self.base = base
        self.size = size
        self.writable = writable
        self.written = None if initialised else np.zeros(size, np.bool_)


class GlobalMemory:
    """The buffers of a launch, known by their real addresses in this process."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._keep: list[object] = []

    def add(self, name: str, array: Array, writable: bool = True, initialised: bool = True) -> int:
        """Register an array, with the gaps between its elements, and return the address of its first element.

        Args:
            name: for messages.
            array: NumPy array of any strides; kept alive.
            writable: whether the kernel may write to it.
            initialised: False when the kernel must write a byte before it may read it.
        """
        low, size = span_bytes(array)
        self._keep.append(array)
        self.add_range(name, low, size, writable, initialised)
        return int(array.ctypes.data)

    def add_range(self, name: str, base: int, size: int, writable: bool = True, initialised: bool = True) -> None:
        """Register memory by its address; the caller keeps it alive."""
        if size:
            self.buffers.append(Buffer(name, base, size, writable, initialised))

    def find(self, low: int, high: int, write: bool) -> Buffer | None:
        """The buffer that holds the bytes from low up to high and may be used so."""
        for buffer in self.buffers:
            if buffer.base <= low and high <= buffer.base + buffer.size and (buffer.writable or not write):
                return buffer
        return None

    def _require(self, low: int, high: int, write: bool) -> Buffer:
        found = self.find(low, high, write)
        if found is not None:
            return found
        if write and self.find(low, high, False) is not None:
            raise Trap(f"write to read-only memory: {self._near(low, high)}")
        raise Trap(f"global {'write' if write else 'read'} out of bounds: {self._near(low, high)}")

    def _near(self, low: int, high: int) -> str:
        """A range told by the nearest buffer."""
        if not self.buffers:
            return f"{high - low} bytes at {low:#x}, and no buffer is registered"
        buffer = min(self.buffers, key=lambda b: max(b.base - low, high - b.base - b.size))
        return f"{high - low} bytes at {low:#x}, byte {low - buffer.base} of '{buffer.name}' ({buffer.size} bytes)"

    def load(self, address: Array, dtype: DType, count: int) -> Array:
        """`[n, count]` elements; element k of each row at address + k * itemsize."""
        bytes_ = dtype.itemsize * count
        _aligned(address, bytes_, "global")
        if not len(address):
            return np.empty((0, count), dtype)
        low, high = int(address.min()), int(address.max()) + bytes_
        buffer = self.find(low, high, False)
        if buffer is None:
            return self._load_one_by_one(address, dtype, count)
        offset = address - buffer.base
        if buffer.written is not None and not buffer.written[offset[:, None] + np.arange(bytes_)].all():
            raise Trap(f"read of unwritten memory of '{buffer.name}'")
        if buffer.base % dtype.itemsize == 0:
            return buffer.typed(dtype)[(offset // dtype.itemsize)[:, None] + np.arange(count)]
        return np.ascontiguousarray(buffer.content[offset[:, None] + np.arange(bytes_)]).view(dtype)

    def _load_one_by_one(self, address: Array, dtype: DType, count: int) -> Array:
        bytes_ = dtype.itemsize * count
        # Each buffer's share at once; what no buffer holds is told apart from what lies in another.
        out = np.empty((len(address), count), dtype)
        left = np.ones(len(address), np.bool_)
        while left.any():
            first = int(address[np.argmax(left)])
            buffer = self._require(first, first + bytes_, False)
            inside = left & (address >= buffer.base) & (address + bytes_ <= buffer.base + buffer.size)
            out[inside] = self.load(address[inside], dtype, count)
            left &= ~inside
        return out

    def store(self, address: Array, data: Array) -> None:
        """Write `[n, count]` elements, row k at address[k]. Where rows coincide, the last one stays."""
        bytes_ = data.dtype.itemsize * data.shape[1]
        _aligned(address, bytes_, "global")
        if not len(address):
            return
        low, high = int(address.min()), int(address.max()) + bytes_
        buffer = self.find(low, high, True)
        if buffer is None:
            left = np.ones(len(address), np.bool_)
            while left.any():
                first = int(address[np.argmax(left)])
                found = self._require(first, first + bytes_, True)
                inside = left & (address >= found.base) & (address + bytes_ <= found.base + found.size)
                self._put(found, address[inside], data[inside])
                left &= ~inside
            return
        self._put(buffer, address, data)

    def _put(self, buffer: Buffer, address: Array, data: Array) -> None:
        offset = (address - buffer.base)[:, None] + np.arange(data.dtype.itemsize * data.shape[1])
        buffer.content[offset] = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)
        if buffer.written is not None:
            buffer.written[offset] = True


def _aligned(address: Array, bytes_: int, space: str) -> None:
    if bytes_ > 1 and len(address) and int(np.bitwise_or.reduce(address)) & (bytes_ - 1):
        wrong = int(address[np.argmax(address % bytes_ != 0)])
        raise Trap(f"misaligned {space} access: {bytes_} bytes at {wrong:#x}")


class SharedMemory(Bytes):
    """Shared memory of one CTA, by offsets from its start.

    Attributes:
        size: in bytes.
        strict: whether ordinary reads of unwritten bytes are a trap.
        written: for each byte whether it has been written.
        reading: for each 16 bytes how many unfinished matrix products read them.
        readers: how many unfinished products there are.
        landing: for each 4 bytes how many unfinished copies write them.
        landings: how many such words there are.
        foreign: for each 16 bytes whether ordinary code wrote them last, and no proxy fence has come after that.
        held: for each 4 bytes whether an mbarrier lies there.
        shadow: the last accesses, where races are looked for.
    """

    def __init__(self, size: int, strict: bool = True) -> None:
        # 0xFF bytes are NaN in every float format and -1 in signed integers, so what was never written shows.
        super().__init__(np.full(size, 0xFF, np.uint8))
        self.size = size
        self.strict = strict
        self.written = np.zeros(size, np.bool_)
        self.reading = np.zeros((size >> _GRANULE_BITS) + 1, np.int16)
        self.readers = 0
        self.landing = np.zeros((size >> 2) + 4, np.int16)
        self.landings = 0
        self.foreign = np.zeros((size >> _GRANULE_BITS) + 1, np.bool_)
        self.any_foreign = False
        self.held = np.zeros((size >> 2) + 4, np.bool_)
        self._lowest_held = size
        self.shadow: Shadow | None = None

    def check(self, offset: Array, bytes_: int, write: bool) -> None:
        """Raise Trap unless the bytes lie inside, aligned, and no unfinished operation is in the way."""
        if not len(offset):
            return
        if int(offset.min()) < 0 or int(offset.max()) + bytes_ > self.size:
            wrong = offset[(offset < 0) | (offset + bytes_ > self.size)]
            doing = "write" if write else "read"
            raise Trap(f"shared {doing} out of bounds: {bytes_} bytes at offset {int(wrong[0])} of {self.size}")
        _aligned(offset, bytes_, "shared")
        if write and self.readers and self.reading[offset >> _GRANULE_BITS].any():
            wrong = offset[self.reading[offset >> _GRANULE_BITS] > 0]
            raise Trap(f"write to shared memory that an unfinished wgmma reads, offset {int(wrong[0])}")
        if self.landings:
            self.require_landed((offset >> 2)[:, None] + np.arange(max(1, bytes_ >> 2)), write)
        # Mbarriers mostly lie behind everything else.
        if int(offset.max()) + bytes_ > self._lowest_held:
            words = (offset >> 2)[:, None] + np.arange(max(1, bytes_ >> 2))
            if self.held[words].any():
                held = 4 * int(words[self.held[words]][0])
                raise Trap(f"an mbarrier lies at offset {held} of shared memory: it is no data, nor made anew")

    def hold(self, offset: int, bytes_: int) -> None:
        """An mbarrier lies here from now on."""
        self.held[offset >> 2 : offset + bytes_ >> 2] = True
        self._lowest_held = min(self._lowest_held, offset)

    def let_go(self, offset: int, bytes_: int) -> None:
        """An mbarrier was here."""
        self.held[offset >> 2 : offset + bytes_ >> 2] = False

    def require_landed(self, words: Array, write: bool = False) -> None:
        """Raise Trap when an unfinished copy still writes some of these 4-byte words."""
        if self.landings and self.landing[words].any():
            wrong = 4 * int(words.reshape(-1)[np.argmax(self.landing[words].reshape(-1) > 0)])
            doing = "write to" if write else "read of"
            raise Trap(f"{doing} shared memory that an unfinished copy still writes, offset {wrong}")

    def load(self, offset: Array, dtype: DType, count: int) -> Array:
        """`[n, count]` elements."""
        bytes_ = dtype.itemsize * count
        self.check(offset, bytes_, False)
        index = (offset // dtype.itemsize)[:, None] + np.arange(count)
        if self.strict:
            written = self.written[offset] & self.written[offset + bytes_ - 1]
            if not written.all():
                raise Trap(f"read of unwritten shared memory, offset {int(offset[np.argmin(written)])}")
        return self.typed(dtype)[index]

    def store(self, offset: Array, data: Array, ordinary: bool = True) -> None:
        """Write `[n, count]` elements; `ordinary` writes need a proxy fence before asynchronous ones may read them."""
        bytes_ = data.dtype.itemsize * data.shape[1]
        self.check(offset, bytes_, True)
        self.typed(data.dtype)[(offset // data.dtype.itemsize)[:, None] + np.arange(data.shape[1])] = data
        self.written[offset[:, None] + np.arange(bytes_)] = True
        self.foreign[offset >> _GRANULE_BITS] = ordinary
        self.any_foreign |= ordinary

    def fence(self) -> None:
        """A proxy fence: what ordinary code wrote so far may be read by asynchronous operations."""
        if self.any_foreign:
            self.foreign[...] = False
            self.any_foreign = False

    def require_fenced(self, granules: Array, does: str = "read") -> None:
        """Raise Trap when ordinary code wrote some of these 16-byte granules and no proxy fence came after."""
        if self.any_foreign and self.foreign[granules].any():
            wrong = 16 * int(granules.reshape(-1)[np.argmax(self.foreign[granules].reshape(-1))])
            raise Trap(f"no fence.proxy.async between an ordinary write and an asynchronous {does}, offset {wrong}")

    def start_landing(self, offset: Array, bytes_: int) -> Array:
        """Mark the destination of a copy as unfinished; the words marked are given back to `end_landing`."""
        self.check(offset, bytes_, True)
        words: Array = ((offset >> 2)[:, None] + np.arange(max(1, bytes_ >> 2))).reshape(-1)
        np.add.at(self.landing, words, 1)
        self.landings += len(words)
        return words

    def end_landing(self, words: Array) -> None:
        """The copy of these words is finished."""
        np.subtract.at(self.landing, words, 1)
        self.landings -= len(words)

    def start_reading(self, granules: Array) -> None:
        """A matrix product reads these 16-byte granules, each named once, until `end_reading`."""
        self.reading[granules] += 1
        self.readers += 1

    def end_reading(self, granules: Array) -> None:
        """The product is finished."""
        self.reading[granules] -= 1
        self.readers -= 1


class LocalMemory:
    """Local memory of a group of threads: `[threads, bytes]`."""

    def __init__(self, threads: int, size: int) -> None:
        self._content = np.full((threads, size), 0xFF, np.uint8)

    def _index(self, thread: Array, offset: Array, bytes_: int) -> tuple[Array, Array]:
        _aligned(offset, bytes_, "local")
        if len(offset) and (int(offset.min()) < 0 or int(offset.max()) + bytes_ > self._content.shape[1]):
            raise Trap(f"local access out of bounds: {bytes_} bytes of {self._content.shape[1]}")
        return thread[:, None], offset[:, None] + np.arange(bytes_)

    def load(self, thread: Array, offset: Array, dtype: DType, count: int) -> Array:
        """`[n, count]` elements."""
        raw: Any = self._content[self._index(thread, offset, dtype.itemsize * count)]
        return np.ascontiguousarray(raw).view(dtype)

    def store(self, thread: Array, offset: Array, data: Array) -> None:
        """Write `[n, count]` elements."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)
        self._content[self._index(thread, offset, raw.shape[1])] = raw
