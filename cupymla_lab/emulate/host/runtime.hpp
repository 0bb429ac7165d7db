// The machine that recompiled kernels run on: every CUDA thread is a fiber of one operating system thread, shared
// memory is ordinary memory, copies by TMA happen a random while after they were issued. A seed decides the order of
// everything, so that a run can be repeated.
//
// Addresses: generic, global, local and parameter addresses are the host's own. A shared-memory address has 32 bits,
// the CTA's rank in its cluster in bits 24-31 and the offset below; the first 1024 bytes belong to the system.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

using uint128_t = unsigned __int128;

namespace machine {

constexpr uint32_t kSystemBytes = 1024;
constexpr uint64_t kNanosecondsPerSwitch = 100;
constexpr uint64_t kStackBytes = 256 * 1024;

struct Thread;
struct Cta;
struct Products;
struct Warpgroup;
class Causality;

// One rendezvous of the lanes of a warp that share a mask.
struct Meeting {
  uint32_t arrived = 0;
  uint64_t generation = 0;
  uint64_t values[32] = {}, results[32] = {};
};

struct Warp {
  uint32_t ended = 0;
  float fragments[2][32][24] = {};  // of the mma.sync at hand and of the one before
  std::map<uint64_t, Meeting> meetings;
  Thread* lanes[32] = {};
};

struct Barrier {
  uint64_t generation = 0;
  uint32_t arrived = 0;
};

// What threads that came to a named barrier in one generation have said of it.
struct NamedBarrier {
  uint64_t generation = ~0ull;
  uint32_t expected = 0;
  bool reduces = false;
};

struct Cta {
  uint32_t rank = 0, position[3] = {}, in_cluster[3] = {};
  uint32_t smem_bytes = 0, dynamic_bytes = 0, ended = 0, threads = 0;
  unsigned char* smem = nullptr;
  std::vector<Warp> warps;
  Barrier barriers[16];
  NamedBarrier named[16];
  uint32_t loose_copies = 0;  // cp.async of threads that ended without a wait for them
  Cta** cluster = nullptr;
  uint32_t cluster_size = 1, cluster_extent[3] = {1, 1, 1};
  Barrier* cluster_barrier = nullptr;
  uint32_t* cluster_ended = nullptr;
  uint64_t* cluster_issued = nullptr;  // see note_issue
  Causality* causality = nullptr;      // where races are looked for; see races.hpp
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;  // see wgmma.hpp
  // What setmaxnreg grants: registers per thread of a warp that nobody has, and those of each warp.
  uint32_t free_registers = 0;
  uint64_t granted = 0;  // how often
  std::vector<uint32_t> registers;

  Cta();
  Cta(Cta&&) noexcept;
  ~Cta();
};

// What a copy does with what is there: nothing, or adds to it.
enum Operation : uint32_t { kReplace, kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };
enum Number : uint32_t { kU32, kS32, kU64, kS64, kF32, kF64, kF16, kBf16 };
struct Reduction {
  Operation operation = kReplace;
  Number number = kU32;
};
// Combines `bytes` of numbers with those that are there.
void reduce(void* to, const void* from, uint32_t bytes, Reduction how);

struct Copy {
  uint64_t issued = 0;
  bool done = false;
  void (*perform)(Copy&) = nullptr;
  Thread* thread = nullptr;
  uint64_t map = 0, global = 0;
  int32_t at[5] = {};
  uint32_t shared = 0, barrier = 0, mask = 0, bytes = 0, from = 0;
  uint64_t data[2] = {};
  Reduction reduction;
  Cta* cta = nullptr;
};

// What a thread that does not run waits for: that a word changes, that something is issued, that time passes.
struct Rest {
  const uint64_t* word = nullptr;
  uint64_t mask = 0, value = 0;
  const uint64_t* events = nullptr;
  uint64_t seen = 0, until = 0;

