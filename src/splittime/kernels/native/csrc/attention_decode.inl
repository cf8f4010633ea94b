// One query token of a row, all heads together, against a stretch of the row's context. Each tile of keys and values
// is read once, straight from the store and in its order: the tiles of a block's heads follow each other, and only long
// runs are read at the memory's rate.
#pragma once

namespace ST_ISA::paged {

constexpr int CHUNK = 128;       // tokens between two steps of the running softmax, at most
constexpr int PART_TOKENS = 256;  // tokens of context that one item covers ..
constexpr int MAX_PARTS = 32;     // .. and more where that would cut a row into more items than this
constexpr int AHEAD = 2;          // tiles between what is read and what is asked for
constexpr int MAX_TILES = CHUNK / LANES;
constexpr int TOGETHER = 4;  // query heads that a pass over a tile serves

inline int32_t round_up(int32_t x, int32_t to) { return (x + to - 1) / to * to; }

// A tile can be read as it is if vectors of keys do not cross its rows, vectors of values end with the head, and no
// chunk ends inside one block and goes on in the next.
inline bool reads_in_place(const StKv &kv) {
  const bool fits = kv.block_size <= CHUNK || kv.block_size % CHUNK == 0;
  return fits && kv.block_size % LANES == 0 && kv.head_dim % LANES == 0;
}

// Whole blocks if they are small; chunks begin where a row's first block does.
inline int32_t chunk_of(const StKv &kv) {
  return kv.block_size > CHUNK ? CHUNK : CHUNK / kv.block_size * kv.block_size;
}

// Where a row's parts begin (its first block that is seen at all), and the tokens of each.
struct Parts {
  int32_t origin, first, end, each;
};

inline Parts parts_of(const Attend &call, int32_t row) {
  const int32_t end = call.batch.context_lens[row], first = call.first_seen(end - 1);
  const int32_t origin = first / call.kv.block_size * call.kv.block_size;
  int32_t each = PART_TOKENS;
  while ((end - origin) / MAX_PARTS > each) each *= 2;
  return {origin, first, end, round_up(each, chunk_of(call.kv))};
}

inline int32_t decode_parts(const Attend &call, int32_t row) {
  const Parts parts = parts_of(call, row);
  return parts.end <= parts.origin ? 1 : (parts.end - parts.origin + parts.each - 1) / parts.each;
}

// Into how many items a row's parts are cut by their KV heads, so that there is one for each thread. Heads do not meet,
// so this changes no bit, whatever it follows from.
inline int32_t decode_groups(const Attend &call, int32_t parts) {
  const int32_t uncut = parts * call.batch.decode_rows, wanted = (pool_threads() + uncut - 1) / uncut;
  return wanted < call.kv.num_kv_heads ? wanted : call.kv.num_kv_heads;
}

// A partial result of a KV head: for each head the largest score and the sum of weights, then the heads' results.
inline int64_t partial_floats(const Attend &call) { return (int64_t)call.sharing * (2 + call.wide_dim); }

}  // namespace ST_ISA::paged

#include "attention_decode_tiles.inl"

