// Matrix products of a warpgroup; see wgmma.hpp.
#include "wgmma.hpp"

#include <algorithm>

#include "state.hpp"

// The model's: the thread whose ordinary write to shared memory lies behind no proxy fence of its own nor of the
// reader's, or -1.
extern "C" __attribute__((weak)) int32_t cupymla_emulate_unfenced(uint32_t rank, uint32_t offset, uint32_t reader);

namespace machine {

Cta::Cta() = default;
Cta::Cta(Cta&&) noexcept = default;
Cta::~Cta() = default;
Thread::Thread() = default;
Thread::~Thread() = default;

namespace {

Warpgroup& group_of(Thread& t, const char* instruction) {
  if (t.index / kGroup * kGroup + kGroup > t.cta->threads) {
    broken("%s by a thread of an incomplete warpgroup", instruction);
  }
  auto& groups = t.cta->warpgroups;
  if (groups.empty()) groups.resize(t.cta->threads / kGroup);
  auto& found = groups[t.index / kGroup];
  if (!found) found = std::make_unique<Warpgroup>();
  found->threads[t.index % kGroup] = &t;
  return *found;
}

// Matrices in shared memory -------------------------------------------------------------------------------------------

struct Matrix {
  uint32_t start, leading, stride, span;  // bytes; of a row of the swizzle, 16 without one
  bool transposed;
  uint32_t per_chunk;  // elements in 16 bytes

  // The 16 bytes that hold chunk `c` of a row, K contiguous.
  uint32_t along_k(uint32_t row, uint32_t c) const {
    const uint32_t within = span == 16 ? c * leading : c * 16;
    return swizzled(start + row / 8 * stride + row % 8 * span + within);
  }
  // The 16 bytes that hold chunk `c` of the rows at one k.
  uint32_t across_k(uint32_t c, uint32_t k) const {
    if (span == 16) return start + c * stride + k / 8 * leading + k % 8 * 16;
    const uint32_t wide = span / 16;
    return swizzled(start + c / wide * leading + k / 8 * stride + k % 8 * span + c % wide * 16);
  }
  uint32_t swizzled(uint32_t address) const { return address ^ (((address >> 7) & (span / 16 - 1)) << 4); }
};

constexpr uint64_t kUnused = 0x3ff1c000c000c000ull;  // bits that no field has

Matrix decode(uint64_t word, uint32_t rows, bool transposed, uint32_t bytes) {
  constexpr uint32_t kSpans[] = {16, 128, 64, 32};
  Matrix made;
  made.start = static_cast<uint32_t>(word & 0x3fff) << 4;
  made.leading = static_cast<uint32_t>(word >> 16 & 0x3fff) << 4;
  made.stride = static_cast<uint32_t>(word >> 32 & 0x3fff) << 4;
  made.span = kSpans[word >> 62];
  made.transposed = transposed, made.per_chunk = 16 / bytes;
  const auto shown = static_cast<unsigned long long>(word);
  if (word >> 49 & 7) broken("matrix descriptor %#llx has a base offset, which is not known here", shown);
  if (word & kUnused) broken("matrix descriptor %#llx has bits that mean nothing", shown);
  if (made.span == 16) return made;
  const uint32_t repeat = 8 * made.span, wide_rows = made.span / bytes;
  if ((made.start & (repeat - 1)) >= made.span) {
    broken("a matrix at %#x of shared memory, in a later row of the swizzle's %u bytes", made.start, repeat);
  }
  if (made.stride % repeat || (transposed && rows > wide_rows && made.leading % repeat)) {
    broken("tiles of a matrix are %u and %u bytes apart, not multiples of %u", made.leading, made.stride, repeat);
  }
  const uint32_t side_by_side = transposed ? bytes * std::min(rows, wide_rows) : 32;
  if (made.start % made.span + side_by_side > made.span) {
    broken("a matrix at %#x of shared memory goes on past the %u bytes of the swizzle's row", made.start, made.span);
  }
  return made;
}

// Calls `each(address, row, k)` for all 16-byte chunks of an operand of `rows` rows: where its first element is.
template <typename Each>
void each_chunk(const Matrix& matrix, uint32_t rows, uint32_t k_count, const Each& each) {
  if (!matrix.transposed) {
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint32_t c = 0; c < 2; ++c) each(matrix.along_k(row, c), row, c * matrix.per_chunk);
    }
    return;
  }
  for (uint32_t k = 0; k < k_count; ++k) {
    for (uint32_t row = 0; row < rows; row += matrix.per_chunk) {
      each(matrix.across_k(row / matrix.per_chunk, k), row, k);
    }
  }
}