  bool over(uint64_t now) const {
    return now >= until || (word && (*word & mask) != value) || (events && *events != seen);
  }
};

// A cp.async that has not been carried out.
struct AsyncCopy {
  unsigned char* to;
  const unsigned char* from;
  uint32_t size, read;
  bool done;
};

// The scheduler looks at each thread in each round: what it needs of one is in one line of the cache.
struct alignas(64) Thread {
  bool resting = false, ended = false;
  bool races = false;       // whether races are looked for
  bool announcing = false;  // its bulk copies are not carried out but looked at for races
  bool looking = false;     // the same, for whether all that they read is `constant`
  bool constant = true;
  uint32_t line = 0;        // of the translated PTX, at what races.hpp looks at
  void* stack_pointer = nullptr;
  Rest rest;
  bool polling = false;  // tests an mbarrier whose phase is incomplete
  bool released = true;  // in a dependent launch: has waited for the primary grid
  bool guarded = false;  // uses of global memory are looked at
  uint32_t id[3] = {}, lane = 0, index = 0;
  uint32_t grid[3] = {}, block[3] = {};
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  const unsigned char* parameters = nullptr;
  uint32_t fuel = 256;
  uint64_t random = 1;
  // The mbarrier whose phase this thread has last found incomplete, and what was issued for it.
  const uint64_t *barrier_word = nullptr, *issued = nullptr;
  uint64_t barrier_seen = 0, issued_seen = 0, patience = 1;
  bool at_cluster_barrier = false;
  std::unique_ptr<unsigned char[]> stack;
  std::deque<std::vector<std::shared_ptr<Copy>>> groups;
  std::vector<std::shared_ptr<Copy>> open_group;
  std::deque<AsyncCopy> async_copies;  // not carried out, the oldest first
  uint64_t async_first = 0;            // the number of the first of them
  std::deque<uint64_t> async_groups;   // where the groups end that were not waited for
  uint32_t products = 0;  // mma.sync so far
  std::unique_ptr<Products> wgmma;
  bool watching = false;  // registers of wgmma are looked at when they are used