namespace ST_ISA::paged {

// Up to CHUNK tokens of context: the `count` tiles of an item's first KV head, each followed by those of its other
// heads. Tokens before `low` and from `tokens` on are not seen. `order`: what is read one after the other, each time
// all heads: keys tile by tile, values, the next chunk's keys.
template <class T> struct Chunk {
  Tile<T> tiles[MAX_TILES];
  int32_t count, low, tokens;
  const char *order[3 * MAX_TILES];
};

// The state of one item; T is the store's element, or float where tiles are gathered first.
template <class T> struct Decode {
  const Attend &call;
  int32_t kv_heads;             // of this item, sharing * kv_heads query heads
  int32_t size, dim;            // of a tile of keys, [dim][size]
  int32_t width;                // of a row of values: dim, or whole panels
  int32_t run;                  // tokens of a tile that a chunk holds: size, or CHUNK
  float *q, *scores, *results;  // [query heads][dim] by pass, [query heads][CHUNK], [query heads][wide_dim]
  Softmax *softmaxes;

  int32_t heads() const { return kv_heads * call.sharing; }
  int64_t apart() const { return (int64_t)size * dim; }  // of two heads' tiles

  // What is read AHEAD tiles after a head's `i`-th tile of a chunk, in the chunk's order.
  const char *ahead(const Chunk<T> &chunk, int32_t i, int32_t kv_head) const {
    const int32_t later = i * kv_heads + kv_head + AHEAD, last = 3 * chunk.count - 1;
    const int32_t stretch = later / kv_heads < last ? later / kv_heads : last;
    return chunk.order[stretch] + later % kv_heads * apart() * sizeof(T);
  }

  template <int R> void score(const T *keys, const char *ahead, int32_t head, int32_t at, int32_t tokens) const {
    const float *mine = q + (int64_t)head * dim;
    float *to = scores + (int64_t)head * CHUNK + at;
    int32_t t = 0;
    for (; t < tokens && t + 2 * LANES <= run; t += 2 * LANES)
      score_vectors<T, R, 2>(mine, keys + t, size, dim, ahead + t * dim * sizeof(T), to + t);
    if (t < tokens) score_vectors<T, R, 1>(mine, keys + t, size, dim, ahead + t * dim * sizeof(T), to + t);
  }

  template <int R>
  void mix(const T *values, const char *ahead, int32_t head, int32_t at, int32_t from, int32_t to) const {
    constexpr int NV = VECTORS<R>;
    const float *mine = scores + (int64_t)head * CHUNK + at + from;
    float *result = results + (int64_t)head * call.wide_dim;
    const int64_t wide = call.wide_dim, step = run * sizeof(T);
    const int32_t tokens = to - from;
    values += (int64_t)from * width;
    int32_t d = 0;
    for (; d + NV * LANES <= width; d += NV * LANES)
      mix_vectors<T, R, NV>(mine, values + d, width, tokens, ahead + d * step, result + d, wide);
    for (; d + 2 * LANES <= width; d += 2 * LANES)
      mix_vectors<T, R, 2>(mine, values + d, width, tokens, ahead + d * step, result + d, wide);
    for (; d < width; d += LANES)
      mix_vectors<T, R, 1>(mine, values + d, width, tokens, ahead + d * step, result + d, wide);
  }

  // body(std::integral_constant<int, R>, first head) for passes over the heads that share a KV head.
  template <class F> void passes(int32_t kv_head, F &&body) const {
    int32_t head = kv_head * call.sharing;
    const int32_t end = head + call.sharing;
    for (; head + TOGETHER <= end; head += TOGETHER) body(std::integral_constant<int, TOGETHER>(), head);
    const int32_t left = end - head;
    if (left == 1) body(std::integral_constant<int, 1>(), head);
    if (left == 2) body(std::integral_constant<int, 2>(), head);
    if (left == 3) body(std::integral_constant<int, 3>(), head);
  }

  template <class F> void all_passes(F &&body) const {
    for (int32_t kv_head = 0; kv_head < kv_heads; kv_head++) passes(kv_head, body);
  }

  void start(const float *query) {
    const float factor = call.factor();
    all_passes([&](auto together, int32_t head) {
      constexpr int R = decltype(together)::value;
      for (int32_t r = 0; r < R; r++)
        for (int32_t d = 0; d < dim; d++)
          q[(int64_t)head * dim + d * R + r] = query[(int64_t)(head + r) * dim + d] * factor;
    });
    clear();
  }

  void clear() {
    for (int32_t head = 0; head < heads(); head++) softmaxes[head] = Softmax();
    memset(results, 0, sizeof(float) * heads() * call.wide_dim);
  }

  // A head's results so far are worth this much of what they were.
  void keep(int32_t head, float share) const {
    float *result = results + (int64_t)head * call.wide_dim;
    if (share != 1)
      for (int32_t d = 0; d < width; d += LANES) store(result + d, load<F32>(result + d) * share);
  }

  void score_chunk(const Chunk<T> &chunk) const {
    for (int32_t i = 0; i * run < chunk.tokens; i++)
      for (int32_t kv_head = 0; kv_head < kv_heads; kv_head++)
        passes(kv_head, [&](auto together, int32_t head) {
          const T *keys = chunk.tiles[i].keys + kv_head * apart();
          score<decltype(together)::value>(keys, ahead(chunk, i, kv_head), head, i * run, chunk.tokens - i * run);
        });
  }

  static ST_INLINE void scale_vector(float *x, const float *by) { store(x, load<F32>(x) * load<F32>(by)); }

  // The running softmax over the tokens that are seen.
  void weigh_chunk(const Chunk<T> &chunk) const {
    for (int32_t head = 0; head < heads(); head++) {
      float *mine = scores + (int64_t)head * CHUNK;
      const int64_t skipped = head / call.sharing * (int64_t)size;
      if (sizeof(T) == 1)
        for (int32_t t = 0; t < chunk.tokens; t += LANES)
          scale_vector(mine + t, chunk.tiles[t / run].key_scales + skipped + t % run);
      keep(head, softmaxes[head].take(mine, chunk.low, chunk.tokens, round_up(chunk.tokens, LANES), call.scores.cap));
      if (sizeof(T) > 1) continue;
      for (int32_t t = 0; t < chunk.tokens; t += LANES)
        scale_vector(mine + t, chunk.tiles[t / run].value_scales + skipped + t % run);
    }
  }

  // Results += weights times values.
  void mix_chunk(const Chunk<T> &chunk) const {
    for (int32_t i = chunk.low / run; i * run < chunk.tokens; i++)
      for (int32_t kv_head = 0; kv_head < kv_heads; kv_head++)
        passes(kv_head, [&](auto together, int32_t head) {
          const T *values = chunk.tiles[i].values + kv_head * apart();
          const int32_t at = i * run, from = chunk.low > at ? chunk.low - at : 0;
          const int32_t to = chunk.tokens - at < run ? chunk.tokens - at : run;
          mix<decltype(together)::value>(values, ahead(chunk, chunk.count + i, kv_head), head, at, from, to);
        });
  }

  void take_chunk(const Chunk<T> &chunk) const {
    score_chunk(chunk);
    weigh_chunk(chunk);
    mix_chunk(chunk);
  }
};

}  // namespace ST_ISA::paged

