// SPDX-License-Identifier: Apache-2.0
// The matrix products of attention: the numbers with which they compute (Singles, Pairs and Matrices), and the loops.
// cpu_prefill.cpp describes the template parameters.

#pragma once

#include "../../linear/cpu_tiles.h"
#include "cpu_kernels.h"
#include "cpu_vectors.h"

namespace {

// Rounds a number up to a multiple of `step`.
constexpr int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// The arithmetic of matrix products in float32. A unit of a row is multiplied by one unit of each of 16 columns. A unit
// is one float here, and two bfloat16 numbers in Pairs.
struct Singles {
  typedef float Unit;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsMatrix = false;
  typedef Singles Packing;  // the arithmetic whose units have the same layout
  // The registers of a thread that must be configured for the rows of a product: none.
  struct Registers {
    void set_rows(int64_t) {}
  };
  // A matrix product computes kRowStep rows, or a multiple of kRowStep up to kRows. With 2 vectors of sums for each
  // row, the sums take 24 of 32 registers with 512-bit vectors, and 12 of 16 registers otherwise.
#ifdef __AVX512F__
  static constexpr int kRows = 12, kRowStep = 4;
#else
  static constexpr int kRows = 6, kRowStep = 6;
#endif
  static constexpr int64_t kTaskRows = 192;  // rows of a task; each tile is packed once for all of them
  // The units of each row and of each column are padded to a multiple of kStepMultiple.
  static constexpr int kStepMultiple = 1;
  // Returns sums + columns * row, for one unit of 16 columns and one unit of a row.
  static inline Floats add(Floats sums, const Unit* columns, Unit row) { return sums + load(columns) * row; }
  // Converts scores into the weights 2^(score * factor - largest). `count` is a multiple of 16. `to` may be the memory
  // of the scores. Returns a vector whose sum is the sum of the weights.
  static inline Floats to_weights(const float* scores, int64_t count, float factor, float largest, Unit* to) {
    Floats total = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const Floats weights = power_of_two(load(scores + t) * factor - largest);
      *reinterpret_cast<Floats*>(to + t) = weights;
      total += weights;
    }
    return total;
  }
  // Stores one unit of each of 16 columns. The second number of a unit exists only in Pairs.
  static inline void pack(Floats first, Floats, Unit* to) { *reinterpret_cast<Floats*>(to) = first; }
  // Returns one unit of a row.
  static inline Unit unit(float first, float) { return first; }
};

#ifdef NEREID_PAIRS
// Returns 16 numbers, rounded to bfloat16, in the lower halves of 32-bit words.
inline Words rounded(Floats numbers) {
  return reinterpret_cast<Words>(
      _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(numbers))));
}

// The arithmetic of matrix products in pairs of bfloat16; see Singles.
struct Pairs {
  typedef uint32_t Unit;
  static constexpr int kNumbers = 2;
  static constexpr bool kIsMatrix = false;
  typedef Pairs Packing;
  typedef Singles::Registers Registers;
  static constexpr int kRows = Singles::kRows, kRowStep = Singles::kRowStep, kStepMultiple = 1;
  static constexpr int64_t kTaskRows = Singles::kTaskRows;
  static inline Floats add(Floats sums, const Unit* columns, Unit row) {
    return reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), as_pairs(_mm512_loadu_si512(columns)), one_pair(row)));
  }
  // The rounded weights are summed, because values are multiplied by them.
  static inline Floats to_weights(const float* scores, int64_t count, float factor, float largest, Unit* to) {
    const __m512bh ones = one_pair(0x3f803f80u);
    __m512 total = _mm512_setzero_ps();
    int64_t t = 0;
    for (; t + 2 * kLanes <= count; t += 2 * kLanes) {
      const Floats first = power_of_two<Coarse>(load(scores + t) * factor - largest);
      const Floats second = power_of_two<Coarse>(load(scores + t + kLanes) * factor - largest);
      const __m512bh weights = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
      _mm512_storeu_si512(to + t / 2, (__m512i)weights);
      total = _mm512_dpbf16_ps(total, weights, ones);
    }
    if (t < count) {
      const Floats last = power_of_two<Coarse>(load(scores + t) * factor - largest);
      const __m512bh weights = _mm512_cvtne2ps_pbh(_mm512_setzero_ps(), reinterpret_cast<__m512>(last));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + t / 2), _mm512_castsi512_si256((__m512i)weights));
      total = _mm512_dpbf16_ps(total, weights, ones);
    }
    return reinterpret_cast<Floats>(total);
  }
  static inline void pack(Floats first, Floats second, Unit* to) {
    *reinterpret_cast<Words*>(to) = rounded(first) | rounded(second) << 16;
  }
  static inline Unit unit(float first, float second) {
    Bfloat16 low, high;
    from_float(first, &low);
    from_float(second, &high);
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
};
#endif

