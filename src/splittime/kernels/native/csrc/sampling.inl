// Choosing tokens from logits: finite checks, argmax, and draws with temperature, top_k, top_p and min_p, without a sort of
// the vocabulary.
//
// A row is read twice: for the largest logit of each block of 64 tokens, then for its weights, exp((logit - largest) /
// temperature). The blocks' maxima give a floor that no kept token lies below, so that only those above it, the *members*,
// are written down the second time.
//
// A filter is a threshold on the logit, and is looked for among the members: the weight at or above each of eight pivots,
// eight sums side by side, says between which two of them the threshold lies; what lies there is gathered and cut again, and
// the last few are sorted. Each turn costs what is left, so a flat row costs little more than a peaked one. top_k weighs each
// token 1, top_p by its probability; all else is the same. Ties at a threshold stay, as in runner/sampler.py, whose
// definitions these are.
//
// Where very many tokens are kept, writing them down costs more than all else: sampling_wide.inl does without, and without the
// first of the two readings.
//
// A token is told as ~token where something in its row is not finite, -INFINITY too, which spares a reading for that alone.
#include <float.h>

#include <algorithm>

#include "vecmath.inl"

namespace ST_ISA {

// How many logits ahead a first reading asks for: a page of 4 KB, at whose end the processor's own prefetchers stop.
constexpr int32_t AHEAD = 1024;

struct Sorted {
  float logit, weight;
};
struct Falling {
  bool operator()(float a, float b) const { return a > b; }
  bool operator()(const Sorted &a, const Sorted &b) const { return a.logit > b.logit; }
};

// What a thread keeps from row to row.
struct DrawScratch {
  Room<float> masked, maxima, peaks, order, logits, weights, near_logits, near_weights;
  Room<int32_t> ids;
  Room<double> sums;
};

// `left` floats, at most LANES, and `fill` behind them.
__attribute__((noinline, cold)) inline F32 few(const float *p, int32_t left, float fill) {
  F32 v = splat(fill);
  for (int lane = 0; lane < left; lane++) v[lane] = p[lane];
  return v;
}
ST_INLINE F32 some(const float *p, int32_t left, float fill) { return left >= LANES ? load<F32>(p) : few(p, left, fill); }

// sum and, in the lanes whose logits reach `floor`, the weights.
ST_INLINE F32 add_from(F32 sum, F32 logits, float floor, F32 weights) {
#if defined(__AVX512F__) && LANES == 16
  return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(logits, splat(floor), _CMP_GE_OQ), sum, weights);
#else
  return sum + (logits >= floor ? weights : splat(0.0f));
#endif
}

// In pairs, which is several times as fast as one after another.
ST_INLINE float total_of(F32 v) {
  const I32 lanes = lane_numbers();
  for (int step = LANES / 2; step; step /= 2) v += __builtin_shuffle(v, lanes ^ step);
  return v[0];
}

// Of sums of x * 0, which is NaN for what is not finite.
ST_INLINE bool is_zero(F32 faults) { return total_of(faults) == 0.0f; }

// A bit for each lane that reaches `floor`, and those lanes of v one after another; `to` has room for LANES.
#if defined(__AVX512F__) && LANES == 16
ST_INLINE uint32_t reaching(F32 v, float floor) { return _mm512_cmp_ps_mask(v, splat(floor), _CMP_GE_OQ); }
template <class T, class V> ST_INLINE void squeeze(T *to, uint32_t bits, V v) {
  store(to, _mm512_maskz_compress_epi32(bits, (__m512i)v));
}
#elif defined(__AVX2__) && LANES == 8
ST_INLINE uint32_t reaching(F32 v, float floor) { return _mm256_movemask_ps((__m256)(v >= floor)); }
const struct Squeezes {
  uint64_t lanes[256] = {};  // a byte each
  constexpr Squeezes() {
    for (int bits = 0; bits < 256; bits++)
      for (int lane = 7; lane >= 0; lane--)
        if (bits >> lane & 1) lanes[bits] = lanes[bits] << 8 | lane;
  }
} squeezes;
template <class T, class V> ST_INLINE void squeeze(T *to, uint32_t bits, V v) {
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&squeezes.lanes[bits]));
  store(to, _mm256_permutevar8x32_epi32((__m256i)v, lanes));
}
#else
ST_INLINE uint32_t reaching(F32 v, float floor) {
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(v[lane] >= floor) << lane;
  return bits;
}
template <class T, class V> ST_INLINE void squeeze(T *to, uint32_t bits, V v) {
  for (; bits; bits &= bits - 1) *to++ = v[__builtin_ctz(bits)];
}
#endif

