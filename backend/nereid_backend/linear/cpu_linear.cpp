// SPDX-License-Identifier: Apache-2.0
// Linear layers on a CPU with 512-bit vectors, or with 256-bit vectors and multiply-add instructions (AVX2 and FMA).
// native_linear.py calls these functions through a plain C interface.
//
// A weight [num_outputs, dim] is stored in panels of 16 outputs. The last panel is padded with zeros:
//
//     float32   [panel][dim][16]           the weights of one input for 16 outputs are adjacent
//     bfloat16  [panel][dim / 2][16][2]    the weights of two inputs for 16 outputs are adjacent, as dot products of
//                                          pairs need them
//
// 16 weights of float32 fill one vector of 512 bits or two vectors of 256 bits. If the processor has no dot products of
// pairs, one vector of bfloat16 weights is converted in registers into two vectors of float32:
//
//     word of an output      | weight of input 1 | weight of input 0 |      32 bits in memory
//     word << 16             | weight of input 0 |         0         |      the float32 number of input 0
//     word & 0xffff0000      | weight of input 1 |         0         |      the float32 number of input 1
//
// The memory traffic is then still half of that of float32 weights.
//
// The rows of the input are divided into tiles of at most kMaxRows rows:
//
//                           panel 0   panel 1   panel 2   ...      each thread computes some panels
//     tile 0 (rows 0-11)    |  16 outputs of 12 rows: the sums stay in registers
//     tile 1 (rows 12-23)   |
//
// The speed of a step with few rows is limited by memory, so the weights are read once, in order, and prefetched. The
// speed of a step with many rows is limited by arithmetic, so the sums of a tile stay in registers. If there are
// several tiles, two panels stay in the cache for all of them, while the next two panels are prefetched. Sums are
// float32. The rows of a tile are transposed ([dim][rows]), because reading many separate rows would need more address
// registers than a processor has.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../attention/cpu/cpu_vectors.h"
#include "cpu_tile_linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kPanel = 16;  // outputs
// The distance of prefetches in bytes, divided by the number of panels that are read at the same time. 2048 is the fastest
// of 1536 to 8192 for 1 to 8 rows on Zen 4.
constexpr int64_t kAhead = 2048;

#if defined(__AVX512F__) || defined(__AVX2__)
#define NEREID_HAS_LINEAR 1

constexpr int kParts = kPanel / kLanes;  // vectors of one panel

// The largest number of rows of a tile, and the number of panels for R rows. They are limited by the registers for
// sums: 24 of 32 with 512-bit vectors, and 12 of 16 with 256-bit vectors.
#ifdef __AVX512F__
constexpr int kMaxRows = 12;
template <int R>
constexpr int panels_for() {
  return R <= 6 ? 4 : 2;
}
#else
constexpr int kMaxRows = 6;
template <int R>
constexpr int panels_for() {
  return R == 1 ? 4 : R <= 3 ? 2 : 1;
}
#endif

// The arithmetic of the tiles below for one data type. A Word contains the weights of one output for kInputs inputs.
// They are multiplied in kSteps steps. An Input contains the numbers of a row for one step. `add` adds the products of a
// vector of weights and one Input to the sums.
struct Float32 {
  using Number = float;
  using Word = float;
  using Input = float;
  using Weights = Floats;
  static constexpr int kInputs = 1, kSteps = 1;
  static Weights load_weights(const Word* at, int) { return load(at); }
  static Floats add(Floats sums, Weights weights, Input input) { return sums + weights * input; }
  static Input input(const Number* at, int) { return *at; }
};

