// SPDX-License-Identifier: Apache-2.0
// The vectors with which the CPU kernels compute, and the types and positions that all kernels share. A vector has 16
// numbers if the processor has 512-bit vectors, and 8 numbers otherwise. The code of the kernels is the same.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_kernels.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NEREID_PAIRS 1  // the processor has dot products of pairs of bfloat16 numbers
#endif

namespace {

// The numbers of one vector. GCC 12 would keep vectors that are wider than the processor's registers in memory.
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr float kLog2E = 1.44269504088896341f;

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// Converts a number into float32 or bfloat16 and stores the result.
inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, Bfloat16* out) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) {
    out->bits = 0x7fc0;  // NaN must stay NaN, but rounding could make it infinite
    return;
  }
  out->bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// Loads kLanes numbers as float32.
inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline Floats load(const Bfloat16* at) {
#ifdef __AVX512F__
  // GCC 12 would compile the portable code below to seven instructions.
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return reinterpret_cast<Floats>(_mm512_slli_epi32(words, 16));
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return reinterpret_cast<Floats>(_mm256_slli_epi32(words, 16));
#else
  const Halves halves = *reinterpret_cast<const Halves*>(at);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats result;
  std::memcpy(&result, &words, sizeof result);
  return result;
#endif
}

inline Floats load(const int8_t* at) {
#ifdef __AVX512F__
  // GCC 12 would compile the portable code below to one load for each number. This instruction needs one.
  return reinterpret_cast<Floats>(
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(at))));
#else
  const Bytes bytes = *reinterpret_cast<const Bytes*>(at);
  // The conversion has two steps, because GCC 12 vectorises each of them, but not one step from bytes to floats.
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints), Floats);
#endif
}

// Loads `count` numbers, fewer than kLanes, and fills the rest of the vector with zeros. The function is not inlined,
// because it is rarely called, and its copies would take a third of the time of the compiler.
template <typename T>
__attribute__((noinline)) Floats load_part(const T* from, int64_t count) {
  Floats numbers = {};
  for (int64_t i = 0; i < count; ++i) numbers[i] = to_float(from[i]);
  return numbers;
}

// Loads min(count, kLanes) numbers and fills the rest of the vector with zeros.
template <typename T>
inline Floats load_some(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : load_part(from, count);
}

// Rounds the numbers of a vector to bfloat16.
inline Halves to_halves(Floats numbers) {
  const Words words = reinterpret_cast<Words>(numbers);
  const Words rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  // NaN must stay NaN, but rounding could make it infinite.
  const Words result = (words & 0x7fffffffu) > 0x7f800000u ? (Words{} + 0x7fc0u) : rounded;
  return __builtin_convertvector(result, Halves);
}

// Stores the first `count` numbers of a vector: none if `count` is negative, at most kLanes.
template <typename Vector, typename Number>
inline void store_first(Vector numbers, Number* to, int64_t count) {
  if (count >= kLanes) {
    std::memcpy(to, &numbers, sizeof(Number) * kLanes);  // the constant size becomes one instruction
  } else {
    std::memcpy(to, &numbers, sizeof(Number) * std::max<int64_t>(count, 0));
  }
}

// Stores the first `count` numbers of a vector as float32 or bfloat16.
inline void store_some(Floats numbers, float* to, int64_t count) { store_first(numbers, to, count); }
inline void store_some(Floats numbers, Bfloat16* to, int64_t count) {
#ifdef NEREID_PAIRS
  store_first(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(numbers)), to, count);
#else
  store_first(to_halves(numbers), to, count);
#endif
}

// Stores the sums [num_rows][num_vectors] in the rows of `out`, which are `stride` numbers apart. At most `count` numbers
// of a row are stored. The function is not inlined, because it is called in functions that are compiled for many numbers
// of rows.
template <typename Number>
__attribute__((noinline)) void store_sums(const Floats* sums, int num_rows, int num_vectors, Number* out,
                                          int64_t stride, int64_t count) {
  for (int r = 0; r < num_rows; ++r)
    for (int v = 0; v < num_vectors; ++v)
      store_some(sums[r * num_vectors + v], out + r * stride + v * kLanes, count - v * kLanes);
}

// Returns a vector of equal numbers.
inline Floats fill(float value) { return Floats{} + value; }

// Returns the larger number of each lane. If the number of `a` is NaN, returns that of `b`.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return reinterpret_cast<Floats>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Returns the two halves of a vector.
inline __m128 lower_half(Floats x) { return _mm256_castps256_ps128(reinterpret_cast<__m256>(x)); }
inline __m128 upper_half(Floats x) { return _mm256_extractf128_ps(reinterpret_cast<__m256>(x), 1); }
#endif

// Returns the largest number of a vector.
inline float largest_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
  __m128 largest = _mm_max_ps(lower_half(x), upper_half(x));
  largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
  return _mm_cvtss_f32(_mm_max_ss(largest, _mm_movehdup_ps(largest)));
#else
  float largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, x[lane]);
  return largest;
#endif
}

