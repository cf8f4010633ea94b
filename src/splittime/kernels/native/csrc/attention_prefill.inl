// A tile of a row's query tokens, for the query heads that share a KV head, against the context in key tiles: two small
// matrix products around a running softmax. Keys and values are first copied as floats into panels that stay in the
// cache; each is used once for every query of the tile.
#pragma once

namespace ST_ISA::paged {

constexpr int QUERY_ROWS = LANES == 16 ? 12 : 6;  // of a register tile: its sums, a row of B, and a value of A fit
constexpr int KEY_TILE = 128;
constexpr int PREFILL_ROWS = 96;     // (query, head) pairs of an item, about
constexpr int TILE_QUERIES = 48;  // at most: a tile computes what its last query sees for all of them

#ifdef ST_AMX
constexpr int AMX_PREFILL_ROWS = 256, AMX_PREFILL_QUERIES = 64;  // on AMX more: packing the keys takes longer there
inline bool goes_by_amx(const Attend &call) { return call.kv.type == ST_BFLOAT16 && call.kv.head_dim % 32 == 0; }
#else
constexpr int AMX_PREFILL_ROWS = 0, AMX_PREFILL_QUERIES = 0;
inline bool goes_by_amx(const Attend &) { return false; }
#endif

inline int32_t tile_queries(const Attend &call) {
  const int32_t fit = (goes_by_amx(call) ? AMX_PREFILL_ROWS : PREFILL_ROWS) / call.sharing;
  const int32_t most = goes_by_amx(call) ? AMX_PREFILL_QUERIES : TILE_QUERIES;
  return fit < 1 ? 1 : fit > most ? most : fit;
}

inline int32_t prefill_parts(const Attend &call, int32_t row) {
  return (call.queries(row) + tile_queries(call) - 1) / tile_queries(call);
}

// sums[m] += sum over [0, depth) of a[m A_ROW + i A_STEP] * b[i]; b in rows of PANEL.
template <int A_ROW, int A_STEP>
ST_INLINE void multiply(const float *a, const float *b, int32_t depth, F32 (&sums)[QUERY_ROWS][2]) {
  for (int32_t i = 0; i < depth; i++, a += A_STEP, b += PANEL) {
    const F32 b0 = load<F32>(b), b1 = load<F32>(b + LANES);
#pragma GCC unroll 12
    for (int m = 0; m < QUERY_ROWS; m++) {
      const F32 one = splat(a[m * A_ROW]);
      sums[m][0] = fma(one, b0, sums[m][0]);
      sums[m][1] = fma(one, b1, sums[m][1]);
    }
  }
}

// scores[m] (rows of KEY_TILE) = q_m . the keys of one panel; q: [dim][QUERY_ROWS].
inline void score_panel(const float *q, const float *keys, int32_t dim, float *scores) {
  F32 sums[QUERY_ROWS][2] = {};
  multiply<1, QUERY_ROWS>(q, keys, dim, sums);
#pragma GCC unroll 12
  for (int m = 0; m < QUERY_ROWS; m++) {
    store(scores + m * KEY_TILE, sums[m][0]);
    store(scores + m * KEY_TILE + LANES, sums[m][1]);
  }
}

// results[m] = results[m] * keeps[m] + the weighted values of `depth` tokens, one strip of columns.
inline void mix_strip(const float *weights, const float *values, int32_t depth, const float *keeps, float *results,
                      int32_t wide_dim) {
  F32 sums[QUERY_ROWS][2];
#pragma GCC unroll 12
  for (int m = 0; m < QUERY_ROWS; m++) {
    sums[m][0] = load<F32>(results + (int64_t)m * wide_dim) * keeps[m];
    sums[m][1] = load<F32>(results + (int64_t)m * wide_dim + LANES) * keeps[m];
  }
  multiply<KEY_TILE, 1>(weights, values, depth, sums);
#pragma GCC unroll 12
  for (int m = 0; m < QUERY_ROWS; m++) {
    store(results + (int64_t)m * wide_dim, sums[m][0]);
    store(results + (int64_t)m * wide_dim + LANES, sums[m][1]);
  }
}

// One item. Its rows are (query, head) pairs, heads within a query, rounded up to whole register tiles; the surplus
// rows compute with a query of zeros, and nobody reads them.
struct Prefill {
  const Attend &call;
  int32_t head;           // of keys and values
  int64_t token;          // first query, in the batch
  int32_t position;       // and its position in the row
  int32_t rows, padded;   // pairs, and rounded up
  float *q, *scores, *results, *keys, *values, *keeps;
  Softmax *softmaxes;

  int32_t position_of(int32_t row) const { return position + row / call.sharing; }
  int32_t last_of(int32_t rows_begin) const {  // the last position of a register tile of rows
    return position_of(rows_begin + QUERY_ROWS < rows ? rows_begin + QUERY_ROWS - 1 : rows - 1);
  }

  void start() {
    const int32_t dim = call.kv.head_dim;
    const float factor = call.factor();
    for (int32_t row = 0; row < padded; row++) {
      float *to = q + (int64_t)(row / QUERY_ROWS) * QUERY_ROWS * dim + row % QUERY_ROWS;
      const int32_t query_head = head * call.sharing + row % call.sharing;
      const float *from = row < rows ? call.query(token + row / call.sharing, query_head) : nullptr;
      for (int32_t d = 0; d < dim; d++) to[d * QUERY_ROWS] = from ? from[d] * factor : 0;
      softmaxes[row] = Softmax();
      keeps[row] = 1;
    }
    memset(results, 0, sizeof(float) * padded * call.wide_dim);
  }

