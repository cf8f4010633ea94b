// The threads of the kernels. Work is cut into items that threads take one by one from a counter, so a thread that the
// system has put aside delays its own item and nothing else. Waiting threads spin for some microseconds, since the next
// call of a step follows at once, then sleep.
#pragma once
#include <stdint.h>

#include <type_traits>

typedef void (*PoolWork)(void *context, int32_t item);

int32_t pool_threads();
void pool_run(int32_t items, PoolWork work, void *context);  // returns when every item is done

// for_each(n, [&](int32_t item) { ... }): the calling thread works too; a single item runs on it directly.
template <class F> inline void for_each(int32_t items, F &&body) {
  if (items == 1 || pool_threads() == 1) {
    for (int32_t item = 0; item < items; item++) body(item);
    return;
  }
  using Body = std::remove_reference_t<F>;
  pool_run(items, [](void *context, int32_t item) { (*static_cast<Body *>(context))(item); }, (void *)&body);
}
