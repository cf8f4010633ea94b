// The kernels of one instruction set, a part at a time: each isa_*.cpp defines ST_ISA, ST_RUNS and LANES, and setup.py
// compiles it once for each value of ST_PART (attention, linear_float, linear_int, table), all of them at the same time.
#include "kernels.h"
#include "pool.h"
#include "reads.h"
#include "simd.h"
//
#define ST_TEXT_(x) #x
#define ST_TEXT(x) ST_TEXT_(x)
#include ST_TEXT(ST_PART.inl)
