#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "splittime.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace {

// Inside an item, or for good (st_work_alone): what wants to run in parallel runs on this thread alone.
thread_local bool is_working = false;

constexpr int SPINS = 4000;  // about 50 us of _mm_pause: longer than the gaps inside a step, shorter than those between

// ticket: generation of the job in the upper half, next item in the lower, in one word. An odd generation means that the
// job is being written: a thread that comes late finds its exchange refused, so it never takes an item of a job other
// than the one it has read.
struct Pool {
  std::vector<std::thread> threads;
  std::mutex turn;  // one job at a time
  std::mutex sleep;
  std::condition_variable wake;
  std::atomic<PoolWork> work{nullptr};
  std::atomic<void *> context{nullptr};
  std::atomic<int32_t> items{0};
  std::atomic<uint64_t> ticket{0};
  std::atomic<int32_t> done{0};
  std::atomic<int32_t> sleeping{0};
  std::atomic<bool> stops{false};

  // Returns the number there is: fewer than wanted where the system refuses more.
  int32_t resize(int32_t num_threads) {
    std::lock_guard<std::mutex> mine(turn);
    stops = true;
    {
      std::lock_guard<std::mutex> lock(sleep);
      wake.notify_all();
    }
    for (auto &thread : threads) thread.join();
    threads.clear();
    stops = false;
    uint32_t generation = ticket.load() >> 32;
    try {
      for (int32_t i = 1; i < num_threads; i++) threads.emplace_back([this, generation] { serve(generation); });
    } catch (const std::system_error &) {
    }
    return (int32_t)threads.size() + 1;
  }

  void run(int32_t new_items, PoolWork new_work, void *new_context) {
    std::lock_guard<std::mutex> mine(turn);
    uint64_t generation = ticket.load() >> 32;
    ticket.store((generation + 1) << 32);
    work.store(new_work);
    context.store(new_context);
    items.store(new_items);
    done.store(0);
    ticket.store((generation + 2) << 32);
    if (sleeping.load()) {
      std::lock_guard<std::mutex> lock(sleep);
      wake.notify_all();
    }
    take((uint32_t)(generation + 2));
    for (int spin = 0; done.load(std::memory_order_acquire) < new_items; spin++) {
      // whoever has the last item may be waiting for this very core
      if (spin < SPINS) relax(); else std::this_thread::yield();
    }
  }

  // Work on items of this generation until none is left.
  void take(uint32_t generation) {
    for (;;) {
      uint64_t seen = ticket.load(std::memory_order_acquire);
      if ((uint32_t)(seen >> 32) != generation) return;
      PoolWork my_work = work.load(std::memory_order_relaxed);
      void *my_context = context.load(std::memory_order_relaxed);
      int32_t item = (int32_t)(uint32_t)seen;
      if (item >= items.load(std::memory_order_relaxed)) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      is_working = true;
      my_work(my_context, item);
      is_working = false;
      done.fetch_add(1, std::memory_order_release);
    }
  }

  void serve(uint32_t generation) {
    while (!stops.load()) {
      uint32_t next = await(generation);
      if (next == generation) continue;
      generation = next;
      take(generation);
    }
  }

  uint32_t current() { return (uint32_t)(ticket.load() >> 32); }

  // The generation that follows this one and is ready; or this one, when the pool stops.
  uint32_t await(uint32_t generation) {
    uint32_t now = generation;
    auto is_ready = [&] { return now = current(), now != generation && now % 2 == 0; };
    for (int spin = 0; spin < SPINS && !stops.load(std::memory_order_relaxed); spin++) {
      if (is_ready()) return now;
      relax();
    }
    std::unique_lock<std::mutex> lock(sleep);
    sleeping.fetch_add(1);
    wake.wait(lock, [&] { return stops.load() || is_ready(); });
    sleeping.fetch_sub(1);
    return stops.load() ? generation : now;
  }
};

std::atomic<int32_t> num_threads{1};

// A forked child has none of the threads, and locks in whatever state they were in: it starts again with a new pool. The
// old one is not destroyed there, nor any at exit, where that would wait for threads that are gone.
Pool *pool = [] {
  pthread_atfork(nullptr, nullptr, [] {
    pool = new Pool;
    num_threads = 1;
  });
  return new Pool;
}();

}  // namespace

int32_t pool_threads() { return num_threads.load(std::memory_order_relaxed); }

void pool_run(int32_t items, PoolWork work, void *context) {
  if (!is_working) return pool->run(items, work, context);
  for (int32_t item = 0; item < items; item++) work(context, item);
}

extern "C" int32_t st_set_threads(int32_t wanted) {
  num_threads = pool->resize(wanted < 1 ? 1 : wanted);
  return num_threads;
}

extern "C" void st_work_alone(void) { is_working = true; }
