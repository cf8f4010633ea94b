// One query token of a row, for the query heads that share a KV head, against a stretch of the row's context. Bound by
// memory: each tile of keys and values is read once, straight from the store, and asked for half a chunk before it is
// needed.
#pragma once

namespace ST_ISA::paged {

constexpr int CHUNK = 64;        // tokens between two steps of the running softmax, at most
constexpr int PART_TOKENS = 512;  // tokens of context that one item covers ..
constexpr int MAX_PARTS = 32;     // .. and more where that would cut a row into more items than this
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

// A partial result: for each head the largest score and the sum of weights, then the heads' results.
inline int64_t partial_floats(const Attend &call) { return (int64_t)call.sharing * (2 + call.wide_dim); }

}  // namespace ST_ISA::paged

#include "attention_decode_tiles.inl"

namespace ST_ISA::paged {

// The state of one item; T is the store's element, or float where tiles are gathered first.
template <class T> struct Decode {
  const Attend &call;
  int32_t size, dim;            // of a tile of keys, [dim][size]
  int32_t width;                // of a row of values: dim, or whole panels
  int32_t run;                  // tokens of a tile that a chunk holds: size, or CHUNK
  float *q, *scores, *results;  // [sharing][dim] by pass, [sharing][CHUNK], [sharing][wide_dim]
  Softmax *softmaxes;

  template <int R> void score(const Column<T> *columns, int32_t count, int32_t head) const {
    constexpr int NV = VECTORS<R>;
    const float *mine = q + (int64_t)head * dim;
    float *to = scores + head * CHUNK;
    int32_t i = 0;
    for (; i + NV <= count; i += NV) score_columns<T, R, NV>(mine, columns + i, size, dim, to + i * LANES);
    for (; i + 2 <= count; i += 2) score_columns<T, R, 2>(mine, columns + i, size, dim, to + i * LANES);
    if (i < count) score_columns<T, R, 1>(mine, columns + i, size, dim, to + i * LANES);
  }

  template <int R> void mix(const Tile<T> *tiles, const Tile<T> *next, int32_t head, int32_t from, int32_t to) {
    constexpr int NV = VECTORS<R>;
    const float *mine = scores + head * CHUNK;
    float *result = results + head * (int64_t)call.wide_dim;
    int32_t d = 0;
    for (; d + NV * LANES <= width; d += NV * LANES)
      mix_vectors<T, R, NV>(mine, tiles, next, run, width, d, from, to, result + d, call.wide_dim);
    for (; d + 2 * LANES <= width; d += 2 * LANES)
      mix_vectors<T, R, 2>(mine, tiles, next, run, width, d, from, to, result + d, call.wide_dim);
    for (; d < width; d += LANES)
      mix_vectors<T, R, 1>(mine, tiles, next, run, width, d, from, to, result + d, call.wide_dim);
  }

  // body(std::integral_constant<int, R>, first head) for passes over the heads that share this KV head.
  template <class F> void passes(F &&body) const {
    int32_t head = 0;
    for (; head + TOGETHER <= call.sharing; head += TOGETHER) body(std::integral_constant<int, TOGETHER>(), head);
    const int32_t left = call.sharing - head;
    if (left == 1) body(std::integral_constant<int, 1>(), head);
    if (left == 2) body(std::integral_constant<int, 2>(), head);
    if (left == 3) body(std::integral_constant<int, 3>(), head);
  }

  void start(const float *query) {
    const float factor = call.scale * LOG2_E;
    passes([&](auto together, int32_t head) {
      constexpr int R = decltype(together)::value;
      for (int32_t r = 0; r < R; r++)
        for (int32_t d = 0; d < dim; d++)
          q[(int64_t)head * dim + d * R + r] = query[(int64_t)(head + r) * dim + d] * factor;
    });
    clear();
  }

  void clear() {
    for (int32_t head = 0; head < call.sharing; head++) softmaxes[head] = Softmax();
    memset(results, 0, sizeof(float) * call.sharing * call.wide_dim);
  }

  // A head's results so far are worth this much of what they were.
  void keep(int32_t head, float share) {
    float *result = results + (int64_t)head * call.wide_dim;
    if (share != 1)
      for (int32_t d = 0; d < width; d += LANES) store(result + d, load<F32>(result + d) * share);
  }

  // Scores of a chunk of `tokens`, while its values are asked for.
  void score_chunk(const Tile<T> *tiles, int32_t tokens) {
    Column<T> columns[CHUNK / LANES];
    const int32_t count = (tokens + LANES - 1) / LANES;
    for (int32_t i = 0; i < count; i++) {
      const Tile<T> &one = tiles[i * LANES / run];
      const int32_t place = i * LANES % run;
      columns[i] = {one.keys + place, (const char *)(one.values + (int64_t)place * width)};
    }
    passes([&](auto together, int32_t head) { score<decltype(together)::value>(columns, count, head); });
  }

  static ST_INLINE void scale_vector(float *x, const float *by) { store(x, load<F32>(x) * load<F32>(by)); }

  // The running softmax over [low, tokens) of the chunk.
  void weigh_chunk(const Tile<T> *tiles, int32_t low, int32_t tokens) {
    for (int32_t head = 0; head < call.sharing; head++) {
      float *mine = scores + head * CHUNK;
      if (sizeof(T) == 1)
        for (int32_t t = 0; t < tokens; t += LANES) scale_vector(mine + t, tiles[t / run].key_scales + t % run);
      keep(head, softmaxes[head].take(mine, low, tokens, round_up(tokens, LANES)));
      if (sizeof(T) > 1) continue;
      for (int32_t t = 0; t < tokens; t += LANES) scale_vector(mine + t, tiles[t / run].value_scales + t % run);
    }
  }

  // Results += weights times values, while the next chunk's keys are asked for.
  void mix_chunk(const Tile<T> *tiles, const Tile<T> *next, int32_t low, int32_t tokens) {
    passes([&](auto together, int32_t head) { mix<decltype(together)::value>(tiles, next, head, low, tokens); });
  }

  void take_chunk(const Tile<T> *tiles, const Tile<T> *next, int32_t low, int32_t tokens) {
    score_chunk(tiles, tokens);
    weigh_chunk(tiles, low, tokens);
    mix_chunk(tiles, next, low, tokens);
  }
};

}  // namespace ST_ISA::paged

