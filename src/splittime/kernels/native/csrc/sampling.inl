// Choosing tokens from logits: finite checks, argmax, and draws with temperature, top_k, top_p and min_p, without a sort of
// the vocabulary.
//
// A filter is a threshold on the logit. It is looked for in a histogram of how far each logit lies below the largest: the
// bin in which the threshold lies is known from the bins' sums, and only its members, a few hundred of a flat distribution
// over 128 thousand tokens, are sorted. top_k weighs each token 1, top_p by its probability; all else is the same. Ties at a
// threshold stay, as in runner/sampler.py, whose definitions these are.
#include <algorithm>

#include "vecmath.inl"

namespace ST_ISA {

struct Member {
  float logit, weight;
};
struct Falling {
  bool operator()(float a, float b) const { return a > b; }
  bool operator()(const Member &a, const Member &b) const { return a.logit > b.logit; }
};

// What a thread keeps from row to row.
struct DrawScratch {
  Room<float> weights, maxima, order;
  Room<double> sums;
  Room<Member> members;
};

// One row's draw. weights: [vocab], exp((logit - largest) / temperature). The row is worked on in blocks of BLOCK tokens;
// maxima: of each block's logits.
struct Drawing {
  static constexpr int32_t BLOCK = 64, BINS = 2048;
  static constexpr float BINS_PER_NAT = 64;  // 2048 bins reach down to e^-32 of the largest probability
  const float *logits;
  int32_t vocab;
  DrawScratch &own;
  float most = 0, scale = 1;

  Drawing(const float *logits, int32_t vocab, DrawScratch &own) : logits(logits), vocab(vocab), own(own) {
    own.weights.of(vocab);
    own.maxima.of(blocks());
    own.order.of(blocks());
    own.sums.of(blocks());
  }

  int32_t blocks() const { return (vocab + BLOCK - 1) / BLOCK; }
  int32_t end_of(int32_t block) const { return block + 1 < blocks() ? (block + 1) * BLOCK : vocab; }

  float find_maxima() {
    float found = -INFINITY;
    for (int32_t block = 0; block < blocks(); block++) {
      int32_t i = block * BLOCK, end = end_of(block);
      F32 lanes = splat(-INFINITY);
      for (; i + LANES <= end; i += LANES) lanes = larger(load<F32>(logits + i), lanes);
      float one = largest_of(lanes);
      for (; i < end; i++) one = logits[i] > one ? logits[i] : one;
      own.maxima[block] = one;
      found = one > found ? one : found;
    }
    return found;
  }

  void weigh(const StDraw &draw) {
    most = find_maxima(), scale = 1.0f / draw.temperature;
    int32_t i = 0;
    for (; i + LANES <= vocab; i += LANES)
      store(&own.weights[i], exp_of((load<F32>(logits + i) - most) * scale));
    for (; i < vocab; i++) own.weights[i] = exp_of(splat((logits[i] - most) * scale))[0];
    if (draw.min_p > 0)
      for (i = 0; i < vocab; i++) own.weights[i] = own.weights[i] < draw.min_p ? 0.0f : own.weights[i];
  }

  // body(logit, weight) for each token that is at or above `floor` and weighs anything.
  template <class Body> void each(float floor, Body &&body) {
    for (int32_t block = 0; block < blocks(); block++) {
      if (own.maxima[block] < floor) continue;
      for (int32_t i = block * BLOCK; i < end_of(block); i++)
        if (logits[i] >= floor && own.weights[i] > 0) body(logits[i], own.weights[i]);
    }
  }

  // Grows as the logit falls, so that a bin is above another exactly if its members are.
  int32_t bin_of(float logit) const {
    float distance = (most - logit) * scale * BINS_PER_NAT;
    return distance < BINS - 1 ? (int32_t)distance : BINS - 1;
  }

  // The least logit v at or above `floor` for which all logits above v weigh less than `target` (> 0) together.
  float threshold(float floor, double target, bool counts) {
    double mass[BINS] = {};
    each(floor, [&](float logit, float weight) { mass[bin_of(logit)] += counts ? 1.0f : weight; });
    double above = 0, reached = 0;  // what weighs more than the chosen bin, and that with it
    int32_t chosen = 0;
    for (int32_t bin = 0; bin < BINS && reached < target; bin++)
      if (mass[bin] > 0) chosen = bin, above = reached, reached += mass[bin];
    Member *members = own.members.of(vocab);
    int64_t count = 0;
    each(floor, [&](float logit, float weight) {
      if (bin_of(logit) == chosen) members[count++] = {logit, counts ? 1.0f : weight};
    });
    std::sort(members, members + count, Falling());
    float found = floor;
    for (int64_t i = 0; i < count && above < target; i++) found = members[i].logit, above += members[i].weight;
    return found;
  }