// Numbers -----------------------------------------------------------------------------------------------------------

constexpr uint32_t kMostColumns = 256, kMostK = 32, kAtOnce = 32;
typedef double Columns __attribute__((vector_size(8 * kAtOnce / 4)));

// sums[j] = a[0] b[0][j] + a[1] b[1][j] + ... for 32 columns; such products are exact in double precision.
__attribute__((target_clones("default", "avx2", "avx512f"))) void add_up(const float* a, const double* b,
                                                                                        uint32_t k_count, double* sums) {
  Columns part[4] = {};
  for (uint32_t k = 0; k < k_count; ++k) {
    const double x = static_cast<double>(a[k]);
    const double* row = b + k * kMostColumns;
    for (uint32_t i = 0; i < 4; ++i) {
      Columns y;
      std::memcpy(&y, row + i * (kAtOnce / 4), sizeof y);
      part[i] += x * y;
    }
  }
  std::memcpy(sums, part, sizeof part);
}

// Registers ---------------------------------------------------------------------------------------------------------

// Calls `each(thread, register, row, column)` for the accumulators of a product; of 16-bit ones a register has two.
template <typename Each>
void each_accumulator(Warpgroup& group, const ProductSite& site, const Each& each) {
  const uint32_t per = site.sums == kHalves ? 2 : 1;
  for (uint32_t i = 0; i < kGroup; ++i) {
    const uint32_t row = i / 32 * 16 + i % 32 / 4, column = i % 4 * 2;
    uint32_t* registers = group.threads[i]->wgmma->registers;
    for (uint32_t j = 0; j < site.d_count; ++j) {
      const uint32_t first = j * per;
      each(registers[site.of_d[j]], row + first / 2 % 2 * 8, first / 4 * 8 + column + first % 2);
    }
  }
}

// Accumulators that were carried out go to their registers.
void put_back(Warpgroup& group) {
  if (!group.held_by) return;
  const ProductSite& site = *group.held_by;
  group.held_by = nullptr;
  each_accumulator(group, site, [&](uint32_t& place, uint32_t row, uint32_t column) {
    const uint32_t at = row * site.columns + column;
    if (site.sums == kSingle) place = as<uint32_t>(group.held[at]);
    if (site.sums == kIntegers) place = static_cast<uint32_t>(group.held_integers[at]);
    if (site.sums == kHalves) {
      place = narrow_f16(group.held[at]) | static_cast<uint32_t>(narrow_f16(group.held[at + 1])) << 16;
    }
  });
}

void take_up(Warpgroup& group, const ProductSite& site) {
  const bool same = group.held_by && group.held_by->of_d == site.of_d && group.held_by->sums == site.sums;
  if (same) return;
  put_back(group);
  group.held_by = &site;
  const uint32_t size = 64 * site.columns;
  if (site.sums == kIntegers) group.held_integers.resize(size);
  if (site.sums != kIntegers) group.held.resize(size);
  each_accumulator(group, site, [&](uint32_t& place, uint32_t row, uint32_t column) {
    const uint32_t at = row * site.columns + column;
    if (site.sums == kSingle) group.held[at] = as<float>(place);
    if (site.sums == kIntegers) group.held_integers[at] = static_cast<int32_t>(place);
    if (site.sums == kHalves) {
      group.held[at] = from_half(static_cast<uint16_t>(place));
      group.held[at + 1] = from_half(static_cast<uint16_t>(place >> 16));
    }
  });
}

