// Accesses to shared and Tensor Memory that nothing orders, and in grid.hpp to global memory, found in whatever order
// threads run: the causality order of a cluster's threads in vector clocks, and who used which bytes last. The rules
// are those of cupymla_lab/interpret/causality.py and shadow.py, with a column more for what each thread gives the
// Tensor Core; docs/emulation.md says where they differ.
//
// A column stands for one line of doings: of a thread itself, of its tensor operations, of its bulk stores, of its
// cp.async, of what one mbarrier counts. A stamp is a moment in it. Three planes say of every column up to which stamp
// a thread sees what was done (kSeen), as far as a proxy fence made it known to asynchronous operations (kFenced), and
// up to which it knows that it is over (kPast). A fourth one is for waits that could miss their phase; see waits.hpp.
//
// Source: PTX ISA 9.0, "Memory Consistency Model", "Async proxy", "tcgen05 Memory Consistency Model". Vector clocks:
// Mattern 1989; epochs of accesses: Flanagan and Freund, "FastTrack", 2009.
#pragma once

#include <array>

#include "runtime.hpp"
#include "waits.hpp"

namespace machine {

constexpr uint32_t kGroup = 128;  // threads of a warpgroup

enum Plane : uint32_t { kSeen, kFenced, kPast, kBefore };
constexpr uint32_t kPlanes = 4;
constexpr int kAnyone = -1;

inline uint32_t rank_of(uint32_t address) { return address >> 24; }
inline uint32_t offset_of(uint32_t address) { return address & 0xffffffu; }

struct Knowledge {
  std::array<std::vector<uint32_t>, kPlanes> planes;
  uint64_t version = 0;  // another one where anything was learnt

  uint32_t at(Plane plane, uint32_t column) const {
    const auto& stamps = planes[plane];
    return column < stamps.size() ? stamps[column] : 0;
  }
  void learn(Plane plane, uint32_t column, uint32_t stamp);
  void merge(const Knowledge& other);
  void merge(Plane plane, const Knowledge& other);
  void merge(Plane to, Plane from);
  void clear();
  bool empty() const { return planes[kPast].empty() && planes[kBefore].empty(); }
};

// What a thread of a warpgroup saw, and knew to be fenced, when it issued a product; the least that all of them did.
struct Shown {
  std::vector<uint32_t> seen, fenced;
};
struct View {
  std::vector<uint32_t> seen, fenced;
  static bool knows(const std::vector<uint32_t>& stamps, uint32_t by, uint32_t stamp) {
    return by < stamps.size() && stamps[by] >= stamp;
  }
};

// What threads of several clusters know, by clusters: of the threads of each.
using Gift = std::map<uint32_t, Knowledge>;

// What arrivals handed to a barrier, by the CTA that they came from and whether their scope was the cluster.
struct Releases {
  struct Entry {
    int rank;
    bool wide;
    Knowledge pending, done;
  };
  std::vector<Entry> entries;

  Knowledge& pending(int rank, bool wide);
  void complete();
  // What a wait takes; as hardware does, of arrivals out of scope, what is over and what is fenced off for other
  // proxies.
  void give(Knowledge& to, int rank, uint32_t order, bool as_hardware) const;
  uint32_t done(Plane plane, uint32_t column) const;
};

struct TrackedBarrier {
  Releases releases;
  uint32_t column = 0;            // of what copies bring that it counts
  uint32_t phase = 0, first = 0;  // completed phases; how many of them before it was initialised
  uint32_t maker = 0, made = 0, line = 0;
  bool alive = false;
  Waits waits;
};

// A barrier at which threads wait for one another: a named one, the cluster's, a warp's. `pending` is of the
// generation, `done` of those before it.
struct TrackedMeeting {
  uint32_t generation = 0;
  Knowledge pending, done;
};

struct Mark {
  uint32_t column, stamp, line;
};

// Readers of one place since its last write, where they are many: threads by warps, and what is no thread.
struct Readers {
  struct Warp {
    uint32_t first, mask;
    uint32_t stamp[32], line[32];  // of the lanes in `mask`
    Warp(uint32_t first, uint32_t mask) : first(first), mask(mask) {}
  };
  std::vector<Warp> warps;
  std::vector<Mark> others;
};

// The last accesses to one unit of shared memory.
struct Cell {
  uint32_t writer, written, writer_line, reader, read, reader_line;
};

struct TrackedCta {
  std::vector<Cell> cells;
  std::vector<Cell> columns;  // of Tensor Memory, each in four quarters of the lanes
  std::vector<std::unique_ptr<TrackedBarrier>> barriers;  // by offset / 8
  std::map<uint32_t, Mark> visits;           // by columns: uses of this memory from other CTAs
  Mark last_visit = {};
  Knowledge parting;
  uint32_t left = 0;
};

// Of one cluster.
class Causality {
 public:
  Causality(Cta* const* ctas, uint32_t count, uint32_t cluster, bool as_hardware, uint32_t unit);

