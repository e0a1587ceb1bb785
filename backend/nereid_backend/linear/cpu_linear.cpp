// SPDX-License-Identifier: Apache-2.0
// Linear layers on a CPU with 512-bit vectors. native_linear.py calls these functions through a plain C interface.
//
// A weight [num_outputs, dim] is stored in panels of 16 outputs. The last panel is padded with zeros:
//
//     float32   [panel][dim][16]           one vector contains the weights of one input for 16 outputs
//     bfloat16  [panel][dim / 2][16][2]    one vector contains the weights of two inputs, as dot products of pairs
//                                          need them
//
// If the processor has no dot products of pairs, one vector of bfloat16 weights is converted in registers into two
// vectors of float32. The memory traffic is then still half of that of float32 weights.
//
// The rows of the input are divided into tiles of at most kMaxRows rows:
//
//                           panel 0   panel 1   panel 2   ...      each thread computes some panels
//     tile 0 (rows 0-11)    |  16 outputs of 12 rows: 12 sums of one vector each, which stay in registers
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

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kMaxRows = 12;      // rows of a tile; with two panels, 24 of 32 registers
// The distance of prefetches in bytes: the fastest of 512 to 4096, for 1 to 16 rows on Zen 5.
constexpr int64_t kAhead = 2048;

#ifdef __AVX512F__

// Rounds 16 numbers to bfloat16.
inline Halves to_halves(Floats numbers) {
  const Words words = reinterpret_cast<Words>(numbers);
  const Words rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  // NaN must stay NaN, but rounding could make it infinite.
  const Words result = (words & 0x7fffffffu) > 0x7f800000u ? (Words{} + 0x7fc0u) : rounded;
  return __builtin_convertvector(result, Halves);
}

// Stores the first min(count, 16) numbers of a vector.
template <typename Vector, typename Number>
inline void store_first(Vector numbers, Number* to, int64_t count) {
  std::memcpy(to, &numbers, sizeof(Number) * std::min<int64_t>(count, kLanes));
}

// The arithmetic of the tiles below for one data type. A Word contains the weights of one output for kInputs inputs. An
// Input contains the kInputs numbers of a row that are multiplied by a Word. `add` adds the products of a vector of
// Words and one Input to the sums.
struct Float32 {
  using Number = float;
  using Word = float;
  using Input = float;
  static constexpr int kInputs = 1;
  using Weights = Floats;
  static Weights load_weights(const Word* at) { return load(at); }
  static Floats add(Floats sums, Weights weights, Input input) { return sums + weights * input; }
  static Input input(const Number* at) { return *at; }
  static void store(Floats sums, Number* to, int64_t count) { store_first(sums, to, count); }
};

#ifdef NEREID_PAIRS
// bfloat16 with dot products of pairs.
struct Pairs {
  using Number = Bfloat16;
  using Word = uint32_t;
  using Input = uint32_t;
  static constexpr int kInputs = 2;
  using Weights = __m512bh;
  static Weights load_weights(const Word* at) { return as_pairs(_mm512_loadu_si512(at)); }
  static Floats add(Floats sums, Weights weights, Input input) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), weights, one_pair(input)));
  }
  static Input input(const Number* at) {
    Input pair;
    std::memcpy(&pair, at, sizeof pair);
    return pair;
  }
  static void store(Floats sums, Number* to, int64_t count) {
    store_first(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(sums)), to, count);
  }
};
using Bfloat16s = Pairs;
#else
// bfloat16 without dot products of pairs: weights are converted into float32.
struct Bfloat16s {
  using Number = Bfloat16;
  using Word = uint32_t;
  struct Input {
    float first, second;
  };
  static constexpr int kInputs = 2;
  struct Weights {
    Floats first, second;
  };
  static Weights load_weights(const Word* at) {
    const Words words = *reinterpret_cast<const Words*>(at);
    return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xffff0000u)};
  }
  static Floats add(Floats sums, const Weights& weights, Input input) {
    return (sums + weights.first * input.first) + weights.second * input.second;
  }
  static Input input(const Number* at) { return {to_float(at[0]), to_float(at[1])}; }
  static void store(Floats sums, Number* to, int64_t count) { store_first(to_halves(sums), to, count); }
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

