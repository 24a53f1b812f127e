// Scratch memory of one work item, and word that there was none.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace jaxkern {
namespace JAXKERN_ISA {

// The allocator takes longer than a small item, so little lies on the stack; with a
// sanitiser, which sees the end of an allocation only, nothing does.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t stack_bytes = 64;
#else
constexpr size_t stack_bytes = 4096;
#endif

// Uninitialised, aligned to a cache line; null where the machine has none left.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    const size_t bytes = ((size_t)count * sizeof(T) + 63) / 64 * 64;
    const bool fits = count == 0 || (bytes <= stack_bytes && stack_bytes > 64);
    data_ = static_cast<T*>(fits ? stack_ : aligned_alloc(64, bytes));
  }
  ~Scratch() {
    if (data_ != static_cast<void*>(stack_)) free(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  alignas(64) unsigned char stack_[stack_bytes];
  T* data_;
};

// Set by items of work that lack memory, read when all are done.
class Flag {
 public:
  void set() { __atomic_store_n(&value_, true, __ATOMIC_RELAXED); }
  explicit operator bool() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }

 private:
  bool value_ = false;
};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
