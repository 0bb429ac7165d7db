// Tensor Memory: allocation, tcgen05.ld and tcgen05.st, and who touched which columns (PTX ISA 9.0, "Tensor Memory",
// "tcgen05.alloc", "tcgen05.ld", "tcgen05.st", "Memory Consistency Model for 5th generation of TensorCore operations").
#pragma once

#include "failure.cuh"

namespace cupymla::emulate {

constexpr uint32_t kPoison = 0x7fc0deadu;  // a NaN that no kernel computes

// A TMEM address: lane in the high half, column in the low half. Addresses of scale factors carry more bits on top.
__device__ __forceinline__ uint32_t lane_of(uint32_t address) { return address >> 16; }
__device__ __forceinline__ uint32_t column_of(uint32_t address) { return address & 0xffffu; }

__device__ __forceinline__ uint32_t read_tmem(const Cta& cta, uint32_t lane, uint32_t column) {
  return fresh(cta.tmem[lane][column]);
}
__device__ __forceinline__ void write_tmem(Cta& cta, uint32_t lane, uint32_t column, uint32_t value) {
  __stcg(&cta.tmem[lane][column], value);
}

// Every tcgen05 instruction of a kernel names the same .cta_group.
__device__ __forceinline__ void require_group(uint32_t cta_group, uint32_t site) {
  const uint32_t before = atomicCAS(&own_cta().cta_group, 0u, cta_group);
  if (before != 0 && before != cta_group) fail(kMixedCtaGroups, site, before, cta_group);
  if (cta_group == 2 && hardware::cluster_size() % 2) fail(kPairMissing, site, hardware::cluster_size());
}

__device__ __forceinline__ void require_allocated(const Cta& cta, uint32_t column, uint32_t count, uint32_t site) {
  bool sound = column + count <= kColumns;
  for (uint32_t unit = column / kAllocationUnit; sound && unit <= (column + count - 1) / kAllocationUnit; ++unit) {
    sound = watched(cta.owner[unit]) != 0;
  }
  if (!sound) fail(kColumnsNotAllocated, site, column, count);
}

// Who touched what ---------------------------------------------------------------------------------------------

enum TouchKind : uint32_t { kTouchLoad = 1, kTouchOther = 0 };

__device__ __forceinline__ uint64_t touch_word(uint64_t clock, uint32_t kind, uint32_t thread) {
  return clock << 16 | kind << 15 | thread;
}

// This thread's access comes after another's: that one has to have fenced it off before synchronising, and this one
// after.
__device__ __forceinline__ void require_fences(uint64_t earlier, uint32_t me, uint32_t column, uint32_t site) {
  const uint32_t other = static_cast<uint32_t>(earlier) & 0x3fffu;
  const uint64_t clock = earlier >> 16;
  const bool loaded = (earlier >> 15) & 1;
  if (earlier == 0) return;
  if (other == me) {
    const uint64_t open = loaded ? own_thread().load_clock : 0;
    if (open && open <= clock) fail(kLoadNotWaited, site, column);
    return;
  }
  Thread& them = thread_of(other);
  if (watched(them.before_clock) <= clock) fail(kBeforeFenceMissing, site, column, other);
  if (loaded && watched(them.before_load_clock) <= clock) fail(kLoadNotWaited, site, column, other);
  if (own_thread().after_clock <= clock) fail(kAfterFenceMissing, site, column, other);
}

// Checks and records an access to columns of one quarter of the lanes; a caller in a warp takes every `step`-th, the
// Tensor Core all of them.
__device__ __forceinline__ void touch(uint32_t rank, uint32_t quarter, uint32_t column, uint32_t count, uint32_t first,
                                      uint32_t step, bool writes, uint32_t kind, uint32_t site) {
  for (uint32_t i = first; i < count && column + i < kColumns; i += step) {
    races::tensor_memory(rank, quarter, column + i, writes, step == 1);
  }
  Cta& cta = cta_of(rank);
  if (!checking(kCheckTcgen05)) return;
  const uint32_t me = cluster_thread();
  const uint64_t word = touch_word(next_clock(), kind, me);
  for (uint32_t i = first; i < count && column + i < kColumns; i += step) {
    Touch& place = cta.touches[column + i][quarter];
    require_fences(watched(place.write), me, column + i, site);
    if (writes) require_fences(watched(place.read), me, column + i, site);
    *const_cast<volatile uint64_t*>(writes ? &place.write : &place.read) = word;
  }
}

// Allocation ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ int find_columns(const Cta& cta, uint32_t units) {
  for (uint32_t first = 0; first + units <= kColumns / kAllocationUnit; first += units) {
    bool free = true;
    for (uint32_t i = 0; i < units; ++i) free = free && watched(cta.owner[first + i]) == 0;
    if (free) return static_cast<int>(first);
  }
  return -1;
}

