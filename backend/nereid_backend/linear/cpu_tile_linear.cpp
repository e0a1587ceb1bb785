// SPDX-License-Identifier: Apache-2.0
// Linear layers with bfloat16 weights on a CPU with matrix tiles (AMX).
//
// cpu_linear.cpp describes the layout of the weights. A tile of weights is 1024 consecutive bytes of a panel: the
// weights of 32 inputs for 16 outputs. The rows of the input are divided into blocks of at most 32 rows. A block needs
// one or two tiles of inputs:
//
//                               panels 0, 1   panels 2, 3   ...      each thread computes some panels
//     block 0 (rows 0-31)       |  the sums of two panels and 32 rows stay in four registers
//     block 1 (rows 32-63)      |
//
// A step multiplies 32 inputs of each row. While the blocks are multiplied by two panels, the next two panels are
// prefetched: each step prefetches some cache lines. Memory accesses and arithmetic then overlap, so the slower of the
// two limits the speed. If there are at most 16 rows, the sums of four panels stay in the registers, because each tile
// of inputs is then loaded once for four panels.

#include "cpu_tile_linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../attention/cpu/cpu_vectors.h"
#include "cpu_integers.h"
#include "cpu_tiles.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef NEREID_TILES

namespace {

constexpr int kTileInputs = 32;  // the number of inputs of a tile
// With at most 16 rows, the prefetched address is kAhead bytes after the address that is read. On Sapphire Rapids, 2048
// was the fastest of the values from 1024 to 16384.
constexpr int64_t kAhead = 2048;

// Returns the quotient, rounded up.
constexpr int64_t divide_up(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

// The arguments of one call of a linear layer.
struct Call {
  const char* weight;
  const Bfloat16* bias;  // may be null
  const Bfloat16* x;
  Bfloat16* out;
  int64_t dim, num_outputs;
  int64_t out_stride;  // the distance from one row of the output to the next row, in numbers

  int64_t panel_bytes() const { return dim * kPanel * sizeof(Bfloat16); }
};

// The weights that a block prefetches. The first step prefetches `per_step` bytes at `from`, the second step prefetches
// the next `per_step` bytes, and so on. A step multiplies 32 inputs of each row.
struct Prefetch {
  const char* from;
  int64_t per_step;
};

// Multiplies 32 inputs of each row by the weights of kPanels panels, and adds the products to the sums. `w` is the
// address of the weights in the first panel. The distance from a panel to the next panel is `w_stride` bytes, and the
// distance from a row of x to the next row is `x_stride` bytes.
template <int kRowTiles, int kPanels>
inline __attribute__((always_inline)) void multiply(const char* x, int64_t x_stride, const char* w, int64_t w_stride) {
  _tile_loadd(4, x, x_stride);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(6, w, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + kTileRows * x_stride, x_stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, w + w_stride, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    _tile_loadd(5, w, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kPanels > 1) {
      _tile_loadd(6, w + w_stride, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kPanels > 2) {
      _tile_loadd(7, w + 2 * w_stride, kTileRowBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 3 * w_stride, kTileRowBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
}

// Adds the bias to the sums [rows][16] of one panel, and stores the outputs. `row` is the index of the first row.
void store_outputs(const Call& call, const float* sums, int64_t row, int64_t rows, int64_t panel) {
  const int64_t place = panel * kPanel, count = call.num_outputs - place;
  const Floats bias = call.bias ? load_some(call.bias + place, count) : Floats{};
  Bfloat16* out = call.out + row * call.out_stride + place;
  const auto store = [&](int64_t width) {
    for (int64_t r = 0; r < rows; ++r) store_some(load(sums + r * kPanel) + bias, out + r * call.out_stride, width);
  };
  // If the width is a constant, the compiled code stores a vector with one instruction.
  count >= kPanel ? store(kPanel) : store(count);
}

// Computes the outputs of kPanels panels for `rows` rows. `row` is the first row, and `panel` is the first panel.
template <int kRowTiles, int kPanels>
void block(const Call& call, int64_t row, int64_t rows, int64_t panel, Prefetch prefetch) {
  const int64_t x_stride = call.dim * sizeof(Bfloat16), w_stride = call.panel_bytes();
  const char* x = reinterpret_cast<const char*>(call.x + row * call.dim);
  const char* w = call.weight + panel * w_stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < call.dim / kTileInputs; ++step, x += kTileRowBytes, w += kTileBytes) {
    if constexpr (kRowTiles == 2) {
      for (int64_t i = 0; i < prefetch.per_step; i += kLineBytes) __builtin_prefetch(prefetch.from + i, 0, 1);
      prefetch.from += prefetch.per_step;
    } else {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 16
        for (int i = 0; i < kTileBytes; i += kLineBytes) __builtin_prefetch(w + p * w_stride + i + kAhead, 0, 3);
    }
    multiply<kRowTiles, kPanels>(x, x_stride, w, w_stride);
  }
  // If `dim` is not a multiple of 32, copy the remaining inputs and weights into tiles that are padded with zeros.
  if (const int64_t rest = call.dim % kTileInputs) {
    alignas(kLineBytes) char last_x[kRowTiles * kTileBytes] = {}, last_w[kPanels * kTileBytes] = {};
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(last_x + r * kTileRowBytes, x + r * x_stride, rest * sizeof(Bfloat16));
    for (int p = 0; p < kPanels; ++p)
      std::memcpy(last_w + p * kTileBytes, w + p * w_stride, rest * kPanel * sizeof(Bfloat16));
    multiply<kRowTiles, kPanels>(last_x, kTileRowBytes, last_w, kTileBytes);
  }
  alignas(kLineBytes) float sums[4][kTileRows * kPanel];
  _tile_stored(0, sums[0], kTileRowBytes);
  _tile_stored(1, sums[1], kTileRowBytes);
  _tile_stored(2, sums[2], kTileRowBytes);
  _tile_stored(3, sums[3], kTileRowBytes);
  for (int p = 0; p < kPanels; ++p) {
    store_outputs(call, sums[p], row, std::min<int64_t>(rows, kTileRows), panel + p);
    if constexpr (kRowTiles == 2)
      store_outputs(call, sums[2 + p], row + kTileRows, rows - kTileRows, panel + p);
  }
}

// Computes the outputs of the panels [first, last) for `rows` rows. `row` is the first row. kPanels panels are computed
// at a time, and the remaining panels are computed one by one.
template <int kRowTiles, int kPanels>
void panels(const Call& call, int64_t row, int64_t rows, int64_t first, int64_t last, Prefetch prefetch) {
  int64_t panel = first;
  for (; panel + kPanels <= last; panel += kPanels) block<kRowTiles, kPanels>(call, row, rows, panel, prefetch);
  for (; panel < last; ++panel) block<kRowTiles, 1>(call, row, rows, panel, prefetch);
}

// Computes the outputs of `count` panels, one or two, for the rows [begin, end). `panel` is the first panel. During the
// computation, `next_bytes` bytes at `next` are prefetched.
void panel_pair(const Call& call, int64_t begin, int64_t end, int64_t panel, int64_t count, const char* next,
                int64_t next_bytes, TileRegisters& registers) {
  const int64_t num_blocks = divide_up(end - begin, kBlockRows);
  const int64_t num_steps = std::max<int64_t>(1, call.dim / kTileInputs);
  // All steps of all blocks prefetch the same number of cache lines.
  const int64_t per_step = divide_up(divide_up(next_bytes, kLineBytes), num_blocks * num_steps) * kLineBytes;
  for (int64_t row = begin; row < end; row += kBlockRows, next += num_steps * per_step) {
    const int64_t rows = std::min<int64_t>(end - row, kBlockRows);
    registers.set_rows(rows);
    if (rows > kTileRows) {
      panels<2, 2>(call, row, rows, panel, panel + count, {next, per_step});
    } else {
      panels<1, 2>(call, row, rows, panel, panel + count, {});
    }
  }
}

// Returns the number of rows in a chunk; see kChunkBytes.
int64_t rows_of_chunk(int64_t dim) {
  const int64_t row_bytes = dim * sizeof(Bfloat16);
  return std::max<int64_t>(1, kChunkBytes / row_bytes / kBlockRows) * kBlockRows;
}

// Divides the panels among the threads. Each thread calls compute(first, last, registers) for its panels [first, last).
template <typename Function>
void in_threads(int64_t num_outputs, int num_threads, const Function& compute) {
  const int64_t num_panels = divide_up(num_outputs, kPanel);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
    TileRegisters registers;
    if (first < last) compute(first, last, registers);
  }
}

// Rounds float32 numbers to bfloat16. The upper half of each returned word is a bfloat16 number, and the lower half is
// arbitrary.
inline __m512i as_upper_halves(__m512 numbers) {
  const __m512i words = _mm512_castps_si512(numbers);
  const __m512i last_bits = _mm512_and_si512(_mm512_srli_epi32(words, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(0x7fff)), last_bits);
}

// Converts one quad, which is four inputs of 16 outputs, to bfloat16 weights. `quad` has one word of four integers for
// each output. The result is [2][16][2]: the first index selects a pair of inputs.
inline void dequantise_quad(__m512i quad, __m512 scale, __m512 offset, char* to) {
  __m512i halves[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i integers = _mm512_and_si512(_mm512_srli_epi32(quad, 8 * i), _mm512_set1_epi32(255));
    halves[i] = as_upper_halves(_mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), scale, offset));
  }
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const __m512i first = _mm512_srli_epi32(halves[2 * pair], 16);
    _mm512_storeu_si512(to + pair * kLineBytes, _mm512_or_si512(first, _mm512_and_si512(halves[2 * pair + 1], upper)));
  }
}

// Converts one panel of integers to bfloat16 weights, [num_groups * group_size / 2][16][2].
template <int kBits>
void dequantise_panel(const GroupedWeights& weights, int64_t panel, int64_t num_groups, char* to) {
  const int64_t units = weights.group_size / kUnitInputs<kBits>;
  constexpr int kQuads = kUnitInputs<kBits> / 4;
  const uint8_t* values = weights.values + panel * num_groups * units * kUnitBytes<kBits>;
  const __m512 shared_zero = _mm512_set1_ps(1 << (kBits - 1));
  for (int64_t g = panel * num_groups; g < (panel + 1) * num_groups; ++g) {
    const __m512 scale = load_float16(weights.scales + g * kPanel);
    const __m512 zero = weights.zeros ? load_zeros(weights, g * kPanel) : shared_zero;
    const __m512 offset = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(zero, scale));
    for (int64_t unit = 0; unit < units; ++unit, values += kUnitBytes<kBits>)
#pragma GCC unroll 4
      for (int quad = 0; quad < kQuads; ++quad, to += 2 * kLineBytes)
        dequantise_quad(load_quad<kBits>(values, quad), scale, offset, to);
  }
}

}  // namespace

