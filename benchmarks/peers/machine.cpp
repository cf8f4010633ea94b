// The machine's own limits, measured: machine THREADS BYTES. For each line on standard input, {"threads": 2}, one line
// of JSON on standard output; threads are THREADS where the line names none, and at most those.
//   read_gb_per_s      streaming read of BYTES by all threads together, each its own part
//   fma_gflop_per_s    float32;  bf16_gflop_per_s  bfloat16;  int8_gop_per_s  8-bit integers: products on registers or
//                      tiles, where a multiplication and its addition are two; a kind that nothing here multiplies is
//                      missing
//   *_held             of products, with all threads for `HELD_S`: what the clock and whoever shares the cores leave of a
//                      burst. The names end in _held_gflop_per_s and _held_gop_per_s.
//   by                 the loop behind each
// The loops: src/splittime/kernels/native/csrc/peaks.cpp, and why there are several. The first line tries them all, the
// later ones the fastest of each kind then, best of `PASSES`. The memory stays allocated between lines, so that the
// first touch is paid once.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "peaks.h"

namespace {

constexpr int PASSES = 3, NUM_KINDS = 4;
constexpr double PRODUCT_S = 0.01;  // of a pass: long enough to wake the threads and the wide units
constexpr double HELD_S = 0.3;
const char *const NAMES[NUM_KINDS] = {"fma_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s", "read_gb_per_s"};
const char *const HELD_NAMES[NUM_KINDS] = {"fma_held_gflop_per_s", "bf16_held_gflop_per_s", "int8_held_gop_per_s", NULL};

struct Memory {
  char *bytes;
  int64_t size;
};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What each thread does is given its number and returns the work done, in operations or bytes.
template <class Work>
double rate(int threads, Work work) {
  std::vector<std::thread> running;
  std::vector<double> done(threads, 0.0);
  const double begin = now_s();
  for (int i = 0; i < threads; i++) running.emplace_back([&, i] { done[i] = work(i); });
  for (std::thread &one : running) one.join();
  const double taken = now_s() - begin;
  double total = 0;
  for (double one : done) total += one;
  return total / taken / 1e9;
}

int64_t rounds_of(int loop) {
  for (int64_t rounds = 1000;; rounds *= 2) {
    const double begin = now_s();
    st_peak_multiply(loop, rounds);
    if (now_s() - begin > PRODUCT_S) return rounds;
  }
}

double best_of(int loop, int threads, const Memory &memory) {
  const bool is_read = st_peak_kind(loop) == ST_PEAK_READ;
  const int64_t share = memory.size / threads / 4096 * 4096, rounds = is_read ? 0 : rounds_of(loop);
  double best = 0;
  for (int pass = 0; pass < PASSES; pass++) {
    const double found = rate(threads, [&](int i) {
      if (!is_read) return st_peak_multiply(loop, rounds);
      volatile int64_t sink = st_peak_read(loop, memory.bytes + share * i, share);
      (void)sink;
      return double(share);
    });
    if (found > best) best = found;
  }
  return best;
}

double held(int loop, int threads) {
  const int64_t rounds = rounds_of(loop);
  return rate(threads, [&](int) {
    double done = 0;
    for (const double begin = now_s(); now_s() - begin < HELD_S;) done += st_peak_multiply(loop, rounds);
    return done;
  });
}

struct Fastest {
  int loop = -1;
  double rate = 0, held = 0;
};

void choose(int threads, const Memory &memory, Fastest (&fastest)[NUM_KINDS]) {
  for (int loop = 0; st_peak_name(loop); loop++) {
    if (!st_peak_runs(loop)) continue;
    Fastest &one = fastest[st_peak_kind(loop)];
    const double found = best_of(loop, threads, memory);
    if (found > one.rate) one = {loop, found, 0};
  }
}

std::string line_of(const Fastest (&fastest)[NUM_KINDS]) {
  std::string limits, by;
  for (int kind = 0; kind < NUM_KINDS; kind++) {
    if (fastest[kind].loop < 0) continue;
    char text[160];
    snprintf(text, sizeof text, "\"%s\": %.2f, ", NAMES[kind], fastest[kind].rate);
    limits += text;
    if (HELD_NAMES[kind]) {
      snprintf(text, sizeof text, "\"%s\": %.2f, ", HELD_NAMES[kind], fastest[kind].held);
      limits += text;
    }
    snprintf(text, sizeof text, "%s\"%s\": \"%s\"", by.empty() ? "" : ", ", NAMES[kind], st_peak_name(fastest[kind].loop));
    by += text;
  }
  return "{" + limits + "\"by\": {" + by + "}}";
}

int threads_of(const char *line, int most) {
  const char *at = strstr(line, "\"threads\":");
  const int asked = at ? atoi(at + strlen("\"threads\":")) : most;
  return asked >= 1 && asked < most ? asked : most;
}

}  // namespace

int main(int count, char **arguments) {
  const int most = count == 3 ? atoi(arguments[1]) : 0;
  const int64_t size = count == 3 ? atoll(arguments[2]) / (4096 * 64) * (4096 * 64) : 0;
  if (most < 1 || size < 1) return 2;
  void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 1;
  madvise(mapped, size, MADV_HUGEPAGE);
  const Memory memory = {static_cast<char *>(mapped), size};
  memset(memory.bytes, 1, size);
  Fastest fastest[NUM_KINDS];
  choose(most, memory, fastest);
  for (char line[256]; fgets(line, sizeof line, stdin);) {
    Fastest now[NUM_KINDS];
    for (int kind = 0; kind < NUM_KINDS; kind++) {
      if (fastest[kind].loop < 0) continue;
      const int loop = fastest[kind].loop, threads = threads_of(line, most);
      now[kind] = {loop, best_of(loop, threads, memory), HELD_NAMES[kind] ? held(loop, threads) : 0};
    }
    puts(line_of(now).c_str());
    fflush(stdout);
  }
}
