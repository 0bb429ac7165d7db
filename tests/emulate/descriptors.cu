// Prints, for every canonical layout of shared memory, the descriptor that CUTLASS builds and, for every element of the
// matrix, where CUTLASS's layout puts it and where the model's decoder looks for it; then instruction descriptors and
// the places of results in Tensor Memory the same way. Host code.
#include <cstdint>
#include <cstdio>

#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/tensor.hpp>

#include "byte_matrix.cuh"
#include "descriptor.cuh"

using namespace cute;
namespace model = cupymla::emulate;

alignas(1024) static unsigned char memory[1 << 18];

template <UMMA::Major kMajor, int kRows, int kK, class Element, class Atom>
void layout(const char* name) {
  auto tile = UMMA::tile_to_mma_shape(Atom{}, make_shape(make_shape(Int<kRows>{}, Int<kK>{}), _1{}, _4{}));
  auto tensor = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory)), tile);
  auto one = make_tensor(tensor.data(), get<0>(tensor.layout()));
  const uint64_t descriptor = UMMA::make_umma_desc<kMajor>(one);
  model::Matrix matrix;
  const bool transposed = kMajor == UMMA::Major::MN;
  const int defect = model::decode_matrix(descriptor & ~0x3fffull, transposed, matrix);
  int wrong = defect != model::kSound;
  for (int row = 0; row < kRows && !wrong; ++row) {
    for (int k = 0; k < kK && !wrong; ++k) {
      const auto theirs = reinterpret_cast<unsigned char*>(&one(row, k)) - memory;
      const auto ours = transposed ? model::mn_major_address(matrix, row * sizeof(Element), k)
                                   : model::k_major_address(matrix, row, k * sizeof(Element));
      wrong = theirs != static_cast<long>(ours);
      if (wrong) std::printf("# %s (%d, %d): %ld, %u\n", name, row, k, static_cast<long>(theirs), ours);
    }
  }
  std::printf("layout %s %d %d %#018llx %s\n", name, kRows, kK, static_cast<unsigned long long>(descriptor),
              wrong ? "WRONG" : "same");
}

template <class Element, int kK, int kRows>
void k_major(const char* name) {
  std::printf("# %s\n", name);
  layout<UMMA::Major::K, kRows, kK, Element, UMMA::Layout_K_INTER_Atom<Element>>("K none");
  layout<UMMA::Major::K, kRows, kK, Element, UMMA::Layout_K_SW32_Atom<Element>>("K 32");
  layout<UMMA::Major::K, kRows, kK, Element, UMMA::Layout_K_SW64_Atom<Element>>("K 64");
  layout<UMMA::Major::K, kRows, kK, Element, UMMA::Layout_K_SW128_Atom<Element>>("K 128");
}

template <class Element, int kK, int kRows>
void mn_major(const char* name) {
  std::printf("# %s\n", name);
  layout<UMMA::Major::MN, kRows, kK, Element, UMMA::Layout_MN_INTER_Atom<Element>>("MN none");
  layout<UMMA::Major::MN, kRows, kK, Element, UMMA::Layout_MN_SW32_Atom<Element>>("MN 32");
  layout<UMMA::Major::MN, kRows, kK, Element, UMMA::Layout_MN_SW64_Atom<Element>>("MN 64");
  layout<UMMA::Major::MN, kRows, kK, Element, UMMA::Layout_MN_SW128_Atom<Element>>("MN 128");
}

template <class A, class B, class C, int kM, int kN, UMMA::Major kA, UMMA::Major kB>
void instruction(const char* name, uint32_t kind, model::Element a, model::Element b, model::Result d) {
  const uint32_t word = static_cast<uint32_t>(UMMA::make_instr_desc<A, B, C, kM, kN, kA, kB>());
  model::Shape shape;
  const int defect = model::decode_instruction(kind, kM == 256 ? 2 : 1, 0, word, shape);
  const bool same = defect == model::kSound && shape.m == kM && shape.n == kN && shape.a == a && shape.b == b &&
                    shape.d == d && shape.a_transposed == (kA == UMMA::Major::MN) &&
                    shape.b_transposed == (kB == UMMA::Major::MN);
  std::printf("instruction %s %#010x %s\n", name, word, same ? "same" : "WRONG");
}

