// SPDX-License-Identifier: Apache-2.0
// Copies queries, keys and values into the layouts of the matrix products of attention (see cpu_products.h).
//
// Keys and values come from a paged KV cache, or from the rows of a step. cpu_kernels.h describes both layouts.

#pragma once

#include <algorithm>
#include <cstring>

#include "cpu_kernels.h"
#include "cpu_products.h"
#include "cpu_vectors.h"

namespace {

// Packs the keys of 16 tokens as [step][16] units.
template <typename T, typename U>
void pack_keys(const T* from, int64_t dim, int64_t stride, const float* scales, typename U::Unit* to) {
  const Floats scale = scales ? load(scales) : fill(1.0f);
  for (int64_t d = 0; d < dim; d += U::kNumbers, to += kLanes) {
    const bool alone = d + 1 == dim;
    const Floats first = load(from + d * stride);
    const Floats second = U::kNumbers == 1 || alone ? Floats{} : load(from + (d + 1) * stride);
    if (scales) {
      U::pack(first * scale, second * scale, to);
    } else {
      U::pack(first, second, to);
    }
  }
}

// Packs the values of the first `count` of 16 tokens: one step of every panel for each unit of tokens. The values after
// the last token are set to zero, because they are multiplied by a weight of zero and must not be NaN.
template <typename T, typename U>
void pack_values(const T* from, int64_t dim, int64_t stride, const float* scales, int64_t count, typename U::Unit* to,
                 int64_t panel) {
  for (int64_t t = 0; t < kLanes; t += U::kNumbers, to += kLanes)
    for (int64_t c = 0; c < dim; c += kLanes) {
      Floats first = {}, second = {};
      if (t < count) first = load_some(from + t * stride + c, dim - c) * (scales ? scales[t] : 1.0f);
      if (U::kNumbers == 2 && t + 1 < count)
        second = load_some(from + (t + 1) * stride + c, dim - c) * (scales ? scales[t + 1] : 1.0f);
      U::pack(first, second, to + c / kLanes * panel);
    }
}

#ifdef NEREID_PAIRS
// Without scales, bfloat16 numbers are copied and not rounded.
template <>
void pack_keys<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, int64_t stride, const float*, uint32_t* to) {
  for (int64_t d = 0; d < dim; d += 2, to += kLanes) {
    const auto at = [&](int64_t i) {
      return __builtin_convertvector(*reinterpret_cast<const Halves*>(from + i * stride), Words);
    };
    *reinterpret_cast<Words*>(to) = d + 1 == dim ? at(d) : (at(d) | at(d + 1) << 16);
  }
}

template <>
void pack_values<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, int64_t stride, const float*, int64_t count,
                                  uint32_t* to, int64_t panel) {
  for (int64_t t = 0; t < kLanes; t += 2, to += kLanes)
    for (int64_t c = 0; c < dim; c += kLanes) {
      const int64_t left = dim - c;
      const __mmask16 some = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
      const auto at = [&](int64_t token) {
        const __mmask16 mask = token < count ? some : 0;
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + token * stride + c));
      };
      _mm512_storeu_si512(to + c / kLanes * panel, _mm512_or_si512(at(t), _mm512_slli_epi32(at(t + 1), 16)));
    }
}
#endif

// Packs one row of queries or keys. Unit k of the row is written to to[k * stride].
template <typename Q, typename U>
inline void pack_row(const Q* from, int64_t dim, typename U::Unit* to, int64_t stride) {
  for (int64_t d = 0; d < dim; d += U::kNumbers, to += stride)
    *to = U::unit(to_float(from[d]), U::kNumbers == 2 && d + 1 < dim ? to_float(from[d + 1]) : 0.0f);
}

// Packs the keys of `count` tokens as [step][16] units; `count` is at most 16. The distance of two keys is `stride`
// numbers. The other columns are zero.
template <typename Q, typename U>
void pack_key_rows(const Q* from, int64_t dim, int64_t stride, int64_t count, typename U::Unit* to) {
  for (int64_t t = 0; t < kLanes; ++t)
    if (t < count) {
      pack_row<Q, U>(from + t * stride, dim, to + t, kLanes);
    } else {
      for (int64_t d = 0; d < dim; d += U::kNumbers) to[d / U::kNumbers * kLanes + t] = typename U::Unit{};
    }
}

#ifdef NEREID_PAIRS
// Pairs of bfloat16 numbers are copied and not rounded.
template <>
inline void pack_row<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, uint32_t* to, int64_t stride) {
  if (stride == 1) {
    std::memcpy(to, from, dim * sizeof(Bfloat16));  // for Matrices, whose rows are padded with zeros
    return;
  }
  for (; dim > 1; dim -= 2, from += 2, to += stride) std::memcpy(to, from, sizeof(uint32_t));
  if (dim == 1) *to = from->bits;
}

// Replaces a matrix of 16 rows and 16 columns by its transpose. Each stage exchanges larger parts of the rows: single
// words, pairs of words, and then quarters of a row twice.
inline void transpose(__m512i rows[16]) {
  __m512i next[16];
  for (int i = 0; i < 16; i += 2) {
    next[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    next[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(next[i + j], next[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(next[i + j], next[i + j + 2]);
    }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // the quarters 0 and 2, or 1 and 3, of both rows
  for (int i = 0; i < 16; i += 8)
    for (int j = i; j < i + 4; ++j) {
      next[j] = _mm512_shuffle_i32x4(rows[j], rows[j + 4], kEven);
      next[j + 4] = _mm512_shuffle_i32x4(rows[j], rows[j + 4], kOdd);
    }
  for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(next[j], next[j + 8], kEven);
    rows[j + 8] = _mm512_shuffle_i32x4(next[j], next[j + 8], kOdd);
  }
}

template <>
void pack_key_rows<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, int64_t stride, int64_t count, uint32_t* to) {
  constexpr int64_t kRowNumbers = 2 * kLanes;  // the numbers of one vector
  for (; dim > 0; dim -= kRowNumbers, from += kRowNumbers, to += kLanes * kLanes) {
    const __mmask32 some = dim >= kRowNumbers ? ~__mmask32{0} : (__mmask32{1} << dim) - 1;
    __m512i rows[kLanes];
    for (int64_t t = 0; t < kLanes; ++t)
      rows[t] = t < count ? _mm512_maskz_loadu_epi16(some, from + t * stride) : _mm512_setzero_si512();
    transpose(rows);
    const int64_t units = std::min<int64_t>(kLanes, (dim + 1) / 2);
    for (int64_t k = 0; k < units; ++k) _mm512_storeu_si512(to + k * kLanes, rows[k]);
  }
}
#endif

}  // namespace
