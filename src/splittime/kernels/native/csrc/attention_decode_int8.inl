// One query token against int8 keys and values in integers: twice the products an instruction, and nothing to convert
// for each query head. A head's query is rounded to 16 bits, and so are, for each chunk, its weights times the scales
// of the values: by 1/65534 of the largest at most, where the store's own rounding is 1/254. Sums are exact (32 bits).
#pragma once

namespace ST_ISA::paged {

constexpr float INT16_MOST = 32767;
constexpr int32_t MOST_DIM = 512;  // products that a sum of 32 bits has room for: 127 * 32767 * 512 < 2^31

// Rows a and b of a tile, PANEL elements each, as pairs (a[i], b[i]); in the order that `straighten` undoes on sums.
ST_INLINE void pair_rows(const int8_t *a, const int8_t *b, I16 (&pairs)[2]) {
#if defined(__AVX2__) && LANES == 8  // what GCC 12 makes of a widening conversion is several times as long
  const __m256i x = _mm256_cvtepi8_epi16(load<__m128i>(a)), y = _mm256_cvtepi8_epi16(load<__m128i>(b));
  pairs[0] = (I16)_mm256_unpacklo_epi16(x, y);
  pairs[1] = (I16)_mm256_unpackhi_epi16(x, y);
#else
  const I16 x = widen_i8(a), y = widen_i8(b);
  I16 order = {};
  for (int i = 0; i < 2 * LANES; i++) order[i] = (int16_t)(i / 2 + i % 2 * 2 * LANES);
  pairs[0] = __builtin_shuffle(x, y, order);
  pairs[1] = __builtin_shuffle(x, y, (I16)(order + LANES));
#endif
}
ST_INLINE void straighten(const I32 (&sums)[2], F32 &first, F32 &second) {
#if defined(__AVX2__) && LANES == 8  // unpack works on halves
  first = to_f32((I32)_mm256_permute2x128_si256((__m256i)sums[0], (__m256i)sums[1], 0x20));
  second = to_f32((I32)_mm256_permute2x128_si256((__m256i)sums[0], (__m256i)sums[1], 0x31));
#else
  first = to_f32(sums[0]), second = to_f32(sums[1]);
#endif
}

// sums[r] += a[r * step] * the pairs of two rows, where a is two integers of 16 bits.
template <int R>
ST_INLINE void add_pairs(const int32_t *a, int step, const int8_t *row, int64_t apart, I32 (&sums)[R][2]) {
  I16 pairs[2];
  pair_rows(row, row + apart, pairs);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const I16 one = (I16)splat(a[r * step]);
    sums[r][0] += madd(one, pairs[0]);
    sums[r][1] += madd(one, pairs[1]);
    ST_IN_REGISTER(sums[r][0]);
    ST_IN_REGISTER(sums[r][1]);
  }
}

// scores[r][0 .. PANEL) = q_r . keys, without their scales; q: [dim / 2][R] pairs.
template <int R>
__attribute__((noinline)) void score_panel_of_ints(const int32_t *q, const int8_t *keys, int64_t size, int32_t dim,
                                                   const char *ahead, float *scores) {
  I32 sums[R][2] = {};
  for (int32_t d = 0; d < dim; d += 4, q += 2 * R, keys += 4 * size, ahead += 4 * PANEL) {
    ask_for<4 * PANEL>(ahead);
    add_pairs<R>(q, 1, keys, size, sums);
    add_pairs<R>(q + R, 1, keys + 2 * size, size, sums);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    F32 first, second;
    straighten(sums[r], first, second);
    store(scores + r * CHUNK, first);
    store(scores + r * CHUNK + LANES, second);
  }
}

// results[r][0 .. PANEL) += steps[r] * the weighted values of `tokens`, an even number.
template <int R>
__attribute__((noinline)) void mix_panel_of_ints(const int16_t *weights, const float *steps, const int8_t *values,
                                                 int64_t width, int32_t tokens, const char *ahead, float *results,
                                                 int64_t wide_dim) {
  I32 sums[R][2] = {};
  int32_t t = 0;
  for (; t + 4 <= tokens; t += 4, values += 4 * width, ahead += 4 * PANEL) {
    ask_for<4 * PANEL>(ahead);
    add_pairs<R>((const int32_t *)(weights + t), CHUNK / 2, values, width, sums);
    add_pairs<R>((const int32_t *)(weights + t + 2), CHUNK / 2, values + 2 * width, width, sums);
  }
  if (t < tokens) add_pairs<R>((const int32_t *)(weights + t), CHUNK / 2, values, width, sums);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    F32 first, second;
    straighten(sums[r], first, second);
    float *result = results + r * wide_dim;
    store(result, fma(splat(steps[r]), first, load<F32>(result)));
    store(result + LANES, fma(splat(steps[r]), second, load<F32>(result + LANES)));
  }
}

// x [count] times by [count] -> integers = x / step, to nearest, with step = max |x| / 32767, which is not finite if
// something in x is not. x is overwritten.
inline float round_to_int16(float *x, const float *by, int32_t count, int16_t *to) {
  F32 most = {}, any = {};
  for (int32_t i = 0; i < count; i += LANES) {
    const F32 v = load<F32>(x + i) * load<F32>(by + i);
    most = larger(most, larger(v, -v));
    any = fma(v, F32{}, any);
    store(x + i, v);
  }
  const float step = largest_of(most) / INT16_MOST, inverse = step > 0 ? 1 / step : 0;
  for (int32_t i = 0; i < count; i += LANES)
    store(to + i, __builtin_convertvector((I32)fma(load<F32>(x + i), splat(inverse), splat(ROUNDER)), I16h));
  return step + sum_of(any);
}

