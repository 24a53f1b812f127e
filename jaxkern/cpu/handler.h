// What the bindings <family>/<op>.cc share: the workers, and operands of a batch of calls.
//
// vmap puts batch dims in front of all operands, of size 1 where it does not map one:
// a handler walks over them, with stride 0 where the size is 1.
#pragma once
#include <string>
#include <utility>

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

// Where call i finds an operand of which each call has `count` elements of `size` bytes;
// null for an absent one.
template <typename T>
T* operand(const Batch& batch, int64_t i, ffi::AnyBuffer x, int64_t count, int64_t size) {
  if (x.element_count() == 0) return nullptr;
  return reinterpret_cast<T*>(at<char>(x, batch.index(x.dimensions(), i) * count * size));
}

// The rest of a binding: so many operands, then so many results, at least one. It cannot
// be moved, so it comes as a reference and each step makes the next.
template <int operands, int results, typename Binding>
auto with_buffers(Binding&& binding) {
  using Buffer = ffi::AnyBuffer;
  if constexpr (operands > 0) {
    return with_buffers<operands - 1, results>(std::move(binding).template Arg<Buffer>());
  } else if constexpr (results > 1) {
    return with_buffers<0, results - 1>(std::move(binding).template Ret<Buffer>());
  } else {
    return std::move(binding).template Ret<Buffer>();
  }
}

// How XLA calls a kernel: with its threads, operands and results.
template <int operands, int results>
auto bind() {
  return with_buffers<operands, results>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>());
}

}  // namespace
}  // namespace jaxkern

// Seen from outside the library, whose rest is hidden.
#define JAXKERN_EXPORT __attribute__((visibility("default")))

// Exports `name` as jaxkern_name; the attributes follow, as .Attr<type>("name").
#define JAXKERN_HANDLER(name, operands, results, ...)                            \
  extern "C" JAXKERN_EXPORT XLA_FFI_Error* jaxkern_##name(XLA_FFI_CallFrame*);   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_##name, name, (bind<operands, results>() __VA_ARGS__))
