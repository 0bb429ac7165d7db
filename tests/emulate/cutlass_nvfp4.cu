// The host side of CUTLASS's example 72a, whose own needs a Blackwell GPU: the same kernel and the same arguments, with
// matrices in host memory. The example's file is included as the installed package has it. Tensor maps are written down
// as requests, which the host machine reads in their place.
#include <cuda.h>

#define main example_main
#include "72a_blackwell_nvfp4_bf16_gemm.cu"
#undef main

namespace {

// `HostMap` of cupymla_lab/emulate/host/machine.py, 128 bytes.
struct HostMap {
  uint64_t magic, pointer, shape[5], strides[4];
  uint32_t rank, element_bits, swizzle, box[5];
  uint16_t nan, number;
  uint32_t unused;
};
static_assert(sizeof(HostMap) == 128);
constexpr uint64_t kMagic = 0x70614D656C69546D;

uint32_t bits_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 8;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 16;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 32;
    default: return 0;
  }
}

}  // namespace

extern "C" CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                                   void* address, const cuuint64_t* shape, const cuuint64_t* strides,
                                                   const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                                   CUtensorMapFloatOOBfill) {
  HostMap made = {};
  made.magic = kMagic, made.pointer = reinterpret_cast<uint64_t>(address), made.rank = rank;
  made.element_bits = bits_of(type);
  if (made.element_bits == 0 || swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_NOT_SUPPORTED;
  made.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16u << swizzle;
  for (uint32_t i = 0; i < rank; ++i) made.shape[i] = shape[i], made.box[i] = box[i];
  for (uint32_t i = 0; i + 1 < rank; ++i) made.strides[i] = strides[i];
  static_assert(sizeof *map == sizeof made);
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

struct Problem {
  int32_t m, n, k;
  float alpha, beta;
  const void *a, *b, *a_scales, *b_scales, *c;
  void* d;
};

struct Launch {
  uint32_t grid[3], cluster[3], block, smem_bytes, parameter_bytes;
};

// Fills the kernel's parameters, at most `room` bytes, and says how it is launched; 0 when all is well.
extern "C" int describe(const Problem* problem, void* parameters, uint64_t room, Launch* launch) {
  using Kernel = Gemm::GemmKernel;
  using Scales = Kernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
  const auto [m, n, k] = std::make_tuple(problem->m, problem->n, problem->k);
  using Data = ElementA::DataType;
  using Factor = ElementA::ScaleFactorType;
  Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Data*>(problem->a), cutlass::make_cute_packed_stride(StrideA{}, {m, k, 1}),
       static_cast<const Data*>(problem->b), cutlass::make_cute_packed_stride(StrideB{}, {n, k, 1}),
       static_cast<const Factor*>(problem->a_scales), Scales::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1)),
       static_cast<const Factor*>(problem->b_scales), Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1))},
      {{problem->alpha, problem->beta},
       static_cast<const ElementC*>(problem->c), cutlass::make_cute_packed_stride(StrideC{}, {m, n, 1}),
       static_cast<ElementD*>(problem->d), cutlass::make_cute_packed_stride(StrideD{}, {m, n, 1})}};
  arguments.hw_info.sm_count = 148;
  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return 1;
  if (sizeof(Kernel::Params) > room) return 2;
  const Kernel::Params made = Kernel::to_underlying_arguments(arguments, nullptr);
  memcpy(parameters, &made, sizeof made);
  const dim3 grid = Kernel::get_grid_shape(made), block = Kernel::get_block_shape();
  *launch = {{grid.x, grid.y, grid.z},
             {cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}), cute::size<2>(ClusterShape{})},
             block.x,
             Kernel::SharedStorageSize,
             sizeof made};
  return 0;
}
