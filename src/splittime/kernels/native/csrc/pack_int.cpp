// Making and reading the blobs of integer weights (see pack_int.h). Plain loops that the compiler vectorises for each
// processor (wide.h): two cores with AVX-512 round 1.2 billion bfloat16 numbers to int8 in 0.46 s (0.96 s with what every
// x86 has), to int4 in groups of 128 in 0.63 s (1.03). Packing runs once a weight, at load, one panel an item.
#include "pack_int.h"

#include <math.h>
#include <string.h>

#include <vector>

#include "halves.h"
#include "pool.h"
#define ST_ISA packing
#define LANES 16
#include "simd.h"
#include "turn.inl"

namespace {

// Ties to even; beyond 65504 infinite.
INLINE uint16_t f16_of(float x) {
  uint32_t bits = to_bits(x);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000)  // subnormal: the sum leaves the rounded multiple of 2^-24 in the mantissa
    return sign | (uint16_t)(to_bits(fabsf(x) + 0.5f) - 0x3f000000);
  return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// The largest magnitude, found among bit patterns: they sort like magnitudes, and integers the compiler can reorder.
INLINE float largest_magnitude(const float *values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t bits = to_bits(values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return from_bits(largest);
}

// The value of largest magnitude, the first of equals; NaN if there is one, which must show in what the weight gives.
// Among the bits, as integers with a sign the positive number of largest magnitude is the largest, as integers without
// one the negative number.
INLINE float extreme(const float *values, int64_t count) {
  int32_t positive = INT32_MIN;
  uint32_t negative = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = to_bits(values[i]);
    positive = (int32_t)bits > positive ? (int32_t)bits : positive;
    negative = bits > negative ? bits : negative;
  }
  const int32_t upper = positive < 0 ? -1 : positive;
  const int32_t lower = negative >> 31 ? (int32_t)(negative & 0x7fffffff) : -1;
  const int32_t magnitude = upper > lower ? upper : lower;
  if (upper != lower || magnitude > 0x7f800000)
    return from_bits(upper > lower || magnitude > 0x7f800000 ? (uint32_t)magnitude : negative);
  for (int64_t i = 0; i < count; i++)
    if (fabsf(values[i]) == from_bits(magnitude)) return values[i];
  return 0;
}

// round(value / scale) + zero, ties to even, within [low, high].
INLINE void round_all(const float *values, int64_t count, float scale, int32_t zero, int32_t low, int32_t high,
                      uint8_t *to) {
  if (scale == 0) {
    memset(to, zero, count);
    return;
  }
  const float shift = 12582912.0f;  // 1.5 * 2^23: what is added to it has no room for a fraction
  const float least = (float)(low - zero), most = (float)(high - zero);
  for (int64_t i = 0; i < count; i++) {
    float value = values[i] / scale;
    value = value < most ? value : most;
    value = value > least ? value : least;
    to[i] = (uint8_t)((int32_t)((value + shift) - shift) + zero);
  }
}

// One row of `in` values, in groups of `group` (0: one group), as integers and scales.
WIDE void round_row(int32_t scheme, int64_t in, int32_t group, bool turns, const void *from, int32_t dtype, float *floats,
                    uint8_t *integers, float *scales) {
  to_float32(from, dtype, in, floats);
  if (turns) packing::turn(floats, in, floats);
  const int64_t width = group ? group : in;
  for (int64_t at = 0; at < in; at += width) {
    const int64_t count = in - at < width ? in - at : width;
    const float *values = floats + at;
    const float exact = scheme == ST_INT8 ? largest_magnitude(values, count) / 127 : extreme(values, count) / -8;
    const float scale = group ? from_half(f16_of(exact)) : exact;
    *scales++ = scale;
    if (scheme == ST_INT8)
      round_all(values, count, scale, 128, 1, 255, integers + at);
    else
      round_all(values, count, scale, 8, 0, 15, integers + at);
  }
}

// Two neighbouring words of integers below 16 as one: the second in the upper halves of the bytes.
INLINE void fold(uint32_t *words, int64_t count) {
  for (int64_t i = 0; i < count; i++) words[i] = words[2 * i] | words[2 * i + 1] << 4;
}

// The integers of a panel, [PANEL][row_bytes], in the order of the blob; what they were is lost.
WIDE void weave(int32_t scheme, int64_t columns, uint8_t *rows, int64_t row_bytes, uint8_t *to) {
  uint32_t *words = reinterpret_cast<uint32_t *>(rows);
  int64_t count = columns / 4;
  if (scheme == ST_INT4) {
    count /= 2;
    for (int32_t n = 0; n < PANEL; n++) fold(words + n * (row_bytes / 4), count);
  }
  transpose(words, row_bytes / 4, count, reinterpret_cast<uint32_t *>(to));
}

// 256 columns of a panel, from bytes to lines of BITS bits.
template <int BITS> INLINE void fold_block(const uint8_t *from, uint8_t *to) {
  constexpr int QUADS = Folded<BITS>::QUADS, LINES = Folded<BITS>::LINES;
  for (int64_t quad = 0; quad < STEPPED / 4; quad += QUADS, from += 64 * QUADS, to += 64 * LINES)
    for (int n = 0; n < PANEL; n++) {
      uint32_t in[QUADS], out[LINES];
      for (int i = 0; i < QUADS; i++) memcpy(&in[i], from + 64 * i + 4 * n, 4);
      fold_lines(in, out);
      for (int i = 0; i < LINES; i++) memcpy(to + 64 * i + 4 * n, &out[i], 4);
    }
}

// One panel of a blob, filled row by row and then woven.
struct Panel {
  const IntLayout &layout;
  int32_t scheme, group;  // group: 0 for a scale a row
  uint8_t *begin;
  std::vector<uint8_t> &rows;  // [PANEL][row_bytes()], the integers

