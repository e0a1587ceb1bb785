// SPDX-License-Identifier: Apache-2.0
// Paged attention on a CPU for prefills (sequences that add several tokens). cpu_attention.py calls this function
// through a plain C interface. cpu_kernels.h describes the layout of the cache.
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
// scores, weights and sums of at most kRows rows at a time are computed, so that they stay in the L1 cache. A matrix
// product keeps kRows x 2 vectors of sums in registers.
//
// Numbers are multiplied in float32, or in pairs of bfloat16 if the processor has such an instruction. The weights of
// bfloat16 values are then rounded to bfloat16, both in the weighted sum and in the sum of weights. Sums are float32.
//
// Template parameters: T is the type of the numbers in the cache, Q the type of queries and outputs, U the arithmetic
// (Singles or Pairs), R a number of rows, and P a number of panels. A panel is kLanes columns of a matrix: 16 with
// 512-bit vectors, and 8 otherwise.

#include "cpu_kernels.h"
#include "cpu_vectors.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

namespace {

// With 2 vectors of sums for each row, the sums take 24 of 32 registers with 512-bit vectors, and 12 of 16 without.
#ifdef __AVX512F__
constexpr int kRows = 12;
constexpr int kRowStep = 4;  // matrix products are compiled for 4, 8 and 12 rows
#else
constexpr int kRows = 6;
constexpr int kRowStep = 6;  // matrix products are compiled for 6 rows
#endif
constexpr int64_t kTaskRows = 192;    // rows of a task; each tile is packed once for all of them
constexpr int kTile = 512;            // keys of a tile

// The arithmetic of matrix products in float32. A unit of a row is multiplied by one unit of each of 16 columns. A unit
// is one float here, and two bfloat16 numbers in Pairs.
struct Singles {
  typedef float Unit;
  static constexpr int kNumbers = 1;
  // Returns sums + columns * row, for one unit of 16 columns and one unit of a row.
  static inline Floats add(Floats sums, const Unit* columns, Unit row) { return sums + load(columns) * row; }
  // Converts scores into weights. `count` is a multiple of 16. `to` may be the memory of the scores. Returns a vector
  // whose sum is the sum of the weights.
  static inline Floats to_weights(const float* scores, int64_t count, float largest, Unit* to) {
    Floats total = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const Floats weights = power_of_two(load(scores + t) - largest);
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
  static inline Floats add(Floats sums, const Unit* columns, Unit row) {
    return reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), as_pairs(_mm512_loadu_si512(columns)), one_pair(row)));
  }
  // The rounded weights are summed, because values are multiplied by them.
  static inline Floats to_weights(const float* scores, int64_t count, float largest, Unit* to) {
    const __m512bh ones = one_pair(0x3f803f80u);
    __m512 total = _mm512_setzero_ps();
    int64_t t = 0;
    for (; t + 2 * kLanes <= count; t += 2 * kLanes) {
      const Floats first = power_of_two<Coarse>(load(scores + t) - largest);
      const Floats second = power_of_two<Coarse>(load(scores + t + kLanes) - largest);
      const __m512bh weights = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
      _mm512_storeu_si512(to + t / 2, (__m512i)weights);
      total = _mm512_dpbf16_ps(total, weights, ones);
    }
    if (t < count) {
      const Floats last = power_of_two<Coarse>(load(scores + t) - largest);
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

// Computes C = factor * A B, or with kAdds C += A B, for R rows and P panels of 16 columns. The unit of row r and
// step k of A is a[k * kAStep + r * kARow]. B is [panel][step][16] units, and its panels are b_panel units apart.
template <typename U, int R, int P, int kAStep, int kARow, bool kAdds>
inline void multiply(const typename U::Unit* a, const typename U::Unit* b, int64_t b_panel, int64_t steps, float* c,
                     int64_t c_row, float factor) {
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
      *reinterpret_cast<Floats*>(c + r * c_row + p * kLanes) = kAdds ? sums[r][p] : sums[r][p] * factor;
}

// Calls `multiply` for any number of panels.
template <typename U, int R, int kAStep, int kARow, bool kAdds>
void multiply_panels(const typename U::Unit* a, const typename U::Unit* b, int64_t b_panel, int64_t panels,
                     int64_t steps, float* c, int64_t c_row, float factor) {
  int64_t p = 0;
  for (; p + 2 <= panels; p += 2)
    multiply<U, R, 2, kAStep, kARow, kAdds>(a, b + p * b_panel, b_panel, steps, c + p * kLanes, c_row, factor);
  if (p < panels)
    multiply<U, R, 1, kAStep, kARow, kAdds>(a, b + p * b_panel, b_panel, steps, c + p * kLanes, c_row, factor);
}

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
  int64_t key_steps;     // units of one key
  int64_t width;         // numbers of one row of `out`
  int64_t panel_keys;    // units of the keys of 16 tokens
  int64_t panel_values;  // units of 16 dimensions of the values of a tile
  std::vector<Unit> query;    // for each matrix product [key_steps][rows of the product]
  std::vector<Unit> keys;     // [kTile / 16][key_steps][16 tokens]
  std::vector<Unit> values;   // [width / 16][units of tokens][16 dimensions]
  std::vector<float> scores;  // [kRows][kTile]; `to_weights` replaces them by weights
  std::vector<float> out;     // [row][width]
  std::vector<Row> rows;

  Scratch(const Shape& shape, int64_t num_rows)
      : key_steps((shape.key_dim + U::kNumbers - 1) / U::kNumbers),
        width(padded(shape.value_dim)),
        panel_keys(key_steps * kLanes),
        panel_values(kTile / U::kNumbers * kLanes),
        query(num_rows * key_steps),
        keys(kTile / kLanes * panel_keys),
        values(width / kLanes * panel_values),
        scores(kRows * kTile),
        out(num_rows * width),
        rows(num_rows) {}
};

// Rounds a number of rows up to a multiple of kRowStep.
int64_t padded_rows(int64_t rows) { return (rows + kRowStep - 1) / kRowStep * kRowStep; }

// Packs the keys of 16 tokens as [step][16] units.
template <typename T, typename U>
void pack_keys(const T* from, int64_t dim, int64_t stride, const float* scales, typename U::Unit* to) {
  const Floats scale = scales ? load(scales) : fill(1.0f);
  for (int64_t d = 0; d < dim; d += U::kNumbers, to += kLanes) {
    const bool alone = d + 1 == dim;
    const Floats first = load(from + d * stride);
    const Floats second = U::kNumbers == 1 || alone ? Floats{} : load(from + (d + 1) * stride);
    if (scales) {
      U::pack(first * scale, second * scale, to);
    } else {
      U::pack(first, second, to);
    }
  }
}

// Packs the values of the first `count` of 16 tokens: one step of every panel for each unit of tokens. The values after
// the last token are set to zero, because they are multiplied by a weight of zero and must not be NaN.
template <typename T, typename U>
void pack_values(const T* from, int64_t dim, const float* scales, int64_t count, typename U::Unit* to, int64_t panel) {
  for (int64_t t = 0; t < kLanes; t += U::kNumbers, to += kLanes)
    for (int64_t c = 0; c < dim; c += kLanes) {
      Floats first = {}, second = {};
      if (t < count) first = load_some(from + t * dim + c, dim - c) * (scales ? scales[t] : 1.0f);
      if (U::kNumbers == 2 && t + 1 < count)
        second = load_some(from + (t + 1) * dim + c, dim - c) * (scales ? scales[t + 1] : 1.0f);
      U::pack(first, second, to + c / kLanes * panel);
    }
}

#ifdef NEREID_PAIRS
// Without scales, bfloat16 numbers are copied and not rounded.
template <>
void pack_keys<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, int64_t stride, const float*, uint32_t* to) {
  for (int64_t d = 0; d < dim; d += 2, to += kLanes) {
    const auto at = [&](int64_t i) {
      return __builtin_convertvector(*reinterpret_cast<const Halves*>(from + i * stride), Words);
    };
    *reinterpret_cast<Words*>(to) = d + 1 == dim ? at(d) : (at(d) | at(d + 1) << 16);
  }
}

