namespace ST_ISA {
void attention(const StBatch *, const StKv *, int32_t, int32_t, float, const float *, int64_t, float *) {}
}  // namespace ST_ISA
