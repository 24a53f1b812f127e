// Scratch memory of one work item.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace jaxkern {
namespace JAXKERN_ISA {

// Uninitialised, aligned to a cache line; null where the machine has none left.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(T) + 63) / 64 * 64 + 64;
    data_ = static_cast<T*>(aligned_alloc(64, bytes));
  }
  ~Scratch() { free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
