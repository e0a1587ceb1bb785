// SPDX-License-Identifier: Apache-2.0
// Linear layers on a CPU with weights of 4-bit, 6-bit or 8-bit integers, with a scale and a zero point for each group.
// grouped_linear.py calls this function through a plain C interface.
//
// cpu_integers.h describes the layout of the weights. The rows of the input are quantised to signed integers of 8 bits
// with one scale for each row and group, so that the products of a group are exact sums of integers:
//
//     out[r][o] = sum over g of scale[o][g] * row_scale[r][g] * (sum of value * x - zero_point[o][g] * sum of x)
//
// The result of a row is the same for any number of rows. Row tiles, panels and prefetches are those of cpu_linear.cpp.
//
// A processor with matrix tiles (AMX) uses two more kernels if there are many rows. cpu_tile_grouped.cpp computes the same
// bits as the kernel of this file. tile_dequantised_linear converts the weights to bfloat16 and does not quantise the
// rows, so its results are slightly different, and more accurate.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../attention/cpu/cpu_vectors.h"
#include "cpu_grouped.h"
#include "cpu_tile_linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// With at least this many rows, tile_dequantised_linear is faster than the other kernels on Emerald Rapids, for values of
// 4 and of 8 bits. Values of 6 bits have the limit of 4 bits, because cpu_tile_grouped.cpp has no kernel for them.
constexpr int64_t kMinDequantisedRows4 = 24, kMinDequantisedRows8 = 128;

#ifdef NEREID_HAS_GROUPED

// The largest number of rows of a tile, and the number of panels that a tile of R rows reads at the same time.
#ifdef __AVX512VNNI__
constexpr int kMaxRows = 12;
template <int R>
constexpr int panels_for() {
  return R <= 3 ? 4 : R <= 6 ? 2 : 1;
}
#else
constexpr int kMaxRows = 4;
template <int R>
constexpr int panels_for() {
  return R == 1 ? 4 : R == 2 ? 2 : 1;
}
#endif

// The arithmetic of integers: products of four unsigned values and four signed numbers of a row, added to 32-bit sums.
//
// Weights is a quad of values in the form that `add` needs, Input the four numbers of a row. Sums may be narrower than
// 32 bits for kChunkQuads quads, after which `flush` adds them to the 32-bit sums.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Products of bytes with 32-bit sums.
template <int kBits>
struct Products {
  using Weights = Wide;
  using Input = uint32_t;
  static constexpr int kChunkQuads = 1 << 20;
  static Weights weights(Wide quad) { return quad; }
  static Wide add(Wide sums, Weights weights, Input input) {
    const Wide numbers = fill_words(static_cast<int32_t>(input));
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sums, weights, numbers);
#else
    return _mm256_dpbusd_avx_epi32(sums, weights, numbers);
#endif
  }
  static void set_input(const int8_t* from, Input* to) { std::memcpy(to, from, sizeof *to); }
};
#else
// Products of bytes with 16-bit sums, for values of 4 bits. Each product of a pair is at most 2 * 15 * 127 = 3810, so
// that eight of them fit into 16 bits.
template <int kBits>
struct Products {
  using Weights = Wide;
  using Input = uint32_t;
  static constexpr int kChunkQuads = 8;
  static Weights weights(Wide quad) { return quad; }
  static Wide add(Wide sums, Weights weights, Input input) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, fill_words(static_cast<int32_t>(input))));
  }
  static Wide flush(Wide sums, Wide narrow) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
  }
  static void set_input(const int8_t* from, Input* to) { std::memcpy(to, from, sizeof *to); }
};

// Products of 16-bit numbers with 32-bit sums, for values of 8 bits: products of bytes could exceed 16 bits. The even
// and the odd bytes of a quad are multiplied separately.
template <>
struct Products<8> {
  struct Weights {
    Wide even, odd;
  };
  struct Input {
    uint32_t even, odd;  // two 16-bit numbers each
  };
  static constexpr int kChunkQuads = 1 << 20;
  static Weights weights(Wide quad) {
    return {_mm256_and_si256(quad, _mm256_set1_epi16(255)), _mm256_srli_epi16(quad, 8)};
  }
  static Wide add(Wide sums, const Weights& weights, Input input) {
    const Wide even = _mm256_madd_epi16(weights.even, fill_words(static_cast<int32_t>(input.even)));
    const Wide odd = _mm256_madd_epi16(weights.odd, fill_words(static_cast<int32_t>(input.odd)));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
  }
  static void set_input(const int8_t* from, Input* to) {
    const auto pair = [](int8_t low, int8_t high) {
      return static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16;
    };
    *to = {pair(from[0], from[2]), pair(from[1], from[3])};
  }
};

