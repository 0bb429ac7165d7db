// For each row of kv, which entries of the queries name it. A counting sort in shared memory.
//
// A cluster takes a range of rows and a chunk of queries, each of its CTAs an eighth of the chunk's entries:
//
//   count   how many of these entries name each row of the range, how many a row below it
//   begin   an eighth of the range's rows: where each CTA's entries of a row go, from the counts of all; `row_ends`
//   place   the same entries again, each into its row's part of `entry_list`
//
// Clusters of other ranges read the chunk's entries again, out of L2. The order inside a part is left to chance; who
// reads it puts it right.
#pragma once

#include "cluster.cuh"
#include "cluster_gather.cuh"
#include "integer_reduction.cuh"
#include "registers.cuh"
#include "types.cuh"
#include "warp.cuh"

namespace cupymla {

constexpr int kListThreads = 512;
constexpr uint32_t kListCtas = 8;           // of a cluster, the most that every GPU takes
constexpr uint32_t kMostRangeRows = 24576;  // two CTAs fit a multiprocessor
constexpr int kListPartEntries = 512;       // of a query, which a warp takes at a time
constexpr int kLaneEntries = kListPartEntries / 32;

struct ListStorage {
  int32_t counts[kMostRangeRows];            // by row: this CTA's entries; then where its next one goes
  int32_t ends[kMostRangeRows / kListCtas];  // of the eighth of rows that this CTA looks after
  int32_t eighths[kListCtas];                // entries of each eighth of the rows
  uint32_t lower;                            // entries that name a row below the range
  int32_t warp_sums[kListThreads / 32];
};
static_assert(sizeof(ListStorage) <= 113 * 1024, "two CTAs share a multiprocessor");

// A chunk of queries, and where its lists go. `Chunk` has
//
//   params       the operator's record, which has `indices`, its strides and `topk` under these names
//   first_query  the chunk's first query, and
//   queries      how many there are
//   kv_rows()    rows, below 2^31
//   query(n)     query n of all: its place, its entries that can be valid and its token limit, as SparseQuery has them
//   first_row(q) the row of token 0, for such a query
//   row_ends()   where to write where each row's part of the list ends
//   entry_list() the list, with room for every entry of the chunk
//   wait()       what a thread does before its first access to global memory (grid_dependency.cuh)
template <typename Chunk>
struct EntryLists {
  ListStorage& storage;
  const Chunk& chunk;
  const uint32_t range_rows, first_row, rows;     // of all ranges but the last; of this one
  const uint32_t rank = cluster_rank(), eighth;   // rows that a CTA looks after
  const int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ __forceinline__ EntryLists(ListStorage& storage, const Chunk& chunk)
      : storage(storage),
        chunk(chunk),
        range_rows((chunk.kv_rows() + gridDim.x / kListCtas - 1) / (gridDim.x / kListCtas)),
        first_row(min(blockIdx.x / kListCtas * range_rows, chunk.kv_rows())),
        rows(min(range_rows, chunk.kv_rows() - first_row)),
        eighth((rows + kListCtas - 1) / kListCtas) {}

  __device__ __forceinline__ void run() const {
    for (uint32_t row = threadIdx.x; row < rows; row += kListThreads) storage.counts[row] = 0;
    if (threadIdx.x == 0) storage.lower = 0;
    __syncthreads();  // zeros are there
    chunk.wait();
    uint32_t lower = 0;
    go_through<false>(lower);
    meet();  // everybody has counted
    begin_rows(lower);
    meet();  // counts are where rows begin, but for what lies before each eighth
    end_rows();
    __syncthreads();  // where rows begin
    go_through<true>(lower);
  }

 private:
  static __device__ __forceinline__ void meet() {
    cluster_arrive();
    cluster_wait();
  }

  // Counts, or places, this CTA's entries. A warp takes a part of a query at a time.
  template <bool kPlace>
  __device__ __forceinline__ void go_through(uint32_t& lower) const {
    const auto& params = chunk.params;
    const uint32_t parts = (static_cast<uint32_t>(params.topk) + kListPartEntries - 1) / kListPartEntries;
    const uint32_t all = chunk.queries * parts;
    uint32_t counts = smem_address(storage.counts);
    make_opaque(counts);
#pragma unroll 1
    for (uint32_t item = rank + threadIdx.x / 32 * kListCtas; item < all; item += kListThreads / 32 * kListCtas) {
      const uint32_t number = item / parts;
      const auto query = chunk.query(chunk.first_query + number);
      const int32_t begin = static_cast<int32_t>(item % parts) * kListPartEntries;
      // The tokens of the range are [low, low + width), those of lower ones [0, below).
      const int32_t shift = chunk.first_row(query) - static_cast<int32_t>(first_row);
      const int32_t limit = static_cast<int32_t>(query.token_limit), low = max(-shift, 0);
      const uint32_t width = max(min(limit, static_cast<int32_t>(rows) - shift) - low, 0), below = min(limit, low);
      if (begin >= query.entries || (width == 0 && (kPlace || below == 0))) continue;
      const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
      int32_t named[kLaneEntries];
      const bool whole = begin + kListPartEntries <= query.entries && reinterpret_cast<uint64_t>(indices) % 16 == 0;
      read(named, indices, begin, query.entries, whole);
#pragma unroll
      for (int i = 0; i < kLaneEntries; ++i) {
        if constexpr (!kPlace) lower += static_cast<uint32_t>(named[i]) < below ? 1 : 0;
        const bool wanted = static_cast<uint32_t>(named[i]) - static_cast<uint32_t>(low) < width;
        const uint32_t count = counts + (static_cast<uint32_t>(named[i]) + static_cast<uint32_t>(shift)) * 4;
        named[i] = -1;
        if (wanted) named[i] = static_cast<int32_t>(shared_add(count, 1));
      }
      if constexpr (kPlace) {
        const int32_t first = static_cast<int32_t>(number) * params.topk + begin;
        store(named, first + lane * (whole ? 4 : 1), whole);
      }
    }
  }

