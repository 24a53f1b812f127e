// Runs the kernels of one instruction set over odd sizes, apart from XLA.
//
// Built with the address and undefined-behaviour sanitisers: every buffer has exactly
// its size, is misaligned where its dtype allows, and results begin as NaN. Prints one
// line per product: format, rows, width, form, the largest error relative to the sum of
// magnitudes, computed in double from the kernels' own decoded weights; then attention.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../../jaxkern/cpu/kernels.h"

namespace jaxkern {
namespace JAXKERN_ISA {
extern const Kernels kernels;
}
}  // namespace jaxkern
using namespace jaxkern;

static void run_on_threads(const Workers* self, int64_t items,
                           void (*item)(void*, int64_t), void* data) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i; (i = next++) < items;) item(data, i);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < self->threads; ++i) threads.emplace_back(work);
  work();
  for (auto& t : threads) t.join();
}

static uint32_t state = 1;
static uint32_t random_bits() {
  state = state * 1664525 + 1013904223;
  return state >> 8;
}
static float random_float() { return (float)random_bits() / (1 << 23) - 1; }

struct Buffer {  // misaligned by 4 bytes, with nothing behind it
  explicit Buffer(size_t bytes) : start((char*)malloc(bytes + 4)), data(start + 4) {}
  ~Buffer() { free(start); }
  char *start, *data;
};

static float worst_product(const Workers& workers, const Layout& s, int64_t rows,
                           int64_t x_rows, bool interleaved, bool int8, int experts) {
  const int64_t width = 3 * s.elements, row_bytes = 3 * s.bytes;
  Buffer w(experts * rows * row_bytes), x(x_rows * width * 4);
  const int64_t per_x = experts > 1 ? 2 : 1, count = x_rows * per_x;
  Buffer y(count * rows * 4), ids(rows * 4), decoded(rows * width * 4), expert(count * 4);
  for (int64_t i = 0; i < experts * rows * row_bytes; ++i) {
    w.data[i] = (char)(0x20 + random_bits() % 16);  // also a small number as float16
  }
  for (int64_t i = 0; i < x_rows * width; ++i) ((float*)x.data)[i] = random_float();
  for (int64_t i = 0; i < rows; ++i) ((int32_t*)ids.data)[i] = (int32_t)i;
  for (int64_t i = 0; i < count; ++i) {
    ((int32_t*)expert.data)[i] = (int32_t)(random_bits() % (experts + 1)) - (experts > 1);
  }
  for (int64_t i = 0; i < count * rows; ++i) ((float*)y.data)[i] = NAN;
  QuantizedMatmul p = {};
  p.w = {(const uint8_t*)w.data, (Format)(&s - layouts), interleaved, rows, width};
  p.x = x.data, p.y = y.data, p.int8_activations = int8;
  p.x_rows = x_rows, p.count = count, p.rows_per_x = per_x, p.experts = experts;
  p.expert = experts > 1 ? (const int32_t*)expert.data : nullptr;
  if (!JAXKERN_ISA::kernels.quantized_matmul(p, workers)) return NAN;
  float worst = 0;
  for (int e = 0; e < experts; ++e) {
    QuantizedEmbedding rows_of_w = {p.w, (const int32_t*)ids.data, rows, decoded.data,
                                    Float::f32};
    rows_of_w.w.data += e * rows * row_bytes;
    JAXKERN_ISA::kernels.quantized_embedding(rows_of_w, workers);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t named = p.expert ? p.expert[i] : 0;
      for (int64_t f = 0; f < rows; ++f) {
        const float actual = ((float*)y.data)[i * rows + f];
        if (named < 0 || named >= experts) {
          if (!(actual == 0)) return NAN;
          continue;
        }
        if (named != e) continue;
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < width; ++k) {
          double term = (double)((float*)decoded.data)[f * width + k] *
                        ((float*)x.data)[i / per_x * width + k];
          sum += term, magnitude += fabs(term);
        }
        const float error = (float)(fabs(actual - sum) / magnitude);
        if (!(error <= worst)) worst = error;
      }
    }
  }
  return worst;
}