  Thread();
  ~Thread();
};

extern Thread* current;  // the one that runs

struct Ended {};
struct Broken {
  std::string what;
};

[[noreturn]] void broken(const char* format, ...);
void yield(Thread& t);
void rest(Thread& t, const Rest& until);
// For some rounds of all threads, or until those bits of the word change.
void rest_until(Thread& t, const uint64_t* word, uint64_t mask, uint64_t value, uint64_t rounds);
// Something is issued that will complete a phase of that barrier, in some CTA of the cluster.
constexpr uint32_t kIssueSlots = 64;
inline uint64_t& issued_for(const Cta& cta, uint32_t barrier) { return cta.cluster_issued[barrier / 8 % kIssueSlots]; }
inline void note_issue(const Thread& t, uint32_t barrier) { ++issued_for(*t.cta, barrier); }
// Until the barrier that this thread has just tested changes, or something is issued that may complete it; for a while.
void rest_at_barrier(Thread& t);
[[noreturn]] void end_thread(Thread& t);
uint64_t now();
uint64_t last_work();  // when a thread last did something else than wait
// Until a word is another one, which something has to bring about: when all stand still for long, it ends in a failure.
void stand(Thread& t, const uint64_t& word, const char* what);
void sleep(Thread& t, uint32_t nanoseconds);
uint64_t draw(Thread& t);

inline void step(Thread& t) {
  if (--t.fuel == 0) t.fuel = 256, yield(t);
}
// Where other threads may have something to say: lets them, now and then. That is no work: whoever waits for a word
// in memory to change does this.
inline void breathe(Thread& t) {
  if ((draw(t) & 31) == 0) rest(t, Rest{});
}

// Takes a cluster of the grid that has not begun out of it; 0 where there is none. `first` is its first CTA.
uint32_t take_cluster(uint32_t* first);

// Memory --------------------------------------------------------------------------------------------------------

// `one` is any CTA of the cluster.
inline unsigned char* shared(const Cta& one, uint32_t address, uint32_t bytes) {
  const uint32_t rank = address >> 24, offset = address & 0xffffffu;
  if (rank >= one.cluster_size) broken("shared address %#x names rank %u", address, rank);
  Cta& cta = *one.cluster[rank];
  if (offset < kSystemBytes || offset + bytes > cta.smem_bytes) broken("shared address %#x is outside", address);
  if (offset % (bytes ? bytes : 1)) broken("shared address %#x is not aligned to %u", address, bytes);
  return cta.smem + offset;
}

inline unsigned char* shared(Thread& t, uint32_t address, uint32_t bytes) { return shared(*t.cta, address, bytes); }

// An address of .shared::cta, which is the thread's own CTA's.
inline uint32_t own_address(Thread& t, uint32_t address) {
  if (address >> 24 != t.cta->rank) {
    broken("address %#x, which mapa made, in an access to .shared::cta and not .shared::cluster", address);
  }
  return address;
}
inline unsigned char* own_shared(Thread& t, uint32_t address, uint32_t bytes) {
  return shared(t, own_address(t, address), bytes);
}
inline uint32_t map_to_rank(Thread& t, uint32_t address, uint32_t rank) {
  if (rank >= t.cta->cluster_size) broken("mapa to rank %u of a cluster of %u CTAs", rank, t.cta->cluster_size);
  return rank << 24 | (address & 0xffffffu);
}

inline uint32_t shared_address(Thread& t, uint32_t offset) { return t.cta->rank << 24 | offset; }

// The shared address of a generic one; 0 in no CTA of the cluster.
inline uint32_t to_shared(Thread& t, uint64_t generic) {
  for (uint32_t rank = 0; rank < t.cta->cluster_size; ++rank) {
    const uint64_t base = reinterpret_cast<uint64_t>(t.cta->cluster[rank]->smem);
    if (generic >= base && generic < base + t.cta->cluster[rank]->smem_bytes) {
      return rank << 24 | static_cast<uint32_t>(generic - base);
    }
  }
  return 0;
}
inline uint64_t from_shared(Thread& t, uint32_t address) {
  return reinterpret_cast<uint64_t>(t.cta->cluster[address >> 24]->smem + (address & 0xffffffu));
}
inline bool in_own_shared(Thread& t, uint64_t generic) {
  const uint32_t found = to_shared(t, generic);
  return found != 0 && found >> 24 == t.cta->rank;
}

template <typename T>
inline T load(const void* place) {
  T value;
  std::memcpy(&value, place, sizeof(T));
  return value;
}
template <typename T>
inline void store(void* place, T value) {
  std::memcpy(place, &value, sizeof(T));
}
inline void require_aligned(uint64_t address, uint32_t bytes) {
  if (address % bytes) broken("address %#llx is not aligned to %u", static_cast<unsigned long long>(address), bytes);
  if (address < 4096) broken("address %#llx is null", static_cast<unsigned long long>(address));
}
inline unsigned char* generic(uint64_t address, uint32_t bytes) {
  require_aligned(address, bytes);
  return reinterpret_cast<unsigned char*>(address);
}
// In a dependent launch global memory may not be used before the thread's griddepcontrol.wait, but for loads and bulk
// copies from arrays that no launch writes. What a generic address means is looked at here: shared memory of the cluster, local memory and
// parameters are free.
void require_released(Thread& t, uint64_t address, const char* instruction);
bool is_private(Thread& t, uint64_t address);
bool in_parameters(Thread& t, uint64_t address);
// What is done with global memory; kConstants: by ld.global.nc. Which of it there is, memory.hpp knows.
enum Use : uint32_t { kLoads = 1, kStores = 2, kConstants = 4 };
void use_global(Thread& t, uint64_t address, uint32_t bytes, uint32_t how, const char* instruction);
void use_bulk(uint64_t address, uint64_t bytes, uint32_t how);
inline unsigned char* global(Thread& t, uint64_t address, uint32_t bytes, uint32_t how, const char* instruction) {
  unsigned char* found = generic(address, bytes);
  if (t.guarded) use_global(t, address, bytes, how, instruction);
  return found;
}
// A variable of the module; recompiled code has a table of them.
struct Variable {
  const void* place;
  uint64_t bytes;
};
// griddepcontrol.launch_dependents.
void let_in(Thread& t);

// Races -----------------------------------------------------------------------------------------------------------

// What an arrival hands on and a wait takes: its scope is the cluster or more, it is relaxed.
enum Order : uint32_t { kClusterScope = 1, kRelaxed = 2 };
// What a thread does with shared memory; kReadTogether: its warp reads as one, so that any lane stands for the others.
enum Access : uint32_t { kRead, kReadTogether, kWrite, kAtomic };

// The same of global memory: several of these. kGridOrders: others may be ordered by it.
enum GridAccess : uint32_t { kGridReads = 1, kGridWrites = 2, kGridStrong = 4, kGridConstant = 8, kGridAcquires = 16,
                             kGridReleases = 32, kGridOrders = 64 };

// Looks for races of an access, to shared memory or, where it may be there, to global memory.
void look(Thread& t, const void* place, uint32_t bytes, Access how, uint32_t in_grid);
inline void touched(Thread& t, const void* place, uint32_t bytes, Access how, uint32_t in_grid = 0) {
  if (t.races) look(t, place, bytes, how, in_grid);
}
void look_at_grid(Thread& t, const void* place, uint32_t bytes, uint32_t how);
inline void touched_grid(Thread& t, const void* place, uint32_t bytes, uint32_t how) {
  if (t.races) look_at_grid(t, place, bytes, how);
}
// By copies, when they are issued: as a thread reads, or as TMA does; by bulk stores, which may add.
void read_global(Thread& t, uint64_t address, uint64_t bytes, bool bulk);
void write_global(Thread& t, uint64_t address, uint64_t bytes, bool adds);
// Whether the barrier.cluster.arrive of that site is relaxed, or the wait for bulk stores is for their reads.
bool is_relaxed(uint32_t site);
enum Fence : uint32_t { kFence, kWideFence, kProxyFence };
void order_fence(Thread& t, Fence what);
inline void fenced(Thread& t, Fence what) {
  if (t.races) order_fence(t, what);
}

// Numbers -------------------------------------------------------------------------------------------------------

template <typename To, typename From>
inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
// The same for a kernel's thousands of moves: a builtin takes the compiler a fifth of the whole time less.
#if defined(__has_builtin)
#if __has_builtin(__builtin_bit_cast)
#define BITS_AS(type, value) __builtin_bit_cast(type, value)
#endif
#endif
#ifndef BITS_AS
#define BITS_AS(type, value) as<type>(value)
#endif
inline float from_half(uint16_t bits) {
  const float scaled = as<float>((bits & 0x7fffu) << 13) * as<float>(0x77800000u);  // 2^112, the biases' difference
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return as<float>(as<uint32_t>(scaled) | special | (bits & 0x8000u) << 16);
}
inline uint16_t to_half(double value) { return as<uint16_t>(static_cast<_Float16>(value)); }
inline float from_bfloat(uint16_t bits) { return as<float>(static_cast<uint32_t>(bits) << 16); }
inline uint16_t to_bfloat(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = as<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
// Of a number with more bits than a float has, rounded once: what is inexact gets an odd last bit first.
inline uint16_t narrow_bf16(double value) {
  const float near = static_cast<float>(value);
  uint32_t bits = as<uint32_t>(near);
  if (value == value && std::fabs(value) < 3e38 && static_cast<double>(near) != value) {
    if (std::fabs(static_cast<double>(near)) > std::fabs(value)) --bits;
    bits |= 1;
  }
  return to_bfloat(as<float>(bits));
}
inline uint16_t narrow_f16(double value) { return value == value ? to_half(value) : 0x7fff; }
inline double wide_f16(uint32_t bits) { return from_half(static_cast<uint16_t>(bits)); }
inline double wide_bf16(uint32_t bits) { return from_bfloat(static_cast<uint16_t>(bits)); }
inline uint16_t half_of_e4m3(uint32_t code) {
  if ((code & 0x7f) == 0x7f) return 0x7fff;
  return to_half(std::ldexp(from_half(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)), 8));
}
inline uint32_t halves_of_e4m3(uint32_t codes) { return half_of_e4m3(codes) | half_of_e4m3(codes >> 8) << 16; }
inline uint32_t halves_of_e5m2(uint32_t codes) { return (codes & 0xff) << 8 | (codes & 0xff00) << 16; }
template <typename To, typename From>
inline To to_integer(From value) {
  if (value != value) return 0;
  const double low = static_cast<double>(std::numeric_limits<To>::min());
  const double high = static_cast<double>(std::numeric_limits<To>::max());
  const double number = static_cast<double>(value);
  if (number <= low) return std::numeric_limits<To>::min();
  if (number >= high) return std::numeric_limits<To>::max();
  return static_cast<To>(number);
}
// `ex2.approx`; as `strayed` in cupymla_lab/ptx/approximation.py.
float approximate_exp2(float argument);
inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.f, value) : value; }
uint32_t permute(uint32_t a, uint32_t b, uint32_t selector);
// Two narrow formats that sm_90 converts to, rounded to nearest even and saturated.
uint32_t to_e4m3(float value, bool relu);
uint32_t to_e5m2(float value, bool relu);
enum Tf32Rounding { kToEven, kAway, kToZero };
uint32_t to_tf32(float value, Tf32Rounding rounding, bool relu, bool saturates);
// A NaN of any kind beside a number gives the number: std::fmax gives NaN for one that signals, no GPU knows those.
template <typename T>
inline T extreme(T a, T b, bool largest, bool nan) {
  if (a != a || b != b) return nan || (a != a && b != b) ? static_cast<T>(NAN) : a != a ? b : a;
  return largest ? std::fmax(a, b) : std::fmin(a, b);
}
template <typename T>
inline uint32_t highest_bit(T value, bool distance) {
  constexpr int kBits = 8 * sizeof(T);
  using Plain = std::make_unsigned_t<T>;
  const auto plain = static_cast<Plain>(std::is_signed_v<T> && value < 0 ? ~value : value);
  if (plain == 0) return ~0u;
  const int at = 63 - __builtin_clzll(static_cast<unsigned long long>(plain));
  return static_cast<uint32_t>(distance ? kBits - 1 - at : at);
}
inline uint32_t bit_mask(uint32_t first, uint32_t count, bool clamps) {
  if (!clamps) first &= 31, count &= 31;
  if (first >= 32) return 0;
  return (count >= 32 ? ~0u : (1u << count) - 1u) << first;
}