#include "attention_decode_int8.inl"

namespace ST_ISA::paged {

// The tiles of the chunk at token `at`, or the last ones before `end` once more.
template <class T>
void find_tiles(const Decode<T> &state, const int32_t *table, int head, int32_t at, int32_t end, Chunk<T> &chunk) {
  const StKv &kv = state.call.kv;
  const int32_t last = (end - 1) / kv.block_size;
  for (int32_t i = 0; i < chunk.count; i++) {
    const int32_t column = at / kv.block_size + i, place = at % kv.block_size;
    const int32_t block = table[column < last ? column : last];
    const int64_t skipped = (int64_t)place * kv.head_dim;
    const T *keys = tile<T>(kv, block, 0, head), *values = tile<T>(kv, block, 1, head) + skipped;
    chunk.tiles[i] = {keys + place, values, scales<T>(kv, block, 0, head) + place,
                      scales<T>(kv, block, 1, head) + place};
    chunk.order[i] = (const char *)(keys + skipped), chunk.order[chunk.count + i] = (const char *)values;
    for (int32_t k = 0; sizeof(T) == 1 && k < state.kv_heads; k++) {
      __builtin_prefetch(chunk.tiles[i].key_scales + (int64_t)k * kv.block_size);
      __builtin_prefetch(chunk.tiles[i].value_scales + (int64_t)k * kv.block_size);
    }
  }
}

template <class T, class State>
void decode_in_place(const State &state, const int32_t *table, int head, int32_t begin, int32_t first, int32_t end) {
  const int32_t step = chunk_of(state.call.kv), count = step / state.run;
  Chunk<T> both[2], *chunk = &both[0], *next = &both[1];
  chunk->count = next->count = count;
  find_tiles<T>(state, table, head, begin, end, *chunk);
  for (int32_t at = begin; at < end; at += step) {
    find_tiles<T>(state, table, head, at + step, end, *next);
    for (int32_t i = 0; i < count; i++) chunk->order[2 * count + i] = next->order[i];
    chunk->low = first > at ? first - at : 0, chunk->tokens = end - at < step ? end - at : step;
    state.take_chunk(*chunk);
    std::swap(chunk, next);
  }
}

// The same for odd sizes, a KV head at a time, through a copy in panels that the state (of float) can read.
template <class T>
void decode_gathered(const Decode<float> &state, const int32_t *table, int head, int32_t begin, int32_t first,
                     int32_t end, float *keys, float *values) {
  const Attend &call = state.call;
  const int32_t step = chunk_of(call.kv), wide = call.wide_dim;
  Chunk<float> chunk;
  chunk.count = CHUNK / PANEL;
  for (int32_t i = 0; i < chunk.count; i++) {
    float *its_keys = keys + (int64_t)i * PANEL * state.dim, *its_values = values + (int64_t)i * PANEL * wide;
    chunk.tiles[i] = {its_keys, its_values, nullptr, nullptr};
    for (int32_t part = 0; part < 3; part++)
      chunk.order[part * chunk.count + i] = (const char *)(part == 1 ? its_values : its_keys);
  }
  for (int32_t at = begin; at < end; at += step) {
    const int32_t from = first > at ? first : at, to = end < at + step ? end : at + step;
    gather_keys<T>(call.kv, table, head, at, from, to, keys);
    gather_values<T>(call.kv, table, head, at, from, to, PANEL, wide, values);
    chunk.low = from - at, chunk.tokens = to - at;
    state.take_chunk(chunk);
  }
}

// Results over their sums, or as they are with what a merge needs to know. `head`: the first KV head of the item.
template <class T> void finish(const Decode<T> &state, int32_t row, int32_t head, float *partial) {
  const Attend &call = state.call;
  for (int32_t i = 0; i < state.heads(); i++) {
    float *result = state.results + (int64_t)i * call.wide_dim;
    const float sum = sum_of(state.softmaxes[i].sums);
    put_in_order<T>(result, state.width);
    if (partial) {
      float *mine = partial + i / call.sharing * partial_floats(call), *its = mine + 2 * (i % call.sharing);
      its[0] = state.softmaxes[i].most, its[1] = sum;
      memcpy(mine + 2 * call.sharing + i % call.sharing * (int64_t)call.wide_dim, result,
             sizeof(float) * call.wide_dim);
    } else {
      const int32_t query_head = head * call.sharing + i;
      float *out = call.result(call.batch.query_begins[row], query_head);
      const float total = call.total(query_head, sum, state.softmaxes[i].most);
      for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] = result[d] * (1 / total);
    }
  }
}

