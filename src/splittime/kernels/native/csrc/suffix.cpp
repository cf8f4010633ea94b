// An index of n-grams of four lengths: a table from the hash of so many tokens to the newest place where they end.
// A place that has been overwritten since, and one that other tokens fell on, are found out by comparing tokens, so the
// tables need neither chains nor deletions, and a text of any length takes memory for `capacity` tokens. A match is
// followed backwards, so it may be longer than its n-gram.
//
// A suffix automaton would also find ends between two of the lengths whose newest n-gram goes on differently, but it
// takes five times the memory, and cannot forget its oldest tokens.
#include "suffix.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int32_t LENGTHS[] = {16, 8, 4, 2};
constexpr int32_t LEVELS = 4;
constexpr int64_t LONGEST = 64;  // no match is followed further back
constexpr int64_t SMALLEST_TABLE = 256;

struct Match {
  int64_t end = -1, length = 0;  // of the matching tokens: the last one's place
};

}  // namespace

struct StText {
  int64_t capacity, count = 0, indexed = 0;  // n-grams that end before `indexed` are in the tables
  std::vector<int32_t> tokens;               // of place p at p % capacity
  std::vector<int32_t> tables[LEVELS];       // 1 + end % capacity; 0: nothing
  int shift = 64;

  explicit StText(int64_t capacity) : capacity(capacity) {}

  int64_t oldest() const { return std::max<int64_t>(0, count - capacity); }
  int32_t at(int64_t place) const { return tokens[place % capacity]; }

  void append(const int32_t *more, int64_t number) {
    for (int64_t i = 0; i < number; i++, count++) {
      if (count < capacity)
        tokens.push_back(more[i]);
      else
        tokens[count % capacity] = more[i];
    }
    grow();
    indexed = std::max(indexed, oldest());
    for (; indexed < count - 1; indexed++) index(indexed);  // not the very end, which would be its own match
  }

  void grow() {
    const int64_t wanted = 2 * std::min(count, capacity);
    int64_t size = tables[0].size();
    if (wanted <= size) return;
    size = std::max(size, SMALLEST_TABLE);
    while (size < wanted) size *= 2;
    shift = 64 - __builtin_ctzll(size);
    for (auto &table : tables) table.assign(size, 0);
    indexed = oldest();
  }

  void index(int64_t end) {
    for (int32_t level = 0; level < LEVELS; level++) {
      const int64_t begin = end + 1 - LENGTHS[level];
      if (begin >= oldest()) tables[level][place_of(level, [&](int32_t i) { return at(begin + i); })] = 1 + end % capacity;
    }
  }

  template <class Token> size_t place_of(int32_t level, Token token) const {
    uint64_t hash = LENGTHS[level];
    for (int32_t i = 0; i < LENGTHS[level]; i++) {
      hash = (hash ^ (uint32_t)token(i)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return (hash * 0x9E3779B97F4A7C15ull) >> shift;
  }

  // tail: the last `length` tokens of a text, the last one first.
  Match find(const int32_t *tail, int64_t length) const {
    for (int32_t level = 0; level < LEVELS && count; level++) {
      const int32_t wanted = LENGTHS[level];
      if (length < wanted) continue;
      const int32_t place = tables[level][place_of(level, [&](int32_t i) { return tail[wanted - 1 - i]; })] - 1;
      if (place < 0) continue;
      const int64_t end = count - 1 - (count - 1 - place) % capacity, most = std::min(length, end + 1 - oldest());
      if (end == count - 1) continue;  // an old entry of a place that the last token has taken
      int64_t same = 0;
      while (same < most && at(end - same) == tail[same]) same++;
      if (same >= wanted) return {end, same};
    }
    return {};
  }

  int32_t followers(const Match &match, bool is_own, int32_t most, int32_t *drafts) const {
    for (int32_t i = 0; i < most; i++) {
      const int64_t place = match.end + 1 + i;
      if (place >= count && !is_own) return i;
      drafts[i] = place < count ? at(place) : drafts[place - count];
      if (drafts[i] < 0) return i;
    }
    return most;
  }
};

StText *st_text_new(int64_t capacity) { return new StText(capacity); }

void st_text_free(StText *text) { delete text; }

void st_text_append(StText *text, const int32_t *tokens, int64_t count) { text->append(tokens, count); }

void st_text_follow(int32_t rows, StText *const *texts, const StText *const *corpora, const int32_t *counts,
                    const int32_t *tokens, int32_t most, int32_t *lengths, int32_t *sources, int32_t *num_drafts,
                    int32_t *drafts) {
  for (int32_t row = 0; row < rows; tokens += counts[row], drafts += most, row++) {
    StText &text = *texts[row];
    text.append(tokens, counts[row]);
    int32_t tail[LONGEST];
    const int64_t length = std::min(LONGEST, text.count - text.oldest());
    for (int64_t i = 0; i < length; i++) tail[i] = text.at(text.count - 1 - i);
    const Match own = text.find(tail, length), other = corpora[row] ? corpora[row]->find(tail, length) : Match{};
    const bool is_own = own.length >= other.length;
    const Match &found = is_own ? own : other;
    lengths[row] = found.length;
    sources[row] = !is_own;
    num_drafts[row] = found.length ? (is_own ? text : *corpora[row]).followers(found, is_own, most, drafts) : 0;
  }
}