// The worst error of a gated product, or of one that is added to `residual`, of rows that
// are normalised or not, beside the plain product of the same kernel. Rows of 1 and -1
// have a root mean square of exactly 1.
static float worst_fused(const Workers& workers, const Layout& s, int64_t x_rows, bool gated,
                         bool int8, bool normed) {
  const int64_t rows = 64, y_rows = gated ? rows / 2 : rows, width = 3 * s.elements;
  Buffer w(rows * 3 * s.bytes), x(x_rows * width * 4), plain(x_rows * rows * 4);
  Buffer y(x_rows * y_rows * 4), residual(x_rows * y_rows * 4);
  Buffer signs(x_rows * width * 4), norm(width * 4);
  for (int64_t i = 0; i < rows * 3 * s.bytes; ++i) {
    w.data[i] = (char)(0x20 + random_bits() % 16);
  }
  for (int64_t i = 0; i < width; ++i) ((float*)norm.data)[i] = random_float();
  for (int64_t i = 0; i < x_rows * width; ++i) {
    const float sign = ((float*)signs.data)[i] = random_bits() % 2 ? 1.f : -1.f;
    ((float*)x.data)[i] = normed ? sign * ((float*)norm.data)[i % width] : random_float();
  }
  for (int64_t i = 0; i < x_rows * y_rows; ++i) {
    ((float*)y.data)[i] = NAN;
    ((float*)residual.data)[i] = random_float();
  }
  QuantizedMatmul p = {};
  p.w = {(const uint8_t*)w.data, (Format)(&s - layouts), true, rows, width};
  p.x = x.data, p.y = plain.data, p.int8_activations = int8;
  p.x_rows = p.count = x_rows, p.rows_per_x = p.experts = 1;
  if (!JAXKERN_ISA::kernels.quantized_matmul(p, workers)) return NAN;
  p.y = y.data, p.gated = gated, p.residual = gated ? nullptr : residual.data;
  if (normed) p.x = signs.data, p.norm = (const float*)norm.data;
  if (!JAXKERN_ISA::kernels.quantized_matmul(p, workers)) return NAN;
  float worst = 0;
  for (int64_t m = 0; m < x_rows; ++m) {
    for (int64_t f = 0; f < y_rows; ++f) {
      const double first = ((float*)plain.data)[m * rows + f];
      const double other = gated ? ((float*)plain.data)[m * rows + y_rows + f]
                                 : ((float*)residual.data)[m * y_rows + f];
      const double expected = gated ? first / (1 + exp(-first)) * other : first + other;
      const double error = fabs(((float*)y.data)[m * y_rows + f] - expected);
      const float relative = (float)(error / (fabs(expected) + 1e-12 * fabs(other)));
      if (!(relative <= worst)) worst = relative;
    }
  }
  return worst;
}

