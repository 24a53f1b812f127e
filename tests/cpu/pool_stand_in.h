// A pool of threads in the place of XLA's, for crew.cc.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {

class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ends_ = true;
    }
    called_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t count() const { return static_cast<int64_t>(threads_.size()); }
  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      tasks_.push_back(std::move(task));
    }
    called_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> hold(mutex_);
      called_.wait(hold, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      hold.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable called_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

struct ThreadPool {  // as much of it as pool_workers.h calls
  Threads* threads;
  int64_t num_threads() const { return threads->count(); }
  template <typename F>
  void Schedule(F&& f) {
    threads->schedule(std::forward<F>(f));
  }
};

}  // namespace xla::ffi