// KV heads [head, head + count) of a row, over one of its parts.
template <class T>
void decode_part(const Attend &call, int32_t row, int32_t head, int32_t count, int32_t part, float *partial) {
  static thread_local Room<float> memory;
  const Parts parts = parts_of(call, row);
  const int32_t begin = parts.origin + part * parts.each;
  const int32_t end = parts.end - begin < parts.each ? parts.end : begin + parts.each;
  const int64_t heads = (int64_t)count * call.sharing, wide = call.wide_dim;
  float *at = memory.of(heads * (2 * wide + CHUNK + 2 * LANES) + 2 * wide * CHUNK + ints_floats(call, heads));
  Softmax *softmaxes = (Softmax *)at;
  float *q = at + heads * 2 * LANES, *results = q + heads * wide, *scores = results + heads * wide;
  float *keys = scores + heads * CHUNK, *values = keys + wide * CHUNK;
  const float *query = call.query(call.batch.query_begins[row], head * call.sharing);
  const int32_t size = call.kv.block_size, dim = call.kv.head_dim;
  if (reads_in_place(call.kv)) {
    const Decode<T> plain = {call, count, size, dim, dim, size < CHUNK ? size : CHUNK, q, scores, results, softmaxes};
    auto run = [&](auto state) {
      state.start(query);
      decode_in_place<T>(state, call.table(row), head, begin, parts.first, end);
      finish(plain, row, head, partial);
    };
    if constexpr (sizeof(T) == 1)
      if (reads_as_ints(call.kv)) return run(DecodeInts(plain, keys));
    return run(plain);
  }
  for (int32_t k = 0; k < count; k++) {
    Decode<float> state = {call, 1, PANEL, dim, call.wide_dim, PANEL, q, scores, results, softmaxes};
    state.start(query + (int64_t)k * call.sharing * dim);
    decode_gathered<T>(state, call.table(row), head + k, begin, parts.first, end, keys, values);
    finish(state, row, head + k, partial ? partial + k * partial_floats(call) : nullptr);
  }
}

// One row and KV head, from `parts` partial results that lie num_kv_heads apart.
inline void merge_parts(const Attend &call, int32_t row, int32_t kv_head, int32_t parts, const float *first) {
  const int64_t apart = partial_floats(call) * call.kv.num_kv_heads;
  for (int32_t i = 0; i < call.sharing; i++) {
    float most = -INFINITY, sum = 0;
    for (int32_t part = 0; part < parts; part++) {
      const float its_most = first[part * apart + 2 * i];
      most = its_most > most ? its_most : most;
    }
    const int32_t query_head = kv_head * call.sharing + i;
    float *out = call.result(call.batch.query_begins[row], query_head);
    memset(out, 0, sizeof(float) * call.kv.head_dim);
    for (int32_t part = 0; part < parts; part++) {
      const float *its = first + part * apart;
      const float share = exp2_of(splat(its[2 * i] - (most == -INFINITY ? 0 : most)))[0];
      const float *result = its + 2 * call.sharing + (int64_t)i * call.wide_dim;
      sum += its[2 * i + 1] * share;
      for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] += result[d] * share;
    }
    const float total = call.total(query_head, sum, most);
    for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] *= 1 / total;
  }
}

}  // namespace ST_ISA::paged
