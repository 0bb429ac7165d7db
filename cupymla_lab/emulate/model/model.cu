// What translated kernels call. Every function takes the site of the instruction it stands for, which Python turns
// back into the line of the PTX; a site that the launch has removed does nothing.
//
// Pointer operands are generic addresses of the caller's local memory. Nothing here uses shared memory.
#include "common/entry.cuh"
#include "barrier.cuh"
#include "convert.cuh"
#include "warp.cuh"

extern "C" __device__ cupymla::emulate::Launch cupymla_emulate_launch = {};

namespace cupymla::emulate {

constexpr uint32_t kFirstSmemByte = 1024;  // below lies what the system keeps for itself

__device__ __forceinline__ bool removed(uint32_t site) { return site == launch().removed; }

__device__ __forceinline__ void require_sound(DescriptorDefect defect, uint64_t descriptor, uint32_t site) {
  switch (defect) {
    case kSound: return;
    case kDefectReserved: return fail(kDescriptorReserved, site, descriptor);
    case kDefectSwizzle: return fail(kDescriptorSwizzle, site, descriptor);
    case kDefectAbsolute: return fail(kDescriptorAbsolute, site, descriptor);
    default: return fail(kInternal, site, descriptor);
  }
}

__device__ __forceinline__ void require_sound_instruction(DescriptorDefect defect, const Mma& mma, uint32_t site) {
  switch (defect) {
    case kSound: return;
    case kDefectReserved: return fail(kInstructionReserved, site, mma.instruction, mma.kind);
    case kDefectFormat: return fail(kInstructionFormat, site, mma.instruction, mma.kind);
    case kDefectShape: return fail(kInstructionShape, site, mma.instruction, mma.kind, mma.cta_group);
    case kDefectTranspose: return fail(kInstructionTranspose, site, mma.instruction, mma.kind);
    case kDefectScaleId: return fail(kScaleFactorId, site, mma.instruction, mma.kind);
    case kDefectSparse: return fail(kInstructionSparse, site, mma.instruction, mma.kind);
    default: return fail(kInternal, site, mma.instruction);
  }
}

// Columns that a product reads or writes in one CTA: allocated, and fenced against other threads' use of them.
__device__ __forceinline__ void use_columns(uint32_t rank, uint32_t address, uint32_t count, bool writes,
                                            uint32_t site) {
  Cta& cta = cta_of(rank);
  const uint32_t column = column_of(address) & 0x1ffu;
  require_allocated(cta, column, count, site);
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    touch(rank, quarter, column, count, 0, 1, writes, kTouchOther, site);
  }
}

__device__ __forceinline__ void require_operands(const Mma& mma, const Shape& shape, uint32_t site) {
  Matrix matrix;
  if (!mma.a_in_tmem) require_sound(decode_matrix(mma.a, shape.a_transposed, matrix), mma.a, site);
  require_sound(decode_matrix(mma.b, shape.b_transposed, matrix), mma.b, site);
  if (mma.a_in_tmem && shape.a_transposed) fail(kInstructionTranspose, site, mma.instruction, mma.kind);
  if (mma.scale_log2 && mma.kind > kF16) fail(kScaleInput, site, mma.kind);
  if (mma.a_shifted && shape.m < 128) fail(kShiftedRows, site, shape.m);
  const uint32_t lane = lane_of(mma.d);
  const bool half_used = mma.cta_group == 1 && shape.m == 64 && !mma.ws;
  if (lane != 0 && !(half_used && lane == 16)) fail(kLaneAlignment, site, lane, shape.m);
  if (mma.a_in_tmem && lane_of(static_cast<uint32_t>(mma.a)) != lane) {
    fail(kLaneAlignment, site, lane_of(static_cast<uint32_t>(mma.a)), shape.m);
  }
}

// Which B a weight-stationary product reads, as its collector buffer would keep it.
__device__ __forceinline__ uint64_t collector_form(const Mma& mma, const Shape& shape) {
  return 1u | mma.kind << 1 | shape.b << 4 | static_cast<uint32_t>(shape.b_transposed) << 8 | shape.n << 9 |
         shape.max_shift << 18 | static_cast<uint32_t>(shape.b_negated) << 24;
}

