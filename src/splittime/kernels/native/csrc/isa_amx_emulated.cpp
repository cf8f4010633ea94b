// The kernels of isa_amx.cpp in plain C++, for tests on processors without AMX. Nobody chooses it for its speed.
#define ST_ISA amx_emulated
#define ST_RUNS 1
#define ST_AMX
#define ST_EMULATED
#define LANES 16
#include "isa.inl"