template <class A, class Scale, int kM, int kN>
void scaled(const char* name, uint32_t kind, uint32_t vector, model::Element a, bool ue8m0) {
  constexpr auto kMajor = UMMA::Major::K;
  const auto descriptor = UMMA::make_instr_desc_block_scaled<A, A, float, Scale, kM, kN, kMajor, kMajor>();
  const uint32_t word = static_cast<uint32_t>(descriptor);
  model::Shape shape;
  const int defect = model::decode_instruction(kind, kM == 256 ? 2 : 1, vector, word, shape);
  const bool same = defect == model::kSound && shape.m == kM && shape.n == kN && shape.a == a && shape.b == a &&
                    shape.scale_is_ue8m0 == ue8m0;
  std::printf("instruction %s %#010x %s\n", name, word, same ? "same" : "WRONG");
}

// Where CuTe's traits put a bit of a thread's row or register, both counted in one order of their own.
template <class Layout>
uint32_t bit_of(Layout layout, uint32_t thread, uint32_t bit) {
  return static_cast<uint32_t>(layout(thread, bit));
}

// Which row and byte of shared memory has that place in the traits' order; `rows` threads have rows of their own.
template <class Rows>
model::MatrixByte byte_at(Rows rows, uint32_t count, uint32_t place) {
  for (uint32_t row = 0; row < count; ++row) {
    for (uint32_t byte = 0; byte < 16; ++byte) {
      if (bit_of(rows, row, 8 * byte) == place) return {row, byte};
    }
  }
  return {~0u, ~0u};
}

// SM100_U8x8_LDSM_T and U8x16 change the order of bytes between ldmatrix and what their traits describe: registers a
// and b of a matrix become {a0, a1, b0, b1} and {a2, a3, b2, b3}.
template <class Operation, bool kTall, bool kStores>
void bytes(const char* name, uint32_t registers) {
  using Traits = Copy_Traits<Operation>;
  int wrong = 0;
  const uint32_t rows = registers * 8;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < 4 * registers; ++i) {
      uint32_t reg = i / 4, byte = i % 4;
      if (kTall) reg = i / 8 * 2 + i / 2 % 2, byte = i % 8 / 4 * 2 + i % 2;
      const uint32_t per_matrix = kTall ? 16 : 8;
      model::MatrixByte ours = model::loaded_byte(kTall, lane, reg % 2, byte);
      if (kStores) ours = model::stored_byte(lane, byte);
      ours.row += per_matrix * (kTall ? reg / 2 : reg);
      model::MatrixByte theirs;
      if (kStores) {
        theirs = byte_at(typename Traits::DstLayout{}, rows, bit_of(typename Traits::SrcLayout{}, lane, 8 * i));
      } else {
        theirs = byte_at(typename Traits::SrcLayout{}, rows, bit_of(typename Traits::DstLayout{}, lane, 8 * i));
      }
      wrong += ours.row != theirs.row || ours.byte != theirs.byte;
    }
  }
  std::printf("bytes %s %u %s\n", name, registers, wrong ? "WRONG" : "same");
}

// The fragment of one CTA; of a pair, the first one's.
template <class Fragment, int kM, int kN>
void result(const char* name, uint32_t group, bool ws) {
  const auto fragment = Fragment::make(make_shape(make_shape(Int<kM>{}, Int<kN>{}), _1{}, _1{}));
  int wrong = 0;
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      const auto theirs = static_cast<uint32_t>(fragment.layout()(make_coord(m, n), 0, 0));
      const model::Place ours = model::place_of(group, ws, kM * group, kN, m, n);
      wrong += ours.half != 0 || theirs != (ours.lane << 16 | ours.column);
    }
  }
  std::printf("result %s %d %d %s\n", name, kM, kN, wrong ? "WRONG" : "same");
}

