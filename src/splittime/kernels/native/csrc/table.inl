// The small kernels of one instruction set, and its table of all of them.
#include "elementwise.inl"
#include "delta.inl"
#include "linear.inl"
#include "sampling.inl"

namespace ST_ISA {
void attention(const StBatch *, const StKv *, int32_t, int32_t, const StScores &, const float *, int64_t, float *);
}

#define ST_TABLE_(isa) isa##_kernels
#define ST_TABLE(isa) ST_TABLE_(isa)

extern const Kernels ST_TABLE(ST_ISA);
const Kernels ST_TABLE(ST_ISA) = {
    .name = ST_TEXT(ST_ISA),
    .runs = [] { return bool(ST_RUNS); },
    .linear = ST_ISA::linear,
    .linear_gated = ST_ISA::linear_gated,
    .add_low_rank = ST_ISA::add_low_rank,
    .rms_norm = ST_ISA::rms_norm,
    .add_normed = ST_ISA::add_normed,
    .gate = ST_ISA::gate,
    .rope_write = ST_ISA::rope_write,
    .attention = ST_ISA::attention,
    .delta = ST_ISA::delta,
    .draw = ST_ISA::draw,
    .argmax = ST_ISA::argmax,
    .finite = ST_ISA::finite,
};