// A collector buffer holds B until it is given up or filled again. The hardware may read B from it or from memory, so
// what comes out is the same only where the buffer's content is the matrix that the instruction names.
__device__ __forceinline__ void use_collector(const Mma& mma, const Shape& shape, uint32_t site) {
  Collector& buffer = own_cta().collectors[mma.collector];
  const uint64_t form = collector_form(mma, shape);
  if (mma.collector_use == kCollectorUse || mma.collector_use == kCollectorLastUse) {
    if (watched(buffer.form) == 0) fail(kCollectorEmpty, site, mma.collector);
    const uint64_t held = watched(buffer.descriptor);
    if (held != mma.b || watched(buffer.form) != form) fail(kCollectorOther, site, mma.collector, held, mma.b);
  }
  const bool keep = mma.collector_use == kCollectorFill || mma.collector_use == kCollectorUse;
  *const_cast<volatile uint64_t*>(&buffer.descriptor) = keep ? mma.b : 0;
  *const_cast<volatile uint64_t*>(&buffer.form) = keep ? form : 0;
}

__device__ __forceinline__ void require_column_mask(const Mma& mma, const Shape& shape, uint32_t site) {
  ColumnMask mask;
  if (decode_column_mask(mma.column_mask, mask) != kSound) fail(kColumnMaskReserved, site, mma.column_mask);
  const uint32_t most = shape.m == 32 && shape.max_shift == 32 ? 16 : shape.max_shift;
  if (mask.shift > most) fail(kColumnShift, site, mask.shift, most, shape.m);
}

// Metadata of a sparse A: its place is known where all lanes of a CTA hold rows. B has twice the elements along K, for
// which a swizzle of 32 bytes has no room.
__device__ __forceinline__ void require_sparse(const Mma& mma, const Shape& shape, uint32_t site) {
  if (!mma.ws && shape.m != 128 * mma.cta_group) fail(kSparseShape, site, shape.m, mma.cta_group);
  const bool halves = mma.kind == kF16 || mma.kind == kTf32;
  if (shape.selector > halves) fail(kSparseSelector, site, shape.selector, mma.kind);
  if (lane_of(mma.metadata) || column_of(mma.metadata) % 2) fail(kSparseAddress, site, mma.metadata);
  Matrix matrix;
  decode_matrix(mma.b, shape.b_transposed, matrix);
  if (!shape.b_transposed && matrix.span_bytes == 32) fail(kDescriptorSwizzle, site, mma.b);
  for (uint32_t half = 0; half < mma.cta_group; ++half) {
    const uint32_t rank = rank_of_half(mma, half), column = column_of(mma.metadata) + shape.selector;
    require_allocated(cta_of(rank), column, halves ? 1 : 2, site);
    use_columns(rank, column, halves ? 1 : 2, false, site);
  }
}

__device__ __noinline__ void issue_mma(const uint64_t* words, uint32_t site) {
  stop_if_asked();
  const Mma mma(words, cluster_thread());
  require_group(mma.cta_group, site);
  Shape shape;
  const auto defect = decode_instruction(mma.kind, mma.cta_group, mma.vector, mma.instruction, shape, mma.ws,
                                         mma.sparse);
  require_sound_instruction(defect, mma, site);
  require_operands(mma, shape, site);
  if (mma.sparse) require_sparse(mma, shape, site);
  if (mma.ws) {
    require_column_mask(mma, shape, site);
    use_collector(mma, shape, site);
  }
  const uint32_t columns = shape.n / splits(mma, shape);
  for (uint32_t half = 0; half < mma.cta_group; ++half) {
    const uint32_t rank = rank_of_half(mma, half);
    if (mma.a_in_tmem) use_columns(rank, static_cast<uint32_t>(mma.a), 8, false, site);
    if (shape.block) {
      use_columns(rank, mma.a_scale, (shape.m / mma.cta_group + 31) / 32, false, site);
      use_columns(rank, mma.b_scale, (columns + 31) / 32, false, site);
    }
    use_columns(rank, mma.d, columns, true, site);
  }
#ifdef CUPYMLA_HOST_MACHINE
  announce_mma(mma, shape);
#endif
  issue(kMma, site, words, 10);
}

