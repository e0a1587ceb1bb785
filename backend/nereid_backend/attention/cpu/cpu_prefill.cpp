// SPDX-License-Identifier: Apache-2.0
// Attention on a CPU for prefills (sequences that add several tokens) and for texts whose keys and values are in no
// cache. cpu_attention.py and cpu_texts.py call this function through a plain C interface. cpu_kernels.h describes the
// layout of the cache.
//
// A task consists of some tokens of one sequence and the query heads that share a key-value head. A row is one token
// and one query head: row = (index of the token in the task) * group + (index of the query head in its group). The task
// reads the keys to which its tokens attend in tiles:
//
//                        tile (512 keys)   tile      tile
//     rows 0 to 11      |scores           |scores   |scores      scores  = queries * keys
//     rows 12 to 23     |                 |         |            weights = exp(scores - largest score so far)
//     ...               |                 |         |            out    += weights * values
//
// The keys and values of a tile are first packed into the layout of the matrix products, once for all rows. Then the
// scores, weights and sums of at most U::kRows rows at a time are computed, so that they stay in the L1 or L2 cache. A
// matrix product keeps the sums of these rows and of two panels in registers.
//
// Numbers are multiplied in float32, or in pairs of bfloat16 if the processor has such an instruction (AVX-512 BF16, or
// AMX, which multiplies whole matrices). The weights of bfloat16 values are then rounded to bfloat16, both in the
// weighted sum and in the sum of weights. Sums are float32.
//
// Template parameters: T is the type of the numbers in the cache, Q the type of queries and outputs, U the arithmetic
// (Singles, Pairs or Matrices), R a number of rows, and P a number of panels. A panel is kLanes columns of a matrix: 16
// with 512-bit vectors, and 8 otherwise.

#include "cpu_kernels.h"
#include "cpu_packing.h"
#include "cpu_products.h"
#include "cpu_vectors.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

namespace {

constexpr int kTile = 512;  // keys of a tile
// The distance of two rows of scores. With a power of two, the rows would compete for the same lines of the L1 cache.
constexpr int kScoreStride = kTile + kLanes;

// The tokens [first, last) of a prefill, and one key-value head.
struct Task {
  const Prefill* prefill;
  int64_t head, first, last;  // first and last are indices of the prefill's new tokens
  int64_t work;               // the approximate number of keys that the tokens attend to
};

// The state of one row of a task: one token and one query head.
struct Row {
  int64_t begin, end;    // the positions that the row attends to
  float largest, total;  // the largest score, times log2(e), and the sum of the weights
};

// The memory of one thread, for one task at a time.
template <typename U>
struct Scratch {
  typedef typename U::Unit Unit;
  int64_t key_steps;     // units of one key, padded with zeros to a multiple of U::kStepMultiple
  int64_t width;         // numbers of one row of `out`
  int64_t panel_keys;    // units of the keys of 16 tokens
  int64_t panel_values;  // units of 16 dimensions of the values of a tile
  std::vector<Unit> query;    // for each matrix product [key_steps][rows of the product]; for Matrices [row][key_steps]
  std::vector<Unit> keys;     // [kTile / 16][key_steps][16 tokens]
  std::vector<Unit> values;   // [width / 16][units of tokens][16 dimensions]
  std::vector<float> scores;  // [U::kRows][kScoreStride]; `to_weights` replaces them by weights
  std::vector<float> out;     // [row][width]
  std::vector<Row> rows;
  typename U::Registers registers;