  // A lane's entries of a part, -1 for those that there are not: four neighbours each time, or every 32nd.
  __device__ __forceinline__ void read(int32_t (&named)[kLaneEntries], const int32_t* indices, int32_t begin,
                                       int32_t entries, bool whole) const {
    if (whole) {
      const int32_t* own = indices + begin + lane * 4;
#pragma unroll
      for (int i = 0; i < kLaneEntries; i += 4) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(own) + i * 8);
        named[i] = four.x, named[i + 1] = four.y, named[i + 2] = four.z, named[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneEntries; ++i) {
        const int32_t entry = begin + i * 32 + lane;
        named[i] = entry < entries ? __ldg(indices + entry) : -1;
      }
    }
  }

  // Puts entries where `places` says: those that `read` has read, of which `first` is the first one's number.
  __device__ __forceinline__ void store(const int32_t (&places)[kLaneEntries], int32_t first, bool whole) const {
    const int32_t entries = static_cast<int32_t>(chunk.queries) * chunk.params.topk;
    int32_t* list = chunk.entry_list();
#pragma unroll
    for (int i = 0; i < kLaneEntries; ++i) {
      // Another kernel may have changed the indices since they were counted: then lists are wrong, but nothing else.
      const bool inside = static_cast<uint32_t>(places[i]) < static_cast<uint32_t>(entries);
      if (inside) list[places[i]] = first + (whole ? i / 4 * 128 + i % 4 : i * 32);
    }
  }

  // Makes the counts of this CTA's eighth of the rows, in all CTAs, where their entries begin, counted from the first
  // row of the eighth.
  __device__ __forceinline__ void begin_rows(uint32_t lower) const {
    const uint32_t counts = smem_address(storage.counts);
    const uint32_t first = min(rank * eighth, rows), end = min(first + eighth, rows);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int32_t before = 0;  // entries of all rows already done
#pragma unroll 1
    for (uint32_t base = first; base < end; base += kListThreads) {
      const uint32_t row = base + threadIdx.x;
      int32_t each[kListCtas], all = 0;
#pragma unroll
      for (uint32_t cta = 0; cta < kListCtas; ++cta) {
        each[cta] = row < end ? cluster_load_int32(cluster_address(counts + row * 4, cta)) : 0;
        all += each[cta];
      }
      const int32_t inclusive = static_cast<int32_t>(warp_scan(static_cast<uint32_t>(all), lane));
      if (lane == 31) storage.warp_sums[warp] = inclusive;
      __syncthreads();  // sums are there
      int32_t begin = before + inclusive - all;
      for (int other = 0; other < kListThreads / 32; ++other) {
        if (other < warp) begin += storage.warp_sums[other];
        before += storage.warp_sums[other];
      }
      if (row < end) {
#pragma unroll
        for (uint32_t cta = 0; cta < kListCtas; ++cta) {
          cluster_store_float(cluster_address(counts + row * 4, cta), __int_as_float(begin));
          begin += each[cta];
        }
        storage.ends[row - first] = begin;
      }
      __syncthreads();  // sums are read
    }
    if (threadIdx.x < kListCtas) {
      cluster_store_float(cluster_address(smem_address(storage.eighths + rank), threadIdx.x), __int_as_float(before));
    }
    const uint32_t of_warp = __reduce_add_sync(0xffffffffu, lower);
    if (lane < static_cast<int>(kListCtas)) {
      cluster_add_relaxed(cluster_address(smem_address(&storage.lower), static_cast<uint32_t>(lane)), of_warp);
    }
  }

  // Adds what lies before each eighth, and writes where the rows of this CTA's eighth end.
  __device__ __forceinline__ void end_rows() const {
    int32_t* row_ends = chunk.row_ends() + first_row;
    int32_t before = static_cast<int32_t>(storage.lower);
#pragma unroll 1
    for (uint32_t cta = 0; cta < kListCtas; ++cta) {
      const uint32_t first = min(cta * eighth, rows), end = min(first + eighth, rows);
      for (uint32_t row = first + threadIdx.x; row < end; row += kListThreads) {
        storage.counts[row] += before;
        if (cta == rank) row_ends[row] = before + storage.ends[row - first];
      }
      before += storage.eighths[cta];
    }
  }
};

}  // namespace cupymla