__device__ __forceinline__ uint32_t take_columns(Cta& cta, uint32_t columns, uint32_t site) {
  const uint32_t units = columns / kAllocationUnit;
  const uint64_t start = hardware::global_nanoseconds();
  int first = -1;
  while (first < 0) {
    stop_if_asked();
    if (atomicCAS(&cta.allocation_lock, 0u, 1u) == 0) {
      first = find_columns(cta, units);
      if (first >= 0) {
        const uint32_t id = ++cta.allocations;
        for (uint32_t i = 0; i < units; ++i) {
          *const_cast<volatile uint32_t*>(&cta.owner[first + i]) = id;
        }
        atomicAdd(&cta.live_allocations, 1u);
      }
      __threadfence();
      atomicExch(&cta.allocation_lock, 0u);
    }
    if (first < 0 && out_of_patience(start)) fail(kAllocationFull, site, columns);
  }
  return static_cast<uint32_t>(first) * kAllocationUnit;
}

// tcgen05.alloc: the warp's first lane allocates, all lanes fill what it got with NaN.
__device__ __forceinline__ void allocate(uint32_t destination, uint32_t columns, uint32_t cta_group, uint32_t site) {
  __syncwarp();
  Cta& cta = own_cta();
  require_group(cta_group, site);
  const bool power = columns >= 32 && columns <= 512 && (columns & (columns - 1)) == 0;
  if (!power) fail(kAllocationSize, site, columns);
  if (watched(cta.permit_given)) fail(kAllocationAfterRelinquish, site);
  uint32_t column = 0;
  if (hardware::lane_index() == 0) column = take_columns(cta, columns, site);
  column = __shfl_sync(0xffffffffu, column, 0);
  for (uint32_t i = hardware::lane_index(); i < columns * kLanes; i += 32) {
    write_tmem(cta, i / columns, column + i % columns, kPoison);
    __stcg(&cta.pending[i / columns][column + i % columns], kPoison);
  }
  if (hardware::lane_index() == 0) races::allocated(hardware::cluster_rank(), column, columns);
  for (uint32_t i = hardware::lane_index(); i < columns * 4; i += 32) {
    cta.touches[column + i / 4][i % 4] = Touch{0, 0};
  }
  __threadfence();
  __syncwarp();
  if (hardware::lane_index() == 0) {
    races::write(destination, 4);
    hardware::store_shared_u32(destination, column);
  }
  note_progress();
}