bool can_use_tiles() { return has_tile_permission(); }

void tile_linear(const void* weight, const void* bias, const void* x, void* out, int64_t num_rows, int64_t dim,
                 int64_t num_outputs, int num_threads) {
  const Call call = {static_cast<const char*>(weight), static_cast<const Bfloat16*>(bias),
                     static_cast<const Bfloat16*>(x),  static_cast<Bfloat16*>(out), dim, num_outputs, num_outputs};
  const int64_t chunk_rows = rows_of_chunk(dim);
  in_threads(num_outputs, num_threads, [&](int64_t first, int64_t last, TileRegisters& registers) {
    if (num_rows <= kTileRows) {
      registers.set_rows(num_rows);
      panels<1, 4>(call, 0, num_rows, first, last, {});
      return;
    }
    for (int64_t begin = 0; begin < num_rows; begin += chunk_rows)
      for (int64_t panel = first; panel < last; panel += 2) {
        const int64_t end = std::min(num_rows, begin + chunk_rows), next = std::min(panel + 2, last);
        panel_pair(call, begin, end, panel, next - panel, call.weight + next * call.panel_bytes(),
                   std::min<int64_t>(2, last - next) * call.panel_bytes(), registers);
      }
  });
}

void tile_dequantised_linear(const GroupedWeights& weights, const void* bias, const void* x, void* out,
                             int64_t num_rows, int num_threads) {
  const int64_t num_groups = divide_up(weights.dim, weights.group_size), chunk_rows = rows_of_chunk(weights.dim);
  const int64_t value_bytes = num_groups * weights.group_size * kPanel * weights.bits / 8;  // in one panel
  const int64_t panel_bytes = weights.dim * kPanel * sizeof(Bfloat16);
  const int64_t padded_bytes = num_groups * weights.group_size * kPanel * sizeof(Bfloat16);
  const auto dequantise = weights.bits == 4   ? dequantise_panel<4>
                          : weights.bits == 6 ? dequantise_panel<6>
                                              : dequantise_panel<8>;
  in_threads(weights.num_outputs, num_threads, [&](int64_t first, int64_t last, TileRegisters& registers) {
    thread_local std::vector<char> storage;
    storage.resize(panel_bytes + padded_bytes + kLineBytes);
    char* panels = storage.data() + (-reinterpret_cast<uintptr_t>(storage.data()) & (kLineBytes - 1));
    for (int64_t panel = first; panel < last; panel += 2) {
      const int64_t count = std::min<int64_t>(2, last - panel), place = panel * kPanel;
      // `panel_pair` expects panels without padding, so the second panel overwrites the padding of the first panel.
      for (int64_t i = 0; i < count; ++i) dequantise(weights, panel + i, num_groups, panels + i * panel_bytes);
      const auto* added = static_cast<const Bfloat16*>(bias);
      const Call call = {panels,
                         added ? added + place : nullptr,
                         static_cast<const Bfloat16*>(x),
                         static_cast<Bfloat16*>(out) + place,
                         weights.dim,
                         weights.num_outputs - place,
                         weights.num_outputs};
      const auto* next = reinterpret_cast<const char*>(weights.values) + (panel + count) * value_bytes;
      const int64_t next_bytes = std::min<int64_t>(2, last - panel - count) * value_bytes;
      for (int64_t begin = 0; begin < num_rows; begin += chunk_rows)
        panel_pair(call, begin, std::min(num_rows, begin + chunk_rows), 0, count, next, next_bytes, registers);
    }
  });
}

#else

bool can_use_tiles() { return false; }

void tile_linear(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int) {}

void tile_dequantised_linear(const GroupedWeights&, const void*, const void*, void*, int64_t, int) {}

#endif  // NEREID_TILES