  bool as_hardware() const { return as_hardware_; }
  uint32_t cluster() const { return cluster_; }
  uint32_t now() const { return moment_; }
  uint32_t number(const Thread& t) const { return t.cta->rank * padded_ + t.index; }
  std::string thread(uint32_t number) const;
  void access(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes, Access how);
  void initialise(Thread& t, uint32_t barrier);
  void end(Thread& t, uint32_t barrier);
  // No mbarrier lies in some bytes.
  void require_data(Thread& t, uint32_t address, uint32_t bytes);
  // `copied`: told by a copy, whose bytes are there when the phase that counts them is over; see write_later.
  void require_initialised(Thread& t, uint32_t barrier, bool copied = false);
  void arrive(Thread& t, uint32_t barrier, uint32_t order);
  void complete(uint32_t rank, uint32_t offset);
  // A thread has tested an mbarrier and found its phase not over; it has waited for it.
  void test(Thread& t, uint32_t barrier);
  void wait(Thread& t, uint32_t barrier, uint32_t order);
  // The phase in progress of an mbarrier will end behind where the thread is now, whatever else it tells.
  void hold(Thread& t, uint32_t barrier);
  // These lanes of the thread's warp are all here.
  void gather(Thread& t, uint32_t lanes);
  void fence(Thread& t);
  void fence_proxy(Thread& t);
  void meet(Thread& t, TrackedMeeting& meeting, uint32_t generation, bool alone);
  void part(Thread& t, TrackedMeeting& meeting, uint32_t generation);
  // A thread changes its registers; all warps of a warpgroup have to meet between two changes (PTX ISA, "setmaxnreg").
  void change_registers(Thread& t);
  TrackedMeeting& meeting(const void* barrier) { return meetings_[barrier]; }
  void leave(Thread& t);

  // Asynchronous operations: what they write counts at an mbarrier, what they read until somebody waited for them.
  void write_later(Thread& t, uint32_t address, uint32_t bytes, uint32_t barrier, bool ordinary);
  void read_later(Thread& t, uint32_t address, uint32_t bytes, uint32_t barrier);
  void landed(uint32_t barrier, int rank);
  void read_by_tensor(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes);
  void read_by_store(Thread& t, uint32_t address, uint32_t bytes);
  // A commit is issued: its number. It is carried out: tells a barrier, and after all of them is forgotten.
  // A column of Tensor Memory in one quarter of the lanes, used by a thread or by what it gives the Tensor Core.
  void tensor_memory(Thread& t, uint32_t rank, uint32_t quarter, uint32_t column, bool writes, bool by_tensor);
  void allocated(uint32_t rank, uint32_t first, uint32_t count);
  uint64_t commit(Thread& t, uint32_t barrier, uint32_t mask);
  void hand(uint32_t barrier, uint64_t commit);
  void drop(uint64_t commit);
  void close_group(Thread& t);
  void wait_group(Thread& t, uint32_t newest);
  // Global memory; see grid.hpp. The group of bulk stores that a thread has open; since when one is over, 0: it is not.
  uint32_t open_stores(const Thread& t) const { return own_[number(t)].stamps[kBulk]; }
  uint32_t store_over(uint32_t thread, uint32_t group) const;
  void wait_stores(Thread& t, uint32_t newest);
  void fence_wide(Thread& t);
  bool knows_of(Thread& t, Plane plane, uint32_t cluster, uint32_t by, uint32_t stamp) const;
  // What a strong operation hands on, all that the thread knows or knew at its last fence, and what one takes.
  Gift gift(Thread& t, bool releases);
  void take(Thread& t, const Gift& gift, bool acquires);
  // Products of a warpgroup (wgmma.hpp): what a thread shows when it issues one, what all knew, what one reads from its
  // issue until all four warps have waited for it, and that a thread has waited.
  std::shared_ptr<const Shown> show(Thread& t);
  std::shared_ptr<const View> view_of(const std::vector<std::shared_ptr<const Shown>>& shown) const;
  void read_by_group(Thread& t, const View& view, uint64_t number, uint32_t offset, uint32_t bytes);
  void wait_products(Thread& t, uint32_t number);
  void write_by_async(Thread& t, uint32_t address, uint32_t bytes);
  void close_async(Thread& t);
  // cp.async.mbarrier.arrive: the moment of the copies so far; they have landed, and the arrival is here.
  uint32_t arrive_async(Thread& t, uint32_t barrier);
  void landed_async(Thread& t, uint32_t barrier, uint32_t stamp);
  void wait_async(Thread& t, uint32_t newest);

