// AVX-512 with bfloat16 products, and AMX (Sapphire Rapids and later). Compiled with avx512bf16's flags: amx_tiles.h has AMX's
// instructions as assembly.
#define ST_ISA amx
#define ST_RUNS amx_works()
#define ST_AMX
#define LANES 16
bool amx_works();  // amx.cpp
#include "isa.inl"