static float worst_attention(const Workers& workers, int64_t t, int64_t s, int64_t g,
                             int64_t h, int64_t hv, bool causal, int64_t window,
                             float softcap, bool codes) {
  const int64_t b = 2, k = 2;
  Buffer q(b * t * k * g * h * 4), key(b * s * k * h * 4), value(b * s * k * hv * 4);
  Buffer out(b * t * k * g * hv * 4), lse(b * t * k * g * 4), length(8), offset(8);
  for (int64_t i = 0; i < b * t * k * g * h; ++i) ((float*)q.data)[i] = random_float();
  for (int64_t i = 0; i < b * s * k * h; ++i) ((float*)key.data)[i] = random_float();
  for (int64_t i = 0; i < b * s * k * hv; ++i) ((float*)value.data)[i] = random_float();
  for (int64_t i = 0; i < b * t * k * g * hv; ++i) ((float*)out.data)[i] = NAN;
  for (int64_t i = 0; i < b * t * k * g; ++i) ((float*)lse.data)[i] = NAN;
  Buffer key_codes(b * s * k * h), value_codes(b * s * k * hv);
  Buffer key_scales(b * s * k * 4), value_scales(b * s * k * 4);
  for (int64_t i = 0; i < b * s * k; ++i) {
    ((float*)key_scales.data)[i] = random_float() / 128;
    ((float*)value_scales.data)[i] = random_float() / 128;
  }
  auto code = [](Buffer& to, const Buffer& scales, Buffer& exact, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n * width; ++i) {
      const uint8_t c = (uint8_t)random_bits();
      to.data[i] = (char)c;
      ((float*)exact.data)[i] = ((float*)scales.data)[i / width] * ((float)c - 128);
    }
  };
  if (codes) code(key_codes, key_scales, key, b * s * k, h);
  if (codes) code(value_codes, value_scales, value, b * s * k, hv);
  Attention p = {};
  p.query = q.data, p.key = key.data, p.value = value.data, p.out = out.data;
  p.lse = (float*)lse.data;
  p.kv_lengths = (int32_t*)length.data, p.q_offset = (int32_t*)offset.data;
  p.b = b, p.t = t, p.s = s, p.k = k, p.g = g, p.h = h, p.hv = hv;
  p.scale = 1.5f, p.softcap = softcap, p.window = window, p.causal = causal;
  if (codes) {
    p.key = key_codes.data, p.key_scales = (float*)key_scales.data;
    p.value = value_codes.data, p.value_scales = (float*)value_scales.data;
  }
  for (int i = 0; i < 2; ++i) {
    ((int32_t*)length.data)[i] = (int32_t)(i ? s : s / 2);
    ((int32_t*)offset.data)[i] = ((int32_t*)length.data)[i] - (int32_t)t;
    for (int64_t j = ((int32_t*)length.data)[i]; j < s; ++j) {  // not to be read
      for (int64_t c = 0; c < k * h; ++c) ((float*)key.data)[(i * s + j) * k * h + c] = NAN;
      for (int64_t c = 0; c < k * hv; ++c) {
        ((float*)value.data)[(i * s + j) * k * hv + c] = NAN;
      }
    }
  }
  if (!JAXKERN_ISA::kernels.attention(p, workers)) return NAN;
  float worst = 0;
  for (int64_t i = 0; i < b * t * k * g; ++i) {
    const int64_t batch = i / (t * k * g), row = i / (k * g) % t, head = i % (k * g) / g;
    const int64_t position = row + p.q_offset[batch];
    std::vector<double> logit;
    std::vector<int64_t> seen;
    for (int64_t j = 0; j < p.kv_lengths[batch]; ++j) {
      if ((causal && j > position) || (window && j <= position - window)) continue;
      double dot = 0;
      for (int64_t c = 0; c < h; ++c) {
        dot += (double)((float*)q.data)[i * h + c] *
               ((float*)key.data)[((batch * s + j) * k + head) * h + c];
      }
      dot *= p.scale;
      logit.push_back(softcap > 0 ? softcap * tanh(dot / softcap) : dot);
      seen.push_back(j);
    }
    double total = 0;
    for (double x : logit) total += exp(x);
    const float l = p.lse[i];
    if (seen.empty() ? !(l == -INFINITY) : !(fabs(l - log(total)) < 1e-5)) return NAN;
    for (int64_t c = 0; c < hv; ++c) {
      double sum = 0;
      for (size_t n = 0; n < seen.size(); ++n) {
        sum += exp(logit[n]) / total *
               ((float*)value.data)[((batch * s + seen[n]) * k + head) * hv + c];
      }
      const float error = (float)fabs(((float*)out.data)[i * hv + c] - sum);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

static float worst_selection(const Workers& workers, int64_t rows, int64_t v, int64_t k,
                             Float type) {  // of argmax, top_k and sample: wrong results
  const int64_t size = type == Float::f32 ? 4 : 2;
  Buffer x(rows * v * size), index(rows * 4), values(rows * k * size);
  Buffer indices(rows * k * 4), tokens(rows * 4);
  std::vector<double> exact(rows * v);
  for (int64_t i = 0; i < rows * v; ++i) {
    // steps of 1/8 tie, and every dtype has them
    const float value = (float)((int)(random_bits() % 97) - 48) / 8;
    exact[i] = value;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == Float::f32) memcpy(x.data + 4 * i, &bits, 4);
    else if (type == Float::bf16) memcpy(x.data + 2 * i, (char*)&bits + 2, 2);
    else {
      const uint16_t half =
          value == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10));
      memcpy(x.data + 2 * i, &half, 2);
    }
  }
  int wrong = 0;
  Argmax a = {x.data, type, rows, v, true, (int32_t*)index.data};
  TopK t = {x.data, type, rows, v, k, values.data, (int32_t*)indices.data};
  std::vector<SampleRow> drawn(rows);
  for (int64_t r = 0; r < rows; ++r) {
    drawn[r] = {x.data + r * v * size, 0.5f, 1.0f, r % 2 ? 0.8f : 1.0f, 0.0f,
                (int32_t)(r % 3 ? k : 0), (int32_t*)tokens.data + r};
  }
  Sample s = {drawn.data(), type, rows, v};
  if (!JAXKERN_ISA::kernels.argmax(a, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.top_k(t, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.sample(s, workers)) return NAN;
  for (int64_t r = 0; r < rows; ++r) {
    const double* row = exact.data() + r * v;
    std::vector<bool> taken(v);
    for (int64_t n = 0; n < k; ++n) {
      int64_t best = -1;
      for (int64_t i = 0; i < v; ++i) {
        if (!taken[i] && (best < 0 || row[i] > row[best])) best = i;
      }
      taken[best] = true;
      wrong += ((int32_t*)indices.data)[r * k + n] != best;
      wrong += memcmp(values.data + (r * k + n) * size, x.data + (r * v + best) * size, size);
      if (n == 0) wrong += ((int32_t*)index.data)[r] != best;
    }
    auto weight = [&](int64_t i) { return exp(row[i]); };
    double cut = -INFINITY;
    if (drawn[r].top_k > 0 && k < v) cut = row[((int32_t*)indices.data)[r * k + k - 1]];
    double total = 0;
    for (int64_t i = 0; i < v; ++i) total += row[i] >= cut ? weight(i) : 0;
    if (drawn[r].top_p < 1) {
      double t = 48;  // from above, in steps that the logits have
      for (;; t -= 0.125) {
        double mass = 0;
        for (int64_t i = 0; i < v; ++i) mass += row[i] >= t && row[i] >= cut ? weight(i) : 0;
        if (mass >= (double)drawn[r].top_p * total) break;
      }
      cut = t > cut ? t : cut;
      total = 0;
      for (int64_t i = 0; i < v; ++i) total += row[i] >= cut ? weight(i) : 0;
    }
    double sum = 0, nearest = 1;
    int64_t token = -1;
    for (int64_t i = 0; i < v && token < 0; ++i) {
      sum += row[i] >= cut ? weight(i) : 0;
      nearest = fmin(nearest, fabs(sum / total - 0.5));
      if (sum > 0.5 * total) token = i;
    }
    // where u meets a step, rounding decides
    wrong += ((int32_t*)tokens.data)[r] != token && nearest > 1e-5;
  }
  return (float)wrong;
}

static float worst_norm(const Workers& workers, int64_t rows, int64_t d, bool centred,
                        bool adds) {  // and of its gradient
  const int64_t n = rows * d;
  Buffer x(n * 4), residual(n * 4), w(d * 4), bias(d * 4), mean(rows * 4), rstd(rows * 4);
  Buffer y(n * 4), total(n * 4), dy(n * 4), dtotal(n * 4), dx(n * 4), dresidual(n * 4);
  Buffer dw(d * 4), dbias(d * 4);
  for (Buffer* b : {&x, &residual, &dy, &dtotal}) {
    for (int64_t i = 0; i < n; ++i) ((float*)b->data)[i] = random_float() + 0.5f;
  }
  for (Buffer* b : {&w, &bias}) {
    for (int64_t i = 0; i < d; ++i) ((float*)b->data)[i] = random_float();
  }
  for (Buffer* b : {&y, &total, &dx, &dresidual}) {
    for (int64_t i = 0; i < n; ++i) ((float*)b->data)[i] = NAN;
  }
  for (Buffer* b : {&dw, &dbias}) {
    for (int64_t i = 0; i < d; ++i) ((float*)b->data)[i] = NAN;
  }
  Norm p = {};
  p.x = x.data, p.weight = (float*)w.data, p.bias = (float*)bias.data;
  p.rows = rows, p.d = d, p.eps = 0.01f, p.centred = centred;
  p.mean = (float*)mean.data, p.rstd = (float*)rstd.data, p.y = y.data, p.dy = dy.data;
  p.dx = dx.data, p.dweight = (float*)dw.data, p.dbias = (float*)dbias.data;
  if (adds) {
    p.residual = residual.data, p.total = total.data;
    p.dtotal = dtotal.data, p.dresidual = dresidual.data;
  }
  if (!JAXKERN_ISA::kernels.norm(p, workers)) return NAN;
  if (!JAXKERN_ISA::kernels.norm_gradient(p, workers)) return NAN;
  float worst = 0;
  auto compare = [&](float actual, double expected, double scale) {
    const float error = (float)(fabs(actual - expected) / scale);
    if (!(error <= worst)) worst = error;
  };
  std::vector<double> dw64(d), dbias64(d);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> t(d), xhat(d), dxhat(d);
    double m = 0, square = 0, sum = 0, along = 0;
    for (int64_t i = 0; i < d; ++i) {
      t[i] = ((float*)x.data)[r * d + i];
      if (adds) t[i] += ((float*)residual.data)[r * d + i];
      m += t[i] / (double)d;
    }
    if (!centred) m = 0;
    for (int64_t i = 0; i < d; ++i) square += (t[i] - m) * (t[i] - m) / (double)d;
    const double s = 1 / sqrt(square + 0.01f);
    for (int64_t i = 0; i < d; ++i) {
      const double g = ((float*)dy.data)[r * d + i];
      xhat[i] = (t[i] - m) * s;
      compare(((float*)y.data)[r * d + i], xhat[i] * p.weight[i] + p.bias[i], 4);
      if (adds) compare(((float*)total.data)[r * d + i], t[i], 4);
      dxhat[i] = g * p.weight[i];
      sum += dxhat[i] / (double)d, along += dxhat[i] * xhat[i] / (double)d;
      dw64[i] += g * xhat[i], dbias64[i] += g;
    }
    for (int64_t i = 0; i < d; ++i) {
      double e = s * (dxhat[i] - (centred ? sum : 0) - xhat[i] * along);
      if (adds) e += ((float*)dtotal.data)[r * d + i];
      compare(((float*)dx.data)[r * d + i], e, 4 + 4 * s);
      if (adds) compare(((float*)dresidual.data)[r * d + i], e, 4 + 4 * s);
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    compare(p.dweight[i], dw64[i], 4 * (double)rows);
    compare(p.dbias[i], dbias64[i], 4 * (double)rows);
  }
  return worst;
}

static float worst_delta_rule(const Workers& workers, int64_t t, int64_t h, int64_t hv,
                              bool zeros, bool by_channel) {
  const int64_t b = 2, k = 2, group = 2, n = k * group, decays = by_channel ? h : 1;
  Buffer q(b * t * k * h * 4), key(b * t * k * h * 4), v(b * t * n * hv * 4);
  Buffer g(b * t * n * decays * 4), beta(b * t * n * 4), state(b * n * h * hv * 4);
  Buffer out(b * t * n * hv * 4), after(b * n * h * hv * 4);
  auto fill = [](Buffer& x, int64_t count, float factor, float shift) {
    for (int64_t i = 0; i < count; ++i) {
      ((float*)x.data)[i] = factor * random_float() + shift;
    }
  };
  fill(q, b * t * k * h, 1, 0), fill(key, b * t * k * h, 1 / sqrtf((float)h), 0);
  fill(v, b * t * n * hv, 1, 0), fill(g, b * t * n * decays, 1, -1);
  fill(beta, b * t * n, 0.5f, 0.5f);
  fill(state, b * n * h * hv, 1, 0), fill(out, b * t * n * hv, 0, NAN);
  fill(after, b * n * h * hv, 0, NAN);
  DeltaRule p = {(float*)q.data, (float*)key.data, (float*)v.data, (float*)g.data,
                 (float*)beta.data, zeros ? nullptr : (float*)state.data, (float*)out.data,
                 (float*)after.data, b, t, k, group, h, hv, 0.5f, by_channel};
  if (!JAXKERN_ISA::kernels.delta_rule(p, workers)) return NAN;
  float worst = 0;
  auto compare = [&](float actual, double expected) {
    const float error = (float)(fabs(actual - expected) / (1 + fabs(expected)));
    if (!(error <= worst)) worst = error;
  };
  for (int64_t head = 0; head < b * n; ++head) {
    std::vector<double> s(h * hv);
    for (int64_t i = 0; i < h * hv && !zeros; ++i) s[i] = p.state[head * h * hv + i];
    for (int64_t i = 0; i < t; ++i) {
      const int64_t token = head / n * t + i, at = token * n + head % n;
      const float *ki = p.key + (token * k + head % n / group) * h;
      const float *qi = p.query + (token * k + head % n / group) * h;
      for (int64_t c = 0; c < hv; ++c) {
        double stored = 0, read = 0;
        for (int64_t r = 0; r < h; ++r) {
          const double decay = exp(p.g[at * decays + (by_channel ? r : 0)]);
          stored += (s[r * hv + c] *= decay) * ki[r];
        }
        const double error = p.beta[at] * (p.value[at * hv + c] - stored);
        for (int64_t r = 0; r < h; ++r) read += (s[r * hv + c] += ki[r] * error) * qi[r];
        compare(p.out[at * hv + c], 0.5 * read);
      }
    }
    for (int64_t i = 0; i < h * hv; ++i) compare(p.new_state[head * h * hv + i], s[i]);
  }
  return worst;
}

static float as_bf16(float x) {  // of 8 bits, so as float16 too
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= 0xffff0000;
  memcpy(&x, &bits, 4);
  return x;
}

static uint16_t half_bits(float x, Float type) {  // of such a number, not tiny
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (type == Float::bf16) return (uint16_t)(bits >> 16);
  return (uint16_t)((bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10)));
}

