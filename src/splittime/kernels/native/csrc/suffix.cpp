// An index of n-grams of four lengths: a table from the hash of so many tokens to the newest place where they end. A hash
// chooses two entries, so an n-gram is lost only where two newer ones have fallen on both.
// A place that has been overwritten since, and one that other tokens fell on, are found out by comparing tokens, so the
// tables need neither chains nor deletions, and a text of any length takes memory for `capacity` tokens. A match is
// followed backwards, so it may be longer than its n-gram.
//
// Tables grow beside the ones in use: with each token that comes, some of those that are there go into the larger ones
// too, until these know all. So no single token pays for the whole text.
//
// A suffix automaton would find every end: here one is missed where a newer n-gram of its length goes on differently, or
// other tokens fell on its entry. But it takes five times the memory, and cannot forget its oldest tokens.
#include "suffix.h"

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace {

constexpr int32_t LENGTHS[] = {2, 4, 8, 16};
constexpr int32_t LEVELS = 4;
constexpr int64_t LONGEST = 64;  // no match is followed further back
constexpr int64_t SMALLEST_TABLE = 256;
constexpr int64_t MOVED_AT_ONCE = 4;  // tokens that go into larger tables with each that comes
constexpr uint64_t MIX = 0x9E3779B97F4A7C15ull;

struct Match {
  int64_t end = -1, length = 0;  // of the matching tokens: the last one's place
};

// Of the n-grams that end at one place, the shortest first; behind the beginning of the text there are none.
struct Hashes {
  uint64_t of[LEVELS];
  int32_t levels = 0;

  // token: counted backwards from the end, of which there are `length`.
  template <class Token> Hashes(int64_t length, Token token) {
    uint64_t hash = 0;
    for (int32_t back = 0; levels < LEVELS && LENGTHS[levels] <= length; levels++) {
      for (; back < LENGTHS[levels]; back++) {
        hash = (hash ^ (uint32_t)token(back)) * MIX;
        hash ^= hash >> 29;
      }
      of[levels] = hash * MIX;
    }
  }
};

struct Free {
  void operator()(int32_t *memory) const { free(memory); }
};

// 1 + the slot where an n-gram ends, 0: nothing; by level. Pages that were never written to take no memory.
struct Tables {
  int64_t size = 0, indexed = 0;  // entries of a level; n-grams that end before `indexed` are known
  int shift = 64;
  std::unique_ptr<int32_t[], Free> entries;

  Tables() = default;
  Tables(int64_t size, int64_t indexed)
      : size(size), indexed(indexed), shift(64 - __builtin_ctzll(size)),
        entries((int32_t *)calloc(LEVELS * size, sizeof(int32_t))) {
    if (!entries) abort();
  }

  int32_t *pair_of(int32_t level, const Hashes &hashes) const {
    return &entries[level * size + ((hashes.of[level] >> shift) & ~1ull)];
  }
};

}  // namespace

struct StText {
  int64_t capacity, count = 0;
  std::vector<int32_t> tokens;  // of place p at p & (capacity - 1)
  Tables tables, larger;        // those in use, and those that come

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
    grow(number);
    index_up_to(tables, count - 1);  // not the very end, which would be its own match
    if (!larger.size) return;
    index_up_to(larger, std::min(count - 1, larger.indexed + MOVED_AT_ONCE * number));
    if (larger.indexed == count - 1) tables = std::exchange(larger, {});
  }

  // number: of tokens that have just come. Where they are many, all are indexed at once.
  void grow(int64_t number) {
    const int64_t wanted = 2 * std::min(count, capacity);
    if (wanted <= std::max(tables.size, larger.size)) return;
    int64_t size = SMALLEST_TABLE;
    while (size < wanted) size *= 2;
    const bool is_at_once = number * MOVED_AT_ONCE >= count - oldest();
    larger = is_at_once ? Tables() : Tables(size, oldest());
    if (is_at_once) tables = Tables(size, oldest());
  }

  void index_up_to(Tables &into, int64_t end) {
    into.indexed = std::max(into.indexed, oldest());
    for (; into.indexed < end; into.indexed++) index(into, into.indexed);
  }

  void index(const Tables &into, int64_t end) {
    const auto token = [&](int32_t back) { return at(end - back); };
    const Hashes hashes(end + 1 - oldest(), token);
    for (int32_t level = 0; level < hashes.levels; level++) {
      int32_t *entries = into.pair_of(level, hashes);
      const int64_t first = end_of(entries[0]), second = end_of(entries[1]);
      const bool is_first = matches(first, LENGTHS[level], token) == LENGTHS[level];
      const bool is_second = !is_first && matches(second, LENGTHS[level], token) == LENGTHS[level];
      entries[is_first ? 0 : is_second ? 1 : first > second] = 1 + slot(end);  // else the older of the two goes
    }
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
  Match find(const int32_t *tail, int64_t length, const Hashes &hashes) const {
    const auto token = [&](int64_t back) { return tail[back]; };
    for (int32_t level = count ? hashes.levels - 1 : -1; level >= 0; level--) {
      const int32_t *entries = tables.pair_of(level, hashes);
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
    const Hashes hashes(length, [&](int32_t back) { return tail[back]; });
    const Match own = text.find(tail, length, hashes);
    const Match other = corpora[row] ? corpora[row]->find(tail, length, hashes) : Match{};
    const int32_t of_other = other.length > own.length ? corpora[row]->followers(other, false, most, drafts) : 0;
    lengths[row] = of_other ? other.length : own.length;
    sources[row] = of_other > 0;
    num_drafts[row] = of_other ? of_other : own.length ? text.followers(own, true, most, drafts) : 0;
  }
}
