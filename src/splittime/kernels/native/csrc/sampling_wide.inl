// Drawing where the nucleus (or, without top_p, all that is kept) is a large part of a large vocabulary. A 32nd of the row tells
// about where the threshold lies. The rest is read once: that pass adds up what is certainly kept, chunk by chunk, and writes
// down only the tokens near the threshold, among which it is found exactly. Weights are relative to the largest logit of that
// 32nd. Should the threshold lie elsewhere, or a weight not fit a float, the row is drawn the other way.
#pragma once

struct WideDrawing {
  static constexpr int32_t LEAST_VOCAB = 1 << 15, EVERY = 32;  // EVERY: one block of so many is looked at first
  static constexpr double LEAST_TOKENS = 256, ERRORS = 3;      // tokens that would tell as much; standard errors
  static constexpr float MOST_POWERS = 64;  // of two: how much more than the largest of those one may weigh

  Drawing &row;
  double seen = 0, tokens = 0;  // what the tokens looked at first weigh, and how many alike would tell as much
  double total = 0, kept = 0;   // weights: of all, of what is certainly kept

  // -1: not drawn.
  int32_t token() {
    if (row.vocab < LEAST_VOCAB || row.has_top_k() || row.how.min_p > 0) return -1;
    float low = -INFINITY, high = -INFINITY;
    if (!look_ahead() || (row.how.top_p < 1 && !find_bounds(&low, &high))) return -1;
    if (!sweep(low, high)) return -1;
    if (row.how.top_p == 1) return pick(-INFINITY);
    const double target = row.how.top_p * total;
    if (kept >= target || kept + near_weight(low) < target) return -1;
    const float floor = row.threshold(low, high, target - kept, false);
    for (int32_t chunk = 0; chunk < chunks(); chunk++) {
      const double more = near_weight_of(chunk, floor);
      row.own.sums[chunk] += more, kept += more;
    }
    return pick(floor);
  }

  int32_t chunks() const { return (row.vocab + Drawing::CHUNK - 1) / Drawing::CHUNK; }

  // Makes some of the row's blocks its members, and the largest of them its largest logit; false if that is not finite.
  // tokens: Kish's effective size, (sum w)^2 / sum w^2.
  bool look_ahead() {
    const int32_t count = row.blocks() / EVERY * Drawing::BLOCK;
    float *logits = row.own.logits.of(row.vocab + LANES), *weights = row.own.weights.of(row.vocab + LANES);
    F32 most = splat(-INFINITY), least = splat(INFINITY), faults = splat(0.0f), sums = splat(0.0f), squares = splat(0.0f);
    for (int32_t i = 0; i < count; i += LANES) {
      const F32 x = load<F32>(row.logits + i / Drawing::BLOCK * EVERY * Drawing::BLOCK + i % Drawing::BLOCK);
      store(logits + i, x);
      most = larger(x, most), least = smaller(x, least), faults += x * 0.0f;
    }
    row.most = largest_of(most), row.least = -largest_of(-least);
    for (int32_t i = 0; i < count; i += LANES) {
      const F32 weight = row.weight_of(load<F32>(logits + i));
      store(weights + i, weight);
      sums += weight, squares = fma(weight, weight, squares);
    }
    seen = total_of(sums), tokens = seen * seen / total_of(squares);
    row.members = {logits, weights, nullptr, count};
    return is_zero(faults);
  }

  // Between which logits the threshold most likely lies, by the members; false if they tell too little.
  bool find_bounds(float *low, float *high) const {
    if (!(tokens >= LEAST_TOKENS)) return false;
    const double share = row.how.top_p, error = ERRORS * sqrt(share * (1 - share) / tokens);
    if (share <= error) return false;
    const Cut cut(row, (share - error) * seen, (share + error) * seen);
    *high = cut.high();
    if (share + error < 1) *low = cut.low();
    return true;
  }

  // About where so much of the members' weight lies above: from eight pivots, then from eight in the gap or gaps that hold both
  // weights, and between two of these on a line. Above the last pivot it goes on as a line: token() checks what comes of it.
  struct Cut {
    static constexpr int LAST = Drawing::PIVOTS - 1;
    double above_high, above_low;  // weights
    float pivots[Drawing::PIVOTS];
    double reach[Drawing::PIVOTS];