// bfe and bfi: a field of that many bits, of which those past the highest one are its sign; a field put in.
template <typename T>
inline T extract_bits(T value, uint32_t at, uint32_t count) {
  using Plain = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  at &= 255, count &= 255;
  const auto plain = static_cast<Plain>(value);
  const bool sign = std::is_signed_v<T> && count && plain >> std::min(at + count - 1, kBits - 1) & 1;
  const uint32_t there = at < kBits ? std::min(count, kBits - at) : 0;
  const Plain mask = there == kBits ? static_cast<Plain>(~Plain{0}) : static_cast<Plain>((Plain{1} << there) - 1);
  const Plain field = there ? static_cast<Plain>(plain >> at & mask) : Plain{0};
  return static_cast<T>(sign ? field | static_cast<Plain>(~mask) : field);
}
template <typename T>
inline T insert_bits(T from, T into, uint32_t at, uint32_t count) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  at &= 255, count &= 255;
  const uint32_t there = at < kBits ? std::min(count, kBits - at) : 0;
  if (there == 0) return into;
  const T mask = static_cast<T>((there == kBits ? ~T{0} : (T{1} << there) - 1) << at);
  return static_cast<T>((static_cast<T>(from << at) & mask) | (into & ~mask));
}
// Quotients that no number is: by zero anything, of the least number by -1 itself.
template <typename T>
inline T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a));
  }
  return static_cast<T>(a / b);
}
template <typename T>
inline T remainder_of(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}