void read_fragment(Warpgroup& group, const ProductSite& site, float* a) {
  const uint32_t per = 4 / element_bytes(site.a);
  for (uint32_t i = 0; i < kGroup; ++i) {
    const uint32_t* registers = group.threads[i]->wgmma->registers;
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t row = i / 32 * 16 + i % 32 / 4 + j % 2 * 8, k = i % 4 * per + j / 2 * 4 * per;
      const uint32_t word = registers[site.of_a[j]];
      numbers(site.a, reinterpret_cast<const unsigned char*>(&word), per, a + row * kMostK + k);
    }
  }
}

// Carrying out ------------------------------------------------------------------------------------------------------

template <typename T>
void read_matrix(const Cta& cta, const Matrix& matrix, Element element, uint32_t rows, uint32_t k_count, T* out,
                 uint32_t row_step, uint32_t k_step) {
  float values[16];
  each_chunk(matrix, rows, k_count, [&](uint32_t address, uint32_t row, uint32_t k) {
    numbers(element, cta.smem + address, matrix.per_chunk, values);
    T* place = out + row * row_step + k * k_step;
    const uint32_t step = matrix.transposed ? row_step : k_step;
    for (uint32_t i = 0; i < matrix.per_chunk; ++i) place[i * step] = values[i];
  });
}

void carry_out(const Cta& cta, Warpgroup& group, const Product& product) {
  static float a[64 * kMostK];
  static double b[kMostK * kMostColumns];
  const ProductSite& site = *product.site;
  take_up(group, site);
  if (site.of_a) {
    read_fragment(group, site, a);
  } else {
    const Matrix matrix = decode(product.a, 64, site.transposed_a, element_bytes(site.a));
    read_matrix(cta, matrix, site.a, 64, site.k, a, kMostK, 1);
  }
  const Matrix matrix = decode(product.b, site.columns, site.transposed_b, element_bytes(site.b));
  read_matrix(cta, matrix, site.b, site.columns, site.k, b, 1, kMostColumns);
  double sums[kAtOnce];
  for (uint32_t row = 0; row < 64; ++row) {
    for (uint32_t first = 0; first < site.columns; first += kAtOnce) {
      add_up(a + row * kMostK, b + first, site.k, sums);
      const uint32_t count = std::min(kAtOnce, site.columns - first), at = row * site.columns + first;
      if (site.sums == kIntegers) {
        for (uint32_t j = 0; j < count; ++j) {
          int64_t sum = static_cast<int64_t>(sums[j]) + (product.keeps ? group.held_integers[at + j] : 0);
          if (site.saturates) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
          group.held_integers[at + j] = static_cast<int32_t>(static_cast<uint32_t>(sum));
        }
        continue;
      }
      float* held = group.held.data() + at;
      if (site.negated) {
        for (uint32_t j = 0; j < count; ++j) sums[j] = -sums[j];
      }
      for (uint32_t j = 0; j < count; ++j) {
        const double sum = product.keeps ? sums[j] + static_cast<double>(held[j]) : sums[j];
        held[j] = site.sums == kSingle ? static_cast<float>(sum) : from_half(narrow_f16(sum));
      }
    }
  }
}

void carry_out_to(const Cta& cta, Warpgroup& group, uint64_t number) {
  while (group.done < number) {
    carry_out(cta, group, group.products.front());
    group.products.pop_front();
    ++group.done;
  }
}