template <>
void pack_values<Bfloat16, Pairs>(const Bfloat16* from, int64_t dim, const float*, int64_t count, uint32_t* to,
                                 int64_t panel) {
  for (int64_t t = 0; t < kLanes; t += 2, to += kLanes)
    for (int64_t c = 0; c < dim; c += kLanes) {
      const int64_t left = dim - c;
      const __mmask16 some = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
      const auto at = [&](int64_t token) {
        const __mmask16 mask = token < count ? some : 0;
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + token * dim + c));
      };
      _mm512_storeu_si512(to + c / kLanes * panel, _mm512_or_si512(at(t), _mm512_slli_epi32(at(t + 1), 16)));
    }
}
#endif

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
    pack_keys<T, U>(keys, shape.key_dim, size, key_scales,
                   scratch.keys.data() + (at - start) / kLanes * scratch.panel_keys);
    pack_values<T, U>(values, shape.value_dim, value_scales, std::min<int64_t>(kLanes, end - at),
                     scratch.values.data() + (at - start) / U::kNumbers * kLanes, scratch.panel_values);
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
  if (shape.softcap > 0)
    for (int64_t t = from; t < to; t += kLanes)
      *reinterpret_cast<Floats*>(scores + t) = tanh_of(load(scores + t)) * (shape.softcap * kLog2E);
  std::fill(scores + from, scores + begin, -INFINITY);
  std::fill(scores + end, scores + to, -INFINITY);
  Floats top = fill(-INFINITY);
  for (int64_t t = from; t < to; t += kLanes) top = larger(load(scores + t), top);
  float largest = std::max(row.largest, largest_of(top));
  if (largest == -INFINITY) largest = 0.0f;  // all scores are NaN
  const Floats total = U::to_weights(scores + from, to - from, largest, weights + from / U::kNumbers);
  const float rescale = row.largest == -INFINITY ? 0.0f : std::exp2(row.largest - largest);
  row.largest = largest;
  row.total = row.total * rescale + sum_of(total);
  if (rescale != 1.0f)
    for (int64_t c = 0; c < width; c += kLanes) *reinterpret_cast<Floats*>(out + c) *= rescale;
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
  const int64_t from = std::max<int64_t>(0, first - start) / kLanes;
  const int64_t to = (std::min(last, end) - start + kLanes - 1) / kLanes;
  if (from >= to) return;
  const float factor = shape.softcap > 0 ? shape.scale / shape.softcap : shape.scale * kLog2E;
  float* scores = scratch.scores.data();
  multiply_panels<U, R, R, 1, false>(scratch.query.data() + row * scratch.key_steps,
                                     scratch.keys.data() + from * scratch.panel_keys, scratch.panel_keys, to - from,
                                     scratch.key_steps, scores + from * kLanes, kTile, factor);
  float* out = scratch.out.data() + row * scratch.width;
  for (int64_t r = 0; r < count; ++r)
    to_weights<U>(shape, scores + r * kTile, start, from * kLanes, to * kLanes, scratch.rows[row + r],
              out + r * scratch.width, scratch.width);
  const int64_t step = from * kLanes / U::kNumbers, steps = (to - from) * kLanes / U::kNumbers;
  multiply_panels<U, R, 1, kTile, true>(reinterpret_cast<const typename U::Unit*>(scores) + step,
                                        scratch.values.data() + step * kLanes, scratch.panel_values,
                                        (shape.value_dim + kLanes - 1) / kLanes, steps, out, scratch.width, 1.0f);
}

