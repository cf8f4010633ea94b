// attention_prefill.inl on AMX, for keys and values kept as bfloat16. Queries, and the softmax's weights, are rounded to
// bfloat16 too; scores, softmax and results stay float32. Keys are taken in the same tiles and order as there, so here too a
// query's result depends on no other query.
#pragma once
#include "amx_block.inl"

namespace ST_ISA::paged {

// Pairs of 16-bit numbers as 32-bit ones, as AMX multiplies them: neighbouring tokens of values, dimensions of keys.
ST_INLINE U32 paired(const uint16_t *low, const uint16_t *high) {
  return __builtin_convertvector(load<U16h>(low), U32) | __builtin_convertvector(load<U16h>(high), U32) << 16;
}

// Copies the keys of tokens [from, to) to to_pairs [head_dim / 2][KEY_TILE], pairs of dimensions; token t goes to column
// t - origin.
inline void pack_keys(const StKv &kv, const int32_t *table, int head, int32_t origin, int32_t from, int32_t to, uint32_t *to_pairs) {
  const int32_t size = kv.block_size, dim = kv.head_dim;
  for (int32_t t = from; t < to;) {
    const int32_t place = t % size, column = t - origin;
    const uint16_t *keys = tile<uint16_t>(kv, table[t / size], 0, head) + place;
    if (place + LANES <= size && column % LANES == 0) {
      for (int32_t d = 0; d < dim; d += 2)
        store(to_pairs + d / 2 * KEY_TILE + column, paired(keys + d * (int64_t)size, keys + (d + 1) * (int64_t)size));
      t += LANES;
    } else {
      for (int32_t d = 0; d < dim; d += 2)
        to_pairs[d / 2 * KEY_TILE + column] = keys[d * (int64_t)size] | (uint32_t)keys[(d + 1) * (int64_t)size] << 16;
      t++;
    }
  }
}

// Copies the values of tokens [from, to) to to_pairs [KEY_TILE / 2][head_dim], pairs of tokens. The rest of the first and the
// last 32 tokens is zeros.
inline void pack_values(const StKv &kv, const int32_t *table, int head, int32_t origin, int32_t from, int32_t to,
                        uint32_t *to_pairs) {
  const int32_t size = kv.block_size, dim = kv.head_dim, begin = (from - origin) / 32 * 32, end = (to - origin + 31) / 32 * 32;
  alignas(64) static const uint16_t NOTHING[LANES] = {};
  for (int32_t t = origin + begin; t < origin + end; t += 2) {
    const uint16_t *halves[2];
    for (int32_t i = 0; i < 2; i++)
      halves[i] = t + i < from || t + i >= to ? nullptr
                                              : tile<uint16_t>(kv, table[(t + i) / size], 1, head) + (int64_t)((t + i) % size) * dim;
    for (int32_t d = 0; d < dim; d += LANES)
      store(to_pairs + (t - origin) / 2 * dim + d, paired(halves[0] ? halves[0] + d : NOTHING, halves[1] ? halves[1] + d : NOTHING));
  }
}

// Prefill with its operands as AMX takes them.
struct AmxPrefill : Prefill {
  uint16_t *q16, *weights16;  // [row][head_dim], [row][KEY_TILE]
  uint32_t *keys16, *values16;

  void start() {
    const int32_t dim = call.kv.head_dim;
    const float factor = call.factor();
    for (int32_t row = 0; row < padded; row++) {
      const float *from = row < rows ? call.query(token + row / call.sharing, head * call.sharing + row % call.sharing) : nullptr;
      for (int32_t d = 0; d < dim; d += LANES)
        store(q16 + row * dim + d, to_bf16(from ? load<F32>(from + d) * factor : F32{}));
      softmaxes[row] = Softmax();
      keeps[row] = 1;
    }
    memset(results, 0, sizeof(float) * padded * call.wide_dim);
  }

  // The last position that 32 rows from `begin` see.
  int32_t last_of_block(int32_t begin) const { return position_of(begin + 32 < rows ? begin + 31 : rows - 1); }