#include "attention_decode_int8.inl"

namespace ST_ISA::paged {

// The tiles of the chunk at token `at`, or the last ones before `end` once more.
template <class T>
void find_tiles(const Attend &call, const int32_t *table, int head, int32_t at, int32_t end, int32_t count,
                Tile<T> *tiles) {
  const StKv &kv = call.kv;
  const int32_t last = (end - 1) / kv.block_size;
  for (int32_t i = 0; i < count; i++) {
    const int32_t column = at / kv.block_size + i, place = at % kv.block_size;
    const int32_t block = table[column < last ? column : last];
    tiles[i] = {tile<T>(kv, block, 0, head) + place, tile<T>(kv, block, 1, head) + (int64_t)place * kv.head_dim,
                scales<T>(kv, block, 0, head) + place, scales<T>(kv, block, 1, head) + place};
    if (sizeof(T) > 1) continue;
    __builtin_prefetch(tiles[i].key_scales);
    __builtin_prefetch(tiles[i].value_scales);
  }
}

template <class T, class State>
void decode_in_place(State &state, const int32_t *table, int head, int32_t begin, int32_t first, int32_t end) {
  const int32_t chunk = chunk_of(state.call.kv), count = chunk / state.run;
  Tile<T> both[2][MAX_TILES], *tiles = both[0], *next = both[1];
  find_tiles(state.call, table, head, begin, end, count, tiles);
  for (int32_t at = begin; at < end; at += chunk) {
    find_tiles(state.call, table, head, at + chunk, end, count, next);
    state.take_chunk(tiles, next, first > at ? first - at : 0, end - at < chunk ? end - at : chunk);
    Tile<T> *used = tiles;
    tiles = next, next = used;
  }
}

// The same for odd sizes, through a copy in panels that the state (of float) can read.
template <class T>
void decode_gathered(Decode<float> &state, const int32_t *table, int head, int32_t begin, int32_t first, int32_t end,
                     float *keys, float *values) {
  const Attend &call = state.call;
  const int32_t chunk = chunk_of(call.kv), wide = call.wide_dim;
  Tile<float> tiles[MAX_TILES];
  for (int32_t i = 0; i < CHUNK / PANEL; i++)
    tiles[i] = {keys + (int64_t)i * PANEL * state.dim, values + (int64_t)i * PANEL * wide, nullptr, nullptr};
  for (int32_t at = begin; at < end; at += chunk) {
    const int32_t from = first > at ? first : at, to = end < at + chunk ? end : at + chunk;
    gather_keys<T>(call.kv, table, head, at, from, to, keys);
    gather_values<T>(call.kv, table, head, at, from, to, PANEL, wide, values);
    state.take_chunk(tiles, tiles, from - at, to - at);
  }
}

// Results over their sums, or as they are with what a merge needs to know.
template <class T> void finish(const Decode<T> &state, int32_t row, int32_t kv_head, float *partial) {
  const Attend &call = state.call;
  for (int32_t i = 0; i < call.sharing; i++) {
    const float *result = state.results + (int64_t)i * call.wide_dim, sum = sum_of(state.softmaxes[i].sums);
    if (partial) {
      partial[2 * i] = state.softmaxes[i].most;
      partial[2 * i + 1] = sum;
      memcpy(partial + 2 * call.sharing + (int64_t)i * call.wide_dim, result, sizeof(float) * call.wide_dim);
    } else {
      float *out = call.result(call.batch.query_begins[row], kv_head * call.sharing + i);
      for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] = result[d] * (1 / sum);
    }
  }
}