  Scratch(const Shape& shape, int64_t num_rows)
      : key_steps(round_up((shape.key_dim + U::kNumbers - 1) / U::kNumbers, U::kStepMultiple)),
        width(padded(shape.value_dim)),
        panel_keys(key_steps * kLanes),
        panel_values(kTile / U::kNumbers * kLanes),
        query(num_rows * key_steps),
        keys(kTile / kLanes * panel_keys),
        values(width / kLanes * panel_values),
        scores(U::kRows * kScoreStride),
        out(num_rows * width),
        rows(num_rows) {}
};

// Rounds a number of rows up to a multiple of U::kRowStep.
template <typename U>
int64_t padded_rows(int64_t rows) {
  return round_up(rows, U::kRowStep);
}

// Packs the keys and values [start, end) of a task's sequence. start is a multiple of 16.
template <typename T, typename U>
void pack_tile(const Layer& layer, const Task& task, int64_t start, int64_t end, Scratch<U>& scratch) {
  const Shape& shape = layer.shape;
  const int64_t size = shape.block_size;
  for (int64_t at = start; at < end; at += kLanes) {
    // A cell is the part of a block that belongs to one key-value head.
    const int64_t cell = task.prefill->blocks[at / size] * shape.num_kv_heads + task.head, place = at % size;
    const T* keys = static_cast<const T*>(layer.keys) + cell * shape.key_dim * size + place;
    const T* values = static_cast<const T*>(layer.values) + (cell * size + place) * shape.value_dim;
    const float* key_scales = layer.key_scales ? layer.key_scales + cell * size + place : nullptr;
    const float* value_scales = layer.value_scales ? layer.value_scales + cell * size + place : nullptr;
    pack_keys<T, typename U::Packing>(keys, shape.key_dim, size, key_scales,
                                      scratch.keys.data() + (at - start) / kLanes * scratch.panel_keys);
    pack_values<T, typename U::Packing>(values, shape.value_dim, shape.value_dim, value_scales,
                                        std::min<int64_t>(kLanes, end - at),
                                        scratch.values.data() + (at - start) / U::kNumbers * kLanes,
                                        scratch.panel_values);
  }
}

// Packs the keys and values [start, end) of a task's sequence from the rows of the step; see `pack_tile`.
template <typename Q, typename U>
void pack_rows(const Shape& shape, const LayerStep& step, const Task& task, int64_t start, int64_t end,
               Scratch<U>& scratch) {
  const auto at = [&](const Rows& rows, int64_t token) {
    return static_cast<const Q*>(rows.at) + (task.prefill->first + token) * rows.token_stride +
           task.head * rows.head_stride;
  };
  for (int64_t first = start; first < end; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, end - first);
    pack_key_rows<Q, typename U::Packing>(at(step.keys, first), shape.key_dim, step.keys.token_stride, count,
                                          scratch.keys.data() + (first - start) / kLanes * scratch.panel_keys);
    pack_values<Q, typename U::Packing>(at(step.values, first), shape.value_dim, step.values.token_stride, nullptr,
                                        count, scratch.values.data() + (first - start) / U::kNumbers * kLanes,
                                        scratch.panel_values);
  }
}

// Converts the scores of one row in the columns [from, to) of a tile into weights, in the same memory, and rescales the
// sums of earlier tiles. The tile begins at position `start`.
template <typename U>
void to_weights(const Shape& shape, float* scores, int64_t start, int64_t from, int64_t to, Row& row, float* out,
            int64_t width) {
  auto* weights = reinterpret_cast<typename U::Unit*>(scores);
  const int64_t begin = std::max(row.begin - start, from), end = std::min(row.end - start, to);
  if (begin >= end) {
    std::fill(weights + from / U::kNumbers, weights + to / U::kNumbers, typename U::Unit{});
    return;
  }
  // Usually, the factor is applied together with the conversion, which is faster. The largest score belongs to the largest
  // product of query and key only if the factor is positive. A softcap and another factor are therefore applied first.
  float factor = shape.scale * kLog2E;
  if (shape.softcap > 0 || !(factor > 0)) {
    for (int64_t t = from; t < to; t += kLanes)
      *reinterpret_cast<Floats*>(scores + t) = shape.softcap > 0
                                                   ? tanh_of(load(scores + t) * (shape.scale / shape.softcap))
                                                   : load(scores + t) * factor;
    factor = shape.softcap > 0 ? shape.softcap * kLog2E : 1.0f;
  }
  std::fill(scores + from, scores + begin, -INFINITY);
  std::fill(scores + end, scores + to, -INFINITY);
  Floats top = fill(-INFINITY);
  for (int64_t t = from; t < to; t += kLanes) top = larger(load(scores + t), top);
  float largest = std::max(row.largest, largest_of(top) * factor);
  if (largest == -INFINITY) largest = 0.0f;  // all scores are NaN
  const Floats total = U::to_weights(scores + from, to - from, factor, largest, weights + from / U::kNumbers);
  const float rescale = row.largest == -INFINITY ? 0.0f : std::exp2(row.largest - largest);
  row.largest = largest;
  row.total = row.total * rescale + sum_of(total);
  if (rescale != 1.0f)
    for (int64_t c = 0; c < width; c += kLanes) *reinterpret_cast<Floats*>(out + c) *= rescale;
}

