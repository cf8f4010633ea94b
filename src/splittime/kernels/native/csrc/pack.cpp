#include "splittime.h"
extern "C" {
int64_t st_packed_bytes(int32_t, int32_t, int32_t, int32_t, int32_t) { return 0; }
void st_pack(int32_t, int32_t, int32_t, int32_t, const void *, int32_t, int32_t, int32_t, uint8_t *) {}
void st_pack_quantized(int32_t, int32_t, int32_t, int32_t, const int8_t *, const float *, const uint8_t *, uint8_t *) {}
void st_unpack(const StLinear *, float *) {}
}
