// y = x W^T: hands a weight to the kernel of its scheme.
#include "reads.h"

namespace ST_ISA {

using Multiply = void(const StLinear *, int32_t, const float *, int64_t, const float *, float *, int64_t, int64_t);
Multiply linear_float, linear_int;  // parts of their own

void add_low_rank(int32_t, const StAdapted *, int32_t, const float *, int64_t, float *, int64_t, float *);

bool gated_int(const StLinear *, int32_t, int32_t, const float *, int64_t, float *);

// Whether linear_int multiplies by this weight: integers, and on AMX bfloat16 with rounded activations too.
inline bool by_linear_int(const StLinear &weight) {
  if (weight.scheme == ST_INT8 || weight.scheme == ST_INT4) return true;
#ifdef ST_AMX
  return weight.scheme == ST_BFLOAT16 && weight.extras & ST_ROUNDED_ACTIVATIONS;
#else
  return false;
#endif
}

void linear(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
            int64_t y_stride, int64_t residual_stride) {
  if (tokens <= 0) return;
  (by_linear_int(*weight) ? linear_int : linear_float)(weight, tokens, x, x_stride, residual, y, y_stride, residual_stride);
  count_weight(*weight);
}

bool linear_gated(const StLinear *weight, int32_t activation, int32_t tokens, const float *x, int64_t x_stride, float *y) {
  if (tokens <= 0 || !by_linear_int(*weight) || !gated_int(weight, activation, tokens, x, x_stride, y)) return false;
  count_weight(*weight);
  return true;
}

}  // namespace ST_ISA
