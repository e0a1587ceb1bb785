// SPDX-License-Identifier: Apache-2.0
// What the kernels for linear layers with integer weights share: cpu_grouped.cpp and cpu_tile_grouped.cpp.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../attention/cpu/cpu_vectors.h"

namespace {

constexpr int kPanel = 16;          // outputs
constexpr int64_t kMaxGroup = 128;  // inputs; grouped_linear.py divides larger groups

}  // namespace

// One row and group: the factor that restores its numbers, and the sum of its integers.
struct RowGroup {
  float scale;
  int32_t sum;
};

// Quantised rows, and where their outputs are stored.
struct QuantisedRows {
  const int8_t* numbers;        // [num_rows][groups * group_size]
  const RowGroup* row_groups;   // [num_rows][groups]
  int64_t num_rows, num_groups;
  bool is_bfloat16;             // whether bias and out are bfloat16
  const void* bias;             // [num_outputs]; may be null
  void* out;                    // [num_rows][num_outputs]
};

// Returns whether tile_grouped_linear can compute a layer with this number of rows.
bool can_use_tiles(const GroupedWeights& weights, int64_t num_rows);

// Computes the panels [first, last) of a layer with matrix tiles (AMX). The results have the same bits as those of the
// kernel in cpu_grouped.cpp.
void tile_grouped_linear(const GroupedWeights& weights, const QuantisedRows& rows, int64_t first, int64_t last);

namespace {

// Adds the bias to the sums of `num_rows` rows and `width` outputs, and stores the results. The first row is `row`, the
// first output is `place`. The function is not a part of the kernels, which are compiled for many sizes.
template <typename Number>
void store_outputs(const GroupedWeights& weights, const void* bias, void* out, const float* sums, int64_t num_rows,
                   int64_t width, int64_t row, int64_t place) {
  const auto* added = static_cast<const Number*>(bias);
  const int64_t count = std::min(width, weights.num_outputs - place);
  for (int64_t r = 0; r < num_rows; ++r) {
    auto* to = static_cast<Number*>(out) + (row + r) * weights.num_outputs + place;
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats numbers = load(sums + r * width + i);
      if (added) numbers += load_some(added + place + i, count - i);
      store_some(numbers, to + i, count - i);
    }
  }
}

}  // namespace
