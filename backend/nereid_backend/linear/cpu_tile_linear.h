// SPDX-License-Identifier: Apache-2.0
// The functions of cpu_tile_linear.cpp. cpu_linear.cpp and cpu_grouped.cpp call these functions.

#pragma once

#include <cstdint>

#include "../attention/cpu/cpu_kernels.h"

// Returns whether this build and this process can use matrix tiles (AMX).
bool can_use_tiles();

// Computes a linear layer with bfloat16 weights; see nereid_linear in cpu_kernels.h. The function may be called only if
// can_use_tiles returns true. The result of a row does not depend on the number of rows.
void tile_linear(const void* weight, const void* bias, const void* x, void* out, int64_t num_rows, int64_t dim,
                 int64_t num_outputs, int num_threads);

// Computes a layer with integer weights, bfloat16 inputs and bfloat16 outputs; see nereid_grouped_linear in
// cpu_kernels.h. Each thread converts the weights of two panels to bfloat16, multiplies them by all rows, and then
// continues with the next two panels. The function may be called only if can_use_tiles returns true.
void tile_dequantised_linear(const GroupedWeights& weights, const void* bias, const void* x, void* out,
                             int64_t num_rows, int num_threads);