// Warps and CTAs --------------------------------------------------------------------------------------------------

enum Together : uint32_t { kSync, kWarpBarrier, kShuffleIndex, kShuffleUp, kShuffleDown, kShuffleXor, kMatchAny,
                           kVoteAny, kVoteAll, kBallot, kElect };
// Of a shuffle `operand` is the lane that is read.
uint64_t together(Thread& t, Together what, uint32_t mask, uint64_t value, uint32_t operand);
// shfl.sync, by its second and third operand; `inside`: the lane that it names is one of the segment.
uint32_t shuffle(Thread& t, Together what, uint32_t mask, uint32_t value, uint32_t by, uint32_t limit, bool& inside);
uint32_t elect(Thread& t, uint32_t mask);
void warp_barrier(Thread& t, uint32_t mask);
void barrier_sync(Thread& t, uint32_t id, uint32_t count, bool waits);
// A thread has come to a named barrier in that generation, where the model counts; it comes to or leaves the cluster's.
void look_at_barrier(Thread& t, uint32_t id, uint64_t generation, uint32_t expected, bool reduces);
void look_at_cluster_barrier(Thread& t, bool arrives);
uint32_t reduce_lanes(Thread& t, uint32_t mask, uint32_t value, uint32_t operation, bool is_signed);
void load_matrices(Thread& t, uint32_t* out, uint32_t address, uint32_t count, bool transposed);
void store_matrices(Thread& t, const uint32_t* in, uint32_t address, uint32_t count, bool transposed);