  Panel(const IntLayout &layout, int32_t scheme, int32_t group, int64_t index, uint8_t *blob, std::vector<uint8_t> &rows,
        int32_t zero)
      : layout(layout), scheme(scheme), group(group), begin(blob + index * layout.panel_bytes), rows(rows) {
    memset(begin, 0, layout.block_bytes ? layout.panel_bytes : layout.values_at);
    rows.assign(PANEL * row_bytes(), zero);
  }

  int64_t row_bytes() const { return layout.columns + 64; }  // rows in different sets of the first-level cache
  uint8_t *row(int32_t n) { return rows.data() + n * row_bytes(); }

  void set_scale(int64_t g, int32_t n, float scale) {
    if (group)
      set_half(2 * (g * PANEL + n), scale);
    else
      memcpy(begin + 4 * n, &scale, 4);
  }

  void set_half(int64_t at, float x) {
    const uint16_t half = f16_of(x);
    memcpy(begin + at, &half, 2);
  }

  void set_zero(int64_t g, int32_t n, uint8_t zero) { begin[layout.zeros_at + g * PANEL + n] = zero; }

  void set_minimum(int64_t g, int32_t n, float minimum) { set_half(layout.minima_at + 2 * (g * PANEL + n), minimum); }

  // Of a block of 256 columns the step of its scales (kind 0) or minima (1), and one of these as so many steps. A step takes
  // the place of what is not finite, so that it shows.
  void set_step(int64_t block, int32_t kind, int32_t n, float step) {
    set_half(block * layout.block_bytes + 2 * (kind * PANEL + n), step);
  }
  void set_multiple(int64_t g, int32_t kind, int32_t n, float x, float step) {
    const int64_t block = g * group / STEPPED, of_block = g * group % STEPPED / group;
    const int64_t at = (kind ? layout.minima_at : layout.scales_at) + of_block * PANEL;
    const float multiple = step == 0 ? 0 : nearbyintf(x / step);
    const int8_t kept = (int8_t)(multiple > 127 ? 127 : multiple > -128 ? multiple : -128);
    if (!isfinite(x)) set_step(block, kind, n, x);
    begin[block * layout.block_bytes + at + n] = (uint8_t)kept;
  }