// Tokens in the order of their ids, which are 0, 1, .. where `ids` is null.
struct Members {
  const float *logits, *weights;
  const int32_t *ids;
  int32_t count;
};

// One row's draw. maxima: the largest logit of each BLOCK tokens; peaks: their weights.
struct Drawing {
  static constexpr int32_t BLOCK = 64, FEW = 64, PIVOTS = 8;
  static constexpr int32_t CHUNK = 16 * LANES;  // added up in float, the chunks in double
  const float *logits;
  int32_t vocab;
  const StDraw &how;
  DrawScratch &own;
  const float scale = 0x1.715476p+0f / how.temperature;  // of powers of two
  float most = -INFINITY, least = INFINITY;              // of the row's logits
  float coarse = -INFINITY;                              // every kept token reaches it
  bool is_finite = true;
  Members members{};

  int32_t blocks() const { return (vocab + BLOCK - 1) / BLOCK; }
  bool has_top_k() const { return how.top_k > 0 && how.top_k < vocab; }
  F32 weight_of(F32 logit) const { return exp2_of((logit - most) * scale); }

  void find_extremes() {
    float *maxima = own.maxima.of(blocks() + LANES), *peaks = own.peaks.of(blocks() + LANES);
    F32 low = splat(INFINITY), faults = splat(0.0f);
    most = -INFINITY;
    for (int32_t block = 0; block < blocks(); block++) {
      F32 high = splat(-INFINITY);
      for (int32_t i = 0; i < BLOCK; i += LANES) __builtin_prefetch(logits + block * BLOCK + i + AHEAD);
      for (int32_t i = block * BLOCK; i < vocab && i < (block + 1) * BLOCK; i += LANES) {
        const F32 x = some(logits + i, vocab - i, logits[i]);
        low = smaller(x, low), high = larger(x, high), faults += x * 0.0f;
      }
      maxima[block] = largest_of(high);
      most = maxima[block] > most ? maxima[block] : most;
    }
    least = -largest_of(-low), is_finite = is_zero(faults);
    for (int32_t block = 0; block < blocks(); block += LANES) store(peaks + block, weight_of(load<F32>(maxima + block)));
  }

  void find_coarse_floor() {
    if (has_top_k()) {
      if (how.top_k < blocks()) coarse = largest_maximum(how.top_k);
    } else if (how.top_p < 1) {
      double known = 0;  // the row weighs more; what weighs less than a vocab-th of the part to leave out is left out
      for (int32_t block = 0; block < blocks(); block++) known += own.peaks[block] < how.min_p ? 0.0f : own.peaks[block];
      coarse = most + log2f(0.99 * (1 - how.top_p) * known / vocab) / scale;
    }
  }

  // The wanted-th largest of the maxima: at least so many logits reach it.
  float largest_maximum(int32_t wanted) {
    float *order = own.order.of(blocks());
    memcpy(order, own.maxima.data, blocks() * sizeof(float));
    std::nth_element(order, order + wanted - 1, order + blocks(), Falling());
    return order[wanted - 1];
  }

  // Makes `members` of what may be kept, and returns the weight of all that min_p leaves (with top_k, of members alone).
  double gather() {
    float *weights = own.weights.of(vocab + LANES);
    if (coarse <= least && how.min_p <= 0) {
      members = {logits, weights, nullptr, vocab};
      return weigh([=](int32_t i, F32, F32 weight) { store(weights + i, weight); });
    }
    const float floor = coarse;
    float *kept = own.logits.of(vocab + LANES);
    int32_t *ids = own.ids.of(vocab + LANES), count = 0;
    const double total = weigh([=, &count](int32_t i, F32 x, F32 weight) {
      const uint32_t bits = reaching(x, floor);
      squeeze(kept + count, bits, x), squeeze(weights + count, bits, weight);
      squeeze(ids + count, bits, lane_numbers() + i);
      count += __builtin_popcount(bits);
    });
    members = {kept, weights, ids, count};
    return total;
  }

