// What the kernels have read, counted once a call (st_bytes_read). Functions are static, for each instruction set its own.
#pragma once
#include "splittime.h"

constexpr int32_t READ_KINDS = 7, FIRST_KV_KIND = 4;
extern int64_t bytes_read[READ_KINDS];

static inline void count_read(int32_t kind, int64_t bytes) {
  __atomic_fetch_add(&bytes_read[kind], bytes, __ATOMIC_RELAXED);
}

static inline void count_weight(const StLinear &weight) {
  count_read(weight.scheme, st_packed_bytes(weight.scheme, weight.out_features, weight.in_features, weight.group,
                                            weight.extras));
}

// Positions from the first that a row's first query sees to its last.
static inline void count_attention(const StBatch &batch, const StKv &kv, int32_t window_tokens) {
  static const int32_t SIZES[] = {4, 2, 1};
  const int64_t of_position = 2 * kv.num_kv_heads * ((int64_t)kv.head_dim * SIZES[kv.type] + (kv.type == ST_INT8 ? 4 : 0));
  int64_t positions = 0;
  for (int32_t row = 0; row < batch.rows; row++) {
    const int64_t queries = batch.query_begins[row + 1] - batch.query_begins[row], context = batch.context_lens[row];
    const int64_t seen = window_tokens ? queries + window_tokens - 1 : context;
    if (queries) positions += seen < context ? seen : context;
  }
  count_read(FIRST_KV_KIND + kv.type, positions * of_position);
}