  // The wanted-th largest of the blocks' maxima: at least so many logits reach it, and few others.
  float likely_floor(int32_t wanted) {
    if (wanted >= blocks()) return -INFINITY;
    float *order = own.order.data;
    memcpy(order, own.maxima.data, blocks() * sizeof(float));
    std::nth_element(order, order + wanted - 1, order + blocks(), Falling());
    return order[wanted - 1];
  }

  // The sum of all weights at or above `floor`, block by block into `sums`.
  double sum_blocks(float floor) {
    double total = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      own.sums[block] = 0;
      if (own.maxima[block] < floor) continue;
      F32 sum = splat(0.0f);
      int32_t i = block * BLOCK, end = end_of(block);
      for (; i + LANES <= end; i += LANES)
        sum += load<F32>(logits + i) >= floor ? load<F32>(&own.weights[i]) : splat(0.0f);
      float rest = sum_of(sum);
      for (; i < end; i++) rest += logits[i] >= floor ? own.weights[i] : 0.0f;
      total += own.sums[block] = rest;
    }
    return total;
  }

  // The least logit that all filters keep. A floor that is likely to hold enough spares most of the row.
  float floor_of(const StDraw &draw) {
    float floor = -INFINITY;
    if (draw.top_k > 0 && draw.top_k < vocab) {
      int64_t reached = 0;
      const float likely = likely_floor(draw.top_k);
      each(likely, [&](float, float) { reached++; });
      floor = threshold(reached >= draw.top_k ? likely : -INFINITY, draw.top_k, true);
    }
    if (draw.top_p < 1.0) {
      const double target = draw.top_p * sum_blocks(floor);
      const float likely = likely_floor(512);
      double reached = 0;
      if (likely > floor) each(likely, [&](float, float weight) { reached += weight; });
      floor = threshold(reached >= target ? likely : floor, target, false);
    }
    return floor;
  }

  // Inverse CDF over the kept tokens in the order of their ids.
  int32_t pick(float floor, double uniform) {
    const double target = uniform * sum_blocks(floor);
    double below = 0;
    int32_t found = 0;  // the last block that weighs anything, in case rounding leaves the sum short of the target
    for (int32_t block = 0; block < blocks(); block++) {
      if (own.sums[block] <= 0) continue;
      found = block;
      if (below + own.sums[block] > target) break;
      below += own.sums[block];
    }
    int32_t last = 0;
    for (int32_t i = found * BLOCK; i < end_of(found); i++) {
      if (logits[i] < floor || own.weights[i] <= 0) continue;
      below += own.weights[i];
      last = i;
      if (below > target) break;
    }
    return last;
  }
};

void draw(int32_t rows, int32_t vocab, const float *logits, const StDraw *draws, int32_t *tokens) {
  for_each(rows, [&](int32_t row) {
    thread_local DrawScratch scratch;
    Drawing drawing(logits + (int64_t)row * vocab, vocab, scratch);
    drawing.weigh(draws[row]);
    tokens[row] = drawing.pick(drawing.floor_of(draws[row]), draws[row].uniform);
  });
}

void argmax(int32_t rows, int32_t vocab, const float *logits, int32_t *tokens) {
  for_each(rows, [&](int32_t row) {
    const float *line = logits + (int64_t)row * vocab;
    F32 most = splat(-INFINITY);
    I32 place = splat(0), here = splat(0);
    int32_t i = 0;
    for (; i + LANES <= vocab; i += LANES, here += 1) {
      F32 x = load<F32>(line + i);
      place = x > most ? here : place;
      most = x > most ? x : most;
    }
    float found = -INFINITY;
    int32_t best = 0;
    auto offer = [&](float x, int32_t token) {
      if (x > found || (x == found && token < best)) found = x, best = token;
    };
    for (int lane = 0; lane < LANES && i > 0; lane++) offer(most[lane], place[lane] * LANES + lane);
    for (; i < vocab; i++) offer(line[i], i);
    tokens[row] = best;
  });
}

void finite(int32_t rows, int32_t width, const float *x, uint8_t *is_finite) {
  for_each(rows, [&](int32_t row) {
    const float *line = x + (int64_t)row * width;
    F32 sum = splat(0.0f);  // x * 0 is 0, or NaN for what is not finite
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) sum += load<F32>(line + i) * 0.0f;
    float rest = sum_of(sum);
    for (; i < width; i++) rest += line[i] * 0.0f;
    is_finite[row] = rest == 0.0f;
  });
}

}  // namespace ST_ISA
