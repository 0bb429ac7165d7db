// Waits for an mbarrier that could take one phase for another. A wait by parity knows a phase from its neighbours only:
// who comes to it when the next phase is over as well waits for one that may never come, and who comes before the phase
// before its own is over is let through at once. So, whatever the schedule, a phase has to end behind every wait for
// the one before, and a wait to come behind the end of the phase before its own. The first half is `Waits` in
// cupymla_lab/interpret/causality.py; the second one finds the same faults where the schedule did let a thread be late.
//
// Knowledge::planes[kBefore] says how many waits and arrivals each thread of the cluster must have come through for a
// thread to be where it is, and how many phases of an mbarrier must be over. It says nothing of memory: scopes and
// orders do not matter to it, and lanes that do something together bring each other up to it.
#pragma once

#include <cstdint>
#include <vector>

namespace machine {

class Waits {
 public:
  struct Event {
    uint32_t thread, number, line;  // which of its waits and arrivals, from 1; of the PTX
  };
  struct Phase {
    std::vector<Event> arrivals;
    bool told = false;  // copies or commits end it as well, or the bytes that a thread announced
  };

  // The phase in progress, and how it was with so many before.
  Phase& phase(uint32_t ago = 0) { return phases_[ago]; }
  const Phase& phase(uint32_t ago) const { return phases_[ago]; }
  const std::vector<Event>& waits() const { return waits_; }

  // A thread has waited for the last phase that is over; it may do so several times.
  void add(const Event& wait) {
    if (places_.size() <= wait.thread) places_.resize(wait.thread + 1);
    uint32_t& place = places_[wait.thread];
    if (place == 0) waits_.push_back(wait), place = static_cast<uint32_t>(waits_.size());
    waits_[place - 1] = wait;
  }
  void next_phase() {
    for (const Event& wait : waits_) places_[wait.thread] = 0;
    waits_.clear();
    std::swap(phases_[1], phases_[2]);
    std::swap(phases_[0], phases_[1]);
    phases_[0].arrivals.clear(), phases_[0].told = false;
  }

 private:
  Phase phases_[3];
  std::vector<Event> waits_;
  std::vector<uint32_t> places_;  // by threads: in `waits_`, from 1
};

}  // namespace machine
