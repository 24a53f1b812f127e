// Workers on the threads of XLA's pool, at hand between two kernels.
//
// A kernel of a small model takes 20 us, and waking a thread as long. So a helper that
// has finished stays on its thread for `patience` and takes the next job at once; then
// it leaves the thread to the pool. At most all threads of the pool but one are held.
//
// The caller works too and waits only for items that a helper has begun, so a pool that
// is busy, or of one thread, cannot hang it.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkern {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A place for one job. Places live for ever, so a late helper may always look.
struct alignas(128) Job {
  std::atomic<bool> taken{false}, open{false};
  std::atomic<int> inside{0};  // helpers that read the fields below, or look
  std::atomic<int> helpers{0};  // at most so many
  void (*item)(void*, int64_t);
  void* data;
  int64_t items;
  alignas(128) std::atomic<int64_t> next;

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      item(data, i);
    }
  }

  bool help() {
    if (!open.load()) return false;
    const bool welcome = inside.fetch_add(1) < helpers.load() && open.load();
    if (welcome) work();
    inside.fetch_sub(1);
    return welcome;
  }
};

class Crew {
 public:
  static Crew& get() {
    static Crew crew;
    return crew;
  }

  void run(xla::ffi::ThreadPool& pool, int helpers, int64_t items,
           void (*item)(void*, int64_t), void* data) {
    Job* job = free_place();
    if (!job) {
      for (int64_t i = 0; i < items; ++i) item(data, i);
      return;
    }
    job->helpers = helpers, job->item = item, job->data = data, job->items = items;
    job->next.store(0, std::memory_order_relaxed);
    job->open.store(true);
    // a helper that leaves says so before its last look: it is counted or it sees this
    for (int there = present_.load(); there < helpers;) {
      if (!present_.compare_exchange_weak(there, there + 1)) continue;
      pool.Schedule([this] { stay(); });
      ++there;
    }
    job->work();
    job->open.store(false);
    for (int spins = 0; job->inside.load() > 0; ++spins) {
      // a helper that lost its core to another process does not get it back by spinning
      spins < 4096 ? relax() : std::this_thread::yield();
    }
    job->taken.store(false, std::memory_order_release);
  }

 private:
  static constexpr std::chrono::microseconds patience{20};

  Job* free_place() {
    for (Job& job : places_) {
      if (!job.taken.exchange(true, std::memory_order_acquire)) return &job;
    }
    return nullptr;
  }

  bool help() {
    bool helped = false;
    for (Job& job : places_) helped |= job.help();
    return helped;
  }

  void stay() {
    using Clock = std::chrono::steady_clock;
    for (auto since = Clock::now(); Clock::now() - since < patience;) {
      for (int i = 0; i < 16; ++i) {
        if (help()) since = Clock::now();
        relax();
      }
    }
    present_.fetch_sub(1);
    help();
  }

  Job places_[8];  // jobs at a time; one more runs on its caller alone
  std::atomic<int> present_{0};  // helpers on a thread, or on their way
};

struct PoolWorkers : Workers {
  explicit PoolWorkers(xla::ffi::ThreadPool pool) : pool(pool) {
    const int64_t threads = pool.num_threads();
    this->threads = threads < 1 ? 1 : static_cast<int>(threads);
    this->run = run_on_pool;
  }

  static void run_on_pool(const Workers* self, int64_t items,
                          void (*item)(void*, int64_t), void* data) {
    const int64_t most = items < self->threads ? items : self->threads;
    if (most <= 1) {
      for (int64_t i = 0; i < items; ++i) item(data, i);
      return;
    }
    auto& pool = const_cast<PoolWorkers*>(static_cast<const PoolWorkers*>(self))->pool;
    Crew::get().run(pool, static_cast<int>(most) - 1, items, item, data);
  }

  xla::ffi::ThreadPool pool;
};

}  // namespace jaxkern