__device__ __noinline__ void issue_copy(const uint64_t* words, uint32_t site) {
  stop_if_asked();
  const TmemCopy copy(words);
  require_group(copy.cta_group, site);
  Matrix matrix;
  require_sound(decode_matrix(copy.descriptor, false, matrix), copy.descriptor, site);
  const bool anywhere = copy.shape == k4x256b;
  if (lane_of(copy.address) != 0 && !anywhere) fail(kLaneAlignment, site, lane_of(copy.address), copy.rows());
  const uint32_t rank = hardware::cluster_rank();
  for (uint32_t half = 0; half < copy.cta_group; ++half) {
    use_columns(rank ^ half, copy.address, copy.columns(), true, site);
  }
#ifdef CUPYMLA_HOST_MACHINE
  announce_copy(copy);
#endif
  issue(kTmemCopy, site, words, 3);
}

// Fills this CTA's shared memory with NaN of every format, so that reading what nobody wrote is seen. By the CTA's own
// window, as a kernel's stores go, so that they come behind these for certain.
__device__ __forceinline__ void poison_shared_memory() {
  const uint32_t end = kFirstSmemByte + hardware::total_smem_bytes();
  for (uint32_t at = kFirstSmemByte + 4 * thread_index(); at + 4 <= end; at += 4 * block_threads()) {
    hardware::store_shared_u32(hardware::map_to_rank(at, hardware::cluster_rank()), 0xffffffffu);
  }
  hardware::fence_proxy_async();
}

// A generic-proxy store to shared memory.
__device__ __forceinline__ void note_shared_store(uint32_t address, uint32_t bytes) {
  if (!checking(kCheckProxy)) return;
  address = kept_address(address);
  const uint64_t word = watched(launch().clock) << 16 | cluster_thread();
  Cta& cta = cta_of(rank_of_address(address));
  const uint32_t offset = offset_of_address(address);
  for (uint32_t at = offset / 16; at <= (offset + bytes - 1) / 16 && at < kSmemBytes / 16; ++at) {
    *const_cast<volatile uint64_t*>(&cta.smem_writes[at]) = word;
  }
}

}  // namespace cupymla::emulate

using namespace cupymla::emulate;
namespace hardware = cupymla::hardware;
using cupymla::uint32_t;
using cupymla::uint64_t;

#define CUPYMLA_MODEL extern "C" __device__ __noinline__

// Threads ---------------------------------------------------------------------------------------------------------

CUPYMLA_MODEL void cupymla_emulate_enter() {
  const uint32_t ctas = gridDim.x * gridDim.y * gridDim.z;
  if (launch().cta_count < ctas) fail(kTooManyCtas, 0, ctas, launch().cta_count);
  stop_if_asked();
  if (thread_index() == 0) note_progress();
  poison_shared_memory();
  __syncthreads();
}

CUPYMLA_MODEL void cupymla_emulate_leave(uint32_t site) { leave(site); }

// Tensor Memory -----------------------------------------------------------------------------------------------------

CUPYMLA_MODEL void cupymla_emulate_alloc(uint32_t destination, uint32_t columns, uint32_t group, uint32_t site) {
  stop_if_asked();
  allocate(destination, columns, group, site);
}

CUPYMLA_MODEL void cupymla_emulate_dealloc(uint32_t address, uint32_t columns, uint32_t group, uint32_t site) {
  stop_if_asked();
  deallocate(address, columns, group, site);
}

CUPYMLA_MODEL void cupymla_emulate_relinquish(uint32_t group, uint32_t site) {
  stop_if_asked();
  require_group(group, site);
  *const_cast<volatile uint32_t*>(&own_cta().permit_given) = 1;
}

CUPYMLA_MODEL void cupymla_emulate_ld(uint64_t out, uint32_t address, uint32_t form, uint32_t site) {
  load_tmem(reinterpret_cast<uint32_t*>(out), address, form, site);
}

CUPYMLA_MODEL void cupymla_emulate_st(uint64_t in, uint32_t address, uint32_t form, uint32_t site) {
  stop_if_asked();
  store_tmem(reinterpret_cast<const uint32_t*>(in), address, form, deferred(), site);
}

CUPYMLA_MODEL void cupymla_emulate_wait_ld(uint32_t site) {
  if (!removed(site)) own_thread().load_clock = 0;
}

CUPYMLA_MODEL void cupymla_emulate_wait_st(uint32_t site) {
  if (!removed(site)) apply_stores();
}

CUPYMLA_MODEL void cupymla_emulate_fence_before(uint32_t site) {
  if (removed(site)) return;
  Thread& mine = own_thread();
  const uint64_t now = next_clock();
  __threadfence();
  *const_cast<volatile uint64_t*>(&mine.before_clock) = now;
  const uint64_t open = mine.load_clock;
  *const_cast<volatile uint64_t*>(&mine.before_load_clock) =
      open == 0 ? now : open - 1 > mine.before_load_clock ? open - 1 : mine.before_load_clock;
  __threadfence();
}