// Computes R rows and P panels of the output. The first column is 16 * panel. x is [num_words][R]. With kFetchesOwn,
// this function prefetches the weights kAhead bytes after those that it reads. Otherwise it prefetches the panel
// `next`.
template <typename T, int R, int P, bool kFetchesOwn>
inline void tile(const Call<T>& call, int64_t panel, const typename T::Input* x, typename T::Number* out,
                 const typename T::Word* next) {
  const int64_t words = call.num_words, stride = words * kLanes;
  const typename T::Word* weight = call.weight + panel * stride;
  Floats sums[R][P];
  for (int p = 0; p < P; ++p) {
    const int64_t place = (panel + p) * kLanes;
    const Floats first = call.bias ? load_some(call.bias + place, call.num_outputs - place) : Floats{};
    for (int r = 0; r < R; ++r) sums[r][p] = first;
  }
  for (int64_t k = 0; k < words; ++k) {
    typename T::Weights weights[P];
    for (int p = 0; p < P; ++p) {
      const typename T::Word* at = weight + p * stride + k * kLanes;
      weights[p] = T::load_weights(at);
      if (kFetchesOwn) __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead, 0, 3);
    }
    if (!kFetchesOwn) __builtin_prefetch(next + k * kLanes, 0, 2);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p] = T::add(sums[r][p], weights[p], x[k * R + r]);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      const int64_t place = (panel + p) * kLanes;
      T::store(sums[r][p], out + r * call.num_outputs + place, call.num_outputs - place);
    }
}

// Computes R rows and the panels [first, last). If `next` is not null, that panel is prefetched for the next call.
template <typename T, int R>
void rows(const Call<T>& call, int64_t first, int64_t last, const typename T::Input* x, typename T::Number* out,
          const typename T::Word* next) {
  constexpr int P = R <= 6 ? 4 : 2;  // limited by the registers for sums
  int64_t panel = first;
  if (next) {
    for (; panel + 2 <= last; panel += 2) tile<T, R, 2, false>(call, panel, x, out, next);
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

// Transposes the words [first, last) of `count` rows: from x [count][dim] to `to` [num_words][count].
template <typename T>
void pack_rows(const typename T::Number* x, int64_t dim, int64_t count, int64_t first, int64_t last,
               typename T::Input* to) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t k = first; k < last; ++k) to[k * count + r] = T::input(x + r * dim + k * T::kInputs);
}

// Computes a linear layer; see nereid_linear in cpu_kernels.h.
template <typename T>
void linear(const void* weight, const void* bias, const void* input, void* output, int64_t num_rows, int64_t dim,
            int64_t num_outputs, int num_threads) {
  using Word = typename T::Word;
  using Input = typename T::Input;
  using Number = typename T::Number;
  // A single row is not copied if its numbers have the form of Inputs.
  constexpr bool kIsReady = sizeof(Input) == T::kInputs * sizeof(Number);
  constexpr auto kRows = rows_of<T>(std::make_integer_sequence<int, kMaxRows>());
  const int64_t words = dim / T::kInputs, num_panels = (num_outputs + kLanes - 1) / kLanes;
  const Call<T> call = {static_cast<const Word*>(weight), static_cast<const Number*>(bias),
                        static_cast<Number*>(output), num_outputs, words};
  const auto* x = static_cast<const Number*>(input);
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  // The tile t contains the rows [begin(t), begin(t + 1)).
  const auto begin = [=](int64_t tile) { return tile * num_rows / num_tiles; };
  const bool is_packed = num_rows > 1 || !kIsReady;
  thread_local std::vector<Input> storage;
  if (is_packed && static_cast<int64_t>(storage.size()) < num_rows * words) storage.resize(num_rows * words);
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
                     words * (thread + 1) / threads, packed + begin(t) * words);
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
          kRows[begin(t + 1) - begin(t) - 1](call, panel, std::min(last, panel + 2), from + begin(t) * words,
                                             call.out + begin(t) * num_outputs, call.weight + next * words * kLanes);
        }
    }
  }
}

#endif  // __AVX512F__

}  // namespace

extern "C" {

// See cpu_kernels.h.
int nereid_has_linear() {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}

// See cpu_kernels.h.
void nereid_linear(int is_bfloat16, const void* weight, const void* bias, const void* x, void* out, int64_t num_rows,
                   int64_t dim, int64_t num_outputs, int num_threads) {
#ifdef __AVX512F__
  if (is_bfloat16) {
    linear<Bfloat16s>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
  } else {
    linear<Float32>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
  }
#else
  (void)is_bfloat16, (void)weight, (void)bias, (void)x, (void)out;
  (void)num_rows, (void)dim, (void)num_outputs, (void)num_threads;
#endif
}

}  // extern "C"
