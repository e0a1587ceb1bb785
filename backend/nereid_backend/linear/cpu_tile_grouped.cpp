// SPDX-License-Identifier: Apache-2.0
// Linear layers with 8-bit integer weights on a CPU with matrix tiles (AMX). The input must have at least 16 rows.
//
// cpu_integers.h describes the layout, and cpu_grouped.cpp the arithmetic. A tile of weights consists of 16 quads of a panel, which are
// 64 inputs of 16 outputs. If group_size is not a multiple of 64, a tile consists of 8 quads, which are 32 inputs.
//
// The rows are computed in blocks of 16 rows. For each group of inputs, the products of a block and a panel are added
// in a tile of 16 x 16 integers of 32 bits. The integers are then multiplied by the scales, and added to float32 sums
// in vector registers.
//
// If the number of rows is not a multiple of 16, the last block overlaps the block before. The rows in the overlap are
// computed twice, with the same result.

#include <algorithm>
#include <cstring>

#include "cpu_grouped.h"
#include "cpu_tiles.h"

#ifdef NEREID_TILES

namespace {

// Returns the number of inputs of a tile, 64 or 32. Each input is one byte in a row of the tile register.
inline uint8_t tile_inputs(const GroupedWeights& weights) {
  return weights.group_size % kTileRowBytes == 0 ? kTileRowBytes : kTileRowBytes / 2;
}

// Adds the products of one group to `sums`, which contains 16 outputs of 16 rows. `totals` [16][16] contains the sums
// of the products of integers. `row_groups` points to the RowGroup of the first row. The operations have the same order
// as in cpu_grouped.cpp, so the results have the same bits.
template <bool kHasZeros>
inline __attribute__((always_inline)) void add_group(const int32_t* totals, const RowGroup* row_groups,
                                                     int64_t num_groups, __m512 scale, __m512 zero, __m512* sums) {
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    const RowGroup& group = row_groups[r * num_groups];
    __m512i integers = _mm512_load_si512(totals + r * kPanel);
    if (!kHasZeros) integers = _mm512_add_epi32(integers, _mm512_set1_epi32(group.start));
    __m512 total = _mm512_cvtepi32_ps(integers);
    if (kHasZeros) total = _mm512_fnmadd_ps(zero, _mm512_set1_ps(group.sum), total);
    sums[r] = _mm512_fmadd_ps(total, _mm512_mul_ps(scale, _mm512_set1_ps(group.scale)), sums[r]);
  }
}

// Computes the outputs of one panel for 16 rows. `row` is the first row, and `values` are the integers of the panel.
// The first group prefetches `per_group` bytes at `next`, the second group prefetches the next `per_group` bytes, and
// so on.
template <bool kHasZeros>
void block(const GroupedWeights& weights, const QuantisedRows& rows, int64_t row, int64_t panel, const uint8_t* values,
           const uint8_t* next, int64_t per_group) {
  const int64_t stride = rows.num_groups * weights.group_size, width = tile_inputs(weights);
  const int8_t* x = rows.numbers + row * stride;
  const RowGroup* row_groups = rows.row_groups + row * rows.num_groups;
  const uint16_t* scales = weights.scales + panel * rows.num_groups * kPanel;
  __m512 sums[kTileRows] = {};
  for (int64_t g = 0; g < rows.num_groups; ++g, ++row_groups, next += per_group) {
    for (int64_t i = 0; i < per_group; i += kLineBytes) __builtin_prefetch(next + i, 0, 1);
    alignas(kLineBytes) int32_t totals[kTileRows * kPanel];
    _tile_zero(0);
    for (int64_t i = 0; i < weights.group_size; i += width, x += width, values += width / 4 * kQuadBytes) {
      _tile_loadd(4, x, stride);
      _tile_loadd(5, values, kTileRowBytes);
      _tile_dpbsud(0, 4, 5);
    }
    _tile_stored(0, totals, kTileRowBytes);
    const __m512 zero = kHasZeros ? load_zeros(weights, (panel * rows.num_groups + g) * kPanel) : __m512{};
    add_group<kHasZeros>(totals, row_groups, rows.num_groups, load_float16(scales + g * kPanel), zero, sums);
  }
  float numbers[kTileRows * kPanel];
  std::memcpy(numbers, sums, sizeof numbers);
  const auto store = rows.is_bfloat16 ? store_outputs<Bfloat16> : store_outputs<float>;
  store(weights, rows.bias, rows.out, numbers, kTileRows, kPanel, row, panel * kPanel);
}

}  // namespace

bool can_use_tiles(const GroupedWeights& weights, int64_t num_rows) {
  const bool has_whole_tiles = weights.group_size % (kTileRowBytes / 2) == 0;
  return weights.bits == 8 && has_whole_tiles && num_rows >= kTileRows && has_tile_permission();
}

void tile_grouped_linear(const GroupedWeights& weights, const QuantisedRows& rows, int64_t first, int64_t last) {
  const int64_t dim = rows.num_groups * weights.group_size, panel_bytes = dim * kPanel;
  const int64_t chunk_rows = std::max<int64_t>(1, kChunkBytes / dim / kTileRows) * kTileRows;
  TileRegisters registers;
  registers.set_rows(kTileRows, tile_inputs(weights));
  for (int64_t begin = 0; begin < rows.num_rows; begin += chunk_rows) {
    const int64_t end = std::min(rows.num_rows, begin + chunk_rows);
    // Each block of rows prefetches a part of the next panel.
    const int64_t num_blocks = (end - begin + kTileRows - 1) / kTileRows;
    const int64_t lines = panel_bytes / kLineBytes, shares = num_blocks * rows.num_groups;
    const int64_t per_group = (lines + shares - 1) / shares * kLineBytes;
    for (int64_t panel = first; panel < last; ++panel) {
      const uint8_t* values = weights.values + panel * panel_bytes;
      const uint8_t* next = values + panel_bytes;
      for (int64_t row = begin; row < end; row += kTileRows, next += rows.num_groups * per_group) {
        const int64_t start = std::min<int64_t>(row, rows.num_rows - kTileRows);
        const auto compute = weights.zeros ? block<true> : block<false>;
        compute(weights, rows, start, panel, values, next, per_group);
      }
    }
  }
}

#else

bool can_use_tiles(const GroupedWeights&, int64_t) { return false; }

void tile_grouped_linear(const GroupedWeights&, const QuantisedRows&, int64_t, int64_t) {}

#endif  // NEREID_TILES