CUPYMLA_MODEL void cupymla_emulate_fence_after(uint32_t site) {
  if (!removed(site)) own_thread().after_clock = next_clock();
}

// The Tensor Core's pipe --------------------------------------------------------------------------------------------

CUPYMLA_MODEL void cupymla_emulate_mma(uint64_t words, uint32_t site) {
  issue_mma(reinterpret_cast<const uint64_t*>(words), site);
}

CUPYMLA_MODEL void cupymla_emulate_cp(uint64_t words, uint32_t site) {
  issue_copy(reinterpret_cast<const uint64_t*>(words), site);
}

CUPYMLA_MODEL void cupymla_emulate_shift(uint32_t address, uint32_t group, uint32_t site) {
  stop_if_asked();
  require_group(group, site);
  if (lane_of(address) % 32) fail(kLaneAlignment, site, lane_of(address), 32);
  const uint32_t rank = hardware::cluster_rank();
  for (uint32_t half = 0; half < group; ++half) use_columns(rank ^ half, address, 8, true, site);
  const uint64_t words[2] = {address, group};
  issue(kShift, site, words, 2);
}

CUPYMLA_MODEL void cupymla_emulate_commit(uint32_t barrier, uint32_t mask, uint32_t group, uint32_t site) {
  stop_if_asked();
  if (removed(site)) return;
  require_group(group, site);
  barrier = kept_address(barrier);
  require_barriers(barrier, mask, site);
  Thread& mine = own_thread();
  *const_cast<volatile uint64_t*>(&mine.before_clock) = next_clock();
  const uint64_t words[3] = {barrier, mask, races::commit(barrier, mask)};
  issue(kCommit, site, words, 3);
}

// Copies ------------------------------------------------------------------------------------------------------------

// A use of global memory for which, in a dependent launch, the thread must have waited for the primary grid, of which the
// host machine keeps account.
CUPYMLA_MODEL void cupymla_emulate_grid_ahead(uint32_t site) {
#ifdef CUPYMLA_HOST_MACHINE
  if (!machine::current->released) fail(kGridAhead, site);
#endif
}

// words: number of the copy, barrier, multicast mask or 0, operands; of these the first two are the destination and,
// once more, the barrier. Where all is shared memory, source and bytes follow.
CUPYMLA_MODEL void cupymla_emulate_load(uint64_t words, uint32_t count, uint32_t site) {
  stop_if_asked();
  auto* operands = reinterpret_cast<uint64_t*>(words);
  operands[1] = kept_address(static_cast<uint32_t>(operands[1]));
  require_barriers(static_cast<uint32_t>(operands[1]), static_cast<uint32_t>(operands[2]), site);
  const auto number = static_cast<uint32_t>(operands[0]);
  if (number & (kBetweenCtas | kAtOnce)) {
    const uint32_t first = offset_of_address(static_cast<uint32_t>(operands[5]));
    for (uint32_t at = 0; at < static_cast<uint32_t>(operands[6]); at += 16) {
      require_proxy_fence(hardware::cluster_rank(), first + at, cluster_thread(), site);
    }
  }
#ifdef CUPYMLA_HOST_MACHINE
  machine::Thread& thread = *machine::current;
  const bool from_global = !(number & (kBetweenCtas | kAtOnce));
  if (from_global && !thread.released &&
      !machine::reads_constants(thread, cupymla_emulate_dispatch, number & kCopyNumber, operands + 3)) {
    fail(kGridAhead, site);
  }
  machine::announce(thread, cupymla_emulate_dispatch, number & kCopyNumber, operands + 3);
#else
  operands[3] = cluster_form(operands[3]);
  operands[4] = cluster_form(operands[4]);
  if (number & kAtOnce) {
    cupymla_emulate_dispatch(number & kCopyNumber, operands + 3);
    note_progress();
    return;
  }
#endif
  issue(kLoad, site, operands, count);
}

