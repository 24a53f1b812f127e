// Several callers at once share the helpers of pool_workers.h.
//
// Built with the thread sanitiser, and pool_stand_in.h as XLA's header. Each item is
// written without a lock: two threads that take the same one, or a caller that goes on
// before a helper is done, are a race. Prints how many items are wrong.
#include <cstdio>
#include <cstdlib>

#include "../../jaxkern/cpu/pool_workers.h"

int main(int, char** arguments) {
  const int threads = atoi(arguments[1]), callers = atoi(arguments[2]), calls = 2000;
  std::atomic<int> wrong{0};
  {
    xla::ffi::Threads pool(threads);
    std::vector<std::thread> every;
    for (int caller = 0; caller < callers; ++caller) {
      every.emplace_back([&, caller] {
        jaxkern::PoolWorkers workers(xla::ffi::ThreadPool{&pool});
        for (int call = 0; call < calls; ++call) {
          std::vector<int> taken((caller + 7 * call) % 40);
          const int64_t items = static_cast<int64_t>(taken.size());
          workers.for_each(items, [&](int64_t i) { ++taken[i]; });
          for (int times : taken) wrong += times != 1;
        }
      });
    }
    for (std::thread& thread : every) thread.join();
  }
  printf("%d\n", wrong.load());
}