// Completes the last matrix of values in a tile of `count` tokens with zeros. Matrices multiplies 32 tokens at a time,
// but the values are packed 16 tokens at a time. Example: 40 tokens are packed as 48 tokens, and 16 more become zero.
template <typename U>
void pad_values(int64_t count, Scratch<U>& scratch) {
  const int64_t step = round_up(count, kLanes) / U::kNumbers;
  if (step % U::kStepMultiple == 0) return;
  for (int64_t panel = 0; panel < scratch.width / kLanes; ++panel)
    std::fill_n(scratch.values.data() + panel * scratch.panel_values + step * kLanes,
                (U::kStepMultiple - step % U::kStepMultiple) * kLanes, typename U::Unit{});
}

// Computes R rows of a task, starting at `row`, over the tile [start, end). Only the panels [from, to) of the tile are
// computed. They contain all keys to which one of the rows attends.
template <typename U, int R>
void attend_rows(const Shape& shape, int64_t row, int64_t num_rows, int64_t start, int64_t end, Scratch<U>& scratch) {
  const int64_t count = std::min<int64_t>(R, num_rows - row);
  int64_t first = end, last = start;
  for (int64_t r = row; r < row + count; ++r) {
    first = std::min(first, scratch.rows[r].begin);
    last = std::max(last, scratch.rows[r].end);
  }
  // A product with Matrices multiplies two panels of keys at a time.
  constexpr int64_t kTokens = U::kIsMatrix ? 2 * kLanes : kLanes;
  const int64_t from = std::max<int64_t>(0, first - start) / kTokens * kTokens;
  const int64_t to = (std::min(last, end) - start + kTokens - 1) / kTokens * kTokens;
  if (from >= to) return;
  float* scores = scratch.scores.data();
  float* out = scratch.out.data() + row * scratch.width;
  const auto* query = scratch.query.data() + row * scratch.key_steps;
  const auto* keys = scratch.keys.data() + from / kLanes * scratch.panel_keys;
  const auto* weights = reinterpret_cast<const typename U::Unit*>(scores) + from / U::kNumbers;
  const auto* values = scratch.values.data() + from / U::kNumbers * kLanes;
  const int64_t key_panels = (to - from) / kLanes, steps = (to - from) / U::kNumbers;
  const auto convert = [&] {
    for (int64_t r = 0; r < count; ++r)
      to_weights<U>(shape, scores + r * kScoreStride, start, from, to, scratch.rows[row + r], out + r * scratch.width,
                    scratch.width);
  };
#ifdef NEREID_TILES
  if constexpr (U::kIsMatrix) {
    multiply_matrices<R / kTileRows, false>(query, scratch.key_steps, keys, scratch.panel_keys, key_panels,
                                            scratch.key_steps, scores + from, kScoreStride);
    convert();
    multiply_matrices<R / kTileRows, true>(weights, kScoreStride, values, scratch.panel_values, scratch.width / kLanes,
                                           steps, out, scratch.width);
  } else
#endif
  {
    multiply_panels<U, R, R, 1, false>(query, keys, scratch.panel_keys, key_panels, scratch.key_steps, scores + from,
                                       kScoreStride);
    convert();
    multiply_panels<U, R, 1, kScoreStride, true>(weights, values, scratch.panel_values,
                                                 (shape.value_dim + kLanes - 1) / kLanes, steps, out, scratch.width);
  }
}