// 16-bit sums of products of bytes could contain only two values of 6 bits, so the products are those of 8 bits.
template <>
struct Products<6> : Products<8> {};
#endif

// The arguments of one call of a layer, and the quantised rows.
template <typename Input>
struct Call {
  const GroupedWeights& weights;
  bool is_bfloat16;  // whether bias and out are bfloat16
  const void* bias;  // may be null
  void* out;
  int64_t num_groups;
  // For each tile [dim / 4][rows] and [groups][rows]. The first row of a tile determines where its numbers start.
  const Input* inputs;
  const RowGroup* row_groups;
};

// The distance of prefetches in bytes for P panels that are read at the same time. It is the fastest of several
// distances on Zen 4.
template <int P>
constexpr int64_t kAhead = P == 1 ? 2048 : 1536 / P;

// Computes R rows, starting at `row`, and P panels, starting at `panel`. The values of a panel are prefetched kAhead<P>
// bytes ahead, and near the end of the P panels, the beginning of the next P panels is prefetched.
template <int kBits, int R, int P>
inline void tile(const Call<typename Products<kBits>::Input>& call, int64_t row, int64_t panel) {
  using Arithmetic = Products<kBits>;
  constexpr int V = P * kParts;               // vectors of sums for each row
  constexpr int kBytes = kUnitBytes<kBits>, kQuads = kUnitInputs<kBits> / 4;
  constexpr int64_t kDistance = kAhead<P> / kBytes * kBytes;  // the distance of prefetches in bytes
  constexpr int kChunkUnits = Arithmetic::kChunkQuads / kQuads;
  constexpr int kPartBytes = 4 * kWideLanes;  // one quad of the outputs of one vector
  constexpr bool kIsNarrow = Arithmetic::kChunkQuads < kMaxGroup / 4;
  const GroupedWeights& weights = call.weights;
  const int64_t units = weights.group_size / kUnitInputs<kBits>, groups = call.num_groups;
  const int64_t panel_bytes = groups * units * kBytes;
  const uint8_t* values = weights.values + panel * panel_bytes;
  // From this address on, a prefetch of the same panel would be beyond the end of the panel.
  const uint8_t* near_end = values + panel_bytes - kDistance;
  int64_t ahead = kDistance;  // the distance of the next prefetch
  const auto* x = call.inputs + row * groups * units * kQuads;
  const RowGroup* row_groups = call.row_groups + row * groups;
  WideFloats sums[R][V] = {};
  for (int64_t g = 0; g < groups; ++g, row_groups += R) {
    Wide totals[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) totals[r][v] = fill_words(row_groups[r].start);
    for (int64_t begin = 0; begin < units; begin += kChunkUnits) {
      const int64_t end = std::min<int64_t>(units, begin + kChunkUnits);
      Wide chunk[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) chunk[r][v] = kIsNarrow ? fill_words(0) : totals[r][v];
      for (int64_t unit = begin; unit < end; ++unit, values += kBytes) {
        if (values == near_end) ahead += (P - 1) * panel_bytes;
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 3
          for (int line = 0; line < kBytes; line += 64)
            __builtin_prefetch(values + p * panel_bytes + line + ahead, 0, 3);
#pragma GCC unroll 4
        for (int quad = 0; quad < kQuads; ++quad, x += R) {
          typename Arithmetic::Weights quads[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v)
            quads[v] = Arithmetic::weights(
                load_quad<kBits>(values + v / kParts * panel_bytes + v % kParts * kPartBytes, quad));
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) chunk[r][v] = Arithmetic::add(chunk[r][v], quads[v], x[r]);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          if constexpr (kIsNarrow) {
            totals[r][v] = Arithmetic::flush(totals[r][v], chunk[r][v]);
          } else {
            totals[r][v] = chunk[r][v];
          }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t place = ((panel + v / kParts) * groups + g) * kPanel + v % kParts * kWideLanes;
      const WideFloats scale = load_float16(weights.scales + place);
      // The scales and zero points of the next P panels are prefetched.
      if (P > 1 && v % kParts == 0) prefetch_group(weights, place + P * groups * kPanel);
      const WideFloats zero = weights.zeros ? load_zeros(weights, place) : WideFloats{};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        WideFloats total = to_floats(totals[r][v]);
        if (weights.zeros) total = subtract_product(total, zero, fill_floats(row_groups[r].sum));
        sums[r][v] = multiply_add(total, multiply(scale, fill_floats(row_groups[r].scale)), sums[r][v]);
      }
    }
  }
  float numbers[R * V * kWideLanes];
  std::memcpy(numbers, sums, sizeof numbers);
  const auto store = call.is_bfloat16 ? store_outputs<Bfloat16> : store_outputs<float>;
  store(weights, call.bias, call.out, numbers, R, V * kWideLanes, row, panel * kPanel);
}

