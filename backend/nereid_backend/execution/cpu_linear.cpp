// SPDX-License-Identifier: Apache-2.0
// Linear layers on a CPU with 512-bit vectors: a plain C interface over raw pointers, called from
// native_linear.py.
//
// A weight [num_outputs, dim] lies in panels of 16 outputs, the last one filled up with zeros:
//
//     float32   [panel][dim][16]           one vector holds one input's weights for 16 outputs
//     bfloat16  [panel][dim / 2][16][2]    ... two inputs', as the dot product of pairs takes them
//
// A step of few rows is bound by memory, so weights are read once, in order, fetched ahead; one of many
// rows by arithmetic, so a tile of up to 12 rows stays in registers. Where there are several tiles, two
// panels stay in the cache for all of them, while the next two are fetched. Sums are float32. The rows of
// a tile lie input by input ([dim][rows]), because more rows than a processor has address registers would
// be read otherwise.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kMostRows = 12;
constexpr int64_t kAhead = 2048;  // bytes; the best of 512 to 4096 for one to 16 rows on Zen 5

#ifdef __AVX512F__

// What the tiles below need of a kind of number: a vector of weights, a broadcast of the inputs that go
// with it (a Word), and their product added to sums.
struct Float32 {
  using Number = float;
  using Word = float;
  static constexpr int kInputs = 1;
  using Weights = __m512;
  static Weights load(const Word* at) { return _mm512_loadu_ps(at); }
  static __m512 add(__m512 sums, Weights weights, Word input) {
    return _mm512_fmadd_ps(weights, _mm512_set1_ps(input), sums);
  }
  static __m512 bias(const Number* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
  static void store(__m512 sums, Number* to, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, sums); }
};

#ifdef __AVX512BF16__
struct Bfloat16 {
  using Number = uint16_t;
  using Word = int32_t;
  static constexpr int kInputs = 2;
  using Weights = __m512bh;
  static Weights load(const Word* at) { return (__m512bh)_mm512_loadu_si512(at); }
  static __m512 add(__m512 sums, Weights weights, Word input) {
    return _mm512_dpbf16_ps(sums, weights, (__m512bh)_mm512_set1_epi32(input));
  }
  static __m512 bias(const Number* at, __mmask16 mask) {
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void store(__m512 sums, Number* to, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums));
  }
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
inline void tile(const Call<T>& call, int64_t panel, const typename T::Word* x, typename T::Number* out,
                 const typename T::Word* next) {
  const int64_t words = call.num_words, stride = words * kLanes;
  const typename T::Word* weight = call.weight + panel * stride;
  __m512 sums[R][P];
  __mmask16 masks[P];
  for (int p = 0; p < P; ++p) {
    const int64_t left = call.num_outputs - (panel + p) * kLanes;
    masks[p] = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __m512 first = call.bias ? T::bias(call.bias + (panel + p) * kLanes, masks[p]) : _mm512_setzero_ps();
    for (int r = 0; r < R; ++r) sums[r][p] = first;
  }
  for (int64_t k = 0; k < words; ++k) {
    typename T::Weights weights[P];
    for (int p = 0; p < P; ++p) {
      const typename T::Word* at = weight + p * stride + k * kLanes;
      weights[p] = T::load(at);
      if (kFetchesOwn) _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
    }
    if (!kFetchesOwn) _mm_prefetch(reinterpret_cast<const char*>(next + k * kLanes), _MM_HINT_T1);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) sums[r][p] = T::add(sums[r][p], weights[p], x[k * R + r]);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) T::store(sums[r][p], out + r * call.num_outputs + (panel + p) * kLanes, masks[p]);
}

// As many panels together as there are registers for their sums.
template <typename T, int R>
void rows(const Call<T>& call, int64_t first, int64_t last, const typename T::Word* x, typename T::Number* out,
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
void some_rows(int64_t count, const Call<T>& call, int64_t first, int64_t last, const typename T::Word* x,
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
  using Number = typename T::Number;
  const int64_t words = dim / T::kInputs, num_panels = (num_outputs + kLanes - 1) / kLanes;
  const Call<T> call = {static_cast<const Word*>(weight), static_cast<const Number*>(bias),
                        static_cast<Number*>(output), num_outputs, words};
  const auto* x = static_cast<const Number*>(input);
  const int64_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  const auto begin = [=](int64_t tile) { return tile * num_rows / num_tiles; };
  thread_local std::vector<Word> kept;
  if (num_rows > 1 && static_cast<int64_t>(kept.size()) < num_rows * words) kept.resize(num_rows * words);
  Word* laid = kept.data();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    if (num_rows > 1) {
      // Each thread lays out its share of the inputs of every tile.
      const int64_t first = words * thread / threads, last = words * (thread + 1) / threads;
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t start = begin(t), count = begin(t + 1) - start;
        Word* to = laid + start * words;
        for (int64_t r = 0; r < count; ++r) {
          const char* from = reinterpret_cast<const char*>(x + (start + r) * dim);
          for (int64_t k = first; k < last; ++k) std::memcpy(to + k * count + r, from + k * sizeof(Word), sizeof(Word));
        }
      }
#pragma omp barrier
    }
    const Word* from = num_rows > 1 ? laid : reinterpret_cast<const Word*>(x);
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

// Whether nereid_linear can be called here with bfloat16 (else float32).
int nereid_has_linear(int is_bfloat16) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  (void)is_bfloat16;
  return 1;
#elif defined(__AVX512F__)
  return !is_bfloat16;
#else
  (void)is_bfloat16;
  return 0;
#endif
}

// x [num_rows][dim] to out [num_rows][num_outputs], both packed tightly; bias [num_outputs] or null. dim is even
// for bfloat16.
void nereid_linear(int is_bfloat16, const void* weight, const void* bias, const void* x, void* out, int64_t num_rows,
                   int64_t dim, int64_t num_outputs, int num_threads) {
#ifdef __AVX512F__
#ifdef __AVX512BF16__
  if (is_bfloat16) {
    linear<Bfloat16>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
    return;
  }
#endif
  linear<Float32>(weight, bias, x, out, num_rows, dim, num_outputs, num_threads);
#else
  (void)is_bfloat16, (void)weight, (void)bias, (void)x, (void)out;
  (void)num_rows, (void)dim, (void)num_outputs, (void)num_threads;
#endif
}

}  // extern "C"
