// Attention over the paged store, in place. A call is cut into items that threads take: for a row of one query token a
// stretch of its context (attention_decode.inl), for a longer row a tile of its queries and one KV head
// (attention_prefill.inl); always with all query heads that share a KV head, so that keys and values are read once. Where
// sums are cut follows from the row alone: neither its neighbours nor the number of threads change a bit of its result.
#include <type_traits>

#include "vecmath.inl"

namespace ST_ISA::paged {

constexpr int PANEL = 2 * LANES;  // keys, or columns of values, that a register tile covers
constexpr float LOG2_E = 1.44269504f;

// One call.
struct Attend {
  const StBatch &batch;
  const StKv &kv;
  int32_t num_heads, sharing, wide_dim;  // sharing: query heads of a KV head; wide_dim: head_dim in whole panels
  int32_t window;
  const StScores &scores;
  const float *q;
  int64_t q_stride;
  float *out;

  float factor() const { return scores.scale * LOG2_E; }

  int32_t queries(int32_t row) const { return batch.query_begins[row + 1] - batch.query_begins[row]; }
  int32_t first_seen(int32_t position) const { return window && position >= window ? position - window + 1 : 0; }
  const int32_t *table(int32_t row) const { return batch.block_tables + (int64_t)row * batch.max_blocks; }
  const float *query(int64_t token, int32_t head) const { return q + token * q_stride + head * (int64_t)kv.head_dim; }
  float *result(int64_t token, int32_t head) const { return out + (token * num_heads + head) * kv.head_dim; }
  // What the results of a query head are divided by: `sum` is of exponents of 2 over `most`.
  float total(int32_t head, float sum, float most) const {
    if (!scores.sinks) return sum;
    const float above = scores.sinks[head] * LOG2_E - most;
    return sum + exp2_of(splat(above < 128 ? above : 128))[0];
  }
};

// One head's keys or values of one block.
template <class T> ST_INLINE const T *tile(const StKv &kv, int64_t block, int part, int head) {
  return (const T *)kv.data + tile_of(kv, block, part, head) * kv.block_size * kv.head_dim;
}
template <class T> ST_INLINE const float *scales(const StKv &kv, int64_t block, int part, int head) {
  return sizeof(T) == 1 ? kv.scales + tile_of(kv, block, part, head) * kv.block_size : nullptr;
}
template <class T> ST_INLINE float scale_at(const float *scales, int32_t place) {
  return sizeof(T) == 1 ? scales[place] : 1.0f;
}

// Keys of tokens [from, to) of a row as floats in panels [head_dim][PANEL]; token t goes to column t - origin. Where a
// whole vector of tokens lies in one block it is copied whole, even past `to`: what stands there is masked later.
template <class T>
void gather_keys(const StKv &kv, const int32_t *table, int head, int32_t origin, int32_t from, int32_t to,
                 float *panels) {
  const int32_t size = kv.block_size, dim = kv.head_dim;
  for (int32_t t = from; t < to;) {
    const int32_t block = table[t / size], place = t % size, column = t - origin;
    const T *keys = tile<T>(kv, block, 0, head) + place;
    const float *scale = scales<T>(kv, block, 0, head);
    float *panel = panels + (int64_t)(column / PANEL) * dim * PANEL + column % PANEL;
    if (place + LANES <= size && column % LANES == 0) {
      const F32 factor = sizeof(T) == 1 ? load<F32>(scale + place) : splat(1.0f);
      for (int32_t d = 0; d < dim; d++) {
        const F32 v = widen(keys + (int64_t)d * size);
        store(panel + d * PANEL, sizeof(T) == 1 ? v * factor : v);
      }
      t += LANES;
    } else {
      const float factor = scale_at<T>(scale, place);
      for (int32_t d = 0; d < dim; d++) panel[d * PANEL] = widen_one(keys[(int64_t)d * size]) * factor;
      t++;
    }
  }
}

// Values of tokens [from, to) as floats; columns in strips of PANEL, `strip` floats apart, a token's row `step` floats
// after the one before. Columns past head_dim are zero.
template <class T>
void gather_values(const StKv &kv, const int32_t *table, int head, int32_t origin, int32_t from, int32_t to,
                   int64_t strip, int64_t step, float *strips) {
  const int32_t size = kv.block_size, dim = kv.head_dim, wide = (dim + PANEL - 1) / PANEL * PANEL;
  for (int32_t t = from; t < to; t++) {
    const T *values = tile<T>(kv, table[t / size], 1, head) + (int64_t)(t % size) * dim;
    const float factor = scale_at<T>(scales<T>(kv, table[t / size], 1, head), t % size);
    float *row = strips + (t - origin) * step;
    int32_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      const F32 v = widen(values + d);
      store(row + d / PANEL * strip + d % PANEL, sizeof(T) == 1 ? v * factor : v);
    }
    for (; d < wide; d++) row[d / PANEL * strip + d % PANEL] = d < dim ? widen_one(values[d]) * factor : 0;
  }
}

// One query head's running softmax: exponents of 2 over `most` (the largest score so far), and their sums by lane.
struct Softmax {
  float most = -INFINITY;
  F32 sums = {};

  // Scores [0, count) -> weights, of which [low, high) are seen and the rest become 0; `count` is in whole vectors. cap: of
  // scores, or 0. Returns what earlier sums and results must be multiplied with.
  ST_INLINE float take(float *scores, int32_t low, int32_t high, int32_t count, float cap) {
    if (cap) bend(scores, count, cap * LOG2_E);
    const float new_most = largest(scores, low, high, count);
    const float base = new_most == -INFINITY ? 0 : new_most;
    const float keeps = new_most == most ? 1.0f : exp2_of(splat(most - base))[0];
    F32 total = {};
    for (int32_t i = 0; i < count; i += LANES) {
      const F32 weight = exp2_of(load<F32>(scores + i) - base);
      store(scores + i, weight);
      total += weight;
    }
    sums = fma(sums, splat(keeps), total);
    most = new_most;
    return keeps;
  }

