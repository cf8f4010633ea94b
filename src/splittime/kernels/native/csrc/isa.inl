// The kernels of one instruction set: included once by each isa_*.cpp, which has defined ST_ISA, ST_RUNS and LANES.
#include "kernels.h"
#include "pool.h"
#include "reads.h"
#include "simd.h"
//
#include "attention.inl"
#include "elementwise.inl"
#include "linear.inl"
#include "sampling.inl"

#define ST_TEXT_(x) #x
#define ST_TEXT(x) ST_TEXT_(x)
#define ST_TABLE_(isa) isa##_kernels
#define ST_TABLE(isa) ST_TABLE_(isa)

extern const Kernels ST_TABLE(ST_ISA);
const Kernels ST_TABLE(ST_ISA) = {
    .name = ST_TEXT(ST_ISA),
    .runs = [] { return bool(ST_RUNS); },
    .linear = ST_ISA::linear,
    .rms_norm = ST_ISA::rms_norm,
    .silu_mul = ST_ISA::silu_mul,
    .rope_write = ST_ISA::rope_write,
    .attention = ST_ISA::attention,
    .draw = ST_ISA::draw,
    .argmax = ST_ISA::argmax,
    .finite = ST_ISA::finite,
};
