// Drawing where the nucleus (or, without top_p, what is kept) is a large part of a large vocabulary. A 32nd of the row tells
// about where the threshold lies; one pass then adds up what is certainly kept, chunk by chunk, and writes down only the tokens
// near the threshold, among which it is found exactly. Should it lie outside, the row is drawn the other way.
#pragma once

struct WideDrawing {
  static constexpr int32_t LEAST_VOCAB = 1 << 15, EVERY = 32;  // EVERY: one block of so many is looked at first
  static constexpr double LEAST_TOKENS = 256, ERRORS = 3;      // tokens that would tell as much; standard errors

  Drawing &row;
  double total = 0, kept = 0, near = 0;  // weights: of all that min_p leaves, of what is certainly kept, of what may be

  // -1: not drawn.
  int32_t token() {
    if (row.vocab < LEAST_VOCAB || row.has_top_k() || !row.is_finite) return -1;
    if (row.how.top_p == 1 && row.how.min_p > 0) return -1;  // which leaves out whole blocks unread
    float low = -INFINITY, high = -INFINITY;
    if (row.how.top_p < 1 && !look_ahead(&low, &high)) return -1;
    sweep(low, high);
    if (row.how.top_p == 1) return pick(-INFINITY);
    const double target = row.how.top_p * total;
    if (kept >= target || kept + near < target) return -1;
    const float floor = row.threshold(low, target - kept, false);
    for (int32_t chunk = 0; chunk < chunks(); chunk++) {
      const double more = near_weight(chunk, floor);
      row.own.sums[chunk] += more, kept += more;
    }
    return pick(floor);
  }

  int32_t chunks() const { return (row.vocab + Drawing::CHUNK - 1) / Drawing::CHUNK; }

  // The weight of LANES logits, 0 for what min_p leaves out.
  ST_INLINE F32 weight_of(F32 logits) const {
    const F32 all = row.weight_of(logits);
    return all >= row.how.min_p ? all : splat(0.0f);
  }

  // Between which logits the threshold most likely lies, by some of the blocks; false if they tell too little. Kish's effective
  // size, (sum w)^2 / sum w^2, takes the place of their number in the standard error of a share.
  bool look_ahead(float *low, float *high) {
    const int32_t seen = row.blocks() / EVERY * Drawing::BLOCK;
    float *logits = row.own.logits.of(row.vocab + LANES), *weights = row.own.weights.of(row.vocab + LANES);
    F32 sums = splat(0.0f), squares = splat(0.0f);
    for (int32_t i = 0; i < seen; i += LANES) {
      const F32 x = load<F32>(row.logits + i / Drawing::BLOCK * EVERY * Drawing::BLOCK + i % Drawing::BLOCK), weight = weight_of(x);
      store(logits + i, x), store(weights + i, weight);
      sums += weight, squares = fma(weight, weight, squares);
    }
    const double sum = total_of(sums), tokens = sum * sum / total_of(squares), share = row.how.top_p;
    if (sum < 1 || !(tokens >= LEAST_TOKENS)) return false;  // the largest weighs 1: these are no fair sample of such a row
    const double error = ERRORS * sqrt(share * (1 - share) / tokens);
    if (share <= error) return false;
    row.members = {logits, weights, nullptr, seen};
    *high = row.threshold(-INFINITY, (share - error) * sum, false);
    if (share + error < 1) *low = row.threshold(-INFINITY, (share + error) * sum, false);
    return true;
  }

  // Adds up all weights, and those of logits at or above `high` by chunk. The tokens in [low, high) become the row's members.
  void sweep(float low, float high) {
    double *sums = row.own.sums.of(chunks());
    float *logits = row.own.logits.of(row.vocab + LANES), *weights = row.own.weights.of(row.vocab + LANES);
    int32_t *starts = row.own.ids.of(chunks() + 1), count = 0;  // of a chunk's members
    for (int32_t chunk = 0; chunk < chunks(); chunk++) {
      const int32_t begin = chunk * Drawing::CHUNK, end = begin + Drawing::CHUNK < row.vocab ? begin + Drawing::CHUNK : row.vocab;
      F32 all = splat(0.0f), above = splat(0.0f), reached = splat(0.0f);
      starts[chunk] = count;
      for (int32_t i = begin; i < end; i += LANES) {
        const F32 x = some(row.logits + i, end - i, -INFINITY), weight = weight_of(x);
        all += weight, above += x >= high ? weight : splat(0.0f), reached += x >= low ? weight : splat(0.0f);
        const uint32_t bits = reaching(x, low) & ~reaching(x, high);
        squeeze(logits + count, bits, x), squeeze(weights + count, bits, weight);
        count += __builtin_popcount(bits);
      }
      total += total_of(all), near += total_of(reached - above), kept += sums[chunk] = total_of(above);
    }
    starts[chunks()] = count;
    row.members = {logits, weights, nullptr, count};
  }

  // What the members of a chunk that reach `floor` weigh.
  double near_weight(int32_t chunk, float floor) const {
    const int32_t end = row.own.ids[chunk + 1];
    F32 sum = splat(0.0f);
    for (int32_t i = row.own.ids[chunk]; i < end; i += LANES) {  // there is room for a whole vector after the last
      const F32 weight = load<F32>(row.members.weights + i);
      sum += (lane_numbers() + i < end) & (load<F32>(row.members.logits + i) >= floor) ? weight : splat(0.0f);
    }
    return total_of(sum);
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
      const float weight = row.logits[i] < floor ? 0.0f : weight_of(splat(row.logits[i]))[0];
      if (weight <= 0) continue;
      below += weight;
      found = i;
      if (below > target) break;
    }
    return found;
  }
};
