// SPDX-License-Identifier: Apache-2.0
// Adds the low-rank products of LoRA adapters to the outputs of linear layers on a CPU.
//
// An adapter has two small matrices for a linear layer. nereid_linear and nereid_grouped_linear call nereid_adapt after
// each product, so that models get the products of adapters without Python, whether the models are compiled or not:
//
//     output of a row += up (down x)        for the adapter of the row
//
// The rows of a step are ordered by adapter and divided into tiles of at most kRows rows with the same adapter. A tile
// reads the matrices of its adapter once. There are two phases:
//
//     hidden = down x    The threads divide the pairs of a tile and kRanks rows of `down`. Each number is a dot product
//                        of a row of the input and a row of `down`.
//     output += up hidden    The threads divide the outputs. A vector contains neighbouring outputs of one row.
//
// Sums are float32. The order of the additions does not depend on the other rows of the step, so the output of a row has
// the same bits whether the row is computed alone or with other rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../attention/cpu/cpu_vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

thread_local AdapterStep* current = nullptr;

#if defined(__AVX512F__) || defined(__AVX2__)

constexpr int kPanel = 16;  // outputs of `up`, and inputs of `down`
constexpr int kRanks = 4;   // ranks are multiples of this number
// The sums of a tile stay in registers: kRows * kRanks vectors of dot products, and kRows * kVectors vectors of outputs.
#ifdef __AVX512F__
constexpr int kRows = 4, kVectors = 4;
#else
constexpr int kRows = 2, kVectors = 2;
#endif

// Returns sum + a * b with one rounding. With the operators + and *, GCC 12 would choose for each number of rows if it
// rounds the product first, so that the output of a row would depend on the other rows.
inline Floats add_product(Floats sum, Floats a, Floats b) {
#ifdef __AVX512F__
  return _mm512_fmadd_ps(a, b, sum);
#else
  return _mm256_fmadd_ps(a, b, sum);
#endif
}

// Rows of a step with the same adapter.
struct Tile {
  const AdapterMatrices* matrices;  // of all layers of the product
  int64_t rows[kRows];
  int count;
  int64_t hidden;  // the index of the first number of the tile in the memory for `hidden`
};

// One product of a linear layer.
struct Call {
  const AdapterStep* step;
  const AdaptedProduct* product;
  const void* x;
  void* out;
  int64_t num_rows, dim;

  // Returns the number of outputs of layer `index` of the product.
  int64_t layer_outputs(int64_t index) const { return step->layer_outputs[product->first_layer + index]; }
};

// Returns the product with these weights and this number of outputs, or null if there is none.
const AdaptedProduct* find_product(const AdapterStep& step, const void* weight, int64_t num_outputs) {
  const AdaptedProduct* end = step.products + step.num_products;
  const AdaptedProduct* found = std::lower_bound(
      step.products, end, weight, [](const AdaptedProduct& product, const void* at) { return product.weight < at; });
  // A layer and the merged product that begins with this layer have the same address.
  for (; found != end && found->weight == weight; ++found)
    if (found->num_outputs == num_outputs) return found;
  return nullptr;
}

// Returns the sum of an adapter's ranks in the layers of a product.
int64_t total_rank(const AdapterStep& step, int64_t adapter, const AdaptedProduct& product) {
  const AdapterMatrices* matrices = step.adapters[adapter] + product.first_layer;
  int64_t rank = 0;
  for (int64_t layer = 0; layer < product.num_layers; ++layer) rank += matrices[layer].rank;
  return rank;
}

// Returns whether an adapter of the step changes a product.
bool is_adapted(const AdapterStep& step, const AdaptedProduct& product) {
  for (int64_t adapter = 0; adapter < step.num_adapters; ++adapter)
    if (total_rank(step, adapter, product) > 0) return true;
  return false;
}

// Returns the adapter of a row, or -1 if the row has none.
int64_t owner_of(const AdapterStep& step, int64_t row, int64_t num_rows) {
  if (num_rows == step.num_tokens) return step.owners[row];
  return step.chunk_owners[row / (num_rows / step.num_chunks)];
}

