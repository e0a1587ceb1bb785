// SPDX-License-Identifier: Apache-2.0
// The layout of integer weights, and the functions that read them. cpu_grouped.cpp, cpu_tile_grouped.cpp and
// cpu_tile_linear.cpp contain the kernels.
//
// A group is `group_size` consecutive inputs of one output. The integers are unsigned:
//
//     weight[o][i] = (value[o][i] - zero_point[o][g]) * scale[o][g]   with g = i / group_size
//
// Values are stored in panels of 16 outputs. A quad is four inputs of 16 outputs, 64 values, which one vector of 512 bits
// or two vectors of 256 bits contain, four bytes for each output:
//
//     8 bits   [panel][dim / 4][16][4]       quad k contains the inputs 4k to 4k + 3
//     4 bits   [panel][dim / 8][16][4]       the lower halves of 64 bytes are a quad, the upper halves are the next quad
//     6 bits   [panel][dim / 16][3][16][4]   four quads: two times 64 bytes with the lower four bits of two quads, in the
//                                            layout of 4 bits, then 64 bytes with the upper two bits of the four quads
//
// Example: with 4 bits, the inputs 1, 2, 3, 4, 5, 6, 7, 8 of one output are the bytes 0x51, 0x62, 0x73, 0x84. With 6
// bits, the byte that contains the upper bits 0, 1, 2, 3 of the first inputs of four quads is 0xe4.
//
// Scales are float16 numbers, [panel][group][16]. Zero points have the same shape. They are bytes if all zero points of
// the layer are integers from 0 to 255, and float16 numbers otherwise.

#pragma once

#include <cstdint>

#include "../attention/cpu/cpu_vectors.h"

namespace {

constexpr int kPanel = 16;          // the number of outputs of a panel
constexpr int64_t kMaxGroup = 128;  // the largest number of inputs of a group; grouped_linear.py divides larger groups
constexpr int kQuadBytes = 64;      // the size of a quad whose values are bytes

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#define NEREID_HAS_GROUPED 1

// Vectors of integers, and the operations on them. Without VNNI, 512-bit vectors have no fast product of bytes, so
// 256-bit vectors are used.
#ifdef __AVX512VNNI__
typedef __m512i Wide;
typedef __m512 WideFloats;
constexpr int kWideLanes = 16;
inline Wide load_wide(const void* at) { return _mm512_loadu_si512(at); }
inline Wide fill_words(int32_t word) { return _mm512_set1_epi32(word); }
inline Wide lower_halves(Wide bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Wide upper_halves(Wide bytes) { return lower_halves(_mm512_srli_epi16(bytes, 4)); }
inline Wide shift_left(Wide words, int count) { return _mm512_slli_epi32(words, count); }
inline Wide shift_right(Wide words, int count) { return _mm512_srli_epi32(words, count); }
inline Wide and_bits(Wide a, Wide b) { return _mm512_and_si512(a, b); }
inline Wide or_bits(Wide a, Wide b) { return _mm512_or_si512(a, b); }
inline WideFloats fill_floats(float number) { return _mm512_set1_ps(number); }
inline WideFloats to_floats(Wide words) { return _mm512_cvtepi32_ps(words); }
inline WideFloats load_float16(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline WideFloats load_bytes(const uint8_t* at) {
  return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline WideFloats multiply(WideFloats a, WideFloats b) { return _mm512_mul_ps(a, b); }
inline WideFloats multiply_add(WideFloats a, WideFloats b, WideFloats c) { return _mm512_fmadd_ps(a, b, c); }
inline WideFloats subtract_product(WideFloats c, WideFloats a, WideFloats b) { return _mm512_fnmadd_ps(a, b, c); }
#else
typedef __m256i Wide;
typedef __m256 WideFloats;
constexpr int kWideLanes = 8;
inline Wide load_wide(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline Wide fill_words(int32_t word) { return _mm256_set1_epi32(word); }
inline Wide lower_halves(Wide bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline Wide upper_halves(Wide bytes) { return lower_halves(_mm256_srli_epi16(bytes, 4)); }
inline Wide shift_left(Wide words, int count) { return _mm256_slli_epi32(words, count); }
inline Wide shift_right(Wide words, int count) { return _mm256_srli_epi32(words, count); }
inline Wide and_bits(Wide a, Wide b) { return _mm256_and_si256(a, b); }
inline Wide or_bits(Wide a, Wide b) { return _mm256_or_si256(a, b); }
inline WideFloats fill_floats(float number) { return _mm256_set1_ps(number); }
inline WideFloats to_floats(Wide words) { return _mm256_cvtepi32_ps(words); }
inline WideFloats load_float16(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline WideFloats load_bytes(const uint8_t* at) {
  return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline WideFloats multiply(WideFloats a, WideFloats b) { return _mm256_mul_ps(a, b); }
inline WideFloats multiply_add(WideFloats a, WideFloats b, WideFloats c) { return _mm256_fmadd_ps(a, b, c); }
inline WideFloats subtract_product(WideFloats c, WideFloats a, WideFloats b) { return _mm256_fnmadd_ps(a, b, c); }
#endif

constexpr int kParts = kPanel / kWideLanes;  // vectors of one panel

// Loads the zero points of one vector of outputs as float32 numbers. `place` is the index of the first zero point.
inline WideFloats load_zeros(const GroupedWeights& weights, int64_t place) {
  return weights.has_byte_zeros ? load_bytes(static_cast<const uint8_t*>(weights.zeros) + place)
                                : load_float16(static_cast<const uint16_t*>(weights.zeros) + place);
}

// Prefetches the scales and zero points of one group of a panel. `place` is the index of the first scale.
inline void prefetch_group(const GroupedWeights& weights, int64_t place) {
  __builtin_prefetch(weights.scales + place, 0, 2);
  const auto* zeros = static_cast<const uint8_t*>(weights.zeros);
  if (zeros) __builtin_prefetch(zeros + (weights.has_byte_zeros ? place : 2 * place), 0, 2);
}

// A unit is the smallest number of inputs that fills whole quads: 8 inputs, or 16 inputs with 6 bits.
template <int kBits>
constexpr int kUnitInputs = kBits == 6 ? 16 : 8;
template <int kBits>
constexpr int kUnitBytes = kBits * kPanel * kUnitInputs<kBits> / 8;

// Returns a quad of the values of a unit for one vector of outputs. `at` is the address of the unit and `quad` the index
// of the quad in the unit.
template <int kBits>
inline Wide load_quad(const uint8_t* at, int quad) {
  if (kBits == 8) return load_wide(at + quad * kQuadBytes);
  const Wide bytes = load_wide(at + quad / 2 * kQuadBytes);
  const Wide lower_bits = quad % 2 == 0 ? lower_halves(bytes) : upper_halves(bytes);
  if (kBits == 4) return lower_bits;
  // Each byte contains the upper two bits of four values. Those of this quad become the bits 4 and 5.
  const Wide upper_bits = load_wide(at + 2 * kQuadBytes);
  const Wide shifted = quad < 2 ? shift_left(upper_bits, 4 - 2 * quad) : shift_right(upper_bits, 2 * quad - 4);
  return or_bits(lower_bits, and_bits(shifted, fill_words(0x30303030)));
}

#endif  // NEREID_HAS_GROUPED

}  // namespace