 private:
  static void bend(float *scores, int32_t count, float most) {
    const float factor = 1 / most;
    for (int32_t i = 0; i < count; i += LANES) store(scores + i, tanh_of(load<F32>(scores + i) * factor) * most);
  }

  ST_INLINE float largest(float *scores, int32_t low, int32_t high, int32_t count) const {
    F32 found = splat(-INFINITY);
    for (int32_t i = 0; i < count; i += LANES) {
      F32 score = load<F32>(scores + i);
      if (i < low || i + LANES > high) {
        const I32 at = lane_numbers() + i;
        score = (at >= low) & (at < high) ? score : splat(-INFINITY);
        store(scores + i, score);
      }
      found = larger(found, score);
    }
    const float most_here = largest_of(found);
    return most_here > most ? most_here : most;
  }
};

}  // namespace ST_ISA::paged

#include "attention_decode.inl"
#include "attention_prefill.inl"
#ifdef ST_AMX
#include "attention_prefill_amx.inl"
#endif

namespace ST_ISA::paged {

constexpr int64_t SERIAL_WORK = 1 << 16;  // products of a call that other threads would only hear of when it is done

// Items of a row: its parts (stretches of context, or tiles of queries), each for `groups` of its KV heads.
struct RowItems {
  int64_t begin;
  int32_t parts, groups, first_partial;
};

struct Schedule {
  RowItems *rows;
  int64_t items = 0, work = 0;
  int32_t partials = 0;
};

inline Schedule schedule_of(const Attend &call, RowItems *rows) {
  Schedule all{rows};
  for (int32_t row = 0; row < call.batch.rows; row++) {
    const bool decodes = row < call.batch.decode_rows;
    const int32_t parts = decodes ? decode_parts(call, row) : prefill_parts(call, row);
    const int32_t groups = decodes ? decode_groups(call, parts) : call.kv.num_kv_heads;
    rows[row] = {all.items, parts, groups, all.partials};
    all.items += (int64_t)parts * groups;
    if (decodes && parts > 1) all.partials += parts * call.kv.num_kv_heads;
    all.work += (int64_t)call.queries(row) * call.batch.context_lens[row] * call.num_heads * call.kv.head_dim;
  }
  return all;
}

inline int32_t row_of(const Schedule &all, int32_t num_rows, int64_t item) {
  int32_t low = 0, high = num_rows - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (all.rows[middle].begin <= item) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <class T> void run_item(const Attend &call, const Schedule &all, float *partials, int64_t item) {
  const int32_t row = row_of(all, call.batch.rows, item);
  const RowItems &mine = all.rows[row];
  const int32_t within = (int32_t)(item - mine.begin), heads = call.kv.num_kv_heads;
  if (row >= call.batch.decode_rows) return prefill_tile<T>(call, row, within / mine.parts, within % mine.parts);
  const int32_t part = within / mine.groups, group = within % mine.groups;
  const int32_t head = group * heads / mine.groups, end = (group + 1) * heads / mine.groups;
  const int64_t first_partial = mine.first_partial + part * heads + head;
  float *partial = mine.parts > 1 ? partials + first_partial * partial_floats(call) : nullptr;
  decode_part<T>(call, row, head, end - head, part, partial);
}

// body(item) for [0, items), largest first: long rows come last in a batch, and late queries see most.
template <class F> void run_items(int64_t items, int64_t work, F &&body) {
  if (work < SERIAL_WORK) {
    for (int64_t item = items; item-- > 0;) body(item);
  } else {
    for_each((int32_t)items, [&](int32_t item) { body(items - 1 - item); });
  }
}

inline void merge_rows(const Attend &call, const Schedule &all, const float *partials) {
  const int32_t heads = call.kv.num_kv_heads;
  run_items((int64_t)call.batch.decode_rows * heads, all.work, [&](int64_t item) {
    const RowItems &mine = all.rows[item / heads];
    if (mine.parts == 1) return;
    const int32_t head = (int32_t)(item % heads);
    const float *first = partials + (mine.first_partial + head) * partial_floats(call);
    merge_parts(call, (int32_t)(item / heads), head, mine.parts, first);
  });
}

}  // namespace ST_ISA::paged

namespace ST_ISA {

void attention(const StBatch *batch, const StKv *kv, int32_t num_heads, int32_t window_tokens, const StScores &scores,
               const float *q, int64_t q_stride, float *out) {
  using namespace paged;
  static thread_local Room<RowItems> row_memory;
  static thread_local Room<float> partial_memory;
  const int32_t wide_dim = (kv->head_dim + PANEL - 1) / PANEL * PANEL;
  const Attend call = {*batch, *kv, num_heads, num_heads / kv->num_kv_heads, wide_dim, window_tokens, scores, q,
                       q_stride, out};
  const Schedule all = schedule_of(call, row_memory.of(batch->rows));
  float *partials = all.partials ? partial_memory.of(all.partials * partial_floats(call)) : nullptr;
  with_kv_type(kv->type, [&](auto *element) {
    using T = std::remove_pointer_t<decltype(element)>;
    run_items(all.items, all.work, [&](int64_t item) { run_item<T>(call, all, partials, item); });
  });
  if (partials) merge_rows(call, all, partials);
  count_attention(*batch, *kv, window_tokens);
}

}  // namespace ST_ISA