#ifdef NEREID_PAIRS
// bfloat16 with dot products of pairs.
struct Pairs {
  using Number = Bfloat16;
  using Word = uint32_t;
  using Input = uint32_t;
  using Weights = __m512bh;
  static constexpr int kInputs = 2, kSteps = 1;
  static Weights load_weights(const Word* at, int) { return as_pairs(_mm512_loadu_si512(at)); }
  static Floats add(Floats sums, Weights weights, Input input) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), weights, one_pair(input)));
  }
  static Input input(const Number* at, int) {
    Input pair;
    std::memcpy(&pair, at, sizeof pair);
    return pair;
  }
};
using Bfloat16s = Pairs;
#else
// bfloat16 without dot products of pairs: weights are converted into float32, first those of input 0 of each Word, then
// those of input 1.
struct Bfloat16s {
  using Number = Bfloat16;
  using Word = uint32_t;
  using Input = float;
  using Weights = Floats;
  static constexpr int kInputs = 2, kSteps = 2;
  static Weights load_weights(const Word* at, int step) {
    const Words words = *reinterpret_cast<const Words*>(at);
    return reinterpret_cast<Floats>(step == 0 ? words << 16 : words & 0xffff0000u);
  }
  static Floats add(Floats sums, Weights weights, Input input) { return sums + weights * input; }
  static Input input(const Number* at, int step) { return to_float(at[step]); }
};
#endif

// The arguments of one call of a linear layer, for the arithmetic T.
template <typename T>
struct Call {
  const typename T::Word* weight;
  const typename T::Number* bias;  // may be null
  typename T::Number* out;
  int64_t num_outputs;
  int64_t num_words;  // the number of Words for one output
};

// Computes R rows and P panels of the output. The first column is 16 * panel. x is [num_words][kSteps][R]. With
// kFetchesOwn, this function prefetches the weights kAhead / P bytes after those that it reads, and near the end of the P
// panels it prefetches the beginning of the next P panels. Otherwise it prefetches the panel `next`.
template <typename T, int R, int P, bool kFetchesOwn>
inline void tile(const Call<T>& call, int64_t panel, const typename T::Input* x, typename T::Number* out,
                 const typename T::Word* next) {
  constexpr int V = P * kParts;  // vectors of sums for each row
  const int64_t words = call.num_words, stride = words * kPanel;
  const typename T::Word* weight = call.weight + panel * stride;
  // From this word on, a prefetch of the same panel would be beyond the end of the panel.
  const int64_t first_near_end = words - kAhead / P / static_cast<int64_t>(kPanel * sizeof(typename T::Word));
  Floats sums[R][V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const int64_t place = panel * kPanel + v * kLanes;
    const Floats first = call.bias ? load_some(call.bias + place, call.num_outputs - place) : Floats{};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sums[r][v] = first;
  }
  int64_t ahead = kAhead / P;  // the distance of the next prefetch in bytes
  for (int64_t k = 0; k < words; ++k) {
    if (k == first_near_end) ahead += (P - 1) * stride * static_cast<int64_t>(sizeof(typename T::Word));
    if (!kFetchesOwn) __builtin_prefetch(next + k * kPanel, 0, 2);
#pragma GCC unroll 2
    for (int step = 0; step < T::kSteps; ++step, x += R) {
      typename T::Weights weights[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const typename T::Word* at = weight + v / kParts * stride + k * kPanel + v % kParts * kLanes;
        weights[v] = T::load_weights(at, step);
        if (kFetchesOwn && step == 0 && v % kParts == 0)
          __builtin_prefetch(reinterpret_cast<const char*>(at) + ahead, 0, 3);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = T::add(sums[r][v], weights[v], x[r]);
    }
  }
  store_sums(sums[0], R, V, out + panel * kPanel, call.num_outputs, call.num_outputs - panel * kPanel);
}

// Computes R rows and the panels [first, last). If `next` is not null, that panel is prefetched for the next call.
template <typename T, int R>
void rows(const Call<T>& call, int64_t first, int64_t last, const typename T::Input* x, typename T::Number* out,
          const typename T::Word* next) {
  constexpr int P = panels_for<R>();
  constexpr int Q = P < 2 ? P : 2;
  int64_t panel = first;
  if (next) {
    for (; panel + Q <= last; panel += Q) tile<T, R, Q, false>(call, panel, x, out, next);
    for (; panel < last; ++panel) tile<T, R, 1, false>(call, panel, x, out, next);
    return;
  }
  for (; panel + P <= last; panel += P) tile<T, R, P, true>(call, panel, x, out, nullptr);
  for (; panel < last; ++panel) tile<T, R, 1, true>(call, panel, x, out, nullptr);
}

// Returns the functions `rows` for 1, 2, ... rows.
template <typename T, int... R>
constexpr std::array<decltype(&rows<T, 1>), sizeof...(R)> rows_of(std::integer_sequence<int, R...>) {
  return {rows<T, R + 1>...};
}

// Transposes the words [first, last) of `count` rows: from x [count][dim] to `to` [num_words][kSteps][count].
template <typename T>
void pack_rows(const typename T::Number* x, int64_t dim, int64_t count, int64_t first, int64_t last,
               typename T::Input* to) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t k = first; k < last; ++k)
      for (int step = 0; step < T::kSteps; ++step)
        to[(k * T::kSteps + step) * count + r] = T::input(x + r * dim + k * T::kInputs, step);
}

