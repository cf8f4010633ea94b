// y = x W^T: hands a weight to the kernel of its scheme.
#include "reads.h"

namespace ST_ISA {

using Multiply = void(const StLinear *, int32_t, const float *, int64_t, const float *, float *, int64_t, int64_t);
Multiply linear_float, linear_int;  // parts of their own

void linear(const StLinear *weight, int32_t tokens, const float *x, int64_t x_stride, const float *residual, float *y,
            int64_t y_stride, int64_t residual_stride) {
  if (tokens <= 0) return;
  if (weight->scheme == ST_INT8 || weight->scheme == ST_INT4)
    linear_int(weight, tokens, x, x_stride, residual, y, y_stride, residual_stride);
  else
    linear_float(weight, tokens, x, x_stride, residual, y, y_stride, residual_stride);
  count_weight(*weight);
}

}  // namespace ST_ISA