// Computes the next U::kRows rows of a task, or its last rows; see `attend_rows`.
template <typename U>
void attend_some_rows(const Shape& shape, int64_t row, int64_t num_rows, int64_t start, int64_t end,
                      Scratch<U>& scratch) {
  const int64_t product_rows = std::min<int64_t>(U::kRows, padded_rows<U>(num_rows - row));
  scratch.registers.set_rows(product_rows);
  if (product_rows == U::kRows) {
    attend_rows<U, U::kRows>(shape, row, num_rows, start, end, scratch);
  } else if (product_rows == U::kRowStep) {
    attend_rows<U, U::kRowStep>(shape, row, num_rows, start, end, scratch);
  } else if constexpr (U::kRows > 2 * U::kRowStep) {
    attend_rows<U, 2 * U::kRowStep>(shape, row, num_rows, start, end, scratch);
  }
}

// Packs the queries of a task's rows. The queries of one matrix product are [step][rows of the product].
template <typename Q, typename U>
void pack_queries(const Shape& shape, const Rows& queries, const Task& task, Scratch<U>& scratch) {
  const int64_t group = shape.num_heads / shape.num_kv_heads, count = (task.last - task.first) * group;
  for (int64_t row = 0; row < count; row += U::kRows) {
    const int64_t product_rows = std::min<int64_t>(U::kRows, padded_rows<U>(count - row));
    const int64_t row_stride = U::kIsMatrix ? scratch.key_steps : 1, step_stride = U::kIsMatrix ? 1 : product_rows;
    auto* to = scratch.query.data() + row * scratch.key_steps;
    for (int64_t r = 0; r < product_rows; ++r) {
      const int64_t source = std::min(row + r, count - 1);  // padding rows repeat the last row
      const int64_t token = task.prefill->first + task.first + source / group;
      const Q* from = static_cast<const Q*>(queries.at) + token * queries.token_stride +
                      (task.head * group + source % group) * queries.head_stride;
      pack_row<Q, typename U::Packing>(from, shape.key_dim, to + r * row_stride, step_stride);
    }
  }
}

// Writes the normalised result of each row of a task to the output of the step.
template <typename Q, typename U>
void write_output(const Shape& shape, const LayerStep& step, const Task& task, const Scratch<U>& scratch) {
  const int64_t group = shape.num_heads / shape.num_kv_heads, num_rows = (task.last - task.first) * group;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t head = task.head * group + row % group, token = task.prefill->first + task.first + row / group;
    float total = scratch.rows[row].total, rescale = 1.0f;
    if (step.sinks) {
      const float sink = step.sinks[head] * kLog2E, largest = std::max(sink, scratch.rows[row].largest);
      rescale = std::exp2(scratch.rows[row].largest - largest);
      total = total * rescale + std::exp2(sink - largest);
    }
    const float* from = scratch.out.data() + row * scratch.width;
    Q* to = static_cast<Q*>(step.out) + (token * shape.num_heads + head) * shape.value_dim;
    const float factor = rescale / total;
    for (int64_t c = 0; c < shape.value_dim; c += kLanes)
      store_some(load(from + c) * factor, to + c, shape.value_dim - c);
  }
}