// tcgen05.dealloc: whatever others did with the columns has to be fenced off, as for a write to them.
__device__ __forceinline__ void deallocate(uint32_t address, uint32_t columns, uint32_t cta_group, uint32_t site) {
  __syncwarp();
  Cta& cta = own_cta();
  const uint32_t rank = hardware::cluster_rank(), lane = hardware::lane_index();
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    touch(rank, quarter, column_of(address), columns, lane, 32, true, kTouchOther, site);
  }
  __syncwarp();
  if (hardware::lane_index() != 0) return;
  require_group(cta_group, site);
  const uint32_t first = column_of(address), units = columns / kAllocationUnit;
  const bool aligned = lane_of(address) == 0 && first % kAllocationUnit == 0 && first + columns <= kColumns && units;
  const uint32_t id = aligned ? watched(cta.owner[first / kAllocationUnit]) : 0;
  if (id == 0) fail(kDeallocationUnknown, site, address, columns);
  uint32_t size = 0;
  bool whole = first == 0 || watched(cta.owner[first / kAllocationUnit - 1]) != id;
  for (uint32_t unit = 0; unit < kColumns / kAllocationUnit; ++unit) size += watched(cta.owner[unit]) == id;
  if (!whole || size != units) fail(kDeallocationSize, site, columns, size * kAllocationUnit);
  for (uint32_t unit = 0; unit < units; ++unit) {
    *const_cast<volatile uint32_t*>(&cta.owner[first / kAllocationUnit + unit]) = 0;
  }
  atomicSub(&cta.live_allocations, 1u);
  __threadfence();
}

// Loads and stores ---------------------------------------------------------------------------------------------

enum MoveShape : uint32_t { k32x32b = 0, k16x64b = 1, k16x128b = 2, k16x256b = 3, k16x32bx2 = 4 };

// How a tcgen05.ld or .st spreads columns over registers, as the translator encodes it: shape in bits 0-2, log2 of
// the multiplicity in 3-6, 16-bit packing in 7, the distance of the second half in 8-23.
struct Form {
  uint32_t shape, count, packed, split;
  __device__ __forceinline__ explicit Form(uint32_t word)
      : shape(word & 7), count(1u << (word >> 3 & 15)), packed(word >> 7 & 1), split(word >> 8 & 0xffff) {}

  __device__ __forceinline__ uint32_t registers() const {
    return shape == k16x256b ? 4 * count : shape == k16x128b ? 2 * count : count;
  }
  // Columns of the first half, the only one but for 16x32bx2.
  __device__ __forceinline__ uint32_t columns() const {
    const uint32_t wide = shape == k16x256b ? 8 : shape == k16x128b ? 4 : shape == k16x64b ? 2 : 1;
    return wide * count << packed;
  }
  __device__ __forceinline__ uint32_t lane(uint32_t thread, uint32_t index) const {
    switch (shape) {
      case k32x32b: return thread;
      case k16x64b: return thread / 4 + thread % 2 * 8;
      case k16x128b: return thread / 4 + index % 2 * 8;
      case k16x256b: return thread / 4 + index / 2 % 2 * 8;
      default: return thread % 16;
    }
  }
  __device__ __forceinline__ uint32_t column(uint32_t thread, uint32_t index) const {
    switch (shape) {
      case k32x32b: return index << packed;
      case k16x64b: return (index * 2 + thread / 2 % 2) << packed;
      case k16x128b: return (index / 2 * 4 + thread % 4) << packed;
      case k16x256b: return (index / 4 * 8 + thread % 4 * 2 + index % 2) << packed;
      default: return (index << packed) + thread / 16 * split;
    }
  }
};

// The lanes that execute this instruction together: those of the warp that have not ended. On a GPU they wait for each
// other, as an instruction that is .sync.aligned has them do; without it lanes that are apart could come to the same
// place of the model from different instructions and be taken for one. On the host each lane is by itself.
__device__ __forceinline__ uint32_t gathered_lanes() {
#ifdef CUPYMLA_HOST_MACHINE
  return __activemask();
#else
  return __ballot_sync(0xffffffffu, true);
#endif
}