// Computes R rows, starting at `row`, and the panels [first, last).
template <int kBits, int R>
void rows(const Call<typename Products<kBits>::Input>& call, int64_t row, int64_t first, int64_t last) {
  constexpr int P = panels_for<R>();
  int64_t panel = first;
  for (; panel + P <= last; panel += P) tile<kBits, R, P>(call, row, panel);
  if constexpr (P > 1)
    for (; panel < last; ++panel) tile<kBits, R, 1>(call, row, panel);
}

// Returns the functions `rows` for 1, 2, ... rows.
template <int kBits, int... R>
constexpr std::array<decltype(&rows<kBits, 1>), sizeof...(R)> rows_of(std::integer_sequence<int, R...>) {
  return {rows<kBits, R + 1>...};
}

// Quantises one group of a row, [count] numbers, which are padded with zeros to group_size. Returns its scale and sum.
// If a number is not finite, the scale is NaN. `shared_zero` is the zero point that all groups of the weights share, or
// 0. The inputs of four numbers are `stride` apart.
template <int kBits, typename Number>
RowGroup quantise(const Number* from, int64_t count, int64_t group_size, int32_t shared_zero,
                  typename Products<kBits>::Input* to, int64_t stride) {
  // The bits of absolute values, as integers, have the same order as the absolute values. Infinity and NaN come last.
  constexpr int32_t kInfinity = 0x7f800000;
  Ints absolute_bits = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints bits = reinterpret_cast<Ints>(load_some(from + i, count - i)) & 0x7fffffff;
    absolute_bits = bits > absolute_bits ? bits : absolute_bits;
  }
  const int32_t largest_bits = largest_of(absolute_bits);
  const bool is_finite = largest_bits < kInfinity;
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  if (!is_finite || !(factor <= 3e38f)) {
    // Either a number is not finite, or all numbers are so close to zero that the factor is infinite.
    const int8_t none[4] = {};
    for (int64_t i = 0; i < group_size; i += 4, to += stride) Products<kBits>::set_input(none, to);
    return {is_finite ? 0.0f : NAN, 0.0f, 0};
  }
  alignas(64) int8_t integers[kMaxGroup + kLanes];
  Ints sums = {};
  for (int64_t i = 0; i < group_size; i += kLanes) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the lower bits of the number.
    const Floats rounded = load_some(from + i, count - i) * factor + 12582912.0f;
    const Ints numbers = reinterpret_cast<Ints>(rounded) - 0x4b400000;
    sums += numbers;
    const Bytes bytes = __builtin_convertvector(numbers, Bytes);
    std::memcpy(integers + i, &bytes, sizeof bytes);
  }
  const int32_t sum = sum_of(sums);
  const int8_t* four = integers;
  for (int64_t i = 0; i < group_size; i += 4, four += 4, to += stride) Products<kBits>::set_input(four, to);
  return {largest / 127.0f, static_cast<float>(sum), -shared_zero * sum};
}

// Quantises the groups [first, last) of the rows of one tile, x [count][dim].
template <int kBits, typename Number>
void quantise_tile(const GroupedWeights& weights, const Number* x, int64_t count, int64_t first, int64_t last,
                   typename Products<kBits>::Input* inputs, RowGroup* row_groups) {
  const int64_t dim = weights.dim, size = weights.group_size;
  const int32_t shared_zero = weights.zeros ? 0 : 1 << (kBits - 1);
  for (int64_t g = first; g < last; ++g)
    for (int64_t r = 0; r < count; ++r)
      row_groups[g * count + r] = quantise<kBits>(x + r * dim + g * size, std::min(size, dim - g * size), size,
                                                  shared_zero, inputs + g * size / 4 * count + r, count);
}