// Of one matrix, or of `experts` of them, two for each row of x, some of which are none.
static float worst_dense(const Workers& workers, int64_t x_rows, int64_t d, int64_t f,
                         Float type, bool narrow, int64_t experts) {
  const int64_t k = experts > 1 ? 2 : 1, rows = x_rows * k, size = type == Float::f32 ? 4 : 2;
  Buffer x(x_rows * d * 4), w(experts * f * d * size), y(rows * f * 4), expert(rows * 4);
  std::vector<float> exact(experts * f * d);
  for (int64_t i = 0; i < x_rows * d; ++i) ((float*)x.data)[i] = as_bf16(random_float());
  for (int64_t i = 0; i < experts * f * d; ++i) {
    const float value = as_bf16(random_float());
    exact[i] = fabsf(value) > 1e-3f ? value : 0.5f;
    const uint16_t half = half_bits(exact[i], type);
    memcpy(w.data + i * size, size == 4 ? (const void*)&exact[i] : &half, size);
  }
  for (int64_t i = 0; i < rows * f; ++i) ((float*)y.data)[i] = NAN;
  for (int64_t i = 0; i < rows; ++i) {
    ((int32_t*)expert.data)[i] =
        experts > 1 ? (int32_t)(random_bits() % (experts + 2)) - 1 : 0;
  }
  const Matmul p = {x.data, w.data, Float::f32, type, narrow ? type : Float::f32, y.data,
                    Float::f32, rows, d, f,
                    experts > 1 ? (const int32_t*)expert.data : nullptr, k, experts};
  if (!JAXKERN_ISA::kernels.matmul_transpose_b(p, workers)) return NAN;
  float worst = 0;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t e = ((int32_t*)expert.data)[m];
    const bool none = e < 0 || e >= experts;
    for (int64_t c = 0; c < f; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < d && !none; ++i) {
        const double term =
            (double)((float*)x.data)[m / k * d + i] * exact[(e * f + c) * d + i];
        sum += term, magnitude += fabs(term);
      }
      const double off = fabs(((float*)y.data)[m * f + c] - sum);
      const float error = (float)(none ? off : off / magnitude);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

static float worst_affine(const Workers& workers, int64_t rows, int64_t f, int bits,
                          int64_t group, Float scale_type) {
  const int64_t groups = 5, d = groups * group, words = d * bits / 32;
  const int64_t size = scale_type == Float::f32 ? 4 : 2;
  Buffer x(rows * d * 4), codes(f * words * 4), y(rows * f * 4);
  Buffer scales(f * groups * size), biases(f * groups * size);
  for (int64_t i = 0; i < rows * d; ++i) ((float*)x.data)[i] = random_float();
  for (int64_t i = 0; i < f * words * 4; ++i) codes.data[i] = (char)random_bits();
  for (int64_t i = 0; i < rows * f; ++i) ((float*)y.data)[i] = NAN;
  std::vector<float> exact[2];
  for (int which : {0, 1}) {
    for (int64_t i = 0; i < f * groups; ++i) {
      const float value = as_bf16(random_float() / 4 + 0.5f);
      char* to = (which ? biases : scales).data + i * size;
      const uint16_t half = half_bits(value, scale_type);
      memcpy(to, size == 4 ? (const void*)&value : &half, size);
      exact[which].push_back(value);
    }
  }
  const AffineMatmul p = {x.data, Float::f32, scale_type, (uint32_t*)codes.data, bits, group,
                          scales.data, biases.data, y.data, rows, d, f, nullptr, 1, 1};
  if (!JAXKERN_ISA::kernels.affine_matmul(p, workers)) return NAN;
  float worst = 0;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t c = 0; c < f; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < d; ++k) {
        uint32_t word;
        memcpy(&word, codes.data + 4 * (c * words + k * bits / 32), 4);
        const uint32_t code = word >> (k * bits % 32) & ((1u << bits) - 1);
        const int64_t at = c * groups + k / group;
        const double w = (double)exact[0][at] * code + exact[1][at];
        const double term = w * ((float*)x.data)[m * d + k];
        sum += term, magnitude += fabs(term);
      }
      const float error = (float)(fabs(((float*)y.data)[m * f + c] - sum) / magnitude);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}