// Packs the queries of a task's rows. The queries of one matrix product are [step][rows of the product].
template <typename Q, typename U>
void pack_queries(const Shape& shape, const Rows& queries, const Task& task, Scratch<U>& scratch) {
  const int64_t group = shape.num_heads / shape.num_kv_heads, count = (task.last - task.first) * group;
  for (int64_t row = 0; row < count; row += kRows) {
    const int64_t product_rows = std::min<int64_t>(kRows, padded_rows(count - row));
    auto* to = scratch.query.data() + row * scratch.key_steps;
    for (int64_t r = 0; r < product_rows; ++r) {
      const int64_t source = std::min(row + r, count - 1);  // padding rows repeat the last row
      const int64_t token = task.prefill->first + task.first + source / group;
      const Q* from = static_cast<const Q*>(queries.at) + token * queries.token_stride +
                      (task.head * group + source % group) * queries.head_stride;
      for (int64_t k = 0; k < scratch.key_steps; ++k) {
        const int64_t d = k * U::kNumbers;
        const float second = U::kNumbers == 2 && d + 1 < shape.key_dim ? to_float(from[d + 1]) : 0.0f;
        to[k * product_rows + r] = U::unit(to_float(from[d]), second);
      }
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
    for (int64_t c = 0; c < shape.value_dim; ++c) from_float(from[c] * factor, to + c);
  }
}

// Computes the attention of one task and writes it to the output.
template <typename T, typename Q, typename U>
void attend(const Layer& layer, const LayerStep& step, const Task& task, Scratch<U>& scratch) {
  const Shape& shape = layer.shape;
  const int64_t group = shape.num_heads / shape.num_kv_heads, num_rows = (task.last - task.first) * group;
  const int64_t num_cached = task.prefill->num_cached;
  pack_queries<Q>(shape, step.query, task, scratch);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = num_cached + task.first + row / group;
    scratch.rows[row] = {first_visible(shape, position), position + 1, -INFINITY, 0.0f};
  }
  std::fill(scratch.out.begin(), scratch.out.begin() + padded_rows(num_rows) * scratch.width, 0.0f);
  const int64_t end = num_cached + task.last;
  for (int64_t start = scratch.rows[0].begin / kLanes * kLanes; start < end; start += kTile) {
    const int64_t stop = std::min(end, start + kTile);
    pack_tile<T, U>(layer, task, start, stop, scratch);
    for (int64_t row = 0; row < num_rows; row += kRows) switch (std::min<int64_t>(kRows, padded_rows(num_rows - row))) {
        case kRows:
          attend_rows<U, kRows>(shape, row, num_rows, start, stop, scratch);
          break;
#if defined(__AVX512F__)
        case 8:
          attend_rows<U, 8>(shape, row, num_rows, start, stop, scratch);
          break;
        case 4:
          attend_rows<U, 4>(shape, row, num_rows, start, stop, scratch);
          break;
#endif
      }
  }
  write_output<Q>(shape, step, task, scratch);
}