// Computes a layer; see nereid_grouped_linear in cpu_kernels.h.
template <int kBits>
void grouped_linear(bool is_bfloat16, const GroupedWeights& weights, const void* bias, const void* x, void* out,
                    int64_t num_rows, int num_threads) {
  using Input = typename Products<kBits>::Input;
  constexpr auto kRows = rows_of<kBits>(std::make_integer_sequence<int, kMaxRows>());
  const int64_t dim = weights.dim, groups = (dim + weights.group_size - 1) / weights.group_size;
  const int64_t quads = groups * weights.group_size / 4, num_panels = (weights.num_outputs + kPanel - 1) / kPanel;
  // The kernel for matrix tiles reads rows that are stored one after the other, as tiles of one row are.
  const bool has_matrix_tiles = can_use_tiles(weights, num_rows);
  const int64_t num_tiles = has_matrix_tiles ? num_rows : (num_rows + kMaxRows - 1) / kMaxRows;
  // The tile t contains the rows [begin(t), begin(t + 1)).
  const auto begin = [=](int64_t tile) { return tile * num_rows / num_tiles; };
  thread_local std::vector<Input> input_storage;
  thread_local std::vector<RowGroup> group_storage;
  if (static_cast<int64_t>(input_storage.size()) < num_rows * quads) input_storage.resize(num_rows * quads);
  if (static_cast<int64_t>(group_storage.size()) < num_rows * groups) group_storage.resize(num_rows * groups);
  // The threads below have their own thread_local vectors, so they use the addresses of these.
  Input* const inputs = input_storage.data();
  RowGroup* const row_groups = group_storage.data();
  const Call<Input> call = {weights, is_bfloat16, bias, out, groups, inputs, row_groups};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    // Each thread quantises some of the groups of every row.
    const int64_t first_group = groups * thread / threads, last_group = groups * (thread + 1) / threads;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = begin(t), count = begin(t + 1) - row;
      const auto quantise_rows = [&](const auto* from) {
        quantise_tile<kBits>(weights, from + row * dim, count, first_group, last_group, inputs + row * quads,
                             row_groups + row * groups);
      };
      is_bfloat16 ? quantise_rows(static_cast<const Bfloat16*>(x)) : quantise_rows(static_cast<const float*>(x));
    }
#pragma omp barrier
    const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
    if (has_matrix_tiles) {
      const auto* numbers = reinterpret_cast<const int8_t*>(inputs);
      tile_grouped_linear(weights, {numbers, row_groups, num_rows, groups, is_bfloat16, bias, out}, first, last);
    } else if (num_tiles == 1) {
      kRows[num_rows - 1](call, 0, first, last);
    } else {
      // The weights of a few panels stay in the cache for all tiles.
      for (int64_t panel = first; panel < last; panel += 2)
        for (int64_t t = 0; t < num_tiles; ++t)
          kRows[begin(t + 1) - begin(t) - 1](call, begin(t), panel, std::min(last, panel + 2));
    }
  }
}

#endif  // NEREID_HAS_GROUPED

}  // namespace

extern "C" {

// See cpu_kernels.h.
int nereid_has_grouped_linear() {
#ifdef NEREID_HAS_GROUPED
  return 1;
#else
  return 0;
#endif
}

// See cpu_kernels.h.
void nereid_grouped_linear(int is_bfloat16, const GroupedWeights* weights, const void* bias, const void* x, void* out,
                           int64_t num_rows, int num_threads) {
#ifdef NEREID_HAS_GROUPED
  const int64_t min_rows = weights->bits == 8 ? kMinDequantisedRows8 : kMinDequantisedRows4;
  if (is_bfloat16 && num_rows >= min_rows && weights->dim % 2 == 0 && can_use_tiles()) {
    tile_dequantised_linear(*weights, bias, x, out, num_rows, num_threads);
  } else if (weights->bits == 4) {
    grouped_linear<4>(is_bfloat16 != 0, *weights, bias, x, out, num_rows, num_threads);
  } else if (weights->bits == 6) {
    grouped_linear<6>(is_bfloat16 != 0, *weights, bias, x, out, num_rows, num_threads);
  } else {
    grouped_linear<8>(is_bfloat16 != 0, *weights, bias, x, out, num_rows, num_threads);
  }
  nereid_adapt(is_bfloat16, weights->values, x, out, num_rows, weights->dim, weights->num_outputs, num_threads);
#else
  (void)is_bfloat16, (void)weights, (void)bias, (void)x, (void)out, (void)num_rows, (void)num_threads;
#endif
}

}  // extern "C"
