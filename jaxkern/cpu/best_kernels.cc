// Picks the kernels for the machine that runs, and tells which.
#include "kernels.h"

namespace jaxkern {

#define JAXKERN_DECLARE(isa) \
  namespace isa {            \
  extern const Kernels kernels; \
  }
JAXKERN_DECLARE(portable)
#if defined(__x86_64__)
JAXKERN_DECLARE(avx2)
JAXKERN_DECLARE(avx512)
JAXKERN_DECLARE(avx512vnni)
#elif defined(__aarch64__)
JAXKERN_DECLARE(neon)
#endif

static const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) return avx512vnni::kernels;
  if (avx512) return jaxkern::avx512::kernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return avx2::kernels;
  }
#elif defined(__aarch64__)
  return neon::kernels;  // built only for machines that have the dot product
#endif
  return portable::kernels;
}

const Kernels& best_kernels() {
  static const Kernels& kernels = choose();
  return kernels;
}

}  // namespace jaxkern

extern "C" __attribute__((visibility("default"))) const char* jaxkern_instruction_set() {
  return jaxkern::best_kernels().name;
}
