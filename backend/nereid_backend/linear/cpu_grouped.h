// SPDX-License-Identifier: Apache-2.0
// Types and functions that cpu_grouped.cpp and cpu_tile_grouped.cpp share. These two files contain kernels for linear
// layers with integer weights.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../attention/cpu/cpu_vectors.h"
#include "cpu_integers.h"

// The numbers that the kernels need for one group of one row.
struct RowGroup {
  float scale;    // integers are converted back to inputs by multiplying them by `scale`
  float sum;      // the sum of the integers
  int32_t start;  // -sum times the zero point that all groups share; 0 if the groups have different zero points
};

// The quantised rows of the inputs, and the address of the outputs.
struct QuantisedRows {
  const int8_t* numbers;        // [num_rows][num_groups * group_size]
  const RowGroup* row_groups;   // [num_rows][num_groups]
  int64_t num_rows, num_groups;
  bool is_bfloat16;             // true if bias and out are bfloat16, false if they are float32
  const void* bias;             // [num_outputs]; may be null
  void* out;                    // [num_rows][num_outputs]
};

// Returns whether tile_grouped_linear can compute a layer for `num_rows` rows.
bool can_use_tiles(const GroupedWeights& weights, int64_t num_rows);

// Computes the panels [first, last) of a layer with matrix tiles (AMX). The results have the same bits as those of the
// kernel in cpu_grouped.cpp.
void tile_grouped_linear(const GroupedWeights& weights, const QuantisedRows& rows, int64_t first, int64_t last);

namespace {

// Adds the bias to the sums [num_rows][width], and stores the results. `row` is the index of the first row, and `place`
// is the index of the first output. The kernels are compiled for many numbers of rows. This code is a separate
// function, so that it is compiled only once for each type.
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
