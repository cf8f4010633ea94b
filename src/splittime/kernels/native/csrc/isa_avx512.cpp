// AVX-512 with byte products (Cascade Lake, Zen 4 and later). Compiled with -mavx512{f,bw,vl,dq,vnni}.
#define ST_ISA avx512
#define ST_RUNS                                                                                                     \
  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && \
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")
#define LANES 16
#include "isa.inl"
