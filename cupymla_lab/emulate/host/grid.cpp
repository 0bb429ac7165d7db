// Who wrote what in global memory, and what strong operations hand on from cluster to cluster; see grid.hpp.
#include "grid.hpp"

#include "state.hpp"

namespace machine {

namespace {

constexpr uint32_t kBulkStore = 0x80000000u, kLine = 0x7fffffffu;  // in Write::line

const char* const kUnordered = "nothing orders the two";

}  // namespace

// Between clusters ----------------------------------------------------------------------------------------------------

uint32_t Causality::block(uint32_t cluster) {
  const auto found = foreign_.find(cluster);
  if (found != foreign_.end()) return found->second;
  const uint32_t first = threads_ + static_cast<uint32_t>(extras_.size());
  for (uint32_t i = 0; i < threads_; ++i) extras_.push_back(Extra{kForeign, i});
  foreign_[cluster] = first;
  return first;
}

bool Causality::knows_of(Thread& t, Plane plane, uint32_t cluster, uint32_t by, uint32_t stamp) const {
  const uint32_t me = number(t);
  if (cluster == cluster_) return knows(me, plane, by, stamp);
  const auto found = foreign_.find(cluster);
  return found != foreign_.end() && own_[me].known.at(plane, found->second + by) >= stamp;
}

void Causality::fence_wide(Thread& t) {
  const uint32_t me = number(t);
  if (own_[me].taken) {
    receive(t, *own_[me].taken);
    own_[me].taken.reset();
  }
  fence(t);
  own_[me].behind_wide = own_[me].behind_fence;
}

Gift Causality::gift(Thread& t, bool releases) {
  const uint32_t me = number(t);
  const Knowledge& known = releases ? release(me) : own_[me].behind_wide;
  Gift gift;
  gift[cluster_] = known;
  for (Plane plane : {kSeen, kFenced, kPast}) {
    auto& mine = gift[cluster_].planes[plane];
    for (const auto& [cluster, first] : foreign_) {
      if (mine.size() <= first) continue;
      const auto end = mine.begin() + std::min<size_t>(mine.size(), first + threads_);
      gift[cluster].planes[plane].assign(mine.begin() + first, end);
    }
    mine.resize(std::min<size_t>(mine.size(), threads_));
  }
  gift[cluster_].planes[kBefore].resize(std::min<size_t>(known.planes[kBefore].size(), threads_));
  return gift;
}

void Causality::receive(Thread& t, const Gift& gift) {
  Own& mine = own_[number(t)];
  mine.gathered = 0;
  for (const auto& [cluster, known] : gift) {
    if (cluster == cluster_) {
      mine.known.merge(known);
      continue;
    }
    const uint32_t first = block(cluster);
    for (Plane plane : {kSeen, kFenced, kPast}) {
      const auto& stamps = known.planes[plane];
      for (uint32_t i = 0; i < stamps.size(); ++i) {
        if (stamps[i]) mine.known.learn(plane, first + i, stamps[i]);
      }
    }
  }
}

void Causality::take(Thread& t, const Gift& gift, bool acquires) {
  if (acquires) return receive(t, gift);
  auto& taken = own_[number(t)].taken;
  if (!taken) taken = std::make_unique<Gift>();
  for (const auto& [cluster, known] : gift) (*taken)[cluster].merge(known);
}

void Causality::wait_stores(Thread& t, uint32_t newest) {
  Own& mine = own_[number(t)];
  const uint32_t closed = mine.stamps[kBulk] - 1;
  const uint32_t over = closed > newest ? closed - newest : 0;
  if (mine.stores_over.size() < over) mine.stores_over.resize(over, moment_);
}

uint32_t Causality::store_over(uint32_t thread, uint32_t group) const {
  const auto& over = own_[thread].stores_over;
  return group <= over.size() ? over[group - 1] : 0;
}

// Memory --------------------------------------------------------------------------------------------------------------

GridShadow::Page* GridShadow::page(uint64_t number, bool make) {
  if (number == last_number_) return last_page_;
  const auto found = pages_.find(number);
  if (found == pages_.end() && !make) return nullptr;
  last_number_ = number, last_page_ = found == pages_.end() ? &pages_[number] : &found->second;
  return last_page_;
}

// Calls `look` with each page, the first of the units there and the one behind the last.
template <typename Look>
void GridShadow::each_page(uint64_t address, uint64_t bytes, bool make, const Look& look) {
  const uint64_t end = (address + bytes + unit_ - 1) / unit_, per_page = kPage / unit_;
  for (uint64_t at = address / unit_; at < end;) {
    const uint64_t next = std::min(end, (at / per_page + 1) * per_page);
    if (Page* found = page(at / per_page, make)) look(*found, at, next);
    at = next;
  }
}

// Calls `look` for writes to some units, once for those that are alike one behind the other, which mostly are of one
// instruction.
template <typename Look>
void GridShadow::each_write(const Write* writes, uint64_t first, uint64_t end, const Look& look) const {
  const Write* last = nullptr;
  for (uint64_t at = first; writes && at < end; ++at) {
    const Write& write = writes[at % (kPage / unit_)];
    if (write.cluster == 0 || (last && std::memcmp(last, &write, sizeof write) == 0)) continue;
    look(write, at * unit_);
    last = &write;
  }
}

void GridShadow::refuse(Thread& t, const Write& write, uint64_t address, const char* does, const char* missing) {
  Causality& mine = *t.cta->causality;
  std::string by = the->causalities[write.cluster - 1]->thread(write.by);
  if (write.line & kBulkStore) by = "a bulk store of " + by;
  if (write.cluster - 1 != mine.cluster()) by += " of cluster " + std::to_string(write.cluster - 1);
  broken("race: %s of cluster %u at PTX line %u %s global memory at %#llx, that %s wrote at PTX line %u, and %s",
         mine.thread(mine.number(t)).c_str(), mine.cluster(), t.line, does, static_cast<unsigned long long>(address),
         by.c_str(), write.line & kLine, missing);
}

// Whether a thread sees a write, or knows that it is over: of a bulk store both say that its thread has waited for it.
bool GridShadow::knows(Thread& t, Plane plane, const Write& write) const {
  const bool stored = write.line & kBulkStore;
  const uint32_t when = stored ? the->causalities[write.cluster - 1]->store_over(write.by, write.when) : write.when;
  if (stored) plane = kSeen;
  return when != 0 && t.cta->causality->knows_of(t, plane, write.cluster - 1, write.by, when);
}

void GridShadow::read(Thread& t, uint64_t address, uint64_t bytes, bool strong, bool constant, bool bulk) {
  if (pages_.empty()) return;
  each_page(address, bytes, false, [&](const Page& page, uint64_t first, uint64_t end) {
    const auto require = [&](const Write& write, uint64_t at) {
      if (constant) refuse(t, write, at, "reads by ld.global.nc", "that may see what was there before");
      if (!knows(t, kSeen, write)) refuse(t, write, at, "reads", kUnordered);
      if (!bulk || write.line & kBulkStore || knows(t, kFenced, write)) return;
      refuse(t, write, at, "asynchronously reads", "no fence.proxy.async lies between the two");
    };
    each_write(page.plain.get(), first, end, require);
    if (!strong) each_write(page.strong.get(), first, end, require);
  });
}

void GridShadow::require_over(Thread& t, const Write* writes, uint64_t first, uint64_t end) {
  each_write(writes, first, end, [&](const Write& write, uint64_t at) {
    if (!knows(t, kPast, write)) refuse(t, write, at, "writes", kUnordered);
  });
}

void GridShadow::write(Thread& t, uint64_t address, uint64_t bytes, bool strong, bool bulk) {
  const Causality& mine = *t.cta->causality;
  const uint32_t when = bulk ? mine.open_stores(t) : mine.now();
  const Write made{mine.cluster() + 1, mine.number(t), when, (t.line & kLine) | (bulk ? kBulkStore : 0)};
  each_page(address, bytes, true, [&](Page& page, uint64_t first, uint64_t end) {
    require_over(t, page.plain.get(), first, end);
    if (!strong) require_over(t, page.strong.get(), first, end);
    auto& kept = strong ? page.strong : page.plain;
    if (!kept) kept = std::make_unique<Write[]>(kPage / unit_);
    for (uint64_t at = first; at < end; ++at) kept[at % (kPage / unit_)] = made;
    // What comes behind an ordinary write comes behind the strong ones before it.
    for (uint64_t at = first; !strong && page.strong && at < end; ++at) page.strong[at % (kPage / unit_)] = Write{};
  });
}

void GridShadow::take(Thread& t, uint64_t address, bool acquires) {
  const auto found = handed_.find(address);
  if (found != handed_.end()) t.cta->causality->take(t, found->second, acquires);
}

void GridShadow::give(Thread& t, uint64_t address, bool releases, bool adds) {
  Gift gift = t.cta->causality->gift(t, releases);
  Gift& kept = handed_[address];
  if (!adds) {
    kept = std::move(gift);
    return;
  }
  for (const auto& [cluster, known] : gift) kept[cluster].merge(known);
}

// What recompiled code calls ------------------------------------------------------------------------------------------

namespace {

bool own_local(Thread& t, const void* place) {
  return static_cast<uint64_t>(static_cast<const unsigned char*>(place) - t.stack.get()) < kStackBytes;
}

}  // namespace

void look_at_grid(Thread& t, const void* place, uint32_t bytes, uint32_t how) {
  if (own_local(t, place)) return;
  const auto address = reinterpret_cast<uint64_t>(place);
  if (how & kGridReads) the->grid->read(t, address, bytes, how & kGridStrong, how & kGridConstant, false);
  if (how & kGridStrong && how & kGridReads && how & kGridOrders) the->grid->take(t, address, how & kGridAcquires);
  if (how & kGridWrites) {
    the->grid->write(t, address, bytes, how & kGridStrong, false);
    if (how & kGridOrders) the->grid->give(t, address, how & kGridReleases, how & kGridReads);
  }
}

void read_global(Thread& t, uint64_t address, uint64_t bytes, bool bulk) {
  if (t.races) the->grid->read(t, address, bytes, false, false, bulk);
}

void write_global(Thread& t, uint64_t address, uint64_t bytes, bool adds) {
  if (t.races) the->grid->write(t, address, bytes, adds, true);
}

}  // namespace machine