// A in Tensor Memory, kM rows of a CTA, as CuTe's traits of products that read it there lay it out. Where D's columns
// are split over two groups of lanes the fragment has 128 rows, the second 64 being the first ones' copies.
template <class Element, class Fragment, int kM, int kK>
void operand(const char* name, uint32_t group) {
  constexpr uint32_t kLane = (1u << 21) / sizeof_bits_v<Element>;  // the distance of two lanes
  const auto fragment = Fragment::make(make_shape(make_shape(Int<kM>{}, Int<kK>{}), _1{}, _1{}));
  const uint32_t copies = model::splits(group, false, kM * group);
  int wrong = size<0>(fragment.layout()) != kM * copies * kK;
  for (uint32_t copy = 0; copy < copies; ++copy) {
    for (int m = 0; m < kM; ++m) {
      for (int k = 0; k < kK; ++k) {
        const int at = m + kM * (copy + copies * k);
        const auto theirs = static_cast<uint32_t>(fragment.layout()(at, 0, 0));
        const model::Place ours = model::place_of(group, false, kM * group, copies, m, copy);
        wrong += ours.half != 0 || ours.column != 0 || theirs != ours.lane * kLane + k;
      }
    }
  }
  std::printf("operand %s %d %s\n", name, kM, wrong ? "WRONG" : "same");
}

// The metadata of a sparse A of kM rows and kK elements, four bits at a time; kBits stand for one element, and
// fragments count in kUnit bits. Of fewer than 128 rows there are copies.
template <class Fragment, int kM, int kK, int kBits, int kUnit>
void metadata(const char* name, uint32_t kind) {
  const auto fragment = Fragment::make(make_shape(make_shape(Int<kM>{}, Int<kK>{}), _1{}, _1{}));
  constexpr uint32_t kLane = (1u << 21) / kUnit;  // the distance of two lanes
  int wrong = 0;
  for (int m = 0; m < 128; ++m) {
    for (int k = 0; k < kK; k += 4 / kBits) {
      const int at = m % kM + kM * (k + kK * (m / kM));
      const auto theirs = static_cast<uint32_t>(fragment.layout()(at, 0, 0));
      const model::MetadataPlace ours = model::metadata_place(kind, 0, m % kM, k);
      wrong += theirs != (ours.lane + m / kM * kM) * kLane + (ours.column * 32 + ours.bit) / kUnit;
    }
  }
  std::printf("metadata %s %d %s\n", name, kM, wrong ? "WRONG" : "same");
}

template <int kM>
void stationary_metadata() {
  metadata<UMMA::tmem_e_frg_ws<half_t>, kM, 32, 1, 1>("ws f16", model::kF16);
  metadata<UMMA::tmem_e_frg_ws<tfloat32_t>, kM, 16, 2, 2>("ws tf32", model::kTf32);
  metadata<UMMA::tmem_e_frg_ws<uint8_t>, kM, 64, 1, 1>("ws f8f6f4", model::kF8f6f4);
}

template <class Element, int kK>
void operands(const char* name) {
  using Mode = UMMA::TmemAllocMode;
  operand<Element, UMMA::tmem_frg_1sm<Element, Element, Mode::NonInterleaved>, 64, kK>(name, 1);
  operand<Element, UMMA::tmem_frg_1sm<Element, Element, Mode::NonInterleaved>, 128, kK>(name, 1);
  operand<Element, UMMA::tmem_frg_2sm<Element, Element, Mode::Duplicated>, 64, kK>(name, 2);
  operand<Element, UMMA::tmem_frg_2sm<Element, Element, Mode::Duplicated>, 128, kK>(name, 2);
}