// Of the memory that an item needs besides what Decode does.
inline int64_t ints_floats(const Attend &call, int64_t heads) {
  return 2 * CHUNK + heads * (2 + (CHUNK + call.wide_dim) / 2);
}

struct DecodeInts : Decode<int8_t> {
  int16_t *weights;                  // [query heads][CHUNK], and while it starts [query heads][dim]
  float *key_scales, *value_scales;  // [CHUNK] each
  float *q_steps, *steps;            // [query heads] each

  DecodeInts(const Decode<int8_t> &plain, float *memory) : Decode<int8_t>(plain) {
    key_scales = memory, value_scales = memory + CHUNK;
    q_steps = memory + 2 * CHUNK, steps = q_steps + heads();
    weights = (int16_t *)(steps + heads());
  }

  int32_t *pairs() const { return (int32_t *)q; }

  void start(const float *query) {
    for (int32_t d = 0; d < dim; d++) results[d] = 1;
    for (int32_t head = 0; head < heads(); head++) {
      float *mine = q + (int64_t)head * dim;
      memcpy(mine, query + (int64_t)head * dim, sizeof(float) * dim);
      q_steps[head] = round_to_int16(mine, results, dim, weights + (int64_t)head * dim) * call.factor();
    }
    all_passes([&](auto together, int32_t head) {
      constexpr int R = decltype(together)::value;
      const int16_t *rounded = weights + (int64_t)head * dim;
      for (int32_t d = 0; d < dim / 2; d++)
        for (int32_t r = 0; r < R; r++)
          pairs()[(int64_t)head * dim / 2 + d * R + r] = load<int32_t>(rounded + (int64_t)r * dim + 2 * d);
    });
    clear();
  }

  void score_chunk(const Chunk<int8_t> &chunk) const {
    for (int32_t i = 0; i * run < chunk.tokens; i++)
      for (int32_t kv_head = 0; kv_head < kv_heads; kv_head++)
        passes(kv_head, [&](auto together, int32_t head) {
          const int8_t *keys = chunk.tiles[i].keys + kv_head * apart();
          const char *later = ahead(chunk, i, kv_head);
          float *to = scores + (int64_t)head * CHUNK + i * run;
          for (int32_t t = 0; t < run && i * run + t < chunk.tokens; t += PANEL)
            score_panel_of_ints<decltype(together)::value>(pairs() + (int64_t)head * dim / 2, keys + t, size, dim,
                                                           later + t * dim, to + t);
        });
  }

  // The chunk's scales; those of values are 0 for tokens that are not seen.
  void gather_scales(const Chunk<int8_t> &chunk, int32_t kv_head) const {
    const int64_t skipped = (int64_t)kv_head * size;
    for (int32_t t = 0; t < chunk.tokens; t += LANES) {
      const Tile<int8_t> &one = chunk.tiles[t / run];
      const I32 at = lane_numbers() + t;
      const F32 value_scale = load<F32>(one.value_scales + skipped + t % run);
      store(key_scales + t, load<F32>(one.key_scales + skipped + t % run));
      store(value_scales + t, (at >= chunk.low) & (at < chunk.tokens) ? value_scale : F32{});
    }
  }

  // The running softmax over what is seen of the chunk, then weights times scales as integers; 0 for the rest.
  void weigh_chunk(const Chunk<int8_t> &chunk) const {
    const int32_t count = round_up(chunk.tokens, LANES);
    for (int32_t head = 0; head < heads(); head++) {
      if (head % call.sharing == 0) gather_scales(chunk, head / call.sharing);
      float *mine = scores + (int64_t)head * CHUNK;
      for (int32_t t = 0; t < count; t += LANES)
        store(mine + t, load<F32>(mine + t) * (load<F32>(key_scales + t) * q_steps[head]));
      keep(head, softmaxes[head].take(mine, chunk.low, chunk.tokens, count, call.scores.cap));
      steps[head] = round_to_int16(mine, value_scales, count, weights + (int64_t)head * CHUNK);
    }
  }

  void mix_chunk(const Chunk<int8_t> &chunk) const {
    for (int32_t i = chunk.low / run; i * run < chunk.tokens; i++)
      for (int32_t kv_head = 0; kv_head < kv_heads; kv_head++)
        passes(kv_head, [&](auto together, int32_t head) {
          const int32_t at = i * run, from = chunk.low > at ? (chunk.low - at) & ~1 : 0;
          const int32_t to = chunk.tokens - at < run ? round_up(chunk.tokens - at, 2) : run;
          const int8_t *values = chunk.tiles[i].values + kv_head * apart() + (int64_t)from * width;
          const char *later = ahead(chunk, chunk.count + i, kv_head);
          for (int32_t d = 0; d < width; d += PANEL)
            mix_panel_of_ints<decltype(together)::value>(weights + (int64_t)head * CHUNK + at + from, steps + head,
                                                         values + d, width, to - from, later + d * run,
                                                         results + (int64_t)head * call.wide_dim + d, call.wide_dim);
        });
  }

  void take_chunk(const Chunk<int8_t> &chunk) const {
    score_chunk(chunk);
    weigh_chunk(chunk);
    mix_chunk(chunk);
  }
};

// Panels of tokens must not cross tiles, nor panels of columns heads.
inline bool reads_as_ints(const StKv &kv) {
  return reads_in_place(kv) && kv.block_size % PANEL == 0 && kv.head_dim % PANEL == 0 && kv.head_dim <= MOST_DIM;
}

}  // namespace ST_ISA::paged