  void weave_rows(int32_t extras) {
    if (!layout.block_bytes) return weave(scheme, layout.columns, rows.data(), row_bytes(), begin + layout.values_at);
    std::vector<uint8_t> woven(layout.columns * PANEL);
    weave(scheme, layout.columns, rows.data(), row_bytes(), woven.data());
    const int32_t bits = bits_of(scheme, extras);
    const int64_t woven_bytes = STEPPED * PANEL / (bits == 4 ? 2 : 1);
    for (int64_t b = 0; b < layout.columns / STEPPED; b++) {
      uint8_t *to = begin + b * layout.block_bytes + layout.values_at;
      const uint8_t *from = woven.data() + b * woven_bytes;
      bits == 4 ? (void)memcpy(to, from, woven_bytes) : bits == 5 ? fold_block<5>(from, to) : fold_block<6>(from, to);
    }
  }
};

template <int BITS> uint8_t folded_at(const uint8_t *lines, int64_t k, int32_t n) {
  constexpr int QUADS = Folded<BITS>::QUADS, LINES = Folded<BITS>::LINES;
  uint32_t in[LINES], out[QUADS];
  for (int i = 0; i < LINES; i++) memcpy(&in[i], lines + k / 4 / QUADS * LINES * 64 + 64 * i + 4 * n, 4);
  spread_lines(in, out);
  return (uint8_t)(out[k / 4 % QUADS] >> k % 4 * 8);
}

uint8_t integer_at(const IntLayout &layout, int32_t scheme, int32_t bits, const uint8_t *panel, int64_t k, int32_t n) {
  if (layout.block_bytes) panel += k / STEPPED * layout.block_bytes, k %= STEPPED;
  const uint8_t *values = panel + layout.values_at;
  if (bits == 5) return folded_at<5>(values, k, n);
  if (bits == 6) return folded_at<6>(values, k, n);
  if (scheme == ST_INT8) return values[k / 4 * 64 + n * 4 + k % 4];
  return values[k / 8 * 64 + n * 4 + k % 4] >> (k & 4) & 15;
}

}  // namespace

int64_t int_packed_bytes(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras) {
  const IntLayout layout = int_layout(scheme, out_features, in_features, group, extras);
  return layout.panels * layout.panel_bytes;
}

void pack_int(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras, const void *weight,
              int32_t dtype, int32_t row_begin, int32_t row_end, uint8_t *blob) {
  const IntLayout layout = int_layout(scheme, out_features, in_features, group, extras);
  const int32_t first = row_begin / PANEL, last = (row_end + PANEL - 1) / PANEL;
  for_each(last - first, [&](int32_t item) {
    thread_local std::vector<float> floats, scales;
    thread_local std::vector<uint8_t> rows;
    floats.resize(in_features);
    scales.resize(layout.groups);
    Panel panel(layout, scheme, group, first + item, blob, rows, scheme == ST_INT8 ? 128 : 8);
    for (int32_t n = 0; n < PANEL && (first + item) * PANEL + n < row_end; n++) {
      const int64_t row = (int64_t)item * PANEL + n;  // of `weight`, which starts at row_begin
      const char *from = (const char *)weight + row * in_features * size_of(dtype);
      round_row(scheme, in_features, group, extras & ST_TURNED, from, dtype, floats.data(), panel.row(n), scales.data());
      const int64_t groups = group ? (in_features + group - 1) / group : 1;
      for (int64_t g = 0; g < groups; g++) panel.set_scale(g, n, scales[g]);
    }
    panel.weave_rows(extras);
  });
}

// The scales and minima of a row, `row` of what is given, in steps.
static void set_steps(Panel &panel, int32_t extras, const GivenRows &given, int64_t row, int64_t in, int32_t n) {
  const int32_t kinds = extras & ST_MINIMA ? 2 : 1;
  const int64_t groups = (in + panel.group - 1) / panel.group, blocks = (in + STEPPED - 1) / STEPPED;
  const float *steps = given.steps + row * kinds * blocks, *scales = given.scales + row * groups;
  for (int32_t kind = 0; kind < kinds; kind++)
    for (int64_t b = 0; b < blocks; b++) panel.set_step(b, kind, n, steps[kind * blocks + b]);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t b = g * panel.group / STEPPED;
    panel.set_multiple(g, 0, n, scales[g], steps[b]);
    if (kinds == 2)
      panel.set_multiple(g, 1, n, given.minima[row * groups + g] + middle_of(panel.scheme) * scales[g], steps[blocks + b]);
  }
}