    Cut(const Drawing &row, double above_high, double above_low) : above_high(above_high), above_low(above_low) {
      look_between(row, fmaxf(row.least, row.most - 127 / row.scale), row.most);
      look_between(row, pivots[first_below(above_low) - 1], pivots[first_below(above_high)]);
    }
    void look_between(const Drawing &row, float from, float to) {
      for (int i = 0; i <= LAST; i++) pivots[i] = from + (to - from) * i / LAST, reach[i] = 0;
      Drawing::measure(row.members, pivots, false, reach);
    }
    // The first pivot above which less than `weight` lies.
    int first_below(double weight) const {
      int i = 1;
      while (i < LAST && reach[i] >= weight) i++;
      return i;
    }
    float at(double weight) const {
      const int i = first_below(weight);
      const double gap = reach[i - 1] - reach[i];
      return gap > 0 ? pivots[i] - (pivots[i] - pivots[i - 1]) * ((weight - reach[i]) / gap) : pivots[i];
    }
    float low() const { return at(above_low); }
    float high() const { return at(above_high); }
  };

  // Adds up all weights, and those of logits at or above `high` by chunk. The tokens in [low, high) become the row's members.
  // False if something in the row is not finite, or weighs too much: with top_p, if one chunk weighs more than the row should by
  // what was looked at first, which missed it.
  bool sweep(float low, float high) {
    const double most_weight = row.how.top_p < 1 ? EVERY * seen : ldexp(1, MOST_POWERS);
    double *sums = row.own.sums.of(chunks());
    float *logits = row.own.logits.data, *weights = row.own.weights.data;
    int32_t *starts = row.own.ids.of(chunks() + 1), count = 0;  // of a chunk's members
    F32 faults = splat(0.0f), most = splat(-INFINITY);
    for (int32_t chunk = 0; chunk < chunks(); chunk++) {
      const int32_t begin = chunk * Drawing::CHUNK, end = begin + Drawing::CHUNK < row.vocab ? begin + Drawing::CHUNK : row.vocab;
      F32 all = splat(0.0f), above = splat(0.0f);
      starts[chunk] = count;
      for (int32_t i = begin; i < end; i += LANES) {
        __builtin_prefetch(row.logits + i + AHEAD);
        const F32 x = some(row.logits + i, end - i, -FLT_MAX), weight = row.weight_of(x);
        faults += x * 0.0f, most = larger(x, most);
        all += weight, above = add_from(above, x, high, weight);
        const uint32_t bits = reaching(x, low) & ~reaching(x, high);
        squeeze(logits + count, bits, x);
        count += __builtin_popcount(bits);
      }
      const double weight = total_of(all);
      if (!(weight <= most_weight)) return false;
      total += weight, kept += sums[chunk] = total_of(above);
    }
    starts[chunks()] = count;
    for (int32_t i = 0; i < count; i += LANES) store(weights + i, row.weight_of(load<F32>(logits + i)));
    row.members = {logits, weights, nullptr, count};
    row.least = -INFINITY;  // was that of the blocks seen first
    return is_zero(faults) && (largest_of(most) - row.most) * row.scale <= MOST_POWERS;
  }

  // What the members of a chunk that reach `floor` weigh.
  double near_weight_of(int32_t chunk, float floor) const {
    const int32_t end = row.own.ids[chunk + 1];
    F32 sum = splat(0.0f);
    for (int32_t i = row.own.ids[chunk]; i < end; i += LANES) {  // there is room for a whole vector after the last
      const F32 weight = load<F32>(row.members.weights + i);
      sum += (lane_numbers() + i < end) & (load<F32>(row.members.logits + i) >= floor) ? weight : splat(0.0f);
    }
    return total_of(sum);
  }
  double near_weight(float floor) const {
    double sum = 0;
    for (int32_t chunk = 0; chunk < chunks(); chunk++) sum += near_weight_of(chunk, floor);
    return sum;
  }

  // Inverse CDF over the kept tokens in the order of their ids.
  int32_t pick(float floor) const {
    const double target = row.how.uniform * kept, *sums = row.own.sums.data;
    double below = 0, before = 0;  // before: of what `begin` begins
    int32_t begin = 0, found = 0;  // the last chunk that weighs anything, in case rounding leaves the sum short
    for (int32_t i = 0; i < row.vocab; i += Drawing::CHUNK) {
      const double sum = sums[i / Drawing::CHUNK];
      if (sum <= 0) continue;
      begin = i, before = below;
      if (below + sum > target) break;
      below += sum;
    }
    below = before;
    for (int32_t i = begin; i < row.vocab && i < begin + Drawing::CHUNK; i++) {
      const float weight = row.logits[i] < floor ? 0.0f : row.weight_of(splat(row.logits[i]))[0];
      if (weight <= 0) continue;
      below += weight;
      found = i;
      if (below > target) break;
    }
    return found;
  }
};
