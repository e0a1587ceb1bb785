// SPDX-License-Identifier: Apache-2.0
// The functions of cpu_tile_linear.cpp, which cpu_linear.cpp calls.

#pragma once

#include <cstdint>

#include "../attention/cpu/cpu_kernels.h"

// Returns whether this build and this process can use matrix tiles (AMX).
bool can_use_tiles();

// Computes a linear layer with bfloat16 weights; see nereid_linear in cpu_kernels.h. can_use_tiles must have returned
// true. The result of a row is the same for any number of rows.
void tile_linear(const void* weight, const void* bias, const void* x, void* out, int64_t num_rows, int64_t dim,
                 int64_t num_outputs, int num_threads);

// Computes a layer with integer weights, bfloat16 inputs and bfloat16 outputs; see nereid_grouped_linear in
// cpu_kernels.h. The weights are converted to bfloat16, two panels at a time.
void tile_dequantised_linear(const GroupedWeights& weights, const void* bias, const void* x, void* out,
                             int64_t num_rows, int num_threads);