// What the last of the threads that issue a product finds: whether its operands are there.
void look_at(Thread& t, Warpgroup& group, Product& product, uint64_t number) {
  const ProductSite& site = *product.site;
  const uint32_t rank = t.cta->rank, name = rank << 10 | t.index;
  if (t.races && product.shown != group.shown) {
    group.view = t.cta->causality->view_of(product.shown);
    group.shown = product.shown;
  }
  const auto look_through = [&](uint64_t word, uint32_t rows, bool transposed, Element element) {
    const Matrix matrix = decode(word, rows, transposed, element_bytes(element));
    each_chunk(matrix, rows, site.k, [&](uint32_t address, uint32_t, uint32_t) {
      if (address < kSystemBytes || address + 16 > t.cta->smem_bytes) {
        broken("wgmma reads shared memory at %#x, which is outside", address);
      }
      if (t.races) {
        t.cta->causality->read_by_group(t, *group.view, number, address, 16);
        return;
      }
      const int32_t writer = cupymla_emulate_unfenced ? cupymla_emulate_unfenced(rank, address, name) : -1;
      if (writer >= 0) {
        broken("wgmma reads shared memory, offset %u, which thread %d wrote, with no fence.proxy.async since",
               address - kSystemBytes, writer & 1023);
      }
    });
  };
  if (!site.of_a) look_through(product.a, 64, site.transposed_a, site.a);
  look_through(product.b, site.columns, site.transposed_b, site.b);
}

void lock(Products& mine, const uint16_t* numbers, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) mine.locked[numbers[i] / 64] |= 1ull << numbers[i] % 64;
}

bool has(const std::vector<uint64_t>& bits, uint32_t number) { return bits[number / 64] >> number % 64 & 1; }

Products& products_of(Thread& t, const char* instruction) {
  if (!t.wgmma) broken("%s in a function without products", instruction);
  return *t.wgmma;
}

}  // namespace

// What recompiled code calls ------------------------------------------------------------------------------------------

void begin_products(Thread& t, uint32_t* registers, uint32_t count) {
  t.wgmma = std::make_unique<Products>();
  t.wgmma->registers = registers;
  t.wgmma->locked.resize(count / 64 + 1);
  t.wgmma->touched.resize(count / 64 + 1);
}

void products_fence(Thread& t) {
  Products& mine = products_of(t, "wgmma.fence");
  mine.fenced = t.watching = true;
  std::fill(mine.touched.begin(), mine.touched.end(), 0);
}

void use_registers(Thread& t, const RegisterUse* uses, uint32_t count) {
  Products& mine = *t.wgmma;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t number = uses[i].number;
    if (has(mine.locked, number)) {
      t.line = uses[i].line;
      broken("a register of an unfinished wgmma is used before wgmma.wait_group");
    }
    mine.touched[number / 64] |= 1ull << number % 64;
  }
}

void multiply(Thread& t, const ProductSite& site, uint64_t a, uint64_t b, bool keeps) {
  breathe(t);
  Warpgroup& group = group_of(t, "wgmma.mma_async");
  Products& mine = *t.wgmma;
  if (!mine.fenced) broken("wgmma.mma_async without a wgmma.fence before it");
  const auto require = [&](const uint16_t* numbers, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      if (has(mine.touched, numbers[i])) {
        broken("wgmma.mma_async with registers that other instructions use behind the wgmma.fence");
      }
    }
  };
  require(site.of_d, site.d_count);
  require(site.of_a, site.a_count);
  for (const Products::Issued& other : mine.unfinished) {
    if (!site.of_a || other.site == &site) continue;
    for (uint32_t i = 0; i < site.a_count; ++i) {
      for (uint32_t j = 0; j < other.site->d_count; ++j) {
        if (other.site->of_d[j] == site.of_a[i]) {
          broken("wgmma.mma_async with accumulators of an unfinished one as its fragments of A");
        }
      }
    }
  }
  const uint64_t number = ++mine.issued;
  while (group.done + group.products.size() < number) group.products.push_back(Product{&site, a, b, keeps});
  Product& product = group.products[number - group.done - 1];
  if (product.site != &site) {
    broken("the threads of a warpgroup execute different wgmma.mma_async, one of them at PTX line %u", product.site->line);
  }
  if (product.a != a || product.b != b) broken("the threads of a warpgroup give different matrix descriptors");
  if (product.keeps != keeps) broken("the threads of a warpgroup give different scale-d");
  if (t.races) {
    if (product.shown.empty()) product.shown.resize(kGroup);
    product.shown[t.index % kGroup] = t.cta->causality->show(t);
  }
  lock(mine, site.of_d, site.d_count);
  lock(mine, site.of_a, site.a_count);
  mine.unfinished.push_back(Products::Issued{number, &site});
  t.watching = true;
  if (++product.arrived < kGroup) return;
  look_at(t, group, product, number);
  product.shown.clear();
  ++group.begun;
  const bool now = the->mode == kEager || (the->mode == kRandom && (draw(t) & 1));
  if (now) carry_out_to(*t.cta, group, number);
}