#ifdef NEREID_TILES
// The arithmetic of matrix products with AMX: a product multiplies 16 or 32 rows of 16 pairs at a time.
struct Matrices : Pairs {
  static constexpr bool kIsMatrix = true;
  typedef TileRegisters Registers;
  static constexpr int kRows = kBlockRows, kRowStep = kTileRows, kStepMultiple = kTileRows;
  static constexpr int64_t kTaskRows = 512;  // more than with Pairs, because packing takes a larger share of the time
};

// Computes C = A B, or with kAdds C += A B, for kRowTiles * 16 rows. `steps` is a multiple of 16, and `panels` is even.
// A is [row][a_row] units. B is [panel][step][16] units, and its panels are b_panel units apart. C is [row][c_row]. The
// registers must be configured for the rows.
template <int kRowTiles, bool kAdds>
inline void multiply_matrices(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_panel, int64_t panels,
                              int64_t steps, float* c, int64_t c_row) {
  const int64_t a_bytes = a_row * sizeof(uint32_t), c_bytes = c_row * sizeof(float);
  for (int64_t p = 0; p < panels; p += 2) {
    const uint32_t *left = b + p * b_panel, *right = left + b_panel;
    float* to = c + p * kLanes;
    float* lower = to + kTileRows * c_row;
    if constexpr (kAdds) {
      _tile_loadd(0, to, c_bytes);
      _tile_loadd(1, to + kLanes, c_bytes);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(2, lower, c_bytes);
        _tile_loadd(3, lower + kLanes, c_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kRowTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int64_t k = 0; k < steps; k += kTileRows) {
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, left + k * kLanes, kTileRowBytes);
      _tile_loadd(7, right + k * kLanes, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(5, a + kTileRows * a_row + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, c_bytes);
    _tile_stored(1, to + kLanes, c_bytes);
    if constexpr (kRowTiles == 2) {
      _tile_stored(2, lower, c_bytes);
      _tile_stored(3, lower + kLanes, c_bytes);
    }
  }
}
#endif

// Computes C = A B, or with kAdds C += A B, for R rows and P panels of 16 columns. The unit of row r and
// step k of A is a[k * kAStep + r * kARow]. B is [panel][step][16] units, and its panels are b_panel units apart.
template <typename U, int R, int P, int kAStep, int kARow, bool kAdds>
inline void multiply(const typename U::Unit* a, const typename U::Unit* b, int64_t b_panel, int64_t steps, float* c,
                     int64_t c_row) {
  Floats sums[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) sums[r][p] = kAdds ? load(c + r * c_row + p * kLanes) : Floats{};
  for (int64_t k = 0; k < steps; ++k)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p)
        sums[r][p] = U::add(sums[r][p], b + p * b_panel + k * kLanes, a[k * kAStep + r * kARow]);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p)
      *reinterpret_cast<Floats*>(c + r * c_row + p * kLanes) = sums[r][p];
}

// Calls `multiply` for any number of panels.
template <typename U, int R, int kAStep, int kARow, bool kAdds>
void multiply_panels(const typename U::Unit* a, const typename U::Unit* b, int64_t b_panel, int64_t panels,
                     int64_t steps, float* c, int64_t c_row) {
  int64_t p = 0;
  for (; p + 2 <= panels; p += 2)
    multiply<U, R, 2, kAStep, kARow, kAdds>(a, b + p * b_panel, b_panel, steps, c + p * kLanes, c_row);
  if (p < panels)
    multiply<U, R, 1, kAStep, kARow, kAdds>(a, b + p * b_panel, b_panel, steps, c + p * kLanes, c_row);
}

}  // namespace
