// Norm, gated activations, and rotary embedding with the write into the KV store. Short loops over memory that is in the cache.
#include "vecmath.inl"

namespace ST_ISA {

constexpr int64_t FLOATS_OF_AN_ITEM = 1 << 14;  // a few microseconds: worth handing to another thread

// body(begin, end) over tokens of `width` floats, cut into items of about FLOATS_OF_AN_ITEM.
template <class F> void for_tokens(int32_t tokens, int64_t width, F &&body) {
  const int32_t each = (int32_t)(FLOATS_OF_AN_ITEM / (width + 1) + 1);
  for_each((tokens + each - 1) / each, [&](int32_t item) {
    const int32_t begin = item * each;
    body(begin, begin + each < tokens ? begin + each : tokens);
  });
}

inline float sum_of_squares(const float *x, int32_t width) {
  F32 sums[4] = {};
  int32_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      F32 v = load<F32>(x + i + j * LANES);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i + LANES <= width; i += LANES) {
    F32 v = load<F32>(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; i++) sum += x[i] * x[i];
  return sum;
}

// y may be x.
inline void norm_row(const float *x, int32_t width, const float *weight, float eps, float *y) {
  const float factor = 1 / sqrtf(sum_of_squares(x, width) / (float)width + eps);
  int32_t i = 0;
  for (; i + LANES <= width; i += LANES) store(y + i, load<F32>(x + i) * factor * load<F32>(weight + i));
  for (; i < width; i++) y[i] = x[i] * factor * weight[i];
}

void rms_norm(int32_t tokens, int32_t width, const float *x, int64_t x_stride, const float *weight, float eps,
              float *y) {
  for_tokens(tokens, width, [&](int32_t begin, int32_t end) {
    for (int64_t t = begin; t < end; t++) norm_row(x + t * x_stride, width, weight, eps, y + t * width);
  });
}

// The sum is made of what the norm was rounded to, as if both were calls of their own.
void add_normed(int32_t tokens, int32_t width, float *x, const float *weight, float eps, float *hidden) {
  for_tokens(tokens, width, [&](int32_t begin, int32_t end) {
    for (int64_t at = begin * (int64_t)width; at < end * (int64_t)width; at += width) {
      norm_row(x + at, width, weight, eps, x + at);
      for (int32_t i = 0; i < width; i++) hidden[at + i] += x[at + i];
    }
  });
}

// y may be up.
inline void gate_row(int32_t activation, const float *gate, const float *up, int32_t inner, float *y) {
  int32_t i = 0;
  for (; i + LANES <= inner; i += LANES) store(y + i, gated_by(activation, load<F32>(gate + i), load<F32>(up + i)));
  if (i == inner) return;
  F32 tail_gate = {}, tail_up = {};
  memcpy(&tail_gate, gate + i, (inner - i) * 4);
  memcpy(&tail_up, up + i, (inner - i) * 4);
  const F32 tail = gated_by(activation, tail_gate, tail_up);
  memcpy(y + i, &tail, (inner - i) * 4);
}

void gate(int32_t tokens, int32_t inner, int32_t activation, const float *gate_up, float *y) {
  for_tokens(tokens, inner, [&](int32_t begin, int32_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float *row = gate_up + t * 2 * inner;
      gate_row(activation, row, row + inner, inner, y + t * inner);
    }
  });
}

// Adjacent pairs (a, b) by (cos, sin): a cos - b sin, a sin + b cos.
inline void turn_head(float *x, const float *turns, int32_t head_dim) {
  const I32 lanes = lane_numbers(), evens = lanes & ~1, odds = lanes | 1, swapped = lanes ^ 1;
  const F32 signs = (lanes & 1) ? splat(1.0f) : splat(-1.0f);
  int32_t d = 0;
  for (; d + LANES <= head_dim; d += LANES) {
    F32 v = load<F32>(x + d), turn = load<F32>(turns + d);
    F32 crossed = __builtin_shuffle(v, swapped) * (__builtin_shuffle(turn, odds) * signs);
    store(x + d, fma(v, __builtin_shuffle(turn, evens), crossed));
  }
  for (; d < head_dim; d += 2) {
    const float a = x[d], b = x[d + 1], c = turns[d], s = turns[d + 1];
    x[d] = a * c - b * s;
    x[d + 1] = a * s + b * c;
  }
}