// Divides `count` prefills into tasks for the threads, the longest task first.
std::vector<Task> plan_tasks(const Shape& shape, const Prefill* prefills, int64_t count, int num_threads) {
  std::vector<Task> tasks;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += prefills[i].num_tokens;
  // Tasks have fewer rows if there would otherwise not be enough tasks for all threads.
  const int64_t share = total * shape.num_kv_heads / (4 * num_threads);
  const int64_t tokens = std::max<int64_t>(1, std::min(kTaskRows / group, num_threads > 1 ? share : kTaskRows));
  for (int64_t i = 0; i < count; ++i) {
    const Prefill& prefill = prefills[i];
    for (int64_t first = 0; first < prefill.num_tokens; first += tokens) {
      const int64_t last = std::min(prefill.num_tokens, first + tokens), end = prefill.num_cached + last;
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
  const std::vector<Task> tasks = plan_tasks(shape, prefills, count, num_threads);
  int64_t max_rows = 0;
  for (const Task& task : tasks) max_rows = std::max(max_rows, padded_rows((task.last - task.first) * group));
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
    using U = std::conditional_t<std::is_same_v<Q, float>, Singles, Bfloat16Arithmetic>;
    run<decltype(cache_number), Q, U>(*layer, prefills, count, *step, num_threads);
  });
}

}  // extern "C"
