// Plain C++ for any processor, NEON's included: the compiler makes what it can of 8-lane vectors.
#define ST_ISA portable
#define ST_RUNS 1
#define LANES 8
#include "isa.inl"