  // Keys [from, to) of the tile that begins at token `at`.
  void score_tile(int32_t at, int32_t from, int32_t to) {
    const int32_t dim = call.kv.head_dim;
    for (int32_t key = from / PANEL * PANEL; key < to; key += PANEL)
      for (int32_t row = 0; row < padded; row += QUERY_ROWS)
        if (at + key <= last_of(row))
          score_panel(q + (int64_t)row * dim, keys + (int64_t)key * dim, dim, scores + (int64_t)row * KEY_TILE + key);
  }

  // Each row sees [low, high) of the tile; the rest of [from, to) has no weight.
  void weigh_tile(int32_t at, int32_t from, int32_t to) {
    for (int32_t row = 0; row < rows; row++) {
      const int32_t seen_from = call.first_seen(position_of(row)) - at, seen_to = position_of(row) + 1 - at;
      const int32_t low = seen_from > from ? seen_from : from, high = seen_to < to ? seen_to : to;
      const int32_t begin = from / LANES * LANES, end = (high + LANES - 1) / LANES * LANES;
      float *mine = scores + (int64_t)row * KEY_TILE;
      keeps[row] = 1;
      if (high > low) keeps[row] = softmaxes[row].take(mine + begin, low - begin, high - begin, end - begin, call.scores.cap);
      for (int32_t i = high > low ? end : begin; i < to; i += LANES) store(mine + i, F32{});
    }
  }

  void mix_tile(int32_t at, int32_t from, int32_t to) {
    for (int32_t strip = 0; strip < call.wide_dim; strip += PANEL)
      for (int32_t row = 0; row < padded; row += QUERY_ROWS) {
        const int32_t seen = last_of(row) + 1 - at, depth = (seen < to ? seen : to) - from;
        if (depth > 0)
          mix_strip(scores + (int64_t)row * KEY_TILE + from, values + (int64_t)strip * KEY_TILE + from * PANEL, depth,
                    keeps + row, results + (int64_t)row * call.wide_dim + strip, call.wide_dim);
      }
  }

  void finish() const {
    for (int32_t row = 0; row < rows; row++) {
      const int32_t query_head = head * call.sharing + row % call.sharing;
      const float total = call.total(query_head, sum_of(softmaxes[row].sums), softmaxes[row].most);
      const float *result = results + (int64_t)row * call.wide_dim, factor = 1 / total;
      float *out = call.result(token + row / call.sharing, query_head);
      for (int32_t d = 0; d < call.kv.head_dim; d++) out[d] = result[d] * factor;
    }
  }
};

template <class T> void take_tiles(Prefill &state, const int32_t *table) {
  const Attend &call = state.call;
  const int32_t first = call.first_seen(state.position), end = state.position_of(state.rows - 1) + 1;
  for (int32_t at = first / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE) {
    const int32_t from = first > at ? first - at : 0, to = end - at < KEY_TILE ? end - at : KEY_TILE;
    gather_keys<T>(call.kv, table, state.head, at, at + from, at + to, state.keys);
    gather_values<T>(call.kv, table, state.head, at, at + from, at + to, KEY_TILE * PANEL, PANEL, state.values);
    state.score_tile(at, from, to);
    state.weigh_tile(at, from, to);
    state.mix_tile(at, from, to);
  }
}

#ifdef ST_AMX
void amx_prefill(const Attend &call, int32_t row, int32_t kv_head, int32_t part);
#else
inline void amx_prefill(const Attend &, int32_t, int32_t, int32_t) {}
#endif

// Tiles of late queries see most and come first: items are taken from the last to the first.
template <class T> void prefill_tile(const Attend &call, int32_t row, int32_t kv_head, int32_t part) {
  static thread_local Room<float> memory;
  if (goes_by_amx(call)) return amx_prefill(call, row, kv_head, part);
  const int32_t count = call.queries(row), each = tile_queries(call), begin = part * each;
  const int32_t rows = (count - begin < each ? count - begin : each) * call.sharing;
  const int64_t padded = (rows + QUERY_ROWS - 1) / QUERY_ROWS * QUERY_ROWS;
  const int64_t dim = call.kv.head_dim, wide = call.wide_dim;
  float *at = memory.of(padded * (2 * LANES + dim + KEY_TILE + wide + 1) + KEY_TILE * (dim + wide));
  const int32_t token = call.batch.query_begins[row] + begin, position = call.batch.context_lens[row] - count + begin;
  Prefill state = {call, kv_head, token, position, rows, (int32_t)padded};
  state.softmaxes = (Softmax *)at;
  state.scores = at + padded * 2 * LANES;
  state.results = state.scores + padded * KEY_TILE;
  state.values = state.results + padded * wide;
  state.keys = state.values + KEY_TILE * wide;
  state.q = state.keys + KEY_TILE * dim;
  state.keeps = state.q + padded * dim;
  state.start();
  take_tiles<T>(state, call.table(row));
  state.finish();
}

}  // namespace ST_ISA::paged
