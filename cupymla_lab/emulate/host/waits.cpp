// mbarriers: what arrivals hand on and waits take, and waits that could miss their phase; see races.hpp, waits.hpp.
#include "races.hpp"

namespace machine {

TrackedBarrier* Causality::barrier(uint32_t address) {
  if (rank_of(address) >= count_) return nullptr;
  auto& barriers = ctas_[rank_of(address)].barriers;
  return offset_of(address) / 8 < barriers.size() ? barriers[offset_of(address) / 8].get() : nullptr;
}

void Causality::initialise(Thread& t, uint32_t address) {
  auto& slot = ctas_[rank_of(address)].barriers[offset_of(address) / 8];
  if (!slot) {
    slot = std::make_unique<TrackedBarrier>();
    slot->column = column(kCounted, 0);
  }
  slot->releases.entries.clear();
  slot->waits = Waits{};
  slot->first = slot->phase;
  slot->alive = true;
  slot->maker = number(t), slot->made = moment_, slot->line = t.line;
}

void Causality::end(Thread& t, uint32_t address) {
  TrackedBarrier* found = barrier(address);
  if (found) found->alive = false;
}

void Causality::require_data(Thread& t, uint32_t address, uint32_t bytes) {
  if (rank_of(address) >= count_ || bytes == 0) return;
  const auto& barriers = ctas_[rank_of(address)].barriers;
  const uint32_t last = (offset_of(address) + bytes - 1) / 8;
  for (uint32_t at = offset_of(address) / 8; at <= last && at < barriers.size(); ++at) {
    if (!barriers[at] || !barriers[at]->alive) continue;
    broken("an mbarrier lies at offset %u of shared memory: it is no data, nor made anew", at * 8 - kSystemBytes);
  }
}

void Causality::require_initialised(Thread& t, uint32_t address, bool copied) {
  const TrackedBarrier* found = barrier(address);
  if (found == nullptr) return;  // others say so
  const uint32_t me = number(t);
  if (rank_of(address) != t.cta->rank && !copied) visit(rank_of(address), me, Mark{me, moment_, t.line});
  if (knows(me, kSeen, found->maker, found->made)) return;
  broken("race: %s uses an mbarrier before it knows of the mbarrier.init of %s at PTX line %u, and nothing orders the "
         "two",
         thread(me).c_str(), thread(found->maker).c_str(), found->line);
}

Waits::Event Causality::next_event(Thread& t) {
  Own& mine = own_[number(t)];
  const Waits::Event event{number(t), mine.known.at(kBefore, number(t)) + 1, t.line};
  mine.known.learn(kBefore, event.thread, event.number);
  mine.gathered = 0;
  return event;
}

void Causality::arrive(Thread& t, uint32_t address, uint32_t order) {
  require_initialised(t, address);
  TrackedBarrier* found = barrier(address);
  if (found == nullptr) return;
  const uint32_t me = number(t);
  found->waits.phase().arrivals.push_back(next_event(t));
  const Knowledge& known = order & kRelaxed ? own_[me].behind_fence : release(me);
  Knowledge& pending = found->releases.pending(static_cast<int>(t.cta->rank), (order & kClusterScope) != 0);
  pending.merge(known);
  if (order & kRelaxed) pending.merge(kBefore, own_[me].known);
}

void Causality::hold(Thread& t, uint32_t address) {
  TrackedBarrier* found = barrier(address);
  if (found == nullptr) return;
  found->waits.phase().told = true;
  found->releases.pending(kAnyone, true).merge(kBefore, own_[number(t)].known);
}

void Causality::complete(uint32_t rank, uint32_t offset) {
  TrackedBarrier* found = barrier(rank << 24 | offset);
  if (found == nullptr) return;
  ++found->phase;
  found->releases.complete();
  for (const Waits::Event& wait : found->waits.waits()) {
    if (found->releases.done(kBefore, wait.thread) >= wait.number) continue;
    broken("race: the wait for an mbarrier (shared offset %u) of %s at PTX line %u is not ordered before the end of "
           "the next phase: had it come later, it would have missed its own",
           offset - kSystemBytes, thread(wait.thread).c_str(), wait.line);
  }
  found->waits.next_phase();
}

// A thread has to know that those phases are over, the last of which is so many ago: somebody has waited for it, or
// all who had to arrive have.
void Causality::require_turn(Thread& t, uint32_t address, const TrackedBarrier& found, uint32_t phases, uint32_t ago) {
  const Knowledge& known = own_[number(t)].known;
  if (phases <= found.first || known.at(kBefore, found.column) >= phases) return;
  const Waits::Phase& last = found.waits.phase(ago);
  bool over = !last.told;
  for (const Waits::Event& arrival : last.arrivals) over &= known.at(kBefore, arrival.thread) >= arrival.number;
  if (over) return;
  broken("race: the wait for an mbarrier (shared offset %u) of %s at PTX line %u is not ordered behind the end of the "
         "phase before its own: had it come sooner, it would have been let through at once",
         offset_of(address) - kSystemBytes, thread(number(t)).c_str(), t.line);
}

void Causality::test(Thread& t, uint32_t address) {
  require_initialised(t, address);
  const TrackedBarrier* found = barrier(address);
  if (found) require_turn(t, address, *found, found->phase, 1);
}

void Causality::wait(Thread& t, uint32_t address, uint32_t order) {
  require_initialised(t, address);
  TrackedBarrier* found = barrier(address);
  if (found == nullptr) return;
  if (found->phase > found->first) require_turn(t, address, *found, found->phase - 1, 2);
  Knowledge& known = own_[number(t)].known;
  found->releases.give(known, static_cast<int>(t.cta->rank), order, as_hardware_);
  known.learn(kBefore, found->column, found->phase);
  found->waits.add(next_event(t));
}

void Causality::gather(Thread& t, uint32_t lanes) {
  const uint32_t first = number(t) / 32 * 32;
  const uint64_t last = own_[first + __builtin_ctz(lanes)].gathered;
  bool same = last != 0;
  for (uint32_t left = lanes; left && same; left &= left - 1) same = own_[first + __builtin_ctz(left)].gathered == last;
  if (same) return;
  Knowledge all;
  ++gathered_;
  for (uint32_t left = lanes; left; left &= left - 1) all.merge(kBefore, own_[first + __builtin_ctz(left)].known);
  for (uint32_t left = lanes; left; left &= left - 1) {
    Own& one = own_[first + __builtin_ctz(left)];
    one.known.planes[kBefore] = all.planes[kBefore];
    one.gathered = gathered_;
  }
}

}  // namespace machine
