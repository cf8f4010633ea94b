// The table of functions that each instruction set fills, and the namespace trick: every isa_*.cpp defines ST_ISA and
// includes the same *.inl files, so that the same source becomes `avx2::linear`, `avx512::linear`, ...
#pragma once
#include "splittime.h"

struct Kernels {
  const char *name;
  bool (*runs)();  // whether this CPU has the instructions
  // One weight, without what is below it. The residual's stride comes last.
  void (*linear)(const StLinear *, int32_t, const float *, int64_t, const float *, float *, int64_t, int64_t);
  // activation(gates) * ups of a weight that has both, gates first; false: it does that in two calls, of linear and gate.
  bool (*linear_gated)(const StLinear *, int32_t, int32_t, const float *, int64_t, float *);
  // What adapters add to a product (st_add_low_rank). Last, room for each token's inner row.
  void (*add_low_rank)(int32_t, const StAdapted *, int32_t, const float *, int64_t, float *, int64_t, float *);
  void (*rms_norm)(int32_t, int32_t, const float *, int64_t, const float *, float, float *);
  // hidden += the rows of x, normed in place.
  void (*add_normed)(int32_t, int32_t, float *, const float *, float, float *);
  void (*gate)(int32_t, int32_t, int32_t, const float *, float *);
  void (*rope_write)(const StBatch *, const StKv *, int32_t, const float *, float, float *);
  void (*attention)(const StBatch *, const StKv *, int32_t, int32_t, const StScores &, const float *, int64_t, float *);
  void (*delta)(const StDelta *, const StStates *, const float *, int64_t, float *, float *);
  void (*draw)(int32_t, int32_t, const float *, const StDraw *, const uint32_t *, int32_t *);
  void (*argmax)(int32_t, int32_t, const float *, int32_t *);
  void (*finite)(int32_t, int32_t, const float *, uint8_t *);
};

extern const Kernels portable_kernels, amx_emulated_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512bf16_kernels, amx_kernels;
#endif