// words: `kTryCancel`, barrier, mask of the cluster's CTAs or 0, where the answer goes.
CUPYMLA_MODEL void cupymla_emulate_try_cancel(uint64_t words, uint32_t site) {
  stop_if_asked();
  auto* operands = reinterpret_cast<uint64_t*>(words);
  operands[1] = kept_address(static_cast<uint32_t>(operands[1]));
  operands[3] = kept_address(static_cast<uint32_t>(operands[3]));
  require_barriers(static_cast<uint32_t>(operands[1]), static_cast<uint32_t>(operands[2]), site);
  if (watched(own_cta().refused)) fail(kAskedAgain, site);
  for (uint32_t rank = 0; operands[2] && rank < hardware::cluster_size(); ++rank) {
    if (watched(cta_of(rank).exited) == block_threads()) fail(kPeerGone, site);
  }
#ifdef CUPYMLA_HOST_MACHINE
  announce_answer(static_cast<uint32_t>(operands[1]), static_cast<uint32_t>(operands[2]),
                  static_cast<uint32_t>(operands[3]));
#endif
  issue(kLoad, site, operands, 4);
}

CUPYMLA_MODEL void cupymla_emulate_query_cancel(uint32_t answer, uint32_t site) {
  if (answer > 1) fail(kNoAnswer, site, answer);
  if (answer == 0) *const_cast<volatile uint32_t*>(&own_cta().refused) = 1;
}

// words: tensor map, barrier, multicast mask or 0, destination, flags, coordinates; see `Tile`.
CUPYMLA_MODEL void cupymla_emulate_tile(uint64_t words, uint32_t site) {
  stop_if_asked();
  auto* operands = reinterpret_cast<uint64_t*>(words);
  operands[1] = kept_address(static_cast<uint32_t>(operands[1]));
  operands[3] = kept_address(static_cast<uint32_t>(operands[3]));
  const Tile tile(operands);
  const TileInfo* info = find_map(tile.map);
  if (info == nullptr) fail(kTensorMapUnknown, site, launch().map_count);
  if (tile.gathers && (info->rank != 2 || info->box[1] != 1)) fail(kFourRowBox, site, info->rank, info->box[1]);
  if (tile.mask == 0) require_barrier(tile.barrier, true, site);
#ifdef CUPYMLA_HOST_MACHINE
  announce_tile(tile, *info);
#endif
  issue(kTile, site, operands, 10);
}

// words: number of the copy, address in shared memory, bytes if known, operands.
CUPYMLA_MODEL void cupymla_emulate_store(uint64_t words, uint32_t count, uint32_t site) {
  stop_if_asked();
  const auto* operands = reinterpret_cast<const uint64_t*>(words);
  const uint32_t first = offset_of_address(static_cast<uint32_t>(operands[1]));
  const auto bytes = static_cast<uint32_t>(operands[2]);
  for (uint32_t at = 0; at < bytes; at += 16) {
    require_proxy_fence(hardware::cluster_rank(), first + at, cluster_thread(), site);
  }
#ifdef CUPYMLA_HOST_MACHINE
  machine::announce(*machine::current, cupymla_emulate_dispatch, static_cast<uint32_t>(operands[0]), operands + 3);
#endif
  issue_store(operands, count, site);
}

// words: those of `cupymla_emulate_store`, the operands being those of `Tile`.
CUPYMLA_MODEL void cupymla_emulate_scatter(uint64_t words, uint32_t site) {
  stop_if_asked();
  auto* operands = reinterpret_cast<uint64_t*>(words);
  operands[6] = kept_address(static_cast<uint32_t>(operands[6]));
  const Tile tile(operands + 3);
  const TileInfo* info = find_map(tile.map);
  if (info == nullptr) fail(kTensorMapUnknown, site, launch().map_count);
  if (info->rank != 2 || info->box[1] != 1) fail(kFourRowBox, site, info->rank, info->box[1]);
  const uint32_t bytes = 4 * info->box[0] * info->element_bits / 8, first = offset_of_address(tile.destination);
  for (uint32_t at = 0; at < bytes; at += 16) {
    require_proxy_fence(hardware::cluster_rank(), first + at, cluster_thread(), site);
  }
#ifdef CUPYMLA_HOST_MACHINE
  announce_scatter(tile, *info);
#endif
  issue_store(operands, 13, site);
}

CUPYMLA_MODEL void cupymla_emulate_group_end(uint32_t site) {
  if (removed(site)) return;
  races::close_group();
  own_thread().groups++;
}

CUPYMLA_MODEL void cupymla_emulate_group_wait(uint32_t newest, uint32_t site) {
  stop_if_asked();
  if (removed(site)) return;
  run_groups(newest);
  races::wait_group(newest, site);
}