// mma.sync with D of 16x8: `count` registers of A and half as many of B.
enum Element : uint8_t { kHalf, kBfloat, kTf32, kE4m3, kE5m2, kSigned8, kUnsigned8 };
inline uint32_t element_bytes(Element element) {
  return element == kTf32 ? 4 : element == kHalf || element == kBfloat ? 2 : 1;
}
// Elements that lie side by side, as floats; those of 8-bit integers are exact too.
void numbers(Element element, const void* from, uint32_t count, float* out);
void multiply_16x8(Thread& t, double (&sums)[4], const uint32_t* a, const uint32_t* b, uint32_t count, Element of_a,
                   Element of_b);
uint32_t transpose_matrix(Thread& t, uint32_t word);
void copy_async(Thread& t, uint32_t to, uint64_t from, uint32_t size, uint32_t read);
void commit_async(Thread& t);
void wait_async(Thread& t, uint32_t newest);
// cp.async.mbarrier.arrive: `counts`: its arrival is one more than the barrier was made for.
void arrive_async(Thread& t, uint32_t barrier, bool counts);

// Products of a warpgroup; see wgmma.hpp ------------------------------------------------------------------------------

enum Sums : uint8_t { kSingle, kHalves, kIntegers };

// What the text of a wgmma.mma_async says: its registers by their numbers among those that products use, and the rest.
struct ProductSite {
  const uint16_t* of_d;
  uint32_t d_count;
  const uint16_t* of_a;  // nullptr: A lies in shared memory
  uint32_t a_count, columns, k, line;
  Element a, b;
  Sums sums;
  bool transposed_a, transposed_b, negated, saturates;
};
struct RegisterUse {
  uint32_t number, line;
};

void begin_products(Thread& t, uint32_t* registers, uint32_t count);
void products_fence(Thread& t);
void multiply(Thread& t, const ProductSite& site, uint64_t a, uint64_t b, bool keeps);
void commit_products(Thread& t);
void wait_products(Thread& t, uint32_t newest);
void use_registers(Thread& t, const RegisterUse* uses, uint32_t count);
// setmaxnreg.
void set_registers(Thread& t, uint32_t count, bool grows);

// mbarriers, bulk copies ----------------------------------------------------------------------------------------------

void barrier_init(Thread& t, uint32_t barrier, uint32_t count);
void barrier_end(Thread& t, uint32_t barrier);
uint64_t barrier_arrive(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes);
// An arrival by the thread itself; `order` says what it hands on.
uint64_t barrier_arrive(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes, uint32_t order);
uint64_t barrier_drop(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes, uint32_t order);
void barrier_expect(const Cta& one, uint32_t barrier, int32_t bytes);
// An arrival that something else brings about; one more that the phase waits for.
void barrier_arrive(const Cta& one, uint32_t barrier);
void barrier_expect_arrival(const Cta& one, uint32_t barrier);
// By the thread itself.
void barrier_count(Thread& t, uint32_t barrier, int32_t bytes);
inline void barrier_expect(Thread& t, uint32_t barrier, int32_t bytes) { barrier_expect(*t.cta, barrier, bytes); }
bool barrier_test(Thread& t, uint32_t barrier, uint32_t parity, uint32_t order);
void copy_tile(Thread& t, uint32_t to, uint64_t map, const int32_t* at, uint32_t rank, uint32_t barrier, uint32_t mask);
void copy_bytes(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint32_t mask);
void store_async(Thread& t, uint32_t to, const void* data, uint32_t bytes, uint32_t barrier, Reduction reduction);
// From shared memory to another CTA's.
void copy_shared(Thread& t, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, Reduction reduction);
void store_tile(Thread& t, uint64_t map, const int32_t* at, uint32_t rank, uint32_t from, Operation operation);
void store_bytes(Thread& t, uint64_t to, uint32_t from, uint32_t bytes, Reduction reduction);
// Lets a bulk copy be looked at for races when it is issued, whenever it is carried out.
void announce(Thread& t, void (*issue)(uint32_t, const uint64_t*), uint32_t number, const uint64_t* operands);
// Whether a bulk copy reads nothing but arrays that no launch writes.
bool reads_constants(Thread& t, void (*issue)(uint32_t, const uint64_t*), uint32_t number, const uint64_t* operands);
void commit_group(Thread& t);
void wait_group(Thread& t, uint32_t newest);

}  // namespace machine
