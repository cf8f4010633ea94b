// AVX-512 with bfloat16 products and tiles (Sapphire Rapids and later). Compiled as avx512bf16; tiles.h has the rest.
#define ST_ISA amx
#define ST_RUNS tiles_work()
#define ST_TILES
#define LANES 16
bool tiles_work();  // amx.cpp
#include "isa.inl"