// Returns the tiles of a call, and sets `num_hidden` to the number of their hidden numbers.
const std::vector<Tile>& tiles_of(const Call& call, int64_t* num_hidden) {
  thread_local std::vector<Tile> tiles;
  const AdapterStep& step = *call.step;
  tiles.clear();
  int64_t next = 0;
  for (int64_t adapter = 0; adapter < step.num_adapters; ++adapter) {
    const AdapterMatrices* matrices = step.adapters[adapter] + call.product->first_layer;
    const int64_t rank = total_rank(step, adapter, *call.product);
    if (rank == 0) continue;
    const size_t first = tiles.size();
    for (int64_t row = 0; row < call.num_rows; ++row) {
      if (owner_of(step, row, call.num_rows) != adapter) continue;
      if (tiles.size() == first || tiles.back().count == kRows) {
        tiles.push_back({matrices, {}, 0, next});
        next += kRows * rank;
      }
      Tile& tile = tiles.back();
      tile.rows[tile.count++] = row;
    }
  }
  *num_hidden = next;
  return tiles;
}

// Returns the number of inputs in a row of `down`, which is padded with zeros.
inline int64_t padded_inputs(int64_t dim) { return (dim + kPanel - 1) / kPanel * kPanel; }

// Computes kRanks dot products for each of R rows: hidden[r * rank + j] for j < kRanks.
template <int R, typename X, typename M>
void dot_products(const X* const* rows, const M* down, int64_t dim, int64_t rank, float* hidden) {
  Floats sums[R][kRanks] = {};
  const int64_t stride = padded_inputs(dim), whole = dim - dim % kLanes;
  const auto add = [&](int64_t i, auto inputs_of) {
    Floats weights[kRanks];
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) weights[j] = load(down + j * stride + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Floats inputs = inputs_of(r);
#pragma GCC unroll 4
      for (int j = 0; j < kRanks; ++j) sums[r][j] = add_product(sums[r][j], inputs, weights[j]);
    }
  };
  for (int64_t i = 0; i < whole; i += kLanes) add(i, [&](int r) { return load(rows[r] + i); });
  if (whole < dim) {
    // The last inputs are copied to memory, because the compiler would add the products of a vector that consists of
    // single numbers with other roundings, which depend on R.
    X ends[R][kLanes] = {};
    for (int r = 0; r < R; ++r) std::memcpy(ends[r], rows[r] + whole, sizeof(X) * (dim - whole));
    add(whole, [&](int r) { return load(ends[r]); });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) hidden[r * rank + j] = sum_of(sums[r][j]);
}