#include "harness_rows.h"

int main() {
  Workers workers = {3, run_on_threads};
  for (const Layout& s : layouts) {
    for (int64_t x_rows : {1, 7, 19}) {
      for (bool interleaved : {false, true}) {
        for (bool int8 : {false, true}) {
          for (int experts : {1, 3}) {
            const int64_t rows = interleaved ? 48 : 37;
            printf("product %s x_rows=%d interleaved=%d experts=%d int8=%d %g\n", s.name,
                   (int)x_rows, interleaved, experts, int8,
                   worst_product(workers, s, rows, x_rows, interleaved, int8, experts));
          }
        }
      }
    }
  }
  for (const Layout& s : layouts) {
    for (int64_t x_rows : {1, 11}) {
      for (bool gated : {false, true}) {
        for (bool int8 : {false, true}) {
          for (bool normed : {false, true}) {
            printf("fused %s x_rows=%d gated=%d rounded=%d normed=%d %g\n", s.name,
                   (int)x_rows, gated, int8, normed,
                   worst_fused(workers, s, x_rows, gated, int8, normed));
          }
        }
      }
    }
  }
  for (int64_t t : {1, 3, 41}) {
    for (int64_t s : {43, 700}) {
      for (bool causal : {false, true}) {
        for (int64_t window : {0, 9}) {
          for (float softcap : {0.f, 3.f}) {
            for (bool codes : {false, true}) {
              for (int64_t h : {21, 64}) {  // whole vectors are read in place
                printf("attention t=%d s=%d causal=%d window=%d softcap=%g codes=%d h=%d %g\n",
                       (int)t, (int)s, causal, (int)window, softcap, codes, (int)h,
                       worst_attention(workers, t, s, 3, h, h == 64 ? 96 : 38, causal, window,
                                       softcap, codes));
              }
            }
          }
        }
      }
    }
  }
  for (Float type : {Float::f32, Float::bf16, Float::f16}) {
    for (int64_t rows : {1, 5}) {
      for (int64_t v : {1, 3, 127, 129, 1000, 20011}) {
        for (int64_t k : {1, 40}) {
          printf("selection type=%d rows=%d v=%d k=%d %g\n", (int)type, (int)rows, (int)v,
                 (int)k, worst_selection(workers, rows, v, k < v ? k : v, type));
        }
      }
    }
  }
  for (int64_t rows : {1, 200}) {
    for (int64_t d : {1, 35, 320}) {
      for (bool centred : {false, true}) {
        for (bool adds : {false, true}) {
          printf("norm rows=%d d=%d centred=%d adds=%d %g\n", (int)rows, (int)d, centred, adds,
                 worst_norm(workers, rows, d, centred, adds));
        }
      }
    }
  }
  for (int64_t t : {1, 2, 5}) {
    for (int64_t h : {1, 22}) {
      for (int64_t hv : {3, 32, 70}) {
        for (bool zeros : {false, true}) {
          for (bool by_channel : {false, true}) {
            printf("delta_rule t=%d h=%d hv=%d zeros=%d by_channel=%d %g\n", (int)t, (int)h,
                   (int)hv, zeros, by_channel,
                   worst_delta_rule(workers, t, h, hv, zeros, by_channel));
          }
        }
      }
    }
  }
  for (Float type : {Float::f32, Float::bf16, Float::f16}) {
    for (bool narrow : {false, true}) {
      for (int64_t rows : {1, 7, 41}) {
        for (int64_t d : {1, 35, 1301}) {
          for (int64_t f : {1, 39}) {
            for (int64_t experts : {1, 3}) {
              printf("dense type=%d narrow=%d rows=%d d=%d f=%d experts=%d %g\n", (int)type,
                     narrow, (int)rows, (int)d, (int)f, (int)experts,
                     worst_dense(workers, rows, d, f, type, narrow, experts));
            }
          }
        }
      }
    }
  }
  for (Float type : {Float::f32, Float::bf16, Float::f16}) {
    for (int bits : {2, 4, 8}) {
      for (int64_t group : {32, 64, 128}) {
        for (int64_t rows : {1, 6, 17}) {
          for (int64_t f : {1, 39}) {
            printf("affine type=%d bits=%d group=%d rows=%d f=%d %g\n", (int)type, bits,
                   (int)group, (int)rows, (int)f,
                   worst_affine(workers, rows, f, bits, group, type));
          }
        }
      }
    }
  }
  print_rows(workers);
}