inline int32_t largest_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  const __m256i words = reinterpret_cast<__m256i>(x);
  __m128i largest = _mm_max_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  largest = _mm_max_epi32(largest, _mm_unpackhi_epi64(largest, largest));
  return _mm_cvtsi128_si32(_mm_max_epi32(largest, _mm_shuffle_epi32(largest, 1)));
#else
  int32_t largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, x[lane]);
  return largest;
#endif
}

// Returns the sum of the numbers of a vector.
inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
  __m128 sum = _mm_add_ps(lower_half(x), upper_half(x));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
#endif
}

inline int32_t sum_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  const __m256i words = reinterpret_cast<__m256i>(x);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 1)));
#else
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
#endif
}

// 2^f for |f| <= 1/2, with a relative error of at most 3e-9.
struct Exact {
  static inline Floats power(Floats f) {
    Floats p = fill(1.5469731e-4f);
    p = p * f + 1.3400433e-3f;
    p = p * f + 9.6180256e-3f;
    p = p * f + 5.5503272e-2f;
    p = p * f + 0.24022651f;
    p = p * f + 0.69314721f;
    return p * f + 1.0f;
  }
};

// 2^f for |f| <= 1/2, with a relative error of at most 8e-5, which is 1/25 of the error of rounding to bfloat16.
struct Coarse {
  static inline Floats power(Floats f) {
    Floats p = fill(5.5171665e-2f);
    p = p * f + 0.24261112f;
    p = p * f + 0.69326099f;
    return p * f + 0.99992807f;
  }
};

// 2^x for x up to 126, as 2^n * 2^f with an integer n. A polynomial computes 2^f.
template <typename Polynomial = Exact>
inline Floats power_of_two(Floats x) {
  const Floats low = fill(-150.0f);  // 2^-150 is 0
#ifdef __AVX512F__
  const __m512 bounded = _mm512_max_ps(reinterpret_cast<__m512>(low), reinterpret_cast<__m512>(x));  // NaN stays NaN
  const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats p = Polynomial::power(reinterpret_cast<Floats>(_mm512_sub_ps(bounded, whole)));
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
#else
  const Floats least = fill(-126.0f);
  const Floats bounded = x > least ? x : least;
  const Ints whole = __builtin_convertvector(bounded + (bounded > 0 ? fill(0.5f) : fill(-0.5f)), Ints);
  const Floats p = Polynomial::power(bounded - __builtin_convertvector(whole, Floats));
  const Ints power = (whole + 127) << 23;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  // NaN stays NaN, so that the sums are NaN, too.
  return x > least ? p * factor : (x == x ? (x > low ? p * factor : Floats{}) : x);
#endif
}

// Returns the hyperbolic tangent of each number.
inline Floats tanh_of(Floats x) {
  const Floats square = x * x;
  // Near zero, 1 - 2 / (e^2x + 1) would lose digits by cancellation, so a polynomial is used there.
  const Floats near = x * (((-17.0f / 315 * square + 2.0f / 15) * square - 1.0f / 3) * square + 1.0f);
  const Floats top = fill(10.0f);
  const Floats bounded = x > top ? top : x;  // NaN stays NaN
  const Floats far = 1.0f - 2.0f / (power_of_two(bounded * (2 * kLog2E)) + 1.0f);
  return square < fill(0.0625f) ? near : far;
}

#ifdef NEREID_PAIRS

// Reinterprets 16 words of 32 bits as pairs of bfloat16 numbers.
inline __m512bh as_pairs(__m512i x) { return (__m512bh)x; }
// Returns a vector of 16 equal pairs.
inline __m512bh one_pair(uint32_t x) { return as_pairs(_mm512_set1_epi32(static_cast<int>(x))); }

#endif

// Calls function(T{}, Q{}), where T is the type of the numbers in the layer's cache, and Q is the type of queries and
// outputs.
template <typename Function>
inline void with_types(const Layer& layer, Function function) {
  const bool has_integers = layer.key_scales != nullptr;
  if (layer.is_bfloat16) {
    has_integers ? function(int8_t{}, Bfloat16{}) : function(Bfloat16{}, Bfloat16{});
  } else {
    has_integers ? function(int8_t{}, float{}) : function(float{}, float{});
  }
}

// Returns the first position that a token attends to.
inline int64_t first_visible(const Shape& shape, int64_t position) {
  int64_t first = 0;
  if (shape.window > 0) first = std::max<int64_t>(first, position - (shape.window - 1));
  if (shape.chunk > 0) first = std::max<int64_t>(first, position - position % shape.chunk);
  return first;
}

// Returns the position after the last one that a token attends to. `length` is the length of the sequence.
inline int64_t visible_end(const Shape& shape, int64_t position, int64_t length) {
  if (!shape.is_bidirectional) return position + 1;
  return shape.window > 0 ? std::min(length, position + shape.window) : length;
}

// Rounds a number of elements up to whole pairs of vectors. Example: padded(80) returns 96.
inline int64_t padded(int64_t dim) { return (dim + 31) / 32 * 32; }

}  // namespace
