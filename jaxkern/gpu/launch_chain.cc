// Kernels launched one after the other in one call of XLA, each before the one ahead has
// ended where that is allowed. XLA captures the call, so its CUDA graph keeps the edges.
//
// Uses the stable part of XLA's foreign function interface. The driver is loaded when it
// is first needed: nothing of CUDA is needed to build this file.
#include <dlfcn.h>

#include <algorithm>
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
  int (*init)(unsigned) = nullptr;
  int (*device)(int*, int) = nullptr;
  int (*current_device)(int*) = nullptr;
  int (*can_access)(int*, int, int) = nullptr;
  int (*context_of)(void**, int) = nullptr;
  int (*push_context)(void*) = nullptr;
  int (*pop_context)(void**) = nullptr;
  int (*enable_access)(void*, unsigned) = nullptr;
  int (*allocate)(uint64_t*, size_t) = nullptr;
  int (*make_stream)(void**, unsigned) = nullptr;
  int (*fill)(uint64_t, unsigned char, size_t, void*) = nullptr;
  int (*copy_in)(uint64_t, const void*, size_t, void*) = nullptr;
  int (*wait)(void*) = nullptr;
  int (*end_stream)(void*) = nullptr;
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
            load(library, "cuGetErrorString", &error_text) &&
            load(library, "cuInit", &init) && load(library, "cuDeviceGet", &device) &&
            load(library, "cuCtxGetDevice", &current_device) &&
            load(library, "cuDeviceCanAccessPeer", &can_access) &&
            load(library, "cuDevicePrimaryCtxRetain", &context_of) &&
            load(library, "cuCtxPushCurrent_v2", &push_context) &&
            load(library, "cuCtxPopCurrent_v2", &pop_context) &&
            load(library, "cuCtxEnablePeerAccess", &enable_access) &&
            load(library, "cuMemAlloc_v2", &allocate) &&
            load(library, "cuStreamCreate", &make_stream) &&
            load(library, "cuMemsetD8Async", &fill) &&
            load(library, "cuMemcpyHtoDAsync_v2", &copy_in) &&
            load(library, "cuStreamSynchronize", &wait) &&
            load(library, "cuStreamDestroy_v2", &end_stream);
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

// The mailboxes of a group of GPUs, by rank; those of one that failed are never made.
using Mailboxes = std::vector<char*>;

// One GPU's mailbox: zeros behind its rank, which all of the group may write to.
int make_mailbox(const Driver& cuda, const std::vector<void*>& contexts, size_t rank,
                 size_t bytes, char** made) {
  constexpr int kNonBlocking = 1, kAlreadyEnabled = 704;
  int e = cuda.push_context(contexts[rank]);
  if (e) return e;
  uint64_t place = 0;
  void* stream = nullptr;
  const int64_t number = rank;
  for (size_t i = 0; i < contexts.size() && !e; ++i) {
    if (i != rank) e = cuda.enable_access(contexts[i], 0);
    if (e == kAlreadyEnabled) e = 0;
  }
  if (!e) e = cuda.allocate(&place, bytes);
  if (!e) e = cuda.make_stream(&stream, kNonBlocking);
  if (!e) {
    e = cuda.fill(place, 0, bytes, stream);
    if (!e) e = cuda.copy_in(place, &number, sizeof number, stream);
    if (!e) e = cuda.wait(stream);
    cuda.end_stream(stream);
  }
  *made = reinterpret_cast<char*>(place);
  void* popped = nullptr;
  cuda.pop_context(&popped);
  return e;
}

// Made at the first call of any GPU of the group; never freed, for a graph may hold them.
ffi::Error mailboxes_of(Integers groups, int64_t ranks, size_t bytes,
                        std::vector<char*>* found) {
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, Mailboxes> known;
  const Driver& cuda = driver();
  int own = -1;
  if (int e = cuda.current_device(&own)) return failed("no device", e);
  const int64_t* at = groups.begin();
  while (at < groups.end() && std::find(at, at + ranks, own) == at + ranks) at += ranks;
  if (at >= groups.end())
    return ffi::Error::Internal("jaxkern: launch_chain: a GPU that is in no group.");
  const std::vector<int64_t> group(at, at + ranks);
  std::lock_guard<std::mutex> lock(mutex);
  auto [place, is_new] = known.try_emplace(group);
  if (is_new) {
    int mode = kRelaxed, error = 0;  // a stream of this thread may be in capture
    cuda.exchange_capture_mode(&mode);
    std::vector<void*> contexts(ranks);
    for (int64_t i = 0; i < ranks && !error; ++i) {
      int device = 0;
      error = cuda.device(&device, static_cast<int>(group[i]));
      if (!error) error = cuda.context_of(&contexts[i], device);
    }
    Mailboxes made(ranks);
    for (int64_t i = 0; i < ranks && !error; ++i)
      error = make_mailbox(cuda, contexts, i, bytes, &made[i]);
    cuda.exchange_capture_mode(&mode);
    if (error) {
      known.erase(place);
      return failed("no mailboxes", error);
    }
    place->second = std::move(made);
  }
  const Mailboxes& all = place->second;
  found->push_back(all[std::find(group.begin(), group.end(), own) - group.begin()]);
  found->insert(found->end(), all.begin(), all.end());
  return ffi::Error::Success();
}

// Each launch of `program`: kernel, grid of three, whether it may begin early, programs of
// a cluster, number of parameters, and of each which buffer, operands before results, and
// bytes into it; -1 is the GPU's own mailbox, -2 - k that of rank k.
ffi::Error LaunchChain(void* stream, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, int64_t key, Integers table,
                       std::string_view names, std::string_view binaries,
                       Integers program, int64_t ranks, Integers groups,
                       int64_t mailbox_bytes) {
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

  std::vector<char*> mailboxes;
  if (ranks > 0) {
    ffi::Error e = mailboxes_of(groups, ranks, mailbox_bytes, &mailboxes);
    if (e.failure()) return e;
  }

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
      values.push_back((at[7 + 2 * i] < 0 ? mailboxes[-1 - at[7 + 2 * i]]
                                          : buffers[at[7 + 2 * i]]) +
                       at[8 + 2 * i]);
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

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkern_launch_chain_4(
    XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkern_launch_chain_4, LaunchChain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("key")
                                  .Attr<Integers>("kernels")
                                  .Attr<std::string_view>("names")
                                  .Attr<std::string_view>("binaries")
                                  .Attr<Integers>("program")
                                  .Attr<int64_t>("ranks")
                                  .Attr<Integers>("groups")
                                  .Attr<int64_t>("mailbox_bytes"),
                              {ffi::Traits::kCmdBufferCompatible});

// Whether each of these devices can use the memory of the others.
extern "C" __attribute__((visibility("default"))) bool jaxkern_reach_each_other(
    const int* numbers, int count) {
  const Driver& cuda = driver();
  if (!cuda.found || cuda.init(0)) return false;
  std::vector<int> devices(count);
  for (int i = 0; i < count; ++i)
    if (cuda.device(&devices[i], numbers[i])) return false;
  for (int one : devices)
    for (int other : devices) {
      int can = 0;
      if (one != other && (cuda.can_access(&can, one, other) || !can)) return false;
    }
  return true;
}