  void score_tile(int32_t at, int32_t from, int32_t to) {
    AmxCall block{};
    block.x_stride = call.kv.head_dim * 2, block.x_step = 64, block.second_x = 16 * block.x_stride;
    block.w_stride = KEY_TILE * 4, block.steps = call.kv.head_dim / 32;
    block.second_w = 64, block.second_sums = 64, block.sum_stride = KEY_TILE * 4, block.is_first = true;
    for (int32_t row = 0; row < rows; row += 32)
      for (int32_t key = from / 32 * 32; key < to && at + key <= last_of_block(row); key += 32) {
        block.x = (const uint8_t *)(q16 + row * call.kv.head_dim), block.w = (const uint8_t *)(keys16 + key);
        block.sums = scores + row * KEY_TILE + key;
        amx_block_of<true, false>(rows - row, 2)(block);
      }
  }

  // Rounds the weights of keys [from, to) to bfloat16, with zeros in the rest of the first and the last 32 keys, and scales
  // what earlier tiles of keys have summed up.
  void round_weights(int32_t from, int32_t to) {
    const int32_t begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
    for (int32_t row = 0; row < rows; row++) {
      for (int32_t key = from / 32 * 32; key < (to + 31) / 32 * 32; key += LANES)
        store(weights16 + row * KEY_TILE + key,
              key < begin || key >= end ? U16h{} : to_bf16(load<F32>(scores + row * KEY_TILE + key)));
      if (keeps[row] == 1) continue;
      float *result = results + (int64_t)row * call.wide_dim;
      for (int32_t d = 0; d < call.wide_dim; d += LANES) store(result + d, load<F32>(result + d) * keeps[row]);
    }
  }

  void mix_tile(int32_t at, int32_t from, int32_t to) {
    const int32_t dim = call.kv.head_dim, first = from / 32 * 32;
    AmxCall block{};
    block.x_stride = KEY_TILE * 2, block.x_step = 64, block.second_x = 16 * block.x_stride, block.w_stride = dim * 4;
    block.second_w = 64, block.second_sums = 64, block.sum_stride = call.wide_dim * 4;
    for (int32_t row = 0; row < rows; row += 32) {
      const int32_t seen = last_of_block(row) + 1 - at;
      block.steps = ((seen < to ? seen : to) - first + 31) / 32;
      for (int32_t d = 0; d < dim && block.steps > 0; d += 32) {
        block.x = (const uint8_t *)(weights16 + row * KEY_TILE + first), block.w = (const uint8_t *)(values16 + first / 2 * dim + d);
        block.sums = results + (int64_t)row * call.wide_dim + d;
        amx_block_of<true, false>(rows - row, 2)(block);
      }
    }
  }

  void take_tiles(const int32_t *table) {
    const int32_t first = call.first_seen(position), end = position_of(rows - 1) + 1;
    tiles_begin(64);
    for (int32_t at = first / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE) {
      const int32_t from = first > at ? first - at : 0, to = end - at < KEY_TILE ? end - at : KEY_TILE;
      pack_keys(call.kv, table, head, at, at + from, at + to, keys16);
      pack_values(call.kv, table, head, at, at + from, at + to, values16);
      score_tile(at, from, to);
      weigh_tile(at, from, to);
      round_weights(from, to);
      mix_tile(at, from, to);
    }
    tiles_end();
  }
};

void amx_prefill(const Attend &call, int32_t row, int32_t kv_head, int32_t part) {
  static thread_local Room<float> memory;
  const int32_t count = call.queries(row), each = tile_queries(call), begin = part * each;
  const int32_t rows = (count - begin < each ? count - begin : each) * call.sharing;
  const int64_t padded = (rows + 31) / 32 * 32, dim = call.kv.head_dim;
  float *at = memory.of(padded * (2 * LANES + KEY_TILE + dim + 1 + dim / 2 + KEY_TILE / 2) + KEY_TILE * dim);
  const int32_t token = call.batch.query_begins[row] + begin, position = call.batch.context_lens[row] - count + begin;
  AmxPrefill state{{call, kv_head, token, position, rows, (int32_t)padded}};
  state.softmaxes = (Softmax *)at;
  state.scores = at + padded * 2 * LANES;
  state.results = state.scores + padded * KEY_TILE;
  state.weights16 = (uint16_t *)(state.results + padded * dim);
  state.q16 = state.weights16 + padded * KEY_TILE;
  state.keys16 = (uint32_t *)(state.q16 + padded * dim);
  state.values16 = state.keys16 + KEY_TILE * dim / 2;
  state.keeps = (float *)(state.values16 + KEY_TILE * dim / 2);
  state.start();
  state.take_tiles(call.table(row));
  state.finish();
}

}  // namespace ST_ISA::paged