// A warp reaches the 32 lanes of its place in its warpgroup and names their first, or for 16-lane shapes their 17th.
__device__ __forceinline__ void require_move(Cta& cta, uint32_t address, const Form& form, bool writes,
                                             uint32_t site) {
  stop_if_asked();
  const uint32_t window = thread_index() / 32 % 4 * 32, lane = lane_of(address), column = column_of(address);
  const bool half = form.shape != k32x32b && lane == window + 16;
  if (lane != window && !half) fail(kLaneWindow, site, lane, window);
  const uint32_t warp = gathered_lanes();
  if (__match_any_sync(warp, address) != warp) fail(kAddressesDiffer, site, address);
  require_allocated(cta, column, form.columns(), site);
  const uint32_t me = hardware::lane_index(), kind = writes ? kTouchOther : kTouchLoad;
  touch(hardware::cluster_rank(), window / 32, column, form.columns(), me, 32, writes, kind, site);
  if (form.shape == k16x32bx2 && form.split) {
    require_allocated(cta, column + form.split, form.columns(), site);
    touch(hardware::cluster_rank(), window / 32, column + form.split, form.columns(), me, 32, writes, kind, site);
  }
}

__device__ __forceinline__ void load_tmem(uint32_t* out, uint32_t address, uint32_t word, uint32_t site) {
  Cta& cta = own_cta();
  const Form form(word);
  const uint32_t thread = hardware::lane_index(), lane = lane_of(address), column = column_of(address);
  Thread& mine = own_thread();
  if (mine.load_clock == 0) mine.load_clock = watched(launch().clock) + 1;
  require_move(cta, address, form, false, site);
  for (uint32_t i = 0; i < form.registers(); ++i) {
    const uint32_t x = lane + form.lane(thread, i), y = column + form.column(thread, i);
    uint32_t value = read_tmem(cta, x, y);
    if (form.packed) value = (value & 0xffffu) | read_tmem(cta, x, y + 1) << 16;
    out[i] = value;
  }
}

template <typename Write>
__device__ __forceinline__ void each_word(uint32_t address, const Form& form, const Write& write) {
  const uint32_t thread = hardware::lane_index(), lane = lane_of(address), column = column_of(address);
  for (uint32_t i = 0; i < form.registers(); ++i) {
    write(i, lane + form.lane(thread, i), column + form.column(thread, i));
  }
}

// Applies what this thread stored and has not waited for.
__device__ __forceinline__ void apply_stores() {
  Cta& cta = own_cta();
  Thread& mine = own_thread();
  const StoreEntry* entries = cta.stores[thread_index()];
  for (uint32_t entry = 0; entry < mine.stores; ++entry) {
    const Form form(watched(entries[entry].form));
    each_word(watched(entries[entry].address), form, [&](uint32_t, uint32_t lane, uint32_t column) {
      for (uint32_t half = 0; half <= form.packed; ++half) {
        write_tmem(cta, lane, column + half, fresh(cta.pending[lane][column + half]));
      }
    });
  }
  mine.stores = 0;
  __threadfence();
}

__device__ __forceinline__ void store_tmem(const uint32_t* in, uint32_t address, uint32_t word, bool deferred,
                                           uint32_t site) {
  Cta& cta = own_cta();
  const Form form(word);
  require_move(cta, address, form, true, site);
  Thread& mine = own_thread();
  if (mine.stores == kPendingStores) apply_stores();
  each_word(address, form, [&](uint32_t i, uint32_t lane, uint32_t column) {
    for (uint32_t half = 0; half <= form.packed; ++half) {
      const uint32_t value = form.packed ? in[i] >> (16 * half) & 0xffffu : in[i];
      if (deferred) {
        __stcg(&cta.pending[lane][column + half], value);
      } else {
        write_tmem(cta, lane, column + half, value);
      }
    }
  });
  if (deferred) {
    StoreEntry& entry = cta.stores[thread_index()][mine.stores++];
    *const_cast<volatile uint32_t*>(&entry.address) = address;
    *const_cast<volatile uint32_t*>(&entry.form) = word;
  }
  __threadfence();
}

}  // namespace cupymla::emulate