  // body(i, logits, weights) of LANES tokens from i on, but of no block in which none is wanted.
  template <class Body> ST_INLINE double weigh(Body &&body) {
    double total = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      if (own.peaks[block] < how.min_p || (has_top_k() && own.maxima[block] < coarse)) continue;
      F32 sum = splat(0.0f);
      for (int32_t i = block * BLOCK; i < vocab && i < (block + 1) * BLOCK; i += LANES) {
        const F32 x = some(logits + i, vocab - i, -INFINITY), all = weight_of(x);
        const F32 weight = all >= how.min_p ? all : splat(0.0f);
        sum += weight;
        body(i, x, weight);
      }
      total += total_of(sum);
    }
    return total;
  }

  // Of each pivot, what of the members reaches it: their number or their weight.
  static void measure(const Members &left, const float *pivots, bool counts, double *reach) {
    for (int32_t begin = 0; begin < left.count; begin += CHUNK) {
      const int32_t end = begin + CHUNK < left.count ? begin + CHUNK : left.count;
      F32 sums[PIVOTS] = {};
      for (int32_t i = begin; i < end; i += LANES) {
        const F32 x = some(left.logits + i, end - i, -INFINITY);
        const F32 weight = counts ? splat(1.0f) : some(left.weights + i, end - i, 0.0f);
        for (int pivot = 0; pivot < PIVOTS; pivot++) sums[pivot] = add_from(sums[pivot], x, pivots[pivot], weight);
      }
      for (int pivot = 0; pivot < PIVOTS; pivot++) reach[pivot] += total_of(sums[pivot]);
    }
  }

  // Those of them in [low, high), which may lie where they are written.
  Members between(const Members &from, float low, float high) {
    float *kept = own.near_logits.of(vocab + LANES), *weights = own.near_weights.of(vocab + LANES);
    int32_t count = 0;
    for (int32_t i = 0; i < from.count; i += LANES) {
      const F32 x = some(from.logits + i, from.count - i, -INFINITY);
      const F32 weight = some(from.weights + i, from.count - i, 0.0f);
      const uint32_t bits = reaching(x, low) & ~reaching(x, high);
      squeeze(kept + count, bits, x), squeeze(weights + count, bits, weight);
      count += __builtin_popcount(bits);
    }
    return {kept, weights, nullptr, count};
  }

  // The least logit v at or above `floor` for which all members above v weigh (or, if it counts, are) less than `target`.
  // The threshold is in [low, high), and `above` is what reaches high. top: no member lies above it.
  float threshold(float floor, float top, double target, bool counts) {
    const float lightest = most - 127 / scale;  // what lies below weighs nothing
    float low = fmaxf(fmaxf(floor, least), fmaxf(lightest, -FLT_MAX)), high = INFINITY;
    double above = 0;
    Members left = members;
    while (low < top) {
      float pivots[PIVOTS];
      double reach[PIVOTS] = {};
      for (int pivot = 0; pivot < PIVOTS; pivot++) {
        const float part = (pivot + 1.0f) / PIVOTS;
        pivots[pivot] = low * (1 - part) + top * part;
      }
      measure(left, pivots, counts, reach);
      int reached = 0;
      while (reached < PIVOTS && above + reach[reached] >= target) low = pivots[reached++];
      if (reached < PIVOTS) high = pivots[reached], above += reach[reached];
      left = between(left, low, high);
      if (left.count <= FEW) return among_few(left, low, target - above, counts);
      find_ends(left, &low, &top);
    }
    return low;
  }

  static void find_ends(const Members &left, float *low, float *top) {
    F32 lowest = splat(INFINITY), highest = splat(-INFINITY);
    for (int32_t i = 0; i < left.count; i += LANES) {
      const F32 x = some(left.logits + i, left.count - i, left.logits[i]);
      lowest = smaller(x, lowest), highest = larger(x, highest);
    }
    *low = -largest_of(-lowest), *top = largest_of(highest);
  }

  static float among_few(const Members &left, float low, double target, bool counts) {
    Sorted sorted[FEW];
    for (int32_t i = 0; i < left.count; i++) sorted[i] = {left.logits[i], counts ? 1.0f : left.weights[i]};
    std::sort(sorted, sorted + left.count, Falling());
    float found = low;
    double above = 0;
    for (int32_t i = 0; i < left.count && above < target; i++) found = sorted[i].logit, above += sorted[i].weight;
    return found;
  }

  // What of these members is kept, in all, and in each chunk.
  double sum_chunks(float floor) {
    double total = 0, *sums = own.sums.of(members.count / CHUNK + 1);
    for (int32_t begin = 0; begin < members.count; begin += CHUNK) {
      const int32_t end = begin + CHUNK < members.count ? begin + CHUNK : members.count;
      F32 sum = splat(0.0f);
      for (int32_t i = begin; i < end; i += LANES) {
        const F32 weight = some(members.weights + i, end - i, 0.0f);
        sum += some(members.logits + i, end - i, -INFINITY) >= floor ? weight : splat(0.0f);
      }
      total += sums[begin / CHUNK] = total_of(sum);
    }
    return total;
  }

  // The least logit that all filters keep. weight: of all that the filters before top_p leave.
  float floor_of(double weight) {
    float floor = coarse;
    if (has_top_k()) {
      floor = threshold(floor, most, how.top_k, true);
      weight = sum_chunks(floor);
    }
    return how.top_p < 1 ? threshold(floor, most, how.top_p * weight, false) : floor;
  }

  // Inverse CDF over the kept tokens in the order of their ids.
  int32_t pick(float floor) {
    const double target = how.uniform * sum_chunks(floor);
    double below = 0, before = 0;  // before: of what `begin` begins
    int32_t begin = 0, found = 0;  // the last chunk that weighs anything, in case rounding leaves the sum short
    for (int32_t i = 0; i < members.count; i += CHUNK) {
      const double sum = own.sums[i / CHUNK];
      if (sum <= 0) continue;
      begin = i, before = below;
      if (below + sum > target) break;
      below += sum;
    }
    below = before;
    for (int32_t i = begin; i < members.count && i < begin + CHUNK; i++) {
      if (members.logits[i] < floor || members.weights[i] <= 0) continue;
      below += members.weights[i];
      found = i;
      if (below > target) break;
    }
    return members.ids && members.count ? members.ids[found] : found;
  }

  int32_t token();
};

