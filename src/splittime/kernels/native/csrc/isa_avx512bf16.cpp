// AVX-512 with bfloat16 products (Cooper Lake, Sapphire Rapids, Zen 4 and later). Compiled with -mavx512bf16 besides.
#define ST_ISA avx512bf16
#define ST_RUNS                                                                                                     \
  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && \
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&                                \
      __builtin_cpu_supports("avx512bf16")
#define LANES 16
#include "isa.inl"
