// Kernels launched one after the other in one call of XLA, each before the one ahead has
// ended where that is allowed. XLA captures the call, so its CUDA graph keeps the edges.
//
// Uses the stable part of XLA's foreign function interface. The driver is loaded when it
// is first needed: nothing of CUDA is needed to build this file.
#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Integers = ffi::Span<const int64_t>;

// The driver's structs and numbers, as its interface fixes them.
constexpr int kMaxDynamicShared = 8;       // CU_FUNC_ATTRIBUTE_...
constexpr int kClusterDimension = 4;       // CU_LAUNCH_ATTRIBUTE_...
constexpr int kProgrammaticStream = 6;     // CU_LAUNCH_ATTRIBUTE_..._SERIALIZATION
constexpr int kRelaxed = 2;                // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int64_t kPlainShared = 48 << 10;  // bytes that need not be asked for

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int number;
    unsigned cluster[3];
  } value;
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver {
  int (*module_load)(void**, const void*) = nullptr;
  int (*module_function)(void**, void*, const char*) = nullptr;
  int (*set_attribute)(void*, int, int) = nullptr;
  int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
  int (*error_text)(int, const char**) = nullptr;
  bool found = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    found = load(library, "cuModuleLoadData", &module_load) &&
            load(library, "cuModuleGetFunction", &module_function) &&
            load(library, "cuFuncSetAttribute", &set_attribute) &&
            load(library, "cuLaunchKernelEx", &launch) &&
            load(library, "cuCtxGetCurrent", &current_context) &&
            load(library, "cuThreadExchangeStreamCaptureMode", &exchange_capture_mode) &&
            load(library, "cuGetErrorString", &error_text);
  }

  template <typename Function>
  static bool load(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

ffi::Error failed(const std::string& what, int code) {
  const char* text = nullptr;
  if (driver().error_text(code, &text) != 0 || text == nullptr) text = "unknown error";
  return ffi::Error::Internal("jaxkern: launch_chain: " + what + ": " + text + ".");
}

// What a call has of kernels: where in `binaries` each is, its threads, its memory.
struct Kernels {
  int64_t key;
  Integers table;
  std::string_view names, binaries;

  static constexpr size_t kEach = 4;
  size_t count() const { return table.size() / kEach; }
  int64_t offset(size_t i) const { return table[kEach * i]; }
  int64_t threads(size_t i) const { return table[kEach * i + 2]; }
  int64_t shared_bytes(size_t i) const { return table[kEach * i + 3]; }
};

using Functions = std::vector<void*>;

// Loaded once for each context; never unloaded, for a graph may hold them.
ffi::Error loaded(const Kernels& kernels, const Functions** functions) {
  static std::mutex mutex;
  static std::map<std::pair<void*, int64_t>, Functions> known;
  const Driver& cuda = driver();
  void* context = nullptr;
  if (int e = cuda.current_context(&context)) return failed("no context", e);
  std::lock_guard<std::mutex> lock(mutex);
  auto [place, is_new] = known.try_emplace({context, kernels.key});
  *functions = &place->second;
  if (!is_new) return ffi::Error::Success();
  Functions found;
  std::string_view names = kernels.names;
  int mode = kRelaxed, error = 0;  // a stream of this thread may be in capture
  cuda.exchange_capture_mode(&mode);
  for (size_t i = 0; i < kernels.count() && !error; ++i) {
    std::string name(names.substr(0, names.find('\n')));
    names.remove_prefix(name.size() + 1);
    void *module = nullptr, *function = nullptr;
    error = cuda.module_load(&module, kernels.binaries.data() + kernels.offset(i));
    if (!error) error = cuda.module_function(&function, module, name.c_str());
    if (!error && kernels.shared_bytes(i) > kPlainShared)
      error = cuda.set_attribute(function, kMaxDynamicShared, kernels.shared_bytes(i));
    found.push_back(function);
  }
  cuda.exchange_capture_mode(&mode);
  if (error) {
    known.erase(place);
    return failed("a kernel does not load", error);
  }
  place->second = std::move(found);
  return ffi::Error::Success();
}

// Each launch of `program`: kernel, grid of three, whether it may begin early, programs of
// a cluster, number of parameters, and of each which buffer, operands before results, and
// bytes into it.
ffi::Error LaunchChain(void* stream, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, int64_t key, Integers table,
                       std::string_view names, std::string_view binaries,
                       Integers program) {
  const Driver& cuda = driver();
  if (!cuda.found)
    return ffi::Error::Internal("jaxkern: launch_chain: no CUDA driver of 12.0 or newer.");
  const Kernels kernels{key, table, names, binaries};
  const Functions* functions = nullptr;
  if (ffi::Error e = loaded(kernels, &functions); e.failure()) return e;

  std::vector<char*> buffers;
  for (size_t i = 0; i < operands.size(); ++i)
    buffers.push_back(static_cast<char*>(operands.get<ffi::AnyBuffer>(i)->untyped_data()));
  for (size_t i = 0; i < results.size(); ++i)
    buffers.push_back(
        static_cast<char*>((*results.get<ffi::AnyBuffer>(i))->untyped_data()));

  LaunchAttribute early{}, together{};
  early.id = kProgrammaticStream;
  early.value.number = 1;
  together.id = kClusterDimension;
  std::vector<void*> values, parameters;
  const int64_t* at = program.begin();
  while (at < program.end()) {
    const size_t kernel = at[0];
    const unsigned cluster = at[5];
    const int64_t count = at[6];
    values.clear();
    for (int64_t i = 0; i < count; ++i)
      values.push_back(buffers[at[7 + 2 * i]] + at[8 + 2 * i]);
    values.insert(values.end(), 2, nullptr);  // Triton's scratch memory, of no bytes
    parameters.clear();
    for (void*& value : values) parameters.push_back(&value);
    LaunchAttribute attributes[2];
    unsigned num_attributes = 0;
    if (at[4]) attributes[num_attributes++] = early;
    if (cluster > 1) {
      for (int i = 0; i < 3; ++i) together.value.cluster[i] = i ? 1 : cluster;
      attributes[num_attributes++] = together;
    }
    const LaunchConfig config{
        {unsigned(at[1]), unsigned(at[2]), unsigned(at[3])},
        {unsigned(kernels.threads(kernel)), 1, 1},
        unsigned(kernels.shared_bytes(kernel)),
        stream,
        attributes,
        num_attributes,
    };
    if (int e = cuda.launch(&config, (*functions)[kernel], parameters.data(), nullptr))
      return failed("a kernel does not launch", e);
    at += 7 + 2 * count;
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkern_launch_chain_2(
    XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_launch_chain_2, LaunchChain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("key")
                                  .Attr<Integers>("kernels")
                                  .Attr<std::string_view>("names")
                                  .Attr<std::string_view>("binaries")
                                  .Attr<Integers>("program"),
                              {ffi::Traits::kCmdBufferCompatible});