void pack_int_rounded(int32_t scheme, int32_t out_features, int32_t in_features, int32_t group, int32_t extras,
                      const GivenRows &given, int32_t row_begin, int32_t row_end, uint8_t *blob) {
  const IntLayout layout = int_layout(scheme, out_features, in_features, group, extras);
  const int32_t first = row_begin / PANEL, last = (row_end + PANEL - 1) / PANEL;
  const int64_t in = in_features, groups = group ? (in + group - 1) / group : 1;
  const int32_t bits = bits_of(scheme, extras), shift = bits == 4 ? 0 : 1 << (bits - 1);
  for_each(last - first, [&](int32_t item) {
    thread_local std::vector<uint8_t> rows;
    Panel panel(layout, scheme, group, first + item, blob, rows, 1 << (bits - 1));
    for (int32_t n = 0; n < PANEL && (first + item) * PANEL + n < row_end; n++) {
      const int64_t row = (int64_t)item * PANEL + n;  // of `values`, which start at row_begin
      for (int64_t k = 0; k < in; k++) panel.row(n)[k] = (uint8_t)(given.values[row * in + k] + shift);
      if (extras & ST_STEPS) set_steps(panel, extras, given, row, in, n);
      for (int64_t g = 0; g < groups && !(extras & ST_STEPS); g++) {
        panel.set_scale(g, n, given.scales[row * groups + g]);
        if (extras & ST_ZEROS) panel.set_zero(g, n, given.zeros[row * groups + g]);
        if (extras & ST_MINIMA) panel.set_minimum(g, n, given.minima[row * groups + g]);
      }
    }
    panel.weave_rows(extras);
  });
}

void unpack_int(const StLinear *linear, float *weight) {
  const int32_t scheme = linear->scheme, group = linear->group, extras = linear->extras;
  const int64_t in = linear->in_features;
  const IntLayout layout = int_layout(scheme, linear->out_features, in, group, extras);
  const int32_t bits = bits_of(scheme, extras);
  const auto half_at = [](const uint8_t *place) {
    uint16_t half;
    memcpy(&half, place, 2);
    return from_half(half);
  };
  for_each((int32_t)layout.panels, [&](int32_t index) {
    const uint8_t *panel = linear->blob + index * layout.panel_bytes;
    for (int32_t n = 0; n < PANEL && index * PANEL + n < linear->out_features; n++) {
      float *row = weight + ((int64_t)index * PANEL + n) * in;
      for (int64_t k = 0; k < in; k++) {
        const int64_t at = group ? k / group * PANEL + n : n;
        float scale, minimum = 0;
        memcpy(&scale, panel + 4 * n, 4);
        if (layout.block_bytes) {
          const uint8_t *block = panel + k / STEPPED * layout.block_bytes;
          const int64_t multiple = k % STEPPED / group * PANEL + n;
          scale = half_at(block + 2 * n) * (int8_t)block[layout.scales_at + multiple];
          if (extras & ST_MINIMA)
            minimum = half_at(block + 2 * (PANEL + n)) * (int8_t)block[layout.minima_at + multiple] - middle_of(scheme) * scale;
        } else if (group) {
          scale = half_at(panel + 2 * at);
          if (extras & ST_MINIMA) minimum = half_at(panel + layout.minima_at + 2 * at);
        }
        const int32_t zero = bits != 4 ? 1 << (bits - 1) : extras & ST_ZEROS ? panel[layout.zeros_at + at] : 8;
        row[k] = (float)(integer_at(layout, scheme, bits, panel, k, n) - zero) * scale;
        if (extras & ST_MINIMA) row[k] -= minimum;
      }
      if (extras & ST_TURNED) packing::turn(row, in, row);  // twice turned is as it was
    }
  });
}
