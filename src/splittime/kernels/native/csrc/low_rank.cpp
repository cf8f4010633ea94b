// What adapters add to a product, each on its own tokens. One adapter is one item of work, whose products run on its
// thread alone; where there are fewer adapters than threads, they come one by one and each product takes all threads.
#include <string.h>

#include <vector>

#include "pool.h"
#include "splittime.h"

namespace {

// Of a thread; it grows to the largest item and stays.
thread_local std::vector<float> memory;

float *floats(int64_t count) {
  if ((int64_t)memory.size() < count) memory.resize(count);
  return memory.data();
}

int64_t widest(const StLowRank &adapter) {
  int64_t most = 0;
  for (int32_t i = 0; i < adapter.num_parts; i++)
    if (adapter.parts[i].out_features > most) most = adapter.parts[i].out_features;
  return most;
}

void add(const StLowRank &adapter, int32_t count, const int32_t *tokens, const float *x, int64_t x_stride, float *y,
         int64_t y_stride) {
  const int64_t in = adapter.down.in_features, rank = adapter.down.out_features;
  float *rows = floats(count * (in + rank + widest(adapter)));
  float *inner = rows + count * in, *out = inner + count * rank;
  for (int32_t i = 0; i < count; i++) memcpy(rows + i * in, x + tokens[i] * x_stride, in * sizeof(float));
  st_linear(&adapter.down, count, rows, in, nullptr, inner, rank);
  for (int32_t part = 0; part < adapter.num_parts; part++) {
    const StLinear &up = adapter.parts[part];
    st_linear(&up, count, inner, rank, nullptr, out, up.out_features);
    for (int32_t i = 0; i < count; i++) {
      float *to = y + tokens[i] * y_stride + adapter.begins[part];
      const float *from = out + (int64_t)i * up.out_features;
      for (int32_t j = 0; j < up.out_features; j++) to[j] += from[j];
    }
    inner += up.in_features;
  }
}

}  // namespace

extern "C" void st_add_low_rank(int32_t adapters, const StLowRank *const *low_ranks, const int32_t *counts,
                                const int32_t *const *tokens, const float *x, int64_t x_stride, float *y,
                                int64_t y_stride) {
  auto item = [&](int32_t i) {
    if (low_ranks[i]) add(*low_ranks[i], counts[i], tokens[i], x, x_stride, y, y_stride);
  };
  if (adapters >= pool_threads())
    for_each(adapters, item);
  else
    for (int32_t i = 0; i < adapters; i++) item(i);
}
