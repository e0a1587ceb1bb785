// SPDX-License-Identifier: Apache-2.0
// Linear layers on a CPU with 512-bit vectors: a plain C interface over raw pointers, called from
// native_linear.py.
//
// A weight [num_outputs, dim] lies in panels of 16 outputs, the last one filled up with zeros:
//
//     float32   [panel][dim][16]           one vector holds one input's weights for 16 outputs
//     bfloat16  [panel][dim / 2][16][2]    ... two inputs', as the dot product of pairs takes them
//
// Where the processor has no product of pairs, weights of bfloat16 become float32 in registers, two vectors of one,
// so that memory still gives half of float32's bytes.
//
// A step of few rows is bound by memory, so weights are read once, in order, fetched ahead; one of many
// rows by arithmetic, so a tile of some rows stays in registers. Where there are several tiles, two
// panels stay in the cache for all of them, while the next two are fetched. Sums are float32. The rows of
// a tile lie input by input ([dim][rows]), because more rows than a processor has address registers would
// be read otherwise.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../attention/cpu/cpu_vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kMostRows = 12;  // of a tile: with two panels 24 of 32 registers
constexpr int64_t kAhead = 2048;  // bytes; the best of 512 to 4096 for one to 16 rows on Zen 5

#ifdef __AVX512F__

inline Halves to_halves(Floats numbers) {
  const Words words = reinterpret_cast<Words>(numbers);
  const Words rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  // NaN stays NaN: rounding could make it infinite.
  const Words result = (words & 0x7fffffffu) > 0x7f800000u ? (Words{} + 0x7fc0u) : rounded;
  return __builtin_convertvector(result, Halves);
}

// As many of the first numbers as there are.
template <typename Vector, typename Number>
inline void store_first(Vector numbers, Number* to, int64_t count) {
  std::memcpy(to, &numbers, sizeof(Number) * std::min<int64_t>(count, kLanes));
}

// What the tiles below need of a kind of number: a vector of weights, the inputs that go with one of its places (an
// Input, made of as many numbers as a Word of weights has), and their product added to sums.
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

template <typename T>
struct Call {
  const typename T::Word* weight;
  const typename T::Number* bias;  // or null
  typename T::Number* out;
  int64_t num_outputs;
  int64_t num_words;  // of one row of inputs
};

// out[r][16 * panel ...] for R rows and P panels. x: [num_words][R]. next: what to fetch meanwhile, a panel long;
// null: these panels' own weights, a little ahead.
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

// As many panels together as there are registers for their sums.
template <typename T, int R>
void rows(const Call<T>& call, int64_t first, int64_t last, const typename T::Input* x, typename T::Number* out,
          const typename T::Word* next) {
  constexpr int P = R <= 6 ? 4 : 2;
  int64_t panel = first;
  if (next) {
    for (; panel + 2 <= last; panel += 2) tile<T, R, 2, false>(call, panel, x, out, next);
    for (; panel < last; ++panel) tile<T, R, 1, false>(call, panel, x, out, next);
    return;
  }
  for (; panel + P <= last; panel += P) tile<T, R, P, true>(call, panel, x, out, nullptr);
  for (; panel < last; ++panel) tile<T, R, 1, true>(call, panel, x, out, nullptr);
}

template <typename T>
void some_rows(int64_t count, const Call<T>& call, int64_t first, int64_t last, const typename T::Input* x,
               typename T::Number* out, const typename T::Word* next) {
  switch (count) {
#define NEREID_ROWS(R)                              \
  case R:                                           \
    rows<T, R>(call, first, last, x, out, next);    \
    break;
    NEREID_ROWS(1) NEREID_ROWS(2) NEREID_ROWS(3) NEREID_ROWS(4) NEREID_ROWS(5) NEREID_ROWS(6)
    NEREID_ROWS(7) NEREID_ROWS(8) NEREID_ROWS(9) NEREID_ROWS(10) NEREID_ROWS(11) NEREID_ROWS(12)
#undef NEREID_ROWS
  }
}

template <typename T>
void linear(const void* weight, const void* bias, const void* input, void* output, int64_t num_rows, int64_t dim,
            int64_t num_outputs, int num_threads) {
  using Word = typename T::Word;
  using Input = typename T::Input;
  using Number = typename T::Number;
  // One row whose numbers are what the tiles take is read where it lies.
  constexpr bool kIsReady = sizeof(Input) == T::kInputs * sizeof(Number);
  const int64_t words = dim / T::kInputs, num_panels = (num_outputs + kLanes - 1) / kLanes;
  const Call<T> call = {static_cast<const Word*>(weight), static_cast<const Number*>(bias),
                        static_cast<Number*>(output), num_outputs, words};
  const auto* x = static_cast<const Number*>(input);
  const int64_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  const auto begin = [=](int64_t tile) { return tile * num_rows / num_tiles; };
  const bool is_laid = num_rows > 1 || !kIsReady;
  thread_local std::vector<Input> kept;
  if (is_laid && static_cast<int64_t>(kept.size()) < num_rows * words) kept.resize(num_rows * words);
  Input* laid = kept.data();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    if (is_laid) {
      // Each thread lays out its share of the inputs of every tile.
      const int64_t first = words * thread / threads, last = words * (thread + 1) / threads;
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t start = begin(t), count = begin(t + 1) - start;
        Input* to = laid + start * words;
        for (int64_t r = 0; r < count; ++r) {
          const Number* from = x + (start + r) * dim;
          for (int64_t k = first; k < last; ++k) to[k * count + r] = T::input(from + k * T::kInputs);
        }
      }
#pragma omp barrier
    }
    const Input* from = is_laid ? laid : reinterpret_cast<const Input*>(x);
    const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
    if (num_tiles == 1) {
      some_rows<T>(num_rows, call, first, last, from, call.out, nullptr);
    } else {
      for (int64_t panel = first; panel < last; panel += 2)
        for (int64_t t = 0; t < num_tiles; ++t) {
          // The first tile fetches one of the next two panels, the second the other.
          const int64_t next = std::min(panel + 2 + std::min<int64_t>(t, 1), num_panels - 1);
          some_rows<T>(begin(t + 1) - begin(t), call, panel, std::min(last, panel + 2), from + begin(t) * words,
                       call.out + begin(t) * num_outputs, call.weight + next * words * kLanes);
        }
    }
  }
}

#endif  // __AVX512F__

}  // namespace

extern "C" {

// Whether nereid_linear can be called here.
int nereid_has_linear() {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}

// x [num_rows][dim] to out [num_rows][num_outputs], both packed tightly; bias [num_outputs] or null. dim is even
// for bfloat16.
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
