// An index of n-grams of four lengths: a table from the hash of so many tokens to the newest place where they end. A hash
// chooses two entries, so an n-gram is lost only where two newer ones have fallen on both.
// A place that has been overwritten since, and one that other tokens fell on, are found out by comparing tokens, so the
// tables need neither chains nor deletions, and a text of any length takes memory for `capacity` tokens. A match is
// followed backwards, so it may be longer than its n-gram.
//
// A suffix automaton would find every end: here one is missed where a newer n-gram of its length goes on differently, or
// other tokens fell on its entry. But it takes five times the memory, and cannot forget its oldest tokens.
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
  std::vector<int32_t> tokens;               // of place p at p & (capacity - 1)
  std::vector<int32_t> tables[LEVELS];       // 1 + (end & (capacity - 1)); 0: nothing
  int shift = 64;

  explicit StText(int64_t capacity) : capacity(capacity) {}

  int64_t oldest() const { return std::max<int64_t>(0, count - capacity); }
  int64_t slot(int64_t place) const { return place & (capacity - 1); }
  int32_t at(int64_t place) const { return tokens[slot(place)]; }

  void append(const int32_t *more, int64_t number) {
    for (int64_t i = 0; i < number; i++, count++) {
      if (count < capacity)
        tokens.push_back(more[i]);
      else
        tokens[slot(count)] = more[i];
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
      if (begin < oldest()) continue;
      const auto token = [&](int32_t back) { return at(end - back); };
      int32_t *entries = pair_of(level, token);
      const int64_t first = end_of(entries[0]), second = end_of(entries[1]);
      const bool is_first = matches(first, LENGTHS[level], token) == LENGTHS[level];
      const bool is_second = !is_first && matches(second, LENGTHS[level], token) == LENGTHS[level];
      entries[is_first ? 0 : is_second ? 1 : first > second] = 1 + slot(end);  // else the older of the two goes
    }
  }

  // token: of an n-gram, counted backwards from its end. The two entries that its hash chooses.
  template <class Token> int32_t *pair_of(int32_t level, Token token) {
    uint64_t hash = LENGTHS[level];
    for (int32_t back = 0; back < LENGTHS[level]; back++) {
      hash = (hash ^ (uint32_t)token(back)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return &tables[level][((hash * 0x9E3779B97F4A7C15ull) >> shift) & ~1ull];
  }

  // Where an entry says that an n-gram ends; -1: nowhere.
  int64_t end_of(int32_t entry) const { return entry ? count - 1 - slot(count - entry) : -1; }

  // How many tokens that end there are these, at most so many. What has been overwritten is other tokens, or the very end.
  template <class Token> int64_t matches(int64_t end, int64_t most, Token token) const {
    if (end == count - 1) return 0;
    int64_t same = 0;
    for (most = std::min(most, end + 1 - oldest()); same < most && at(end - same) == token(same);) same++;
    return same;
  }

  // tail: the last `length` tokens of a text, the last one first.
  Match find(const int32_t *tail, int64_t length) {
    const auto token = [&](int64_t back) { return tail[back]; };
    for (int32_t level = 0; level < LEVELS && count; level++) {
      if (length < LENGTHS[level]) continue;
      const int32_t *entries = pair_of(level, token);
      Match found;
      for (int32_t which = 0; which < 2; which++) {
        const int64_t end = end_of(entries[which]), same = matches(end, length, token);
        if (same >= LENGTHS[level] && end > found.end) found = {end, same};
      }
      if (found.length) return found;
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

void st_text_follow(int32_t rows, StText *const *texts, StText *const *corpora, const int32_t *counts,
                    const int32_t *tokens, int32_t most, int32_t *lengths, int32_t *sources, int32_t *num_drafts,
                    int32_t *drafts) {
  for (int32_t row = 0; row < rows; tokens += counts[row], drafts += most, row++) {
    StText &text = *texts[row];
    text.append(tokens, counts[row]);
    int32_t tail[LONGEST];
    const int64_t length = std::min(LONGEST, text.count - text.oldest());
    for (int64_t i = 0; i < length; i++) tail[i] = text.at(text.count - 1 - i);
    const Match own = text.find(tail, length), other = corpora[row] ? corpora[row]->find(tail, length) : Match{};
    const int32_t of_other = other.length > own.length ? corpora[row]->followers(other, false, most, drafts) : 0;
    lengths[row] = of_other ? other.length : own.length;
    sources[row] = of_other > 0;
    num_drafts[row] = of_other ? of_other : own.length ? text.followers(own, true, most, drafts) : 0;
  }
}