 private:
  enum Doer : uint32_t { kTensor, kBulk, kAsync, kCounted, kForeign, kProducts };
  struct Extra {
    Doer doer;
    uint32_t thread;
  };
  // What a thread has besides its knowledge: columns for others that work for it (0: none yet), their stamps.
  struct Own {
    Knowledge known, behind_fence, behind_wide;
    std::unique_ptr<Gift> taken;  // with relaxed operations since the last fence
    std::vector<uint32_t> stores_over;
    std::vector<uint32_t> async_groups;  // the last stamp of the copies in each
    uint32_t columns[3] = {}, stamps[3] = {1, 1, 1};
    std::shared_ptr<const Shown> shown;  // of that version
    uint64_t shown_version = 0;
    std::vector<uint32_t> register_changes;  // their moments
    uint32_t started = 0;  // ranks of CTAs that it knows to have started, as bits
    uint64_t gathered = 0;  // nothing in kBefore has changed since that call of `gather`
  };

  uint32_t column(Doer doer, uint32_t thread);
  uint32_t own_column(uint32_t thread, Doer doer);
  uint32_t column_of_warp(uint32_t warp);
  bool over(uint32_t thread, uint32_t column, uint32_t stamp);
  bool knows(uint32_t thread, Plane plane, uint32_t by, uint32_t stamp) const {
    return (by == thread && plane != kFenced) || (pipe_ != ~0u && (by == pipe_ || by / 32 == thread / 32)) ||
           own_[thread].known.at(plane, by) >= stamp;
  }
  const Knowledge& release(uint32_t thread);
  TrackedBarrier* barrier(uint32_t address);
  Waits::Event next_event(Thread& t);
  void require_turn(Thread& t, uint32_t barrier, const TrackedBarrier& found, uint32_t phases, uint32_t ago);
  Cell* cells(uint32_t rank, uint32_t offset, uint32_t bytes, uint32_t& count);
  void require_written(Thread& t, uint32_t rank, const Cell& cell, bool asynchronous);
  [[noreturn]] void require_any(Thread& t, uint32_t rank, const Cell& cell);
  void require_free(Thread& t, uint32_t rank, const Cell& cell, bool atomic);
  void note_read(Thread& t, Cell& cell, uint32_t column, uint32_t stamp);
  void note_write(Cell& cell, uint32_t column, uint32_t stamp, uint32_t line, uint32_t flags);
  void visit(uint32_t rank, uint32_t from, Mark mark);
  void require_started(uint32_t thread, uint32_t rank);
  void require_fenced(Thread& t, uint32_t rank, const Cell& cell);
  void read(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes, uint32_t column, uint32_t stamp);
  uint32_t block(uint32_t cluster);
  void receive(Thread& t, const Gift& gift);
  std::string doer(uint32_t column) const;
  std::string place(uint32_t rank, const Cell& cell) const;
  template <typename Look>
  void each(const Mark& what, uint32_t thread, Cell* cell, uint32_t count, const Look& look);

  // While Tensor Memory is looked at: the column of operations that the pipe of the Tensor Core keeps in order; threads
  // of a warp use Tensor Memory together then.
  uint32_t pipe_ = ~0u;
  bool as_hardware_;
  uint32_t cluster_, unit_, padded_, threads_, moment_ = 1, count_;
  std::vector<Own> own_;
  std::vector<Extra> extras_;
  std::map<uint32_t, uint32_t> foreign_;  // the first column of the threads of another cluster
  std::vector<TrackedCta> ctas_;
  std::vector<Cta*> members_;
  std::map<const void*, TrackedMeeting> meetings_;  // by what their threads count in
  std::map<uint64_t, Knowledge> commits_;  // what those under way will hand on
  uint64_t commit_count_ = 0, gathered_ = 0;
  std::vector<std::unique_ptr<Readers>> readers_;
  std::vector<uint32_t> free_readers_;
  std::vector<uint32_t> warps_;  // columns of the products that each warp has waited for, 0: none yet
  // The last access: places next to each other mostly were used alike before, and are alike behind it.
  struct {
    Mark what;
    uint32_t thread;
    Cell before, after;
  } last_ = {};
};

}  // namespace machine