template <int kN>
void results() {
  result<UMMA::tmem_frg_1sm<float>, 64, kN>("dense", 1, false);
  result<UMMA::tmem_frg_1sm<float>, 128, kN>("dense", 1, false);
  result<UMMA::tmem_frg_2sm<float>, 64, kN>("pair", 2, false);
  result<UMMA::tmem_frg_2sm<float>, 128, kN>("pair", 2, false);
  result<UMMA::tmem_frg_ws_1sm<float>, 32, kN>("ws", 1, true);
  result<UMMA::tmem_frg_ws_1sm<float>, 64, kN>("ws", 1, true);
  result<UMMA::tmem_frg_ws_1sm<float>, 128, kN>("ws", 1, true);
}

int main() {
  k_major<half_t, 16, 128>("f16");
  k_major<tfloat32_t, 8, 64>("tf32");
  k_major<float_e4m3_t, 32, 128>("e4m3");
  mn_major<half_t, 16, 64>("f16");
  mn_major<float_e4m3_t, 32, 128>("e4m3");
  layout<UMMA::Major::MN, 128, 8, tfloat32_t, UMMA::Layout_MN_SW128_32B_Atom<tfloat32_t>>("MN 128 by 32");
  constexpr auto K = UMMA::Major::K, MN = UMMA::Major::MN;
  instruction<half_t, half_t, float, 128, 256, K, K>("f16", model::kF16, model::kElementF16, model::kElementF16,
                                                     model::kResultF32);
  instruction<bfloat16_t, bfloat16_t, float, 64, 8, K, MN>("bf16", model::kF16, model::kElementBf16,
                                                           model::kElementBf16, model::kResultF32);
  instruction<half_t, half_t, half_t, 256, 64, MN, K>("f16 into f16", model::kF16, model::kElementF16,
                                                      model::kElementF16, model::kResultF16);
  instruction<tfloat32_t, tfloat32_t, float, 128, 32, K, K>("tf32", model::kTf32, model::kElementTf32,
                                                            model::kElementTf32, model::kResultF32);
  instruction<float_e4m3_t, float_e5m2_t, float, 128, 64, K, K>("f8", model::kF8f6f4, model::kElementE4m3,
                                                                model::kElementE5m2, model::kResultF32);
  instruction<int8_t, uint8_t, int32_t, 128, 32, K, K>("i8", model::kI8, model::kElementS8, model::kElementU8,
                                                       model::kResultS32);
  scaled<float_e2m1_t, float_ue4m3_t, 128, 64>("nvf4", model::kMxf4nvf4, 4, model::kElementE2m1Packed, false);
  scaled<float_e2m1_t, float_ue8m0_t, 256, 128>("mxf4", model::kMxf4, 2, model::kElementE2m1Packed, true);
  scaled<float_e4m3_t, float_ue8m0_t, 128, 128>("mxf8", model::kMxf8f6f4, 1, model::kElementE4m3, true);
  results<64>();
  results<256>();
  operands<half_t, 16>("f16");
  operands<tfloat32_t, 8>("tf32");
  operands<int8_t, 32>("i8");
  metadata<UMMA::tmem_e_frg<half_t>, 128, 32, 1, 1>("f16", model::kF16);
  metadata<UMMA::tmem_e_frg<tfloat32_t>, 128, 16, 2, 2>("tf32", model::kTf32);
  metadata<UMMA::tmem_e_frg<uint8_t>, 128, 64, 1, 1>("f8f6f4", model::kF8f6f4);
  stationary_metadata<32>();
  stationary_metadata<64>();
  stationary_metadata<128>();
  bytes<SM100_U8x8_LDSM_T, true, false>("m16n16", 2);
  bytes<SM100_U8x16_LDSM_T, true, false>("m16n16", 4);
  bytes<SM100_SU4_DU8x16_x1_LDSM_N, false, false>("m8n16", 1);
  bytes<SM100_SU6_DU8x16_x2_LDSM_N, false, false>("m8n16", 2);
  bytes<SM100_SU4_DU8x16_x4_LDSM_N, false, false>("m8n16", 4);
  bytes<SM100_U8x4_STSM_T, false, true>("m16n8", 1);
  bytes<SM100_U8x8_STSM_T, false, true>("m16n8", 2);
  bytes<SM100_U8x16_STSM_T, false, true>("m16n8", 4);
  return 0;
}
