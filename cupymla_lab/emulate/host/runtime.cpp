// Fibers, the scheduler, launches; see runtime.hpp.
#include <algorithm>
#include <csignal>
#include <cstdarg>

#include "state.hpp"

namespace machine {

namespace {

constexpr uint64_t kLongestRest = 64;  // rounds of all threads
constexpr uint64_t kLatestBegin = 64;  // rounds of a cluster's threads
constexpr size_t kAhead = 4;           // threads

}  // namespace

Machine* the;
Thread* current;

namespace {

extern "C" void cupymla_switch(void** save, void* next);
asm(R"(
.text
.globl cupymla_switch
.type cupymla_switch, @function
cupymla_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// A failure with the thread that met it and the last instruction of its that is remembered with its line, where the
// failure does not say so itself.
std::string told_of(const Thread& t, const std::string& what) {
  if (what.rfind("race: ", 0) == 0 || what.rfind("thread ", 0) == 0) return what;
  const uint32_t* at = t.cta->position;
  char who[128];
  std::snprintf(who, sizeof who, t.line ? "thread %u of CTA (%u, %u, %u), PTX line %u: " : "thread %u of CTA (%u, %u, %u): ",
                t.index, at[0], at[1], at[2], t.line);
  return who + what;
}

void fiber() {
  Thread& t = *current;
  try {
    the->entry(t);
  } catch (const Ended&) {
  } catch (const Broken& error) {
    if (the->failure.empty()) the->failure = told_of(t, error.what);
  }
  t.ended = true;
  t.warp->ended |= 1u << t.lane;
  for (Thread* other : t.warp->lanes) {
    if (other) other->resting = false;
  }
  t.cta->loose_copies += static_cast<uint32_t>(loose_copies(t));
  if (++t.cta->ended == t.cta->threads && the->failure.empty()) the->failure = left_behind(*t.cta);
  ++*t.cta->cluster_ended;
  void* unused;
  cupymla_switch(&unused, the->scheduler);
}

void prepare(Thread& t) {
  t.stack.reset(new unsigned char[kStackBytes]);
  auto top = reinterpret_cast<uint64_t>(t.stack.get() + kStackBytes) & ~63ull;
  auto* slots = reinterpret_cast<uint64_t*>(top);
  // A return address for `ret`, below it six saved registers; the fiber starts with its stack misaligned by a call.
  slots[-2] = reinterpret_cast<uint64_t>(&fiber);
  for (int i = 3; i <= 8; ++i) slots[-i] = 0;
  t.stack_pointer = slots - 8;
}

}  // namespace

void broken(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Broken{text};
}

bool in_parameters(Thread& t, uint64_t address) {
  return address - reinterpret_cast<uint64_t>(t.parameters) < the->parameter_bytes;
}

// Whether a generic address is of shared memory, local memory or a parameter.
bool is_private(Thread& t, uint64_t address) {
  if (address - reinterpret_cast<uint64_t>(t.stack.get()) < kStackBytes) return true;
  return in_parameters(t, address) || to_shared(t, address) != 0;
}

void require_released(Thread& t, uint64_t address, const char* instruction) {
  if (is_private(t, address)) return;
  const uint32_t* at = t.cta->position;
  broken("thread %u of CTA (%u, %u, %u) of a dependent launch uses global address %#llx before its griddepcontrol.wait: %s",
         t.index, at[0], at[1], at[2], static_cast<unsigned long long>(address), instruction);
}

uint32_t take_cluster(uint32_t* first) {
  auto& waiting = the->waiting;
  if (waiting.empty()) return 0;
  const uint64_t at = (shuffle_bits(the->random) >> 32) * waiting.size() >> 32;
  const Cluster& taken = the->clusters[waiting[at]];
  for (int d = 0; d < 3; ++d) first[d] = taken.first[d];
  waiting.erase(waiting.begin() + static_cast<int64_t>(at));
  return 1;
}

uint64_t last_work() { return the->worked * kNanosecondsPerSwitch; }
uint64_t now() { return the->switches * kNanosecondsPerSwitch; }
uint64_t draw(Thread& t) { return shuffle_bits(t.random); }

void yield(Thread& t) {
  void* const mine = the->scheduler;
  cupymla_switch(&t.stack_pointer, mine);
  if (!the->failure.empty()) throw Ended{};
}

void ask(uint64_t address, uint64_t bytes, uint32_t how) {
  if (!the->in_thread) return the->regions.tell(address, bytes, how);
  the->asked = Asked{true, address, bytes, how};
  void* const mine = the->scheduler;
  cupymla_switch(&current->stack_pointer, mine);
}

void rest(Thread& t, const Rest& until) {
  t.rest = until;
  t.resting = true;
  yield(t);
}

void rest_until(Thread& t, const uint64_t* word, uint64_t mask, uint64_t value, uint64_t rounds) {
  Rest until;
  until.word = word, until.mask = mask, until.value = value;
  until.until = the->switches + rounds * the->alive;
  rest(t, until);
}

void rest_at_barrier(Thread& t) {
  Rest until;
  until.word = t.barrier_word, until.mask = ~0ull, until.value = t.barrier_seen;
  until.events = t.issued, until.seen = t.issued_seen;
  until.until = the->switches + t.patience * the->alive;
  t.patience = std::min<uint64_t>(2 * t.patience, kLongestRest);
  rest(t, until);
}

void stand(Thread& t, const uint64_t& word, const char* what) {
  constexpr uint64_t kRounds = 1024;
  const uint64_t start = now();
  Rest until;
  until.word = &word, until.mask = ~0ull, until.value = word;
  while (word == until.value) {
    until.until = the->switches + kRounds * the->alive;
    rest(t, until);
    // Sooner than the model loses its patience: what stands behind this waits there.
    if (word == until.value && now() > std::max(start, last_work()) + the->patience / 2) broken("deadlock: %s", what);
  }
}

void sleep(Thread& t, uint32_t nanoseconds) {
  Rest until;
  until.until = the->switches + nanoseconds / kNanosecondsPerSwitch + 1;
  // A lane of the warp that ends wakes the others, who may wait for it.
  while (!until.over(the->switches)) rest(t, until);
}

void end_thread(Thread&) { throw Ended{}; }

float approximate_exp2(float argument) {
  constexpr int32_t kUlps = 2;
  constexpr uint32_t kMultiplier = 0x9E3779B1u;
  const float exact = std::exp2(argument);
  const Approximation where = the->approximation;
  if (where == Approximation::kExact || argument == 0 || !std::isfinite(exact) || exact < 0x1p-125f) return exact;
  int32_t steps = where == Approximation::kAbove ? kUlps : -kUlps;
  uint32_t bits;
  if (where == Approximation::kScattered) {
    std::memcpy(&bits, &argument, sizeof(bits));
    steps = static_cast<int32_t>((bits * kMultiplier >> 16) % (2 * kUlps + 1)) - kUlps;
  }
  std::memcpy(&bits, &exact, sizeof(bits));
  bits = std::min(bits + static_cast<uint32_t>(steps), 0x7F800000u);
  float strayed;
  std::memcpy(&strayed, &bits, sizeof(strayed));
  return strayed;
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (4 * i) & 15;
    uint32_t byte = both >> (8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

namespace {

// A float with that many exponent and mantissa bits, from a magnitude; `largest` is the greatest encoding.
uint32_t small_float(float value, int mantissa_bits, int bias, uint32_t largest) {
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return 0;
  if (std::isinf(magnitude)) return largest;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  const double code = std::ldexp(exponent + bias - 1, mantissa_bits) + steps;
  return code > largest ? largest : static_cast<uint32_t>(code);
}

}  // namespace

uint32_t to_e4m3(float value, bool relu) {
  if (value != value) return 0x7f;
  if (relu && !(value > 0)) return 0;
  return (std::signbit(value) ? 0x80u : 0u) | small_float(value, 3, 7, 0x7e);
}

uint32_t to_e5m2(float value, bool relu) {
  if (value != value) return 0x7f;
  if (relu && !(value > 0)) return 0;
  return (std::signbit(value) ? 0x80u : 0u) | small_float(value, 2, 15, 0x7b);
}

uint32_t to_tf32(float value, Tf32Rounding rounding, bool relu, bool saturates) {
  if (value != value) return 0x7fffffffu;
  if (relu && !(value > 0)) return 0;
  const uint32_t bits = as<uint32_t>(value);
  const uint32_t added = rounding == kToEven ? 0xfffu + (bits >> 13 & 1) : rounding == kAway ? 0x1000u : 0u;
  const bool infinite = (bits & 0x7f800000u) == 0x7f800000u;
  const uint32_t rounded = infinite ? bits : (bits + added) & 0xffffe000u;
  return saturates && (rounded & 0x7fffffffu) == 0x7f800000u ? rounded - 0x2000u : rounded;
}

// Running -------------------------------------------------------------------------------------------------------------

namespace {

// An address that is nobody's ends the thread that used it, not the process. It is left where it stands.
void on_fault(int, siginfo_t* info, void*) {
  char text[160];
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uint64_t>(info->si_addr));
  if (!the->in_thread) {
    std::snprintf(text, sizeof text, "a bulk copy uses global address %#llx, where nothing is", address);
    the->failure = text;
    siglongjmp(the->outside, 1);
  }
  Thread& t = *current;
  const uint32_t* at = t.cta->position;
  const char* format = "thread %u of CTA (%u, %u, %u) uses address %#llx, where nothing is";
  std::snprintf(text, sizeof text, format, t.index, at[0], at[1], at[2], address);
  if (the->failure.empty()) the->failure = text;
  t.ended = true;
  void* unused;
  cupymla_switch(&unused, the->scheduler);
}

// While it lives, faults go to `on_fault`.
class Faults {
 public:
  Faults() {
    stack_t stack = {};
    stack.ss_sp = memory_, stack.ss_size = sizeof memory_;
    sigaltstack(&stack, &stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv_);
    sigaction(SIGBUS, &action, &bus_);
  }
  ~Faults() {
    sigaction(SIGSEGV, &segv_, nullptr);
    sigaction(SIGBUS, &bus_, nullptr);
    sigaltstack(&stack_, nullptr);
  }

 private:
  unsigned char memory_[65536];
  stack_t stack_ = {};
  struct sigaction segv_ = {}, bus_ = {};
};

// Lets clusters begin while there is room for them, in the order of the grid.
void begin_clusters(std::vector<Thread*>& alive) {
  auto& running = the->running;
  const auto over = [](uint32_t index) { return the->clusters[index].ended == the->clusters[index].threads.size(); };
  running.erase(std::remove_if(running.begin(), running.end(), over), running.end());
  while (!the->waiting.empty() && running.size() < the->resident && the->failure.empty()) {
    const uint32_t index = the->waiting.front();
    the->waiting.erase(the->waiting.begin());
    running.push_back(index);
    for (Thread* t : the->clusters[index].threads) {
      t->rest.until += the->switches;
      alive.push_back(t);
    }
  }
}

void schedule() {
  std::vector<Thread*> alive, ready;
  begin_clusters(alive);
  while (!alive.empty()) {
    the->alive = alive.size();
    ready.clear();
    const bool failed = !the->failure.empty();
    for (size_t i = 0; i < alive.size(); ++i) {
      Thread* const t = alive[i];
      if (i + 4 * kAhead < alive.size()) __builtin_prefetch(alive[i + 4 * kAhead]);
      if (!t->resting || failed || t->rest.over(the->switches)) ready.push_back(t);
    }
    the->switches += alive.size() - ready.size();
    if (ready.empty() && the->copies.empty()) {
      // Nothing can change but the time.
      uint64_t next = ~0ull;
      for (const Thread* t : alive) next = std::min(next, t->rest.until);
      if (next == ~0ull) the->failure = "deadlock: nothing moves any more";
      if (next != ~0ull) the->switches = std::max(the->switches, next);
    }
    for (size_t i = ready.size(); i > 1; --i) {
      std::swap(ready[i - 1], ready[(shuffle_bits(the->random) >> 32) * i >> 32]);
    }
    for (size_t i = 0; i < ready.size(); ++i) {
      Thread* const t = ready[i];
      // Thousands of stacks are in no cache: the next ones are fetched meanwhile.
      if (i + 2 * kAhead < ready.size()) __builtin_prefetch(ready[i + 2 * kAhead], 1);
      if (i + kAhead < ready.size()) __builtin_prefetch(ready[i + kAhead]->stack_pointer, 1);
      t->resting = false;
      current = t;
      ++the->switches, ++the->turns;
      the->in_thread = true;
      cupymla_switch(&the->scheduler, t->stack_pointer);
      while (the->asked.pending) {
        the->asked.pending = false;
        the->regions.tell(the->asked.address, the->asked.bytes, the->asked.how);
        cupymla_switch(&the->scheduler, t->stack_pointer);
      }
      the->in_thread = false;
      if (!t->resting && !t->polling) the->worked = the->switches;
    }
    // Behind a failure nobody takes what is still under way: its CTAs have been ended.
    if (!the->copies.empty() && the->failure.empty()) run_copies();
    if (the->limit && the->turns > the->limit && the->failure.empty()) the->failure = "the grid does not end";
    alive.erase(std::remove_if(alive.begin(), alive.end(), [](Thread* t) { return t->ended; }), alive.end());
    if (!the->waiting.empty()) begin_clusters(alive);
  }
  if (the->failure.empty() && !the->copies.empty()) run_copies();
}

}  // namespace

}  // namespace machine

// Called from Python.

struct LaunchRequest {
  uint32_t grid[3], block, cluster[3], static_bytes, dynamic_bytes, dependent, parameter_bytes, resident;
  uint32_t approximation, races, unit, grid_unit;  // 0: races are not looked for, 1: as hardware does, 2: as specified
  uint32_t mode, registers, strict, unused;        // registers: of each thread at launch; 0: nobody says
  uint64_t seed, limit, patience;
  const unsigned char* relaxed;
  const machine::Region* regions;
  const uint32_t* beside;
  const machine::Watched* watched;
  machine::Watcher watcher;
  uint32_t region_count, beside_count, launch, watched_count;
  uint32_t lets_in_early, padding;  // this one and the next are told
  uint64_t turns;
};

extern "C" int cupymla_run(void (*entry)(machine::Thread&), LaunchRequest* request, const unsigned char* parameters,
                           char* message, uint64_t message_bytes) {
  using namespace machine;
  Machine machine;
  the = &machine;
  machine.entry = entry;
  machine.random = request->seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  machine.limit = request->limit;
  machine.approximation = static_cast<Approximation>(request->approximation);
  machine.parameter_bytes = request->parameter_bytes;
  machine.mode = static_cast<Mode>(request->mode);
  machine.strict = request->strict, machine.leader = static_cast<uint32_t>(request->seed * 2654435761u >> 16 & 0xff);
  machine.patience = request->patience, machine.registers = request->registers;
  machine.regions.watch(request->watched, request->watched_count, request->watcher);
  machine.regions.set(request->regions, request->region_count, request->launch, request->beside, request->beside_count);
  const uint32_t* grid = request->grid;
  const uint32_t* extent = request->cluster;
  const uint32_t ctas = grid[0] * grid[1] * grid[2], size = extent[0] * extent[1] * extent[2];
  std::vector<Cta> all(ctas);
  std::vector<std::vector<Cta*>> clusters(ctas / size, std::vector<Cta*>(size));
  machine.clusters.resize(clusters.size());
  machine.resident = request->resident ? request->resident : static_cast<uint32_t>(clusters.size());
  std::vector<uint64_t> issued(clusters.size() * kIssueSlots);
  std::vector<uint32_t> owners;  // the cluster that each CTA belongs to
  const uint32_t bytes = kSystemBytes + request->static_bytes + request->dynamic_bytes;
  std::vector<std::unique_ptr<unsigned char, void (*)(void*)>> memory;
  for (uint32_t i = 0; i < ctas; ++i) {
    Cta& cta = all[i];
    const uint32_t position[3] = {i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    uint32_t cluster_index = 0, scale = 1, rank = 0, rank_scale = 1;
    for (int d = 0; d < 3; ++d) {
      cta.position[d] = position[d];
      cta.in_cluster[d] = position[d] % extent[d];
      cta.cluster_extent[d] = extent[d];
      cluster_index += position[d] / extent[d] * scale, scale *= grid[d] / extent[d];
      rank += cta.in_cluster[d] * rank_scale, rank_scale *= extent[d];
    }
    cta.rank = rank, cta.cluster_size = size, cta.cluster = clusters[cluster_index].data();
    cta.cluster_ended = &machine.clusters[cluster_index].ended, cta.cluster_issued = &issued[cluster_index * kIssueSlots];
    clusters[cluster_index][rank] = &cta;
    for (int d = 0; rank == 0 && d < 3; ++d) machine.clusters[cluster_index].first[d] = position[d];
    owners.push_back(cluster_index);
    cta.smem_bytes = bytes, cta.dynamic_bytes = request->dynamic_bytes, cta.threads = request->block;
    auto* block = static_cast<unsigned char*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
    std::memset(block, 0xff, bytes);
    memory.emplace_back(block, std::free);
    cta.smem = block;
    cta.warps.resize((request->block + 31) / 32);
    for (uint32_t w = 0; w < cta.warps.size(); ++w) {
      const uint32_t lanes = std::min(32u, request->block - 32 * w);
      cta.warps[w].ended = lanes == 32 ? 0 : ~((1u << lanes) - 1u);
    }
  }
  auto& causalities = machine.causalities;
  if (request->races) machine.grid = std::make_unique<GridShadow>(request->grid_unit);
  machine.relaxed = request->relaxed;
  for (uint32_t i = 0; request->races && i < clusters.size(); ++i) {
    causalities.push_back(std::make_unique<Causality>(clusters[i].data(), size, i, request->races == 1, request->unit));
    for (Cta* cta : clusters[i]) cta->causality = causalities[i].get();
  }
  // Half of the CTAs begin later than others, also of their cluster: only its barrier says that another has begun.
  uint64_t begins = machine.random;
  for (uint32_t i = 0; i < ctas; ++i) {
    const uint64_t drawn = shuffle_bits(begins) >> 32;
    const uint64_t begin = drawn % 2 ? (drawn >> 1) % (kLatestBegin * size * request->block) : 0;
    for (uint32_t n = 0; n < request->block; ++n) {
      auto t = std::make_unique<Thread>();
      t->id[0] = t->index = n, t->lane = n % 32, t->cta = &all[i], t->warp = &all[i].warps[n / 32];
      for (int d = 0; d < 3; ++d) t->grid[d] = grid[d], t->block[d] = d ? 1 : request->block;
      t->parameters = parameters;
      t->races = request->races != 0;
      t->released = !request->dependent;
      t->guarded = machine.regions.any() || !t->released;
      t->random = (i * 1024ull + n + 1) * 0x9e3779b97f4a7c15ull + request->seed;
      t->resting = begin != 0, t->rest.until = begin;
      prepare(*t);
      t->warp->lanes[t->lane] = t.get();
      machine.clusters[owners[i]].threads.push_back(t.get());
      machine.threads.push_back(std::move(t));
    }
  }
  for (uint32_t i = 0; i < machine.clusters.size(); ++i) machine.waiting.push_back(i);
  const auto faults = std::make_unique<Faults>();
  try {
    if (sigsetjmp(machine.outside, 1) == 0) schedule();
  } catch (const Broken& error) {
    if (machine.failure.empty()) machine.failure = error.what;
  }
  std::snprintf(message, message_bytes, "%s", machine.failure.c_str());
  request->turns = machine.turns, request->lets_in_early = machine.lets_in_early;
  the = nullptr;
  return machine.failure.empty() ? 0 : 1;
}