void commit_products(Thread& t) {
  Products& mine = products_of(t, "wgmma.commit_group");
  mine.groups.push_back(mine.issued);
}

void wait_products(Thread& t, uint32_t newest) {
  Products& mine = products_of(t, "wgmma.wait_group");
  if (mine.groups.size() <= newest) return;
  Warpgroup& group = group_of(t, "wgmma.wait_group");
  uint64_t number = 0;
  for (; mine.groups.size() > newest; mine.groups.pop_front()) number = mine.groups.front();
  while (group.begun < number) stand(t, group.begun, "wgmma.wait_group for products that not all threads have issued");
  carry_out_to(*t.cta, group, number);
  put_back(group);
  if (t.races) t.cta->causality->wait_products(t, static_cast<uint32_t>(number));
  // Registers that ordinary code may use again need a fence before the next product uses them.
  mine.fenced = false;
  while (!mine.unfinished.empty() && mine.unfinished.front().number <= number) mine.unfinished.pop_front();
  std::fill(mine.locked.begin(), mine.locked.end(), 0);
  for (const Products::Issued& left : mine.unfinished) {
    lock(mine, left.site->of_d, left.site->d_count);
    lock(mine, left.site->of_a, left.site->a_count);
  }
  t.watching = !mine.unfinished.empty();
}

// setmaxnreg ----------------------------------------------------------------------------------------------------------

namespace {

constexpr uint32_t kLeastRegisters = 24, kMostRegisters = 256;

// All of a warpgroup's threads have come: whether its registers could be set. An increase takes all or none.
bool grant(Cta& cta, uint32_t first, uint32_t count, bool grows) {
  uint32_t wanted = 0;
  for (uint32_t warp = first; warp < first + 4; ++warp) {
    const uint32_t has = cta.registers[warp];
    if (grows ? has > count : has < count) {
      broken("setmaxnreg.%s to %u registers where a warp has %u", grows ? "inc" : "dec", count, has);
    }
    wanted += grows ? count - has : 0;
  }
  if (wanted > cta.free_registers) return false;
  for (uint32_t warp = first; warp < first + 4; ++warp) {
    cta.free_registers += cta.registers[warp] - count;
    cta.registers[warp] = count;
  }
  return true;
}

}  // namespace

void set_registers(Thread& t, uint32_t count, bool grows) {
  if (the->registers == 0) broken("setmaxnreg in a kernel without launch bounds, where ptxas ignores it");
  if (count < kLeastRegisters || count > kMostRegisters || count % 8) {
    broken("setmaxnreg of %u registers: multiples of 8 from 24 to 256 are allowed", count);
  }
  Cta& cta = *t.cta;
  if (cta.registers.empty()) cta.registers.resize(cta.warps.size(), the->registers);
  Warpgroup& group = group_of(t, "setmaxnreg");
  if (t.races) cta.causality->change_registers(t);
  const uint32_t asked = count << 1 | grows;
  if (group.come && group.asked != asked) broken("the warps of a warpgroup set different numbers of registers");
  group.asked = asked;
  const uint64_t granted = group.granted;
  const char* what = grows ? "setmaxnreg.inc" : "setmaxnreg.dec";
  if (++group.come == kGroup) {
    while (!grant(cta, t.index / kGroup * 4, count, grows)) stand(t, cta.granted, what);
    group.come = 0;
    ++group.granted, ++cta.granted;
    return;
  }
  while (group.granted == granted) stand(t, group.granted, what);
}

}  // namespace machine
