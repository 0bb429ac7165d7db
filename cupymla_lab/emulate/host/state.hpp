// What the parts of the machine share: the grid that runs.
#pragma once

#include <csetjmp>

#include "grid.hpp"
#include "memory.hpp"
#include "races.hpp"
#include "runtime.hpp"

namespace machine {

// Where in its error ex2.approx lies; as cupymla_lab/ptx/approximation.py numbers them.
enum class Approximation : uint32_t { kExact, kAbove, kBelow, kScattered };

enum Mode : uint32_t { kEager, kLazy, kRandom };

// A cluster of the grid.
struct Cluster {
  uint32_t first[3] = {};
  uint32_t ended = 0;
  std::vector<Thread*> threads;
};

// A use of memory that somebody is to be told of.
struct Asked {
  bool pending = false;
  uint64_t address = 0, bytes = 0;
  uint32_t how = 0;
};

struct Machine {
  Asked asked;
  std::vector<Cluster> clusters;
  std::vector<uint32_t> waiting;  // clusters that have not begun
  std::vector<uint32_t> running;
  uint32_t resident = 0;  // how many run at a time
  std::vector<std::unique_ptr<Thread>> threads;
  std::deque<std::shared_ptr<Copy>> copies;
  uint64_t switches = 0, turns = 0, random = 1, limit = 0, alive = 0, worked = 0;
  uint64_t parameter_bytes = 0;
  void* scheduler = nullptr;
  void (*entry)(Thread&) = nullptr;
  std::string failure;
  Approximation approximation = Approximation::kExact;
  bool in_thread = false;  // else the scheduler runs
  Mode mode = kEager;
  Regions regions;
  bool lets_in_early = false;  // a thread let dependent launches in before it had waited for the primary grid
  uint64_t patience = 0;   // nanoseconds that all may stand still
  uint32_t leader = 0;     // which lane elect.sync elects, from the first that takes part
  bool strict = false;     // where races are looked for: reads of shared memory that nothing has written end the launch
  uint32_t registers = 0;  // of each thread at launch, where the kernel says it
  const unsigned char* relaxed = nullptr;  // by sites; see is_relaxed
  std::vector<std::unique_ptr<Causality>> causalities;  // of the clusters
  std::unique_ptr<GridShadow> grid;
  sigjmp_buf outside;
};

extern Machine* the;

inline uint64_t shuffle_bits(uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

// Tells who watches of a use of memory, outside of the fibers, whose stacks are small.
void ask(uint64_t address, uint64_t bytes, uint32_t how);

// cp.async that a thread has neither waited for nor let an arrival follow; what a CTA leaves unfinished when it exits.
uint64_t loose_copies(const Thread& t);
std::string left_behind(const Cta& cta);

// Carries out copies that were issued: in any order, a random while later.
void run_copies();

}  // namespace machine