// Barriers and fences -------------------------------------------------------------------------------------------------

CUPYMLA_MODEL void cupymla_emulate_barrier_init(uint32_t barrier) { note_barrier_init(kept_address(barrier)); }
CUPYMLA_MODEL void cupymla_emulate_barrier_end(uint32_t barrier) { note_barrier_end(kept_address(barrier)); }
CUPYMLA_MODEL void cupymla_emulate_poll(uint32_t barrier, uint32_t site) { poll(kept_address(barrier), site); }
CUPYMLA_MODEL void cupymla_emulate_begin_wait(uint32_t barrier) { begin_wait(kept_address(barrier)); }
CUPYMLA_MODEL void cupymla_emulate_arrived() { take_time_elsewhere(); }
CUPYMLA_MODEL void cupymla_emulate_polled(uint32_t barrier) { polled(barrier); }

CUPYMLA_MODEL uint32_t cupymla_emulate_named_barrier(uint32_t id, uint32_t count, uint32_t waits, uint32_t vote,
                                                     uint32_t site) {
  if (removed(site)) return 0;
  return named_barrier(id, count, (waits & 1) != 0, (waits & 2) != 0, vote != 0, site);
}

CUPYMLA_MODEL void cupymla_emulate_cluster_arrive(uint32_t site) {
  cluster_arrive(site);
}

CUPYMLA_MODEL void cupymla_emulate_cluster_wait(uint32_t site) {
  if (!removed(site)) cluster_wait(site);
}

CUPYMLA_MODEL void cupymla_emulate_proxy_fence(uint32_t site) {
  if (removed(site)) return;
  Thread& mine = own_thread();
  const uint64_t now = next_clock();
  *const_cast<volatile uint64_t*>(&mine.proxy_clock) = now;
  *const_cast<volatile uint64_t*>(&mine.init_clock) = now;
  __threadfence();
}

CUPYMLA_MODEL void cupymla_emulate_init_fence(uint32_t site) {
  if (removed(site)) return;
  *const_cast<volatile uint64_t*>(&own_thread().init_clock) = next_clock();
  __threadfence();
}

CUPYMLA_MODEL void cupymla_emulate_shared_store(uint32_t address, uint32_t bytes) {
  note_shared_store(address, bytes);
}

// Matrices of bytes -------------------------------------------------------------------------------------------------

CUPYMLA_MODEL void cupymla_emulate_load_bytes(uint64_t out, uint32_t address, uint32_t form) {
  load_byte_matrices(reinterpret_cast<uint32_t*>(out), address, form);
}

CUPYMLA_MODEL void cupymla_emulate_store_bytes(uint64_t in, uint32_t address, uint32_t form) {
  if (store_byte_matrices(reinterpret_cast<const uint32_t*>(in), address, form)) note_shared_store(address, 16);
}

// Arithmetic ----------------------------------------------------------------------------------------------------------

CUPYMLA_MODEL uint32_t cupymla_emulate_convert(uint32_t flags, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                               uint32_t random) {
  const uint32_t sources[4] = {a, b, c, d};
  return convert(flags, sources, random);
}

CUPYMLA_MODEL uint32_t cupymla_emulate_reduce(uint32_t word, uint32_t mask, uint32_t flags) {
  return reduce_floats(word, mask, flags);
}

// st.bulk: clears shared memory.
CUPYMLA_MODEL void cupymla_emulate_clear(uint32_t address, uint32_t bytes) {
  races::write(address, bytes);
  for (uint32_t at = 0; at + 4 <= bytes; at += 4) hardware::store_shared_u32(address + at, 0);
}

#ifdef CUPYMLA_HOST_MACHINE
// For wgmma, which the host machine carries out.
extern "C" int32_t cupymla_emulate_unfenced(uint32_t rank, uint32_t offset, uint32_t issuer) {
  return unfenced(rank, offset, issuer);
}
#endif

// setmaxnreg, of which the host machine keeps account.
CUPYMLA_MODEL void cupymla_emulate_registers(uint32_t count, uint32_t grows, uint32_t site) {
#ifdef CUPYMLA_HOST_MACHINE
  stop_if_asked();
  machine::set_registers(*machine::current, count, grows != 0);
#endif
}

CUPYMLA_LAUNCH_FACTS(launch_bytes = sizeof(Launch), cta_bytes = sizeof(Cta), failure_bytes = sizeof(Failure));
