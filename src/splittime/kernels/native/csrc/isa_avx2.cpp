// x86-64 since 2013 (Haswell, Zen). Compiled with -mavx2 -mfma -mf16c.
#define ST_ISA avx2
#define ST_RUNS __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
#define LANES 8
#include "isa.inl"