#include "sampling_wide.inl"

int32_t Drawing::token() {
  int32_t found = WideDrawing{*this}.token();
  if (found >= 0) return found;
  find_extremes();
  find_coarse_floor();
  const double weight = gather();
  found = pick(floor_of(weight));
  return is_finite ? found : ~found;
}

int32_t largest(int32_t vocab, const float *line) {
  F32 most = splat(-INFINITY), faults = splat(0.0f);
  I32 place = splat(0), here = splat(0);
  int32_t i = 0;
  for (; i + LANES <= vocab; i += LANES, here += 1) {
    F32 x = load<F32>(line + i);
    __builtin_prefetch(line + i + AHEAD);
    place = x > most ? here : place;
    most = x > most ? x : most;
    faults += x * 0.0f;
  }
  float found = -INFINITY;
  int32_t best = 0;
  auto offer = [&](float x, int32_t token) {
    if (x > found || (x == found && token < best)) found = x, best = token;
  };
  for (int lane = 0; lane < LANES && i > 0; lane++) offer(most[lane], place[lane] * LANES + lane);
  faults += some(line + i, vocab - i, 0.0f) * 0.0f;
  for (; i < vocab; i++) offer(line[i], i);
  return is_zero(faults) ? best : ~best;
}

// What the bits allow of a row, and -INFINITY for the rest; returns whether all of the row is finite.
bool mask(int32_t vocab, const float *from, const uint32_t *bits, float *to) {
  F32 faults = splat(0.0f);
  for (int32_t i = 0; i < vocab; i += LANES) {
    const F32 x = some(from + i, vocab - i, 0.0f);
    const I32 is_set = splat((int32_t)(bits[i / 32] >> i % 32)) >> lane_numbers() & 1;
    store(to + i, is_set != 0 ? x : splat(-INFINITY));
    faults += x * 0.0f;
  }
  return is_zero(faults);
}

int32_t draw_line(int32_t vocab, const float *line, const StDraw &how, DrawScratch &own) {
  return how.temperature == 0 ? largest(vocab, line) : Drawing{line, vocab, how, own}.token();
}

void draw(int32_t rows, int32_t vocab, const float *logits, const StDraw *draws, const uint32_t *bits, int32_t *tokens) {
  for_each(rows, [&](int32_t row) {
    thread_local DrawScratch scratch;
    const float *line = logits + (int64_t)row * vocab;
    const StDraw &how = draws[row];
    if (!how.allowed) {
      tokens[row] = draw_line(vocab, line, how, scratch);
      return;
    }
    float *masked = scratch.masked.of(vocab + LANES);
    const bool is_finite = mask(vocab, line, bits + (int64_t)(how.allowed - 1) * ((vocab + 31) / 32), masked);
    const int32_t told = draw_line(vocab, masked, how, scratch), token = told < 0 ? ~told : told;
    tokens[row] = is_finite ? token : ~token;
  });
}

void argmax(int32_t rows, int32_t vocab, const float *logits, int32_t *tokens) {
  for_each(rows, [&](int32_t row) { tokens[row] = largest(vocab, logits + (int64_t)row * vocab); });
}

void finite(int32_t rows, int32_t width, const float *x, uint8_t *is_finite) {
  for_each(rows, [&](int32_t row) {
    const float *line = x + (int64_t)row * width;
    F32 faults = splat(0.0f);
    for (int32_t i = 0; i < width; i += LANES) faults += some(line + i, width - i, 0.0f) * 0.0f;
    is_finite[row] = is_zero(faults);
  });
}

}  // namespace ST_ISA