template <class T> void decode_part(const Attend &call, int32_t row, int32_t kv_head, int32_t part, float *partial) {
  static thread_local Room<float> memory;
  const Parts parts = parts_of(call, row);
  const int32_t begin = parts.origin + part * parts.each;
  const int32_t end = parts.end - begin < parts.each ? parts.end : begin + parts.each;
  const bool in_place = reads_in_place(call.kv);
  const int64_t sharing = call.sharing, wide = call.wide_dim;
  float *at = memory.of(sharing * (2 * wide + CHUNK + 2 * LANES) + 2 * wide * CHUNK + ints_floats(call));
  Softmax *softmaxes = (Softmax *)at;
  float *q = at + sharing * 2 * LANES, *results = q + sharing * wide, *scores = results + sharing * wide;
  float *keys = scores + sharing * CHUNK, *values = keys + wide * CHUNK;
  const float *query = call.query(call.batch.query_begins[row], kv_head * call.sharing);
  if (in_place) {
    const int32_t size = call.kv.block_size, dim = call.kv.head_dim;
    const Decode<T> plain = {call, size, dim, dim, size < CHUNK ? size : CHUNK, q, scores, results, softmaxes};
    auto run = [&](auto state) {
      state.start(query);
      decode_in_place<T>(state, call.table(row), kv_head, begin, parts.first, end);
      finish<T>(state, row, kv_head, partial);
    };
    if constexpr (sizeof(T) == 1)
      if (reads_as_ints(call.kv)) return run(DecodeInts(plain, keys));
    return run(plain);
  }
  Decode<float> state = {call, PANEL, call.kv.head_dim, call.wide_dim, PANEL, q, scores, results, softmaxes};
  state.start(query);
  decode_gathered<T>(state, call.table(row), kv_head, begin, parts.first, end, keys, values);
  finish(state, row, kv_head, partial);
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
    float *out = call.result(call.batch.query_begins[row], kv_head * call.sharing + i);
    memset(out, 0, sizeof(float) * call.kv.head_dim);
    for (int32_t part = 0; part < parts; part++) {
      const float *its = first + part * apart;
      const float share = exp2_of(splat(its[2 * i] - (most == -INFINITY ? 0 : most)))[0];
      const float *result = its + 2 * call.sharing + (int64_t)i * call.wide_dim;
      sum += its[2 * i + 1] * share;
      for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] += result[d] * share;
    }
    for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] *= 1 / sum;
  }
}

}  // namespace ST_ISA::paged