// Adds the products of `up` and `hidden` to V vectors of the outputs of R rows, from output `first` on.
template <int R, int V, typename X, typename M>
inline void add_vectors(X* const* rows, const M* up, int64_t first, int64_t num_outputs, int64_t rank,
                        const float* hidden) {
  Floats sums[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      sums[r][v] = load_some(rows[r] + first + v * kLanes, num_outputs - first - v * kLanes);
  for (int64_t j = 0; j < rank; ++j) {
    Floats weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int64_t output = first + v * kLanes;
      weights[v] = load(up + (output / kPanel * rank + j) * kPanel + output % kPanel);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        sums[r][v] = add_product(sums[r][v], hidden[r * rank + j] - Floats{}, weights[v]);
  }
  for (int r = 0; r < R; ++r) store_sums(sums[r], 1, V, rows[r] + first, 0, num_outputs - first);
}

// Adds the products of `up` and `hidden` to the outputs [first, last) of R rows. `first` is a multiple of kPanel.
template <int R, typename X, typename M>
void add_outputs(X* const* rows, const M* up, int64_t first, int64_t last, int64_t num_outputs, int64_t rank,
                 const float* hidden) {
  for (; first + kVectors * kLanes <= last; first += kVectors * kLanes)
    add_vectors<R, kVectors>(rows, up, first, num_outputs, rank, hidden);
  for (; first < last; first += kLanes) add_vectors<R, 1>(rows, up, first, num_outputs, rank, hidden);
}

// Calls function(constant), where the type of the constant contains the number of rows.
template <typename Function>
void with_rows(int count, Function function) {
  switch (count) {
    case 1: return function(std::integral_constant<int, 1>{});
    case 2: return function(std::integral_constant<int, 2>{});
#ifdef __AVX512F__
    case 3: return function(std::integral_constant<int, 3>{});
    case 4: return function(std::integral_constant<int, 4>{});
#endif
  }
}

// Computes the hidden numbers of the tasks that belong to one thread. A task is a tile and kRanks rows of `down`.
template <typename X, typename M>
void compute_hidden(const Call& call, const std::vector<Tile>& tiles, int64_t thread, int64_t threads, float* hidden) {
  int64_t task = 0;
  for (const Tile& tile : tiles) {
    const X* rows[kRows] = {};
    for (int r = 0; r < tile.count; ++r) rows[r] = static_cast<const X*>(call.x) + tile.rows[r] * call.dim;
    float* to = hidden + tile.hidden;
    for (int64_t layer = 0; layer < call.product->num_layers; ++layer) {
      const AdapterMatrices& matrices = tile.matrices[layer];
      for (int64_t j = 0; j < matrices.rank; j += kRanks, ++task) {
        if (task % threads != thread) continue;
        with_rows(tile.count, [&](auto count) {
          const M* down = static_cast<const M*>(matrices.down) + j * padded_inputs(call.dim);
          dot_products<decltype(count)::value>(rows, down, call.dim, matrices.rank, to + j);
        });
      }
      to += kRows * matrices.rank;
    }
  }
}

// Adds the products of all tiles to the outputs that belong to one thread.
template <typename X, typename M>
void add_products(const Call& call, const std::vector<Tile>& tiles, int64_t thread, int64_t threads,
                  const float* hidden) {
  for (const Tile& tile : tiles) {
    const float* from = hidden + tile.hidden;
    int64_t start = 0;
    for (int64_t layer = 0; layer < call.product->num_layers; ++layer) {
      const AdapterMatrices& matrices = tile.matrices[layer];
      const int64_t num_outputs = call.layer_outputs(layer), panels = (num_outputs + kPanel - 1) / kPanel;
      X* rows[kRows] = {};
      for (int r = 0; r < tile.count; ++r)
        rows[r] = static_cast<X*>(call.out) + tile.rows[r] * call.product->num_outputs + start;
      const int64_t first = panels * thread / threads * kPanel;
      const int64_t last = std::min(num_outputs, panels * (thread + 1) / threads * kPanel);
      if (matrices.rank > 0) {
        with_rows(tile.count, [&](auto count) {
          add_outputs<decltype(count)::value>(rows, static_cast<const M*>(matrices.up), first, last, num_outputs,
                                              matrices.rank, from);
        });
      }
      from += kRows * matrices.rank;
      start += num_outputs;
    }
  }
}

// Adds the products of the adapters to the outputs of one call, whose numbers have the type X. M is the type of the
// numbers of the adapters.
template <typename X, typename M>
void adapt(const Call& call, int num_threads) {
  int64_t num_hidden;
  const std::vector<Tile>& tiles = tiles_of(call, &num_hidden);
  thread_local std::vector<float> storage;
  if (static_cast<int64_t>(storage.size()) < num_hidden) storage.resize(num_hidden);
  float* hidden = storage.data();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    compute_hidden<X, M>(call, tiles, thread, threads, hidden);
#pragma omp barrier
    add_products<X, M>(call, tiles, thread, threads, hidden);
  }
}

#endif

}  // namespace

extern "C" {

// See cpu_kernels.h.
void nereid_serve_adapters(AdapterStep* step) { current = step; }

// See cpu_kernels.h.
void nereid_adapt(int is_bfloat16, const void* weight, const void* x, void* out, int64_t num_rows, int64_t dim,
                  int64_t num_outputs, int num_threads) {
#if defined(__AVX512F__) || defined(__AVX2__)
  if (!current || num_rows == 0) return;
  const AdaptedProduct* product = find_product(*current, weight, num_outputs);
  // The output layer, for example, has no adapters and computes only some tokens of the step.
  if (!product || !is_adapted(*current, *product)) return;
  if (num_rows != current->num_tokens && num_rows % current->num_chunks != 0) {
    current->unfit_rows = num_rows;
    return;
  }
  const Call call = {current, product, x, out, num_rows, dim};
  if (is_bfloat16) {
    current->is_bfloat16 ? adapt<Bfloat16, Bfloat16>(call, num_threads) : adapt<Bfloat16, float>(call, num_threads);
  } else {
    current->is_bfloat16 ? adapt<float, Bfloat16>(call, num_threads) : adapt<float, float>(call, num_threads);
  }
#else
  (void)is_bfloat16, (void)weight, (void)x, (void)out, (void)num_rows, (void)dim, (void)num_outputs, (void)num_threads;
#endif
}

}  // extern "C"
