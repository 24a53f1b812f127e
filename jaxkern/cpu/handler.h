// What the handlers share: the workers, and operands of a batch of calls.
//
// vmap puts batch dims in front of all operands, of size 1 where it does not map one:
// a handler walks over them, with stride 0 where the size is 1.
#pragma once
#include <string>

#include "kernels.h"
#include "pool_workers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxkern {
namespace {

inline ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jaxkern cpu: " + what);
}

inline ffi::Error out_of_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxkern cpu: out of memory");
}

// Where the operands of one call lie, for each call of a batch.
class Batch {
 public:
  // The first `dims` dims of the result are those of the batch.
  Batch(ffi::AnyBuffer::Dimensions result, int64_t dims) : sizes_(result.first(dims)) {
    for (int64_t n : sizes_) count_ *= n;
  }
  int64_t count() const { return count_; }

  // Which of its own calls an operand of these dims takes part with in call i.
  int64_t index(ffi::AnyBuffer::Dimensions operand, int64_t i) const {
    int64_t index = 0, stride = 1;
    for (int64_t d = static_cast<int64_t>(sizes_.size()) - 1; d >= 0; --d) {
      if (operand[d] != 1) index += i % sizes_[d] * stride;
      stride *= operand[d];
      i /= sizes_[d];
    }
    return index;
  }

 private:
  ffi::AnyBuffer::Dimensions sizes_;
  int64_t count_ = 1;
};

inline bool float_type(ffi::DataType type, Float* out) {
  if (type == ffi::F32) *out = Float::f32;
  else if (type == ffi::F16) *out = Float::f16;
  else if (type == ffi::BF16) *out = Float::bf16;
  else return false;
  return true;
}

template <typename T>
inline T* at(ffi::AnyBuffer buffer, int64_t element) {
  return static_cast<T*>(buffer.untyped_data()) + element;
}

inline int64_t item_size(Float type) { return type == Float::f32 ? 4 : 2; }

}  // namespace
}  // namespace jaxkern
