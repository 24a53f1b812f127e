// Compiled once per instruction set, with JAXKERN_ISA its name and the flags for it.
#include "kernels.h"

#include "activation/softmax.h"
#include "attention/attention.h"
#include "delta_rule/causal_conv1d.h"
#include "delta_rule/gated_delta_rule.h"
#include "delta_rule/state_space_dual.h"
#include "index/argmax.h"
#include "index/top_k.h"
#include "linear/matmul_transpose_b.h"
#include "loss/linear_cross_entropy.h"
#include "norm/norm.h"
#include "quant/affine_matmul.h"
#include "quant/quantized_matmul.h"
#include "rope/rope.h"
#include "sampling/sample.h"

namespace jaxkern {
namespace JAXKERN_ISA {

extern const Kernels kernels;
const Kernels kernels = {JAXKERN_ISA_NAME, quantized_matmul, quantized_embedding,
                         attention, argmax, top_k, sample,
                         norm, norm_gradient, delta_rule, state_space,
                         matmul_transpose_b, affine_matmul,
                         linear_cross_entropy, linear_cross_entropy_gradient,
                         causal_conv, causal_conv_gradient,
                         softmax, softmax_gradient, rope};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