// Computes a linear layer; see nereid_linear in cpu_kernels.h.
template <typename T>
void linear(const void* weight, const void* bias, const void* input, void* output, int64_t num_rows, int64_t dim,
            int64_t num_outputs, int num_threads) {
  using Word = typename T::Word;
  using Input = typename T::Input;
  using Number = typename T::Number;
  // A single row is not copied if its numbers have the form of Inputs.
  constexpr bool kIsReady = T::kSteps * sizeof(Input) == T::kInputs * sizeof(Number);
  constexpr auto kRows = rows_of<T>(std::make_integer_sequence<int, kMaxRows>());
  const int64_t words = dim / T::kInputs, num_panels = (num_outputs + kPanel - 1) / kPanel;
  const Call<T> call = {static_cast<const Word*>(weight), static_cast<const Number*>(bias),
                        static_cast<Number*>(output), num_outputs, words};
  const auto* x = static_cast<const Number*>(input);
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  // The tile t contains the rows [begin(t), begin(t + 1)).
  const auto begin = [=](int64_t tile) { return tile * num_rows / num_tiles; };
  const bool is_packed = num_rows > 1 || !kIsReady;
  thread_local std::vector<Input> storage;
  const int64_t row_inputs = words * T::kSteps;
  if (is_packed && static_cast<int64_t>(storage.size()) < num_rows * row_inputs) storage.resize(num_rows * row_inputs);
  Input* packed = storage.data();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    if (is_packed) {
      // Each thread packs some of the words of every tile.
      for (int64_t t = 0; t < num_tiles; ++t)
        pack_rows<T>(x + begin(t) * dim, dim, begin(t + 1) - begin(t), words * thread / threads,
                     words * (thread + 1) / threads, packed + begin(t) * row_inputs);
#pragma omp barrier
    }
    const Input* from = is_packed ? packed : reinterpret_cast<const Input*>(x);
    const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
    if (num_tiles == 1) {
      kRows[num_rows - 1](call, first, last, from, call.out, nullptr);
    } else {
      for (int64_t panel = first; panel < last; panel += 2)
        for (int64_t t = 0; t < num_tiles; ++t) {
          // The first tile prefetches one of the next two panels, the second tile the other.
          const int64_t next = std::min(panel + 2 + std::min<int64_t>(t, 1), num_panels - 1);
          kRows[begin(t + 1) - begin(t) - 1](call, panel, std::min(last, panel + 2), from + begin(t) * row_inputs,
                                             call.out + begin(t) * num_outputs, call.weight + next * words * kPanel);
        }
    }
  }
}

#endif  // NEREID_HAS_LINEAR

}  // namespace

extern "C" {

// See cpu_kernels.h.
int nereid_has_linear() {
#ifdef NEREID_HAS_LINEAR
  return 1;
#else
  return 0;
#endif
}

// See cpu_kernels.h.
void nereid_linear(int is_bfloat16, const void* weight, const void* bias, const void* x, void* out, int64_t num_rows,
                   int64_t dim, int64_t num_outputs, int num_threads) {
#ifdef NEREID_HAS_LINEAR
  if (is_bfloat16 && can_use_tiles()) {
    tile_linear(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
  } else if (is_bfloat16) {
    linear<Bfloat16s>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
  } else {
    linear<Float32>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
  }
  nereid_adapt(is_bfloat16, weight, x, out, num_rows, dim, num_outputs, num_threads);
#else
  (void)is_bfloat16, (void)weight, (void)bias, (void)x, (void)out;
  (void)num_rows, (void)dim, (void)num_outputs, (void)num_threads;
#endif
}

}  // extern "C"