inline void narrow(const float *x, int32_t n, int64_t step, float *to) {
  for (int32_t i = 0; i < n; i++) to[i * step] = x[i];
}
inline void narrow(const float *x, int32_t n, int64_t step, uint16_t *to) {
  for (int32_t i = 0; i < n; i++) to[i * step] = bf16_of(x[i]);
}

// max |x| / 127, or NaN if there is one.
inline float scale_of(const float *x, int32_t n) {
  float most = 0;
  bool is_number = true;
  for (int32_t i = 0; i < n; i++) {
    const float size = fabsf(x[i]);
    most = size > most ? size : most;
    is_number &= size == size;
  }
  return is_number ? most / 127 : NAN;
}

// Below this the division is not exact enough to stay within a byte; such a head is kept as zeros.
constexpr float LEAST_SCALE = 1e-38f;

// What is not finite has a scale that is not, so that it shows when it is read, whatever integer stands here.
inline void narrow_scaled(const float *x, int32_t n, float scale, int64_t step, int8_t *to) {
  const bool usable = scale >= LEAST_SCALE && scale < INFINITY;
  for (int32_t i = 0; i < n; i++) to[i * step] = usable ? (int8_t)((x[i] / scale + ROUNDER) - ROUNDER) : 0;
}

// One head of one token into its tile: `offset` elements in, `step` elements apart.
inline void write_head(const float *x, const StKv &kv, int64_t tile, int32_t place, int64_t offset, int64_t step) {
  const int64_t at = tile * kv.block_size * kv.head_dim + offset;
  if (kv.type == ST_FLOAT32) return narrow(x, kv.head_dim, step, (float *)kv.data + at);
  if (kv.type == ST_BFLOAT16) return narrow(x, kv.head_dim, step, (uint16_t *)kv.data + at);
  const float scale = kv.scales[tile * kv.block_size + place] = scale_of(x, kv.head_dim);
  narrow_scaled(x, kv.head_dim, scale, step, (int8_t *)kv.data + at);
}

inline void rope_write_token(const StBatch &batch, const StKv &kv, int32_t num_heads, const float *qk_norm, float eps,
                             int32_t token, float *heads) {
  const int64_t dim = kv.head_dim;
  const int32_t place = batch.token_offsets[token];
  for (int32_t head = 0; head < num_heads + kv.num_kv_heads; head++) {
    if (qk_norm) norm_row(heads + head * dim, dim, qk_norm + head * dim, eps, heads + head * dim);
    turn_head(heads + head * dim, batch.turns + token * dim, dim);
  }
  const float *keys = heads + num_heads * dim, *values = keys + kv.num_kv_heads * dim;
  for (int32_t head = 0; head < kv.num_kv_heads; head++) {
    const int64_t block = batch.token_blocks[token];
    write_head(keys + head * dim, kv, tile_of(kv, block, 0, head), place, place, kv.block_size);
    write_head(values + head * dim, kv, tile_of(kv, block, 1, head), place, place * dim, 1);
  }
}

void rope_write(const StBatch *batch, const StKv *kv, int32_t num_heads, const float *qk_norm, float eps, float *qkv) {
  const int64_t width = (int64_t)(num_heads + 2 * kv->num_kv_heads) * kv->head_dim;
  for_tokens(batch->tokens, width, [&](int32_t begin, int32_t end) {
    for (int32_t token = begin; token < end; token++)
      rope_write_token(*batch, *kv, num_heads, qk_norm, eps, token, qkv + token * width);
  });
}

}  // namespace ST_ISA