// Computes the attention of one task and writes it to the output.
template <typename T, typename Q, typename U>
void attend(const Layer& layer, const LayerStep& step, const Task& task, Scratch<U>& scratch) {
  const Shape& shape = layer.shape;
  const int64_t group = shape.num_heads / shape.num_kv_heads, num_rows = (task.last - task.first) * group;
  const int64_t num_cached = task.prefill->num_cached, length = num_cached + task.prefill->num_tokens;
  pack_queries<Q>(shape, step.query, task, scratch);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = num_cached + task.first + row / group;
    scratch.rows[row] = {first_visible(shape, position), visible_end(shape, position, length), -INFINITY, 0.0f};
  }
  std::fill(scratch.out.begin(), scratch.out.begin() + padded_rows<U>(num_rows) * scratch.width, 0.0f);
  const int64_t end = scratch.rows[num_rows - 1].end;
  for (int64_t start = scratch.rows[0].begin / kLanes * kLanes; start < end; start += kTile) {
    const int64_t stop = std::min(end, start + kTile);
    if (layer.keys) {
      pack_tile<T, U>(layer, task, start, stop, scratch);
    } else {
      pack_rows<Q, U>(shape, step, task, start, stop, scratch);
    }
    pad_values(stop - start, scratch);
    for (int64_t row = 0; row < num_rows; row += U::kRows)
      attend_some_rows<U>(shape, row, num_rows, start, stop, scratch);
  }
  write_output<Q>(shape, step, task, scratch);
}

// Divides `count` prefills into tasks for the threads, the longest task first.
template <typename U>
std::vector<Task> plan_tasks(const Shape& shape, const Prefill* prefills, int64_t count, int num_threads) {
  std::vector<Task> tasks;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += prefills[i].num_tokens;
  // Tasks have fewer rows if there would otherwise not be enough tasks for all threads.
  const int64_t share = total * shape.num_kv_heads / (4 * num_threads);
  const int64_t tokens = std::max<int64_t>(1, std::min(U::kTaskRows / group, num_threads > 1 ? share : U::kTaskRows));
  for (int64_t i = 0; i < count; ++i) {
    const Prefill& prefill = prefills[i];
    for (int64_t first = 0; first < prefill.num_tokens; first += tokens) {
      const int64_t last = std::min(prefill.num_tokens, first + tokens);
      const int64_t length = prefill.num_cached + prefill.num_tokens;
      const int64_t end = visible_end(shape, prefill.num_cached + last - 1, length);
      const int64_t work = (end - first_visible(shape, prefill.num_cached + first)) * (last - first);
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) tasks.push_back({&prefill, head, first, last, work});
    }
  }
  // The longest tasks start first, so that the last tasks to start are short.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
  return tasks;
}

// Computes the attention of `count` prefills.
template <typename T, typename Q, typename U>
void run(const Layer& layer, const Prefill* prefills, int64_t count, const LayerStep& step, int num_threads) {
  const Shape& shape = layer.shape;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const std::vector<Task> tasks = plan_tasks<U>(shape, prefills, count, num_threads);
  int64_t max_rows = 0;
  for (const Task& task : tasks) max_rows = std::max(max_rows, padded_rows<U>((task.last - task.first) * group));
  std::atomic<size_t> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch<U> scratch(shape, max_rows);
    for (size_t i = next++; i < tasks.size(); i = next++) attend<T, Q, U>(layer, step, tasks[i], scratch);
  }
}

}  // namespace

extern "C" {

void nereid_attend_prefills(const Layer* layer, const Prefill* prefills, int64_t count, const LayerStep* step,
                            int num_threads) {
#ifdef NEREID_PAIRS
  using Bfloat16Arithmetic = Pairs;
#else
  using Bfloat16Arithmetic = Singles;
#endif
  with_types(*layer, [&](auto cache_number, auto query_number) {
    using Q = decltype(query_number);
#ifdef NEREID_TILES
    if constexpr (!std::is_same_v<Q, float>)
      if (has_tile_permission())
        return run<decltype(cache_number), Q, Matrices>(*layer, prefills, count, *step, num_threads);
#endif
    using U = std::conditional_t<std::is_same_v<Q, float>, Singles, Bfloat16Arithmetic>;
    run<decltype(cache_number), Q, U>(*layer, prefills, count, *step, num_threads);
  });
}

}  // extern "C"
