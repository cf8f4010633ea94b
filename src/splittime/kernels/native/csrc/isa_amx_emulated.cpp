// The kernels of isa_amx.cpp in plain C++, for the tests of processors without tiles. Nobody chooses it for its speed.
#define ST_ISA amx_emulated
#define ST_RUNS 1
#define ST_TILES
#define ST_EMULATED
#define LANES 16
#include "isa.inl"
