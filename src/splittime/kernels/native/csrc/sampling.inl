// Choosing tokens from logits: finite checks, argmax, and draws with temperature, top_k, top_p and min_p, without a sort.
//
// A filter is a threshold on the logit, and a threshold is found by radix selection: logits become integers of the same
// order, a histogram of their upper bits says in which bin the threshold lies, and only that bin's members go to the next
// bits. top_k weighs each token 1, top_p by its probability; all else is the same. The first pass reads the whole
// vocabulary, the next ones what is left of it. Ties at a threshold stay, as in runner/sampler.py, whose definitions these are.
#include <algorithm>
#include <vector>

#include "vecmath.inl"

namespace ST_ISA {

struct Candidate {
  uint32_t key;
  float weight;
};

// Integers in the order of the floats: the sign bit is flipped, and of negative ones all bits.
inline uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

inline float float_of(uint32_t key) {
  uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The least key v among the candidates for which all keys above v weigh less than `target` (> 0). Keeps what it needs
// in `left`, which it empties.
inline uint32_t threshold(std::vector<Candidate> &left, double target) {
  static const int SHIFTS[] = {21, 10, 0}, BITS[] = {11, 11, 10};
  double above = 0;
  for (int level = 0; level < 3; level++) {
    double mass[1 << 11] = {};
    bool taken[1 << 11] = {};
    const uint32_t mask = (1u << BITS[level]) - 1;
    for (const Candidate &one : left) {
      mass[one.key >> SHIFTS[level] & mask] += one.weight;
      taken[one.key >> SHIFTS[level] & mask] = true;
    }
    uint32_t chosen = 0;
    double above_chosen = above;
    for (int bin = mask; bin >= 0; bin--) {
      if (!taken[bin]) continue;
      if (above >= target) break;
      chosen = bin, above_chosen = above;
      above += mass[bin];
    }
    above = above_chosen;
    size_t kept = 0;
    for (const Candidate &one : left)
      if ((one.key >> SHIFTS[level] & mask) == chosen) left[kept++] = one;
    left.resize(kept);
  }
  uint32_t found = left[0].key;
  left.clear();
  return found;
}

// One row's draw. weights: [vocab], exp((logit - largest) / temperature). The row is worked on in blocks of BLOCK tokens.
struct Drawing {
  static constexpr int32_t BLOCK = 64;
  const float *logits;
  int32_t vocab;
  std::vector<float> &weights, &maxima;  // maxima: of each block's logits
  std::vector<Candidate> &left;

  int32_t blocks() const { return (vocab + BLOCK - 1) / BLOCK; }
  int32_t end_of(int32_t block) const { return block + 1 < blocks() ? (block + 1) * BLOCK : vocab; }

  float find_maxima() {
    float most = -INFINITY;
    for (int32_t block = 0; block < blocks(); block++) {
      int32_t i = block * BLOCK, end = end_of(block);
      F32 found = splat(-INFINITY);
      for (; i + LANES <= end; i += LANES) found = larger(load<F32>(logits + i), found);
      float one = largest_of(found);
      for (; i < end; i++) one = logits[i] > one ? logits[i] : one;
      maxima[block] = one;
      most = one > most ? one : most;
    }
    return most;
  }

  void weigh(float temperature) {
    const float most = find_maxima(), scale = 1.0f / temperature;
    int32_t i = 0;
    for (; i + LANES <= vocab; i += LANES)
      store(&weights[i], exp_of((load<F32>(logits + i) - most) * scale));
    for (; i < vocab; i++) weights[i] = exp_of(splat((logits[i] - most) * scale))[0];
  }

  // Candidates at or above `floor`, each weighing 1 or its weight; returns what they weigh together.
  double gather(float floor, bool counts) {
    left.clear();
    double total = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      if (maxima[block] < floor) continue;
      for (int32_t i = block * BLOCK; i < end_of(block); i++)
        if (logits[i] >= floor && weights[i] > 0) {
          left.push_back({key_of(logits[i]), counts ? 1.0f : weights[i]});
          total += left.back().weight;
        }
    }
    return total;
  }

  // The wanted-th largest of the blocks' maxima: at least so many logits reach it, and few others.
  float likely_floor(int32_t wanted, std::vector<float> &order) {
    if (wanted >= blocks()) return -INFINITY;
    order.assign(maxima.begin(), maxima.begin() + blocks());
    std::nth_element(order.begin(), order.begin() + wanted - 1, order.end(), [](float a, float b) { return a > b; });
    return order[wanted - 1];
  }

  // The sum of all weights at or above `floor`, block by block into `sums` (from here on those below weigh nothing).
  double sum_blocks(float floor, std::vector<double> &sums) {
    double total = 0;
    for (int32_t block = 0; block < blocks(); block++) {
      sums[block] = 0;
      if (maxima[block] < floor) continue;
      F32 sum = splat(0.0f);
      int32_t i = block * BLOCK, end = end_of(block);
      for (; i + LANES <= end; i += LANES)
        sum += load<F32>(logits + i) >= floor ? load<F32>(&weights[i]) : splat(0.0f);
      float rest = sum_of(sum);
      for (; i < end; i++) rest += logits[i] >= floor ? weights[i] : 0.0f;
      total += sums[block] = rest;
    }
    return total;
  }

  // The least logit that all filters keep.
  float floor_of(const StDraw &draw, std::vector<double> &sums, std::vector<float> &order) {
    float floor = -INFINITY;
    if (draw.min_p > 0)
      for (int32_t i = 0; i < vocab; i++) weights[i] = weights[i] < draw.min_p ? 0.0f : weights[i];
    if (draw.top_k > 0 && draw.top_k < vocab) {
      if (gather(likely_floor(draw.top_k, order), true) < draw.top_k) gather(-INFINITY, true);
      floor = float_of(threshold(left, draw.top_k));
    }
    if (draw.top_p < 1.0) {
      const double target = draw.top_p * sum_blocks(floor, sums), likely = likely_floor(512, order);
      if (!(likely > floor && gather(likely, false) >= target)) gather(floor, false);
      floor = float_of(threshold(left, target));
    }
    return floor;
  }

  // Inverse CDF over the kept tokens in the order of their ids.
  int32_t pick(float floor, double uniform, std::vector<double> &sums) {
    const double target = uniform * sum_blocks(floor, sums);
    double below = 0;
    int32_t found = 0;  // the last block that weighs anything, in case rounding leaves the sum short of the target
    for (int32_t block = 0; block < blocks(); block++) {
      if (sums[block] <= 0) continue;
      found = block;
      if (below + sums[block] > target) break;
      below += sums[block];
    }
    int32_t last = 0;
    for (int32_t i = found * BLOCK; i < end_of(found); i++) {
      if (logits[i] < floor || weights[i] <= 0) continue;
      below += weights[i];
      last = i;
      if (below > target) break;
    }
    return last;
  }
};

void draw(int32_t rows, int32_t vocab, const float *logits, const StDraw *draws, int32_t *tokens) {
  for_each(rows, [&](int32_t row) {
    thread_local std::vector<float> weights, maxima, order;
    thread_local std::vector<double> sums;
    thread_local std::vector<Candidate> left;
    Drawing drawing{logits + (int64_t)row * vocab, vocab, weights, maxima, left};
    weights.resize(vocab), maxima.resize(drawing.blocks()), sums.resize(drawing.blocks());
    drawing.weigh(draws[row].temperature);
    tokens[row] = drawing.pick(drawing.floor_of(draws[row], sums, order), draws[row].uniform, sums);
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
