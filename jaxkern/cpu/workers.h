// Splits work over the threads of XLA's pool without ever waiting for a free thread.
//
// The caller works too and takes items as the others do. It only waits for items that
// another thread has already begun, so a pool that is busy, or of one thread, cannot
// hang it. Plain C inside: this header is read by files compiled for different
// instruction sets, and an inline C++ function of the library could be linked from the
// wrong one.
#pragma once
#include <cstdint>

namespace jaxkern {

struct Workers {
  int threads;  // at most so many work at once, the caller included
  void (*run)(const Workers*, int64_t items, void (*item)(void*, int64_t), void* data);

  // Calls f(i) for each i in [0, items), in any order, on several threads.
  template <typename F>
  void for_each(int64_t items, F f) const {
    run(this, items, [](void* data, int64_t i) { (*static_cast<F*>(data))(i); }, &f);
  }
};

}  // namespace jaxkern
