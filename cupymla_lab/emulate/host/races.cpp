// Who knows of whom, and who used which bytes last; see races.hpp.
#include "races.hpp"

#include <algorithm>

#include "state.hpp"

namespace machine {

namespace {

constexpr uint32_t kNobody = 0xffffffffu, kMany = 0xfffffffeu;
constexpr uint32_t kAnyLane = 0x80000000u;  // in a reader: any thread of the warp with that number stands for it
constexpr uint32_t kWarpgroup = 0x40000000u;  // or products of that warpgroup
constexpr uint32_t kReaderKind = 0xc0000000u;
constexpr uint32_t kOrdinary = 0x80000000u, kAtomicWrite = 0x40000000u, kLine = 0x3fffffffu;  // in Cell::writer_line

__attribute__((optimize("O3"), target_clones("default", "avx2", "avx512f"))) void raise(
    uint32_t* __restrict__ into, const uint32_t* __restrict__ other, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = into[i] < other[i] ? other[i] : into[i];
}

void raise(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  raise(to.data(), from.data(), from.size());
}

}  // namespace

// Knowledge -----------------------------------------------------------------------------------------------------------

void Knowledge::learn(Plane plane, uint32_t column, uint32_t stamp) {
  auto& stamps = planes[plane];
  ++version;
  if (stamps.size() <= column) stamps.resize(column + 1);
  stamps[column] = std::max(stamps[column], stamp);
}

void Knowledge::merge(Plane plane, const Knowledge& other) {
  ++version;
  raise(planes[plane], other.planes[plane]);
}

void Knowledge::merge(Plane to, Plane from) {
  ++version;
  raise(planes[to], planes[from]);
}

void Knowledge::merge(const Knowledge& other) {
  for (Plane plane : {kSeen, kFenced, kPast, kBefore}) merge(plane, other);
}

void Knowledge::clear() {
  for (auto& stamps : planes) stamps.clear();
}

Knowledge& Releases::pending(int rank, bool wide) {
  for (Entry& entry : entries) {
    if (entry.rank == rank && entry.wide == wide) return entry.pending;
  }
  entries.push_back(Entry{rank, wide, {}, {}});
  return entries.back().pending;
}

void Releases::complete() {
  for (Entry& entry : entries) {
    entry.done.merge(entry.pending);
    entry.pending.clear();
  }
}

void Releases::give(Knowledge& to, int rank, uint32_t order, bool as_hardware) const {
  for (const Entry& entry : entries) {
    if (order & kRelaxed) {
      to.merge(kBefore, entry.done);
    } else if (entry.rank == kAnyone || entry.rank == rank || (entry.wide && order & kClusterScope)) {
      to.merge(entry.done);
    } else {
      to.merge(kBefore, entry.done);
      if (as_hardware) to.merge(kFenced, entry.done), to.merge(kPast, entry.done);
    }
  }
}

uint32_t Releases::done(Plane plane, uint32_t column) const {
  uint32_t found = 0;
  for (const Entry& entry : entries) found = std::max(found, entry.done.at(plane, column));
  return found;
}

Causality::Causality(Cta* const* ctas, uint32_t count, uint32_t cluster, bool as_hardware, uint32_t unit)
    : as_hardware_(as_hardware), cluster_(cluster), unit_(unit),
      padded_((ctas[0]->threads + kGroup - 1) / kGroup * kGroup), threads_(padded_ * count), count_(count),
      own_(threads_), ctas_(count), members_(ctas, ctas + count) {
  // Whoever hears of a thread's first moment knows that its CTA has started.
  for (uint32_t i = 0; i < threads_; ++i) own_[i].known.learn(kBefore, i, 1);
  for (TrackedCta& cta : ctas_) {
    cta.cells.assign(ctas[0]->smem_bytes / unit + 16, Cell{kNobody, 0, 0, kNobody, 0, 0});
    cta.columns.assign(512 * 4, Cell{kNobody, 0, 0, kNobody, 0, 0});
    cta.barriers.resize(ctas[0]->smem_bytes / 8 + 1);
  }
}

uint32_t Causality::column(Doer doer, uint32_t thread) {
  extras_.push_back(Extra{doer, thread});
  return threads_ + static_cast<uint32_t>(extras_.size()) - 1;
}

uint32_t Causality::own_column(uint32_t thread, Doer doer) {
  uint32_t& found = own_[thread].columns[doer];
  if (found == 0) found = column(doer, thread);
  return found;
}

// All that a thread knows, its own doings among it, to be handed on at once.
const Knowledge& Causality::release(uint32_t thread) {
  Knowledge& known = own_[thread].known;
  known.learn(kSeen, thread, moment_);
  known.learn(kPast, thread, moment_);
  ++moment_;
  return known;
}

void Causality::fence(Thread& t) {
  Own& mine = own_[number(t)];
  mine.behind_fence = release(number(t));
}

void Causality::fence_proxy(Thread& t) {
  const uint32_t me = number(t);
  Knowledge& known = own_[me].known;
  release(me);
  known.merge(kFenced, kSeen);
}

// Barriers whose threads wait for one another -------------------------------------------------------------------------

void Causality::meet(Thread& t, TrackedMeeting& meeting, uint32_t generation, bool alone) {
  if (meeting.generation != generation) {
    meeting.done.merge(meeting.pending);
    meeting.pending.clear();
    meeting.generation = generation;
  }
  const uint32_t me = number(t);
  meeting.pending.merge(alone ? own_[me].behind_fence : release(me));
  if (alone) meeting.pending.merge(kBefore, own_[me].known);
}

void Causality::part(Thread& t, TrackedMeeting& meeting, uint32_t generation) {
  // The first of the generation to part: all of it have met, and nobody of the next one.
  if (meeting.generation == generation && !meeting.pending.empty()) {
    meeting.done.merge(meeting.pending);
    meeting.pending.clear();
  }
  own_[number(t)].known.merge(meeting.done);
  own_[number(t)].gathered = 0;
}

void Causality::change_registers(Thread& t) {
  const uint32_t me = number(t), first = me - t.index % kGroup;
  std::vector<uint32_t>& mine = own_[me].register_changes;
  for (uint32_t other = first; !mine.empty() && other < first + kGroup; ++other) {
    if (other / 32 == me / 32 || knows(me, kPast, other, own_[other].register_changes[mine.size() - 1])) continue;
    broken("race: %s changes its registers again, and nothing orders that behind the last change of %s",
           thread(me).c_str(), thread(other).c_str());
  }
  mine.push_back(moment_);
}

void Causality::require_started(uint32_t thread_, uint32_t rank) {
  Own& mine = own_[thread_];
  if (mine.started >> rank & 1) return;
  for (uint32_t i = rank * padded_; i < (rank + 1) * padded_; ++i) {
    if (mine.known.at(kBefore, i)) {
      mine.started |= 1u << rank;
      return;
    }
  }
  broken("race: %s uses shared memory of the CTA with rank %u, which need not have started: nothing says that it has",
         thread(thread_).c_str(), rank);
}

void Causality::visit(uint32_t rank, uint32_t from, Mark mark) {
  require_started(from, rank);
  if (ctas_[rank].left == members_[rank]->threads) {
    broken("race: %s uses shared memory of the CTA with rank %u, which has exited", thread(from).c_str(), rank);
  }
  Mark& last = ctas_[rank].last_visit;
  if (last.column == mark.column && last.stamp == mark.stamp) return;
  last = mark;
  Mark& kept = ctas_[rank].visits[mark.column];
  if (kept.stamp <= mark.stamp) kept = mark;
}

void Causality::leave(Thread& t) {
  TrackedCta& cta = ctas_[t.cta->rank];
  cta.parting.merge(kPast, own_[number(t)].known);
  if (++cta.left < t.cta->threads) return;
  for (const auto& [column, mark] : cta.visits) {
    if (cta.parting.at(kPast, column) >= mark.stamp) continue;
    broken("race: the CTA with rank %u exits, and nothing orders that behind the use of its shared memory by %s at PTX "
           "line %u",
           t.cta->rank, doer(column).c_str(), mark.line);
  }
}

// Shared memory -------------------------------------------------------------------------------------------------------

Cell* Causality::cells(uint32_t rank, uint32_t offset, uint32_t bytes, uint32_t& count) {
  count = 0;
  if (rank >= count_ || offset + bytes > members_[rank]->smem_bytes || bytes == 0) return nullptr;  // others say so
  const uint32_t first = offset / unit_;
  count = (offset + bytes - 1) / unit_ - first + 1;
  return &ctas_[rank].cells[first];
}

void Causality::require_any(Thread& t, uint32_t rank, const Cell& cell) {
  broken("%s reads %s at PTX line %u, which nothing has written", thread(number(t)).c_str(),
         place(rank, cell).c_str(), t.line);
}

void Causality::require_written(Thread& t, uint32_t rank, const Cell& cell, bool asynchronous) {
  if (cell.writer == kNobody) return;
  const uint32_t me = number(t);
  const bool across = asynchronous && (cell.writer_line & kOrdinary);  // from one proxy to the other
  const bool fenced = !across || knows(me, kFenced, cell.writer, cell.written);
  const bool seen = knows(me, kSeen, cell.writer, cell.written) || (as_hardware_ && across && fenced);
  if (seen && fenced) return;
  broken("race: %s %s %s, that %s wrote at PTX line %u, and %s", thread(me).c_str(),
         seen ? "asynchronously reads" : "reads", place(rank, cell).c_str(), doer(cell.writer).c_str(),
         cell.writer_line & kLine, seen ? "no fence.proxy.async lies between the two" : "nothing orders the two");
}

// Whether a thread knows that a read is over: by a thread or what works for one, by any lane of a warp, or by products
// of a warpgroup, each warp of which has to have waited.
bool Causality::over(uint32_t thread, uint32_t column, uint32_t stamp) {
  const uint32_t kind = column & kReaderKind, which = column & ~kReaderKind;
  if (kind == 0) return knows(thread, kPast, column, stamp);
  if (kind == kWarpgroup) {
    for (uint32_t warp = 4 * which; warp < 4 * which + 4; ++warp) {
      if (own_[thread].known.at(kPast, column_of_warp(warp)) < stamp) return false;
    }
    return true;
  }
  for (uint32_t lane = 32 * which; lane < 32 * which + 32; ++lane) {
    if (knows(thread, kPast, lane, stamp)) return true;
  }
  return false;
}

uint32_t Causality::column_of_warp(uint32_t warp) {
  if (warps_.empty()) warps_.resize(threads_ / 32);
  if (warps_[warp] == 0) warps_[warp] = column(kProducts, warp * 32);
  return warps_[warp];
}

void Causality::require_free(Thread& t, uint32_t rank, const Cell& cell, bool atomic) {
  const uint32_t me = number(t);
  if (cell.writer != kNobody && !(atomic && (cell.writer_line & kAtomicWrite)) &&
      !knows(me, kPast, cell.writer, cell.written)) {
    broken("race: %s writes %s, that %s wrote at PTX line %u, and nothing orders the two",
           thread(me).c_str(), place(rank, cell).c_str(), doer(cell.writer).c_str(), cell.writer_line & kLine);
  }
  if (cell.reader == kNobody) return;
  const auto require = [&](uint32_t column, uint32_t stamp, uint32_t line) {
    if (over(me, column, stamp)) return;
    broken("race: %s writes %s, that %s read or was still reading at PTX line %u, and nothing "
           "orders the two",
           thread(me).c_str(), place(rank, cell).c_str(), doer(column).c_str(), line);
  };
  if (cell.reader != kMany) return require(cell.reader, cell.read, cell.reader_line);
  const Readers& many = *readers_[cell.read];
  for (const Mark& mark : many.others) require(mark.column, mark.stamp, mark.line);
  for (const auto& warp : many.warps) {
    for (uint32_t left = warp.mask; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      require(warp.first + lane, warp.stamp[lane], warp.line[lane]);
    }
  }
}

void Causality::note_read(Thread& t, Cell& cell, uint32_t column, uint32_t stamp) {
  if (cell.reader == column || cell.reader == kNobody) {
    cell.reader = column, cell.read = stamp, cell.reader_line = t.line;
    return;
  }
  if (cell.reader != kMany) {
    // Who knows that the last read is over stands for it.
    if (!(cell.reader & kAnyLane) && over(number(t), cell.reader, cell.read)) {
      cell.reader = column, cell.read = stamp, cell.reader_line = t.line;
      return;
    }
    const Mark first{cell.reader, cell.read, cell.reader_line};
    if (free_readers_.empty()) {
      readers_.push_back(std::make_unique<Readers>());
      free_readers_.push_back(static_cast<uint32_t>(readers_.size()) - 1);
    }
    cell.reader = kMany, cell.read = free_readers_.back();
    free_readers_.pop_back();
    Readers& many = *readers_[cell.read];
    many.warps.clear(), many.others.clear();
    const auto add = [&](const Mark& mark) {
      if (mark.column >= threads_) return many.others.push_back(mark);
      many.warps.emplace_back(mark.column / 32 * 32, 1u << mark.column % 32);
      many.warps.back().stamp[mark.column % 32] = mark.stamp;
      many.warps.back().line[mark.column % 32] = mark.line;
    };
    add(first);
  }
  Readers& many = *readers_[cell.read];
  if (column >= threads_) {
    for (Mark& mark : many.others) {
      if (mark.column == column) {
        mark.stamp = stamp, mark.line = t.line;
        return;
      }
    }
    many.others.push_back(Mark{column, stamp, t.line});
    return;
  }
  const uint32_t lane = column % 32;
  auto found = std::find_if(many.warps.begin(), many.warps.end(),
                            [&](const Readers::Warp& warp) { return warp.first == column - lane; });
  if (found == many.warps.end()) {
    many.warps.emplace_back(column - lane, 0u);
    found = many.warps.end() - 1;
  }
  found->mask |= 1u << lane;
  found->stamp[lane] = stamp, found->line[lane] = t.line;
}

void Causality::note_write(Cell& cell, uint32_t column, uint32_t stamp, uint32_t line, uint32_t flags) {
  if (cell.reader == kMany) free_readers_.push_back(cell.read);
  cell = Cell{column, stamp, (line & kLine) | flags, kNobody, 0, 0};
}

// Calls `look` for cells of one access, but for those that were like the one before, which become like it too: what a
// thread knows does not become less.
template <typename Look>
void Causality::each(const Mark& what, uint32_t thread, Cell* cell, uint32_t count, const Look& look) {
  const auto same = [](const auto& a, const auto& b) { return std::memcmp(&a, &b, sizeof a) == 0; };
  for (; count; --count, ++cell) {
    if (last_.thread == thread && same(last_.what, what) && same(last_.before, *cell)) {
      *cell = last_.after;
      continue;
    }
    const Cell before = *cell;
    look(*cell);
    if (before.reader == kMany || cell->reader == kMany) continue;
    last_ = {what, thread, before, *cell};
  }
}

// The proxy fence between what ordinary code has done and a write by an asynchronous operation; as specified behind its
// reads as well.
void Causality::require_fenced(Thread& t, uint32_t rank, const Cell& cell) {
  const Knowledge& known = own_[number(t)].known;
  if (cell.writer != kNobody && cell.writer_line & kOrdinary && known.at(kFenced, cell.writer) < cell.written) {
    broken("race: %s asynchronously writes %s, that %s wrote at PTX line %u, and no fence.proxy.async lies between the two",
           thread(number(t)).c_str(), place(rank, cell).c_str(), doer(cell.writer).c_str(), cell.writer_line & kLine);
  }
  if (as_hardware_ || cell.reader == kNobody) return;
  const auto require = [&](uint32_t column, uint32_t stamp, uint32_t line) {
    if (column >= threads_ && !(column & kAnyLane)) return;  // an asynchronous operation
    const uint32_t first = column & kAnyLane ? (column & ~kAnyLane) * 32 : column;
    const uint32_t last = column & kAnyLane ? first + 31 : column;
    for (uint32_t lane = first; lane <= last; ++lane) {
      if (known.at(kFenced, lane) >= stamp) return;
    }
    broken("race: %s asynchronously writes %s, that %s read or was still reading at PTX line %u, and no "
           "fence.proxy.async lies between the two",
           thread(number(t)).c_str(), place(rank, cell).c_str(), doer(column).c_str(), line);
  };
  if (cell.reader != kMany) return require(cell.reader, cell.read, cell.reader_line);
  const Readers& many = *readers_[cell.read];
  for (const Mark& mark : many.others) require(mark.column, mark.stamp, mark.line);
  for (const auto& warp : many.warps) {
    for (uint32_t left = warp.mask; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      require(warp.first + lane, warp.stamp[lane], warp.line[lane]);
    }
  }
}

void Causality::access(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes, Access how) {
  const uint32_t me = number(t);
  require_data(t, rank << 24 | offset, bytes);
  uint32_t count;
  Cell* cell = cells(rank, offset, bytes, count);
  if (rank != t.cta->rank && count) visit(rank, me, Mark{me, moment_, t.line});
  if (how == kRead || how == kReadTogether) {
    const uint32_t reader = how == kRead ? me : kAnyLane | me / 32;
    each(Mark{reader, moment_, t.line << 2 | kRead}, me, cell, count, [&](Cell& one) {
      if (the->strict && one.writer == kNobody) require_any(t, rank, one);
      require_written(t, rank, one, false);
      note_read(t, one, reader, moment_);
    });
    return;
  }
  each(Mark{me, moment_, t.line << 2 | how}, me, cell, count, [&](Cell& one) {
    if (the->strict && how == kAtomic && one.writer == kNobody) require_any(t, rank, one);
    require_free(t, rank, one, how == kAtomic);
    note_write(one, me, moment_, t.line, kOrdinary | (how == kAtomic ? kAtomicWrite : 0));
  });
}

// Asynchronous operations ---------------------------------------------------------------------------------------------

void Causality::write_later(Thread& t, uint32_t address, uint32_t bytes, uint32_t told, bool ordinary) {
  TrackedBarrier* found = barrier(told);
  if (found == nullptr) return;
  uint32_t count;
  Cell* cell = cells(rank_of(address), offset_of(address), bytes, count);
  const uint32_t stamp = found->phase + 1;
  if (count && rank_of(address) != t.cta->rank) {
    visit(rank_of(address), number(t), Mark{found->column, stamp, t.line});
  }
  require_data(t, address, bytes);
  each(Mark{found->column, stamp, t.line << 2 | kWrite}, number(t), cell, count, [&](Cell& one) {
    require_free(t, rank_of(address), one, false);
    if (!ordinary) require_fenced(t, rank_of(address), one);
    note_write(one, found->column, stamp, t.line, ordinary ? kOrdinary : 0);
  });
}

void Causality::read(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes, uint32_t column, uint32_t stamp) {
  uint32_t count;
  Cell* cell = cells(rank, offset, bytes, count);
  if (count && rank != t.cta->rank) visit(rank, number(t), Mark{column, stamp, t.line});
  each(Mark{column, stamp, t.line << 2 | kRead}, number(t), cell, count, [&](Cell& one) {
    if (one.reader == column && one.read == stamp) return;
    require_written(t, rank, one, true);
    note_read(t, one, column, stamp);
  });
}

void Causality::read_later(Thread& t, uint32_t address, uint32_t bytes, uint32_t told) {
  const TrackedBarrier* found = barrier(told);
  if (found) read(t, rank_of(address), offset_of(address), bytes, found->column, found->phase + 1);
}

void Causality::landed(uint32_t told, int rank) {
  TrackedBarrier* found = barrier(told);
  if (found == nullptr) return;
  Knowledge& known = found->releases.pending(rank, true);
  for (Plane plane : {kSeen, kPast}) known.learn(plane, found->column, found->phase + 1);
}

void Causality::read_by_tensor(Thread& t, uint32_t rank, uint32_t offset, uint32_t bytes) {
  const uint32_t me = number(t);
  read(t, rank, offset, bytes, own_column(me, kTensor), own_[me].stamps[kTensor]);
}

void Causality::read_by_store(Thread& t, uint32_t address, uint32_t bytes) {
  const uint32_t me = number(t);
  read(t, rank_of(address), offset_of(address), bytes, own_column(me, kBulk), own_[me].stamps[kBulk]);
}

// That an operation on Tensor Memory is behind another's fences is for the check `tcgen05`; on hardware that is enough
// for reads, where it is known that the write is over.
void Causality::tensor_memory(Thread& t, uint32_t rank, uint32_t quarter, uint32_t column, bool writes,
                              bool by_tensor) {
  const uint32_t me = number(t), mine = own_column(me, kTensor), who = by_tensor ? mine : me;
  const uint32_t stamp = by_tensor ? own_[me].stamps[kTensor] : moment_;
  Cell& cell = ctas_[rank].columns[column * 4 + quarter];
  pipe_ = by_tensor ? mine : me;
  if (writes) {
    require_free(t, rank, cell, false);
    note_write(cell, who, stamp, t.line, 0);
  } else {
    if (!(as_hardware_ && cell.writer != kNobody && knows(me, kPast, cell.writer, cell.written))) {
      require_written(t, rank, cell, false);
    }
    note_read(t, cell, who, stamp);
  }
  pipe_ = ~0u;
}

void Causality::allocated(uint32_t rank, uint32_t first, uint32_t count) {
  for (uint32_t i = 4 * first; i < 4 * (first + count); ++i) note_write(ctas_[rank].columns[i], kNobody, 0, 0, 0);
}

// A commit's arrival says that the tensor operations of its thread are over, and all that these were known to be
// behind, proxy fences among it; of what the thread itself did in the ordinary way it says nothing.
uint64_t Causality::commit(Thread& t, uint32_t told, uint32_t mask) {
  const uint32_t me = number(t), column = own_column(me, kTensor), stamp = own_[me].stamps[kTensor]++;
  for (uint32_t rank = 0; rank < count_; ++rank) {
    if (mask ? !(mask >> rank & 1) : rank != rank_of(told)) continue;
    const uint32_t target = rank << 24 | offset_of(told);
    const TrackedBarrier* found = barrier(target);
    if (found == nullptr) continue;
    if (rank != t.cta->rank) visit(rank, me, Mark{column, stamp, t.line});
    if (!knows(me, kSeen, found->maker, found->made)) require_initialised(t, target);
  }
  Knowledge& made = commits_[++commit_count_];
  made.merge(kPast, own_[me].known);
  made.merge(kBefore, own_[me].known);
  made.merge(kFenced, own_[me].known);
  if (made.planes[kPast].size() > me) made.planes[kPast][me] = 0;
  for (Plane plane : {kSeen, kPast}) made.learn(plane, column, stamp);
  return commit_count_;
}

void Causality::hand(uint32_t told, uint64_t commit) {
  TrackedBarrier* found = barrier(told);
  if (found == nullptr) return;
  found->waits.phase().told = true;
  found->releases.pending(kAnyone, true).merge(commits_[commit]);
}

void Causality::drop(uint64_t commit) { commits_.erase(commit); }

void Causality::close_group(Thread& t) { ++own_[number(t)].stamps[kBulk]; }

void Causality::wait_group(Thread& t, uint32_t newest) {
  const uint32_t me = number(t), closed = own_[me].stamps[kBulk] - 1;
  if (own_[me].columns[kBulk] && closed > newest) own_[me].known.learn(kPast, own_[me].columns[kBulk], closed - newest);
}

std::shared_ptr<const Shown> Causality::show(Thread& t) {
  const uint32_t me = number(t);
  Own& mine = own_[me];
  if (!mine.shown || mine.shown_version != mine.known.version) {
    Shown made{mine.known.planes[kSeen], mine.known.planes[kFenced]};
    if (made.seen.size() <= me) made.seen.resize(me + 1);
    made.seen[me] = ~0u;  // what it has done itself it sees
    mine.shown = std::make_shared<const Shown>(std::move(made));
    mine.shown_version = mine.known.version;
  }
  return mine.shown;
}

std::shared_ptr<const View> Causality::view_of(const std::vector<std::shared_ptr<const Shown>>& shown) const {
  View made{shown[0]->seen, shown[0]->fenced};
  const auto lower = [](std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
    to.resize(std::min(to.size(), from.size()));
    for (size_t i = 0; i < to.size(); ++i) to[i] = std::min(to[i], from[i]);
  };
  for (const auto& one : shown) lower(made.seen, one->seen), lower(made.fenced, one->fenced);
  return std::make_shared<const View>(std::move(made));
}

void Causality::read_by_group(Thread& t, const View& view, uint64_t number_, uint32_t offset, uint32_t bytes) {
  const uint32_t me = number(t), rank = t.cta->rank;
  const uint32_t reader = kWarpgroup | me / kGroup, stamp = static_cast<uint32_t>(number_);
  uint32_t count;
  Cell* cell = cells(rank, offset, bytes, count);
  each(Mark{reader, stamp, t.line << 2 | kRead}, me, cell, count, [&](Cell& one) {
    if (one.writer != kNobody) {
      const bool across = one.writer_line & kOrdinary;
      const bool fenced = !across || View::knows(view.fenced, one.writer, one.written);
      const bool seen = View::knows(view.seen, one.writer, one.written) || (as_hardware_ && across && fenced);
      if (!seen || !fenced) {
        broken("race: a wgmma of the warpgroup of %s at PTX line %u %s %s, that %s wrote at PTX line %u, and %s",
               thread(me / kGroup * kGroup).c_str(), t.line, seen ? "asynchronously reads" : "reads",
               place(rank, one).c_str(), doer(one.writer).c_str(), one.writer_line & kLine,
               seen ? "no fence.proxy.async lies between the two" : "nothing orders the two");
      }
    }
    note_read(t, one, reader, stamp);
  });
}

void Causality::wait_products(Thread& t, uint32_t number_) {
  own_[number(t)].known.learn(kPast, column_of_warp(number(t) / 32), number_);
}

void Causality::write_by_async(Thread& t, uint32_t address, uint32_t bytes) {
  const uint32_t me = number(t), column = own_column(me, kAsync);
  require_data(t, address, bytes);
  uint32_t count;
  Cell* cell = cells(rank_of(address), offset_of(address), bytes, count);
  for (uint32_t i = 0; i < count; ++i, ++cell) {
    require_free(t, rank_of(address), *cell, false);
    note_write(*cell, column, own_[me].stamps[kAsync], t.line, kOrdinary);
  }
}

void Causality::close_async(Thread& t) {
  Own& mine = own_[number(t)];
  mine.async_groups.push_back(mine.stamps[kAsync]++);
}

void Causality::wait_async(Thread& t, uint32_t newest) {
  Own& mine = own_[number(t)];
  if (!mine.columns[kAsync] || mine.async_groups.size() <= newest) return;
  const uint32_t stamp = mine.async_groups[mine.async_groups.size() - newest - 1];
  for (Plane plane : {kSeen, kPast}) mine.known.learn(plane, mine.columns[kAsync], stamp);
}

uint32_t Causality::arrive_async(Thread& t, uint32_t told) {
  require_initialised(t, told);
  hold(t, told);
  return own_[number(t)].stamps[kAsync]++;
}

void Causality::landed_async(Thread& t, uint32_t told, uint32_t stamp) {
  TrackedBarrier* found = barrier(told);
  if (found == nullptr || !own_[number(t)].columns[kAsync]) return;
  Knowledge& known = found->releases.pending(static_cast<int>(t.cta->rank), false);
  for (Plane plane : {kSeen, kPast}) known.learn(plane, own_[number(t)].columns[kAsync], stamp);
}

// Words ---------------------------------------------------------------------------------------------------------------

std::string Causality::place(uint32_t rank, const Cell& cell) const {
  const TrackedCta& cta = ctas_[rank];
  if (&cell >= cta.columns.data() && &cell < cta.columns.data() + cta.columns.size()) {
    return "Tensor Memory, column " + std::to_string((&cell - cta.columns.data()) / 4);
  }
  return "shared memory, offset " + std::to_string((&cell - cta.cells.data()) * unit_ - kSystemBytes);
}

std::string Causality::thread(uint32_t number) const {
  std::string text = "thread " + std::to_string(number % padded_);
  if (count_ > 1) text += " of the CTA with rank " + std::to_string(number / padded_);
  return text;
}

std::string Causality::doer(uint32_t column) const {
  const uint32_t which = column & ~kReaderKind;
  if ((column & kReaderKind) == kWarpgroup) return "a wgmma of the warpgroup of " + thread(which * kGroup);
  if (column & kReaderKind) return "the warp of " + thread(which * 32);
  if (column < threads_) return thread(column);
  const Extra& extra = extras_[column - threads_];
  switch (extra.doer) {
    case kTensor: return "a tensor operation of " + thread(extra.thread);
    case kBulk: return "a bulk store of " + thread(extra.thread);
    case kAsync: return "a cp.async of " + thread(extra.thread);
    default: return "a copy that an mbarrier counts";
  }
}

// What the rest of the machine calls --------------------------------------------------------------------------------

void look(Thread& t, const void* pointer, uint32_t bytes, Access how, uint32_t in_grid) {
  const uint32_t address = to_shared(t, reinterpret_cast<uint64_t>(pointer));
  if (address) return t.cta->causality->access(t, rank_of(address), offset_of(address), bytes, how);
  if (in_grid) look_at_grid(t, pointer, bytes, in_grid);
}

bool is_relaxed(uint32_t site) { return the->relaxed && the->relaxed[site]; }

void order_fence(Thread& t, Fence what) {
  switch (what) {
    case kProxyFence: return t.cta->causality->fence_proxy(t);
    case kWideFence: return t.cta->causality->fence_wide(t);
    default: return t.cta->causality->fence(t);
  }
}

}  // namespace machine
