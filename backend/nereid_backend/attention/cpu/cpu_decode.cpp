// SPDX-License-Identifier: Apache-2.0
// Paged attention on a CPU for decodes (sequences that add one token), and the cache write. cpu_attention.py calls
// these functions through a plain C interface. cpu_kernels.h describes the layout of the cache.
//
// A task is one segment of a sequence for some key-value heads. A task is computed tile by tile:
//
//     tokens of the sequence     |first                                        last|    segment (struct Task)
//     tile                       |--- about 64 tokens ---|--- 64 ---|--- 64 ---|---|    whole blocks (struct Tile)
//     vector                     |16|16|16|16|                                      8 tokens without 512-bit vectors
//
// The query heads of a task are its rows: row = (index of the key-value head in the task) * group + (index of the query
// head in its group). Each row has these numbers in the memory of the thread (struct Scratch):
//
//     query   [row][key_dim]     in the form that Arithmetic<T>::pack writes
//     scores  [row][tile]        query * keys of one tile
//     weights [row][tile]        exp(scores - largest score so far)
//     out     [row][value_dim]   the sum of weights * values of all tiles so far; padded to whole pairs of vectors
//     sums    [row]              the largest score and the sum of weights of all tiles so far
//
// Template parameters: T is the type of the numbers in the cache, Q the type of queries and outputs, G the number of
// query heads that are computed together, and U the number of independent sums for each of these heads.
//
// A thread reads the blocks of its tasks in one stream (class Reader), so that each block is prefetched long before it
// is needed, even if it belongs to the next head, tile or task. Query heads that share a key-value head are computed
// together, so each key and value is read once. Scores and sums are float32 for all data types. With AVX512-BF16, the
// weights of bfloat16 values are rounded to bfloat16, both in the weighted sum and in the sum of weights by which it is
// divided. For a cache of 8-bit integers, scores and weights are multiplied by the scales, which takes less time than
// scaling the vectors.

#include "cpu_kernels.h"
#include "cpu_vectors.h"

#include <array>
#include <atomic>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kMaxSegments = 64;        // of one sequence
constexpr int kMaxGroup = 8;            // query heads that are computed together; limited by the number of registers
constexpr int64_t kMinSegment = 512;    // tokens; shorter segments take longer to combine than they save
constexpr int64_t kTileTokens = 64;     // tokens between two rescalings of the sums; at least one block is used
constexpr int64_t kAheadBytes = 8192;   // bytes that are prefetched ahead; more would evict data from the L1 cache
constexpr int64_t kRunBytes = 4096;     // bytes of a block that a task reads contiguously: one page

// The running softmax of one query head over one segment: the largest score, times log2(e), and the sum of weights.
struct Sums {
  float largest, total;
};

// The number of independent sums for each of G query heads. About 8 sums together hide the latency of a multiply-add.
template <int G>
constexpr int chains() {
  return G == 1 ? 4 : G <= 4 ? 2 : 1;
}

// Functions that only prefetch must be inlined, because GCC 12 removes calls of functions without visible effects.
#define NEREID_INLINE inline __attribute__((always_inline))

// Prefetches the cache line that is `ahead` bytes after `at`.
NEREID_INLINE void prefetch_line(const void* at, int64_t ahead) {
  __builtin_prefetch(static_cast<const char*>(at) + ahead, 0, 0);
}

// Prefetches the memory [at, at + bytes).
NEREID_INLINE void prefetch_bytes(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 0);
}

// Computes the scores of kLanes tokens for G query heads: scores[g][t] = sum over d of query[g][d] * keys[d][t]. The keys
// are transposed, so one vector contains dimension d of these tokens. The memory `ahead` bytes after the keys is
// prefetched.
template <typename T, int G>
void score(const T* keys, int64_t stride, const float* query, int64_t dim, float* scores, int64_t scores_stride,
           int64_t ahead) {
  constexpr int U = chains<G>();
  // A cache line contains rest + 1 dimensions of a block.
  const int64_t rest = std::max<int64_t>(1, 64 / (stride * sizeof(T))) - 1;
  Floats sums[U][G] = {};
  int64_t d = 0;
  for (; d + U <= dim; d += U)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      if (((d + u) & rest) == 0) prefetch_line(keys + (d + u) * stride, ahead);
      const Floats key = load(keys + (d + u) * stride);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[u][g] += key * query[g * dim + d + u];
    }
  for (; d < dim; ++d) {
    const Floats key = load(keys + d * stride);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[0][g] += key * query[g * dim + d];
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sums[0][g] += sums[u][g];
    *reinterpret_cast<Floats*>(scores + g * scores_stride) = sums[0][g];
  }
}

// Adds the weighted values of `count` tokens to U * kLanes dimensions of `out`, starting at dimension c:
// out[g][d] += sum over t of weights[g][t] * values[t][d].
template <typename T, int G, int U>
inline void weigh_lanes(const T* values, int64_t dim, int64_t c, const float* weights, int64_t stride, int count,
                        float* out, int64_t out_stride, int64_t ahead) {
  Floats sums[U][G];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[u][g] = load(out + g * out_stride + c + u * kLanes);
  for (int t = 0; t < count; ++t)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      if (u % (64 / (kLanes * sizeof(T))) == 0) prefetch_line(values + t * dim + c + u * kLanes, ahead);
      const Floats value = load(values + t * dim + c + u * kLanes);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[u][g] += value * weights[g * stride + t];
    }
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) *reinterpret_cast<Floats*>(out + g * out_stride + c + u * kLanes) = sums[u][g];
}

// Adds the weighted values of at most kLanes tokens to `out`, in all dimensions.
template <typename T, int G>
void weigh(const T* values, int64_t dim, const float* weights, int64_t stride, int count, float* out,
           int64_t out_stride, int64_t ahead) {
  constexpr int U = chains<G>();
  int64_t c = 0;
  for (; c + U * kLanes <= dim; c += U * kLanes)
    weigh_lanes<T, G, U>(values, dim, c, weights, stride, count, out, out_stride, ahead);
  for (; c + kLanes <= dim; c += kLanes)
    weigh_lanes<T, G, 1>(values, dim, c, weights, stride, count, out, out_stride, ahead);
  for (; c < dim; ++c)
    for (int t = 0; t < count; ++t)
      for (int g = 0; g < G; ++g)
        out[g * out_stride + c] += weights[g * stride + t] * to_float(values[t * dim + c]);
}

// The arithmetic for a cache of type T, with float32 weights.
template <typename T>
struct Plain {
  typedef float Query;
  typedef float Weight;
  typedef void (*Score)(const T*, int64_t, const Query*, int64_t, float*, int64_t, int64_t);
  typedef void (*Weigh)(const T*, int64_t, const Weight*, int64_t, int, float*, int64_t, int64_t);
  template <int G>
  static constexpr Score score_of = score<T, G>;
  template <int G>
  static constexpr Weigh weigh_of = weigh<T, G>;

  // Returns the number of Query elements of one query head.
  static int64_t query_size(int64_t dim) { return dim; }

  // Converts the queries of `heads` heads into the form that `Score` reads.
  template <typename Q>
  static void pack(const Q* from, int64_t head_stride, int64_t heads, int64_t dim, Query* to) {
    for (int64_t g = 0; g < heads; ++g)
      for (int64_t d = 0; d < dim; ++d) to[g * dim + d] = to_float(from[g * head_stride + d]);
  }

  // Stores the weights of a vector in the form that `Weigh` reads. Returns the weights that must be summed.
  static Floats store_weights(Floats weights, Weight* to) {
    *reinterpret_cast<Floats*>(to) = weights;
    return weights;
  }
};

// The arithmetic that is used for a cache of type T.
template <typename T>
struct Arithmetic : Plain<T> {};

#ifdef NEREID_PAIRS

// Like `score`, with two dimensions at a time. The query is [pair of dimensions][G].
template <int G>
void score_pairs(const Bfloat16* keys, int64_t stride, const uint32_t* query, int64_t dim, float* scores,
                 int64_t scores_stride, int64_t ahead) {
  constexpr int U = G == 1 ? 8 : G <= 4 ? 4 : 2;
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  const bool together = stride == kLanes;
  const auto pair = [&](int64_t d) {
    prefetch_line(keys + d * stride, ahead);
    if (!together) prefetch_line(keys + (d + 1) * stride, ahead);
    const __m512i both = together
                             ? _mm512_loadu_si512(keys + d * kLanes)
                             : _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(
                                                      reinterpret_cast<const __m256i*>(keys + d * stride))),
                                                  _mm256_loadu_si256(
                                                      reinterpret_cast<const __m256i*>(keys + (d + 1) * stride)),
                                                  1);
    return as_pairs(_mm512_permutexvar_epi16(order, both));
  };
  __m512 sums[U][G];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[u][g] = _mm512_setzero_ps();
  int64_t d = 0;
  for (; d + 2 * U <= dim; d += 2 * U, query += U * G)
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const __m512bh key = pair(d + 2 * u);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[u][g] = _mm512_dpbf16_ps(sums[u][g], key, one_pair(query[u * G + g]));
    }
  for (; d + 2 <= dim; d += 2, query += G) {
    const __m512bh key = pair(d);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[0][g] = _mm512_dpbf16_ps(sums[0][g], key, one_pair(query[g]));
  }
  if (d < dim) {
    prefetch_line(keys + d * stride, ahead);
    const __m512i last = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + d * stride)));
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[0][g] = _mm512_dpbf16_ps(sums[0][g], as_pairs(last), one_pair(query[g]));
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) sums[0][g] = _mm512_add_ps(sums[0][g], sums[u][g]);
    _mm512_storeu_ps(scores + g * scores_stride, sums[0][g]);
  }
}

// Like `weigh_lanes`, with two tokens at a time and U * 32 dimensions. The last of these may be beyond `dim`; the
// rows of `out` are padded for them.
template <int G, int U>
inline void weigh_pair_lanes(const Bfloat16* values, int64_t dim, int64_t c, const uint16_t* weights, int64_t stride,
                             int count, float* out, int64_t out_stride, int64_t ahead) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const int64_t rest = dim - c - (U - 1) * 32;
  const __mmask32 some = rest >= 32 ? ~0u : (1u << rest) - 1;
  __m512 sums[U][2][G];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      sums[u][0][g] = _mm512_loadu_ps(out + g * out_stride + c + u * 32);
      sums[u][1][g] = _mm512_loadu_ps(out + g * out_stride + c + u * 32 + 16);
    }
  for (int t = 0; t < count; t += 2) {
    const Bfloat16* at = values + t * dim + c;
    const bool alone = t + 1 == count;  // memory after the last token must not be read
    uint32_t pairs[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) std::memcpy(&pairs[g], weights + g * stride + t, sizeof pairs[g]);
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const __mmask32 mask = u == U - 1 ? some : ~0u;
      prefetch_line(at + u * 32, ahead);
      prefetch_line(at + dim + u * 32, ahead);
      const __m512i first = _mm512_maskz_loadu_epi16(mask, at + u * 32);
      const __m512i second = _mm512_maskz_loadu_epi16(alone ? 0 : mask, at + dim + u * 32);
      const __m512bh lower = as_pairs(_mm512_permutex2var_epi16(first, low, second));
      const __m512bh upper = as_pairs(_mm512_permutex2var_epi16(first, high, second));
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const __m512bh weight = one_pair(pairs[g]);
        sums[u][0][g] = _mm512_dpbf16_ps(sums[u][0][g], lower, weight);
        sums[u][1][g] = _mm512_dpbf16_ps(sums[u][1][g], upper, weight);
      }
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      _mm512_storeu_ps(out + g * out_stride + c + u * 32, sums[u][0][g]);
      _mm512_storeu_ps(out + g * out_stride + c + u * 32 + 16, sums[u][1][g]);
    }
}

// Like `weigh`, with pairs of tokens.
template <int G>
void weigh_pairs(const Bfloat16* values, int64_t dim, const uint16_t* weights, int64_t stride, int count, float* out,
                 int64_t out_stride, int64_t ahead) {
  constexpr int U = G <= 4 ? 2 : 1;
  int64_t c = 0;
  for (; c + (U - 1) * 32 < dim; c += U * 32)
    weigh_pair_lanes<G, U>(values, dim, c, weights, stride, count, out, out_stride, ahead);
  for (; c < dim; c += 32) weigh_pair_lanes<G, 1>(values, dim, c, weights, stride, count, out, out_stride, ahead);
}

// The arithmetic with products of pairs of bfloat16 and float32 sums. Weights are rounded to bfloat16.
template <>
struct Arithmetic<Bfloat16> {
  typedef uint32_t Query;
  typedef uint16_t Weight;
  typedef void (*Score)(const Bfloat16*, int64_t, const Query*, int64_t, float*, int64_t, int64_t);
  typedef void (*Weigh)(const Bfloat16*, int64_t, const Weight*, int64_t, int, float*, int64_t, int64_t);
  template <int G>
  static constexpr Score score_of = score_pairs<G>;
  template <int G>
  static constexpr Weigh weigh_of = weigh_pairs<G>;

  static int64_t query_size(int64_t dim) { return (dim + 1) / 2; }

  static void pack(const Bfloat16* from, int64_t head_stride, int64_t heads, int64_t dim, Query* to) {
    for (int64_t d = 0; d < dim; d += 2)
      for (int64_t g = 0; g < heads; ++g) {
        const Bfloat16* at = from + g * head_stride + d;
        *to++ = at[0].bits | (d + 1 < dim ? static_cast<uint32_t>(at[1].bits) << 16 : 0u);
      }
  }

  static Floats store_weights(Floats weights, Weight* to) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(weights));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    // The rounded weights are summed, because values are multiplied by them. Rounding errors then cancel in part.
    return reinterpret_cast<Floats>(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
  }
};

#endif  // NEREID_PAIRS

// Returns the functions that compute scores, for 1, 2, ... query heads.
template <typename T, int... G>
constexpr std::array<typename Arithmetic<T>::Score, sizeof...(G)> scores_of(std::integer_sequence<int, G...>) {
  return {Arithmetic<T>::template score_of<G + 1>...};
}

// Returns the functions that add weighted values, for 1, 2, ... query heads.
template <typename T, int... G>
constexpr std::array<typename Arithmetic<T>::Weigh, sizeof...(G)> weighs_of(std::integer_sequence<int, G...>) {
  return {Arithmetic<T>::template weigh_of<G + 1>...};
}

// Returns the number of tokens in a full tile: about kTileTokens, in whole blocks.
int64_t tile_size(const Shape& shape) {
  return std::max<int64_t>(1, kTileTokens / shape.block_size) * shape.block_size;
}

// The tokens [first, last) of one sequence for the key-value heads [head, head + num_heads). `partial` is the index of
// this segment's result among the results of all segments, or -1 if the sequence has only one segment.
struct Task {
  int64_t seq, head, num_heads, first, last, partial;
};

// The segments [partial, partial + count) of one sequence for some key-value heads, which are combined at the end.
struct Merge {
  int64_t seq, head, num_heads, partial, count;
};

// The division of the decodes of a group into tasks.
struct Plan {
  std::vector<Task> tasks;
  std::vector<Merge> merges;
  int64_t num_partials = 0;    // the number of tasks that compute one of several segments
  int64_t heads_per_task = 1;  // key-value heads
};

// Divides the decodes of a group into tasks for the threads.
Plan plan_tasks(const Shape& shape, const DecodeGroup& decodes, int64_t bytes_per_head, int num_threads) {
  Plan plan;
  // Heads are contiguous in a block. A task computes several heads if there are still enough tasks for all threads.
  const int64_t run = std::clamp<int64_t>(kRunBytes / std::max<int64_t>(1, bytes_per_head), 1, shape.num_kv_heads);
  int64_t tasks_per_segment = (shape.num_kv_heads + run - 1) / run;
  if (decodes.num_seqs * tasks_per_segment < 4 * num_threads && num_threads > 1) tasks_per_segment = shape.num_kv_heads;
  plan.heads_per_task = (shape.num_kv_heads + tasks_per_segment - 1) / tasks_per_segment;
  int64_t total = 0;
  for (int64_t i = 0; i < decodes.num_seqs; ++i) total += decodes.lens[i] - first_visible(shape, decodes.lens[i] - 1);
  // Long sequences are divided, so that no thread still computes one after all other threads have finished.
  const int64_t segment = std::max<int64_t>(kMinSegment, total * tasks_per_segment / (4 * num_threads));
  for (int64_t seq = 0; seq < decodes.num_seqs; ++seq) {
    const int64_t length = decodes.lens[seq], begin = first_visible(shape, length - 1);
    int64_t segments = 1;
    if (num_threads > 1) segments = std::clamp<int64_t>((length - begin) / segment, 1, kMaxSegments);
    const int64_t blocks = (length + shape.block_size - 1) / shape.block_size - begin / shape.block_size;
    const int64_t tokens = (blocks + segments - 1) / segments * shape.block_size;
    for (int64_t head = 0; head < shape.num_kv_heads; head += plan.heads_per_task) {
      const int64_t heads = std::min(plan.heads_per_task, shape.num_kv_heads - head);
      if (segments > 1) plan.merges.push_back({seq, head, heads, plan.num_partials, 0});
      for (int64_t first = begin; first < length;) {
        const int64_t last = std::min(length, (first / shape.block_size) * shape.block_size + tokens);
        plan.tasks.push_back({seq, head, heads, first, last, segments > 1 ? plan.num_partials++ : -1});
        if (segments > 1) ++plan.merges.back().count;
        first = last;
      }
    }
  }
  return plan;
}

// The order in which one thread reads the blocks of its tasks: the keys of a tile, the values of the tile, then the
// next tile. The reader takes tasks ahead of time, so that the memory of the next task is prefetched before the
// current task ends.
template <typename T>
class Reader {
 public:
  // The keys or the values of one block, for all heads of a task.
  struct Visit {
    const T* at;    // the keys or values of the block, starting at the task's first head
    int64_t cell;   // the index of the part of the block that belongs to the first head
    int64_t bytes;  // the size of the keys or values of all heads of the task
  };

  Reader(const Layer& layer, const DecodeGroup& decodes, const Plan& plan, std::atomic<int64_t>& next)
      : shape_(layer.shape), layer_(layer), decodes_(decodes), plan_(plan), next_(next), tile_(tile_size(layer.shape)) {
    const int64_t largest =
        std::max(shape_.key_dim, shape_.value_dim) * shape_.block_size * plan.heads_per_task * int64_t(sizeof(T));
    ahead_ = std::clamp<int64_t>(kAheadBytes / largest, 1, 32);
  }

  // Returns the next task, or null.
  const Task* next_task() {
    if (taken_ == tasks_.size() && !add_tile()) return nullptr;
    return &plan_.tasks[tasks_[taken_++]];
  }

  // Returns the next block of the current task.
  Visit next_block() {
    while (at_ + ahead_ >= static_cast<int64_t>(visits_.size()) && add_tile()) {
    }
    if (at_ > 1024) {
      visits_.erase(visits_.begin(), visits_.begin() + at_);
      at_ = 0;
    }
    return visits_[at_++];
  }

  // Returns the distance in bytes from the current block to the block that is prefetched while the current block is
  // read. The kernels prefetch one line for each line that they read, so that only a few loads are pending in the
  // processor. If the two blocks differ in size, this function prefetches the whole block and returns 0.
  NEREID_INLINE int64_t prefetch_distance() const {
    const int64_t index = at_ - 1 + ahead_;
    if (index >= static_cast<int64_t>(visits_.size())) return 0;
    const Visit &here = visits_[at_ - 1], &there = visits_[index];
    if (std::is_same<T, int8_t>::value) {
      const int64_t size = plan_.heads_per_task * shape_.block_size * sizeof(float);
      prefetch_bytes(reinterpret_cast<const char*>(layer_.key_scales + there.cell * shape_.block_size), size);
      prefetch_bytes(reinterpret_cast<const char*>(layer_.value_scales + there.cell * shape_.block_size), size);
    }
    if (here.bytes == there.bytes)
      return reinterpret_cast<const char*>(there.at) - reinterpret_cast<const char*>(here.at);
    prefetch_bytes(reinterpret_cast<const char*>(there.at), there.bytes);
    return 0;
  }

 private:
  // Adds the blocks of one more tile. Returns false if there is no further tile.
  bool add_tile() {
    if (start_ >= last_) {
      const int64_t number = next_.fetch_add(1, std::memory_order_relaxed);
      if (number >= static_cast<int64_t>(plan_.tasks.size())) return false;
      tasks_.push_back(number);
      const Task& task = plan_.tasks[number];
      start_ = task.first / shape_.block_size * shape_.block_size;
      last_ = task.last;
    }
    const Task& task = plan_.tasks[tasks_.back()];
    const int64_t size = shape_.block_size, end = std::min(last_, start_ + tile_);
    const int64_t* blocks = decodes_.blocks + task.seq * decodes_.blocks_stride;
    for (const bool is_value : {false, true}) {
      const int64_t dim = is_value ? shape_.value_dim : shape_.key_dim;
      const T* base = static_cast<const T*>(is_value ? layer_.values : layer_.keys);
      for (int64_t t = start_; t < end; t += size) {
        const int64_t cell = blocks[t / size] * shape_.num_kv_heads + task.head;
        visits_.push_back({base + cell * dim * size, cell, task.num_heads * dim * size * int64_t(sizeof(T))});
      }
    }
    start_ += tile_;
    return true;
  }

  const Shape& shape_;
  const Layer& layer_;
  const DecodeGroup& decodes_;
  const Plan& plan_;
  std::atomic<int64_t>& next_;
  const int64_t tile_;
  int64_t ahead_;
  std::vector<Visit> visits_;
  std::vector<int64_t> tasks_;
  size_t taken_ = 0;
  int64_t at_ = 0, start_ = 0, last_ = 0;
};

// Converts the scores of one query head over one tile into weights, and rescales the sums of earlier tiles. The head
// attends to the tokens [first, last) of the tile.
template <typename T>
void to_weights(const Shape& shape, float* scores, int64_t first, int64_t last, typename Arithmetic<T>::Weight* weights,
            Sums& state, float* out) {
  const int64_t from = std::max<int64_t>(0, first) / kLanes * kLanes, to = (last + kLanes - 1) / kLanes * kLanes;
  float factor = shape.scale * kLog2E;
  if (shape.softcap > 0) {
    for (int64_t t = from; t < to; t += kLanes)
      *reinterpret_cast<Floats*>(scores + t) = tanh_of(load(scores + t) * (shape.scale / shape.softcap));
    factor = shape.softcap * kLog2E;
  } else if (!(factor > 0)) {
    // The scores below, which are -inf, would become NaN or +inf if they were multiplied by this factor.
    for (int64_t t = from; t < to; t += kLanes) *reinterpret_cast<Floats*>(scores + t) = load(scores + t) * factor;
    factor = 1.0f;
  }
  for (int64_t t = from; t < first; ++t) scores[t] = -INFINITY;
  for (int64_t t = last; t < to; ++t) scores[t] = -INFINITY;
  Floats top = fill(-INFINITY);
  for (int64_t t = from; t < to; t += kLanes) {
    const Floats s = load(scores + t) * factor;
    *reinterpret_cast<Floats*>(scores + t) = s;
    top = larger(s, top);
  }
  float largest = std::max(state.largest, largest_of(top));
  if (largest == -INFINITY) largest = 0.0f;  // all scores are hidden or NaN
  Floats total = {};
  for (int64_t t = from; t < to; t += kLanes)
    total += Arithmetic<T>::store_weights(power_of_two(load(scores + t) - largest), weights + t);
  const float rescale = state.largest == -INFINITY ? 0.0f : std::exp2(state.largest - largest);
  state = {largest, state.total * rescale + sum_of(total)};
  if (rescale != 1.0f)
    for (int64_t c = 0; c < padded(shape.value_dim); c += kLanes) *reinterpret_cast<Floats*>(out + c) *= rescale;
}

// The memory of one thread, for all rows of a task. The head of this file describes the arrays.
template <typename T>
struct Scratch {
  std::vector<typename Arithmetic<T>::Query> query;
  std::vector<float> scores, out;
  std::vector<typename Arithmetic<T>::Weight> weights;
  std::vector<Sums> sums;

  Scratch(const Shape& shape, int64_t rows)
      : query(rows * Arithmetic<T>::query_size(shape.key_dim)),
        scores(rows * tile_size(shape)),
        out(rows * padded(shape.value_dim)),
        weights(rows * tile_size(shape)),
        sums(rows) {}
};

// The tokens [start, end) of a sequence. `start` is the first token of a block. Column t of the tile is the token
// start + t. The columns [from, to), in whole vectors, contain all tokens of the task.
struct Tile {
  int64_t start, end, from, to;
};

// kLanes tokens of a tile for one key-value head and at most kMaxGroup of its query heads.
template <typename T>
struct Part {
  const T* at;            // the keys or values of the block and the head
  int64_t column, place;  // the first of the tokens, in the tile and in the block
  int64_t slot;           // the index of this token and head in the scales of the cache
  int64_t row, count;     // the rows [row, row + count) of the task
  int64_t ahead;          // the distance of prefetches in bytes
};

// Reads the blocks of a tile, and calls compute(part) for each Part. `dim` is key_dim or value_dim.
template <typename T, typename Compute>
NEREID_INLINE void for_each_part(const Shape& shape, const Task& task, const Tile& tile, int64_t dim, Reader<T>& reader,
                                 Compute compute) {
  const int64_t size = shape.block_size, group = shape.num_heads / shape.num_kv_heads;
  for (int64_t block = 0; block < tile.end - tile.start; block += size) {
    const auto visit = reader.next_block();
    const int64_t ahead = reader.prefetch_distance();
    for (int64_t h = 0; h < task.num_heads; ++h)
      for (int64_t t = std::max(tile.from, block); t < std::min(tile.to, block + size); t += kLanes)
        for (int64_t g = 0; g < group; g += kMaxGroup)
          compute(Part<T>{visit.at + h * dim * size, t, t - block, (visit.cell + h) * size + t - block, h * group + g,
                          std::min<int64_t>(kMaxGroup, group - g), g == 0 ? ahead : 0});
  }
}

// Multiplies the scores or weights of kLanes tokens by the scales of the cache, for `count` rows.
NEREID_INLINE void multiply_by_scales(const float* scales, float* at, int64_t count, int64_t stride) {
  const Floats scale = load(scales);
  for (int64_t i = 0; i < count; ++i) *reinterpret_cast<Floats*>(at + i * stride) *= scale;
}

// Computes the attention of one task. The result is in `sums` and `out` of the scratch memory, not normalised.
template <typename T>
void attend(const Layer& layer, const Task& task, Reader<T>& reader, Scratch<T>& scratch) {
  typedef Arithmetic<T> A;
  constexpr bool kHasScales = std::is_same<T, int8_t>::value;
  constexpr auto kScores = scores_of<T>(std::make_integer_sequence<int, kMaxGroup>());
  constexpr auto kWeighs = weighs_of<T>(std::make_integer_sequence<int, kMaxGroup>());
  const Shape& shape = layer.shape;
  const int64_t size = shape.block_size, columns = tile_size(shape), width = padded(shape.value_dim);
  const int64_t rows = task.num_heads * (shape.num_heads / shape.num_kv_heads);
  std::fill(scratch.sums.begin(), scratch.sums.end(), Sums{-INFINITY, 0.0f});
  std::fill(scratch.out.begin(), scratch.out.end(), 0.0f);
  for (int64_t start = task.first / size * size; start < task.last; start += columns) {
    const int64_t end = std::min(task.last, start + columns);
    const Tile tile = {start, end, std::max<int64_t>(0, task.first - start) / kLanes * kLanes,
                       (end - start + kLanes - 1) / kLanes * kLanes};
    for_each_part(shape, task, tile, shape.key_dim, reader, [&](const Part<T>& part) {
      const auto* query = scratch.query.data() + part.row * A::query_size(shape.key_dim);
      float* scores = scratch.scores.data() + part.row * columns + part.column;
      kScores[part.count - 1](part.at + part.place, size, query, shape.key_dim, scores, columns, part.ahead);
      if (kHasScales) multiply_by_scales(layer.key_scales + part.slot, scores, part.count, columns);
    });
    for (int64_t row = 0; row < rows; ++row)
      to_weights<T>(shape, scratch.scores.data() + row * columns, task.first - start, end - start,
                    scratch.weights.data() + row * columns, scratch.sums[row], scratch.out.data() + row * width);
    for_each_part(shape, task, tile, shape.value_dim, reader, [&](const Part<T>& part) {
      auto* weights = scratch.weights.data() + part.row * columns + part.column;
      if constexpr (kHasScales) multiply_by_scales(layer.value_scales + part.slot, weights, part.count, columns);
      const int count = static_cast<int>(std::min<int64_t>(kLanes, end - start - part.column));
      kWeighs[part.count - 1](part.at + part.place * shape.value_dim, shape.value_dim, weights, columns, count,
                              scratch.out.data() + part.row * width, width, part.ahead);
    });
  }
}

// Combines the segments of one query head of a sequence, and writes the normalised result to the output of the step.
// The numbers of segment s are sums[s * stride] and partial[s * stride * width].
template <typename Q>
void write_output(const Shape& shape, const DecodeGroup& decodes, const LayerStep& step, int64_t seq, int64_t head,
                  const Sums* sums, const float* partial, int64_t stride, int64_t num_segments) {
  const int64_t dim = shape.value_dim, width = padded(dim), token = decodes.tokens ? decodes.tokens[seq] : seq;
  const float* sink = step.sinks ? step.sinks + head : nullptr;
  Q* out = static_cast<Q*>(step.out) + (token * shape.num_heads + head) * dim;
  float largest = sink ? *sink * kLog2E : -INFINITY;
  for (int64_t s = 0; s < num_segments; ++s) largest = std::max(largest, sums[s * stride].largest);
  float total = sink ? std::exp2(*sink * kLog2E - largest) : 0.0f;
  float factors[kMaxSegments];
  for (int64_t s = 0; s < num_segments; ++s) {
    factors[s] = std::exp2(sums[s * stride].largest - largest);
    total += factors[s] * sums[s * stride].total;
  }
  const float inverse = 1.0f / total;
  for (int64_t s = 0; s < num_segments; ++s) factors[s] *= inverse;
  for (int64_t c = 0; c < dim; c += kLanes) {
    Floats value = load(partial + c) * factors[0];
    for (int64_t s = 1; s < num_segments; ++s) value += load(partial + s * stride * width + c) * factors[s];
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, dim - c); ++lane) from_float(value[lane], out + c + lane);
  }
}

// Stores one vector as integers that are `step` apart. Returns the factor that restores it, or NaN if a number is not
// finite.
template <typename T>
float quantise(const T* from, int64_t dim, int8_t* to, int64_t step) {
  float largest = 0.0f, finite = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float value = to_float(from[d]);
    largest = std::max(largest, std::fabs(value));
    finite += value * 0.0f;  // becomes NaN if a number is not finite
  }
  const bool usable = largest > 0.0f && finite == 0.0f;
  const float factor = usable ? 127.0f / largest : 0.0f;
  for (int64_t d = 0; d < dim; ++d)
    to[d * step] = usable ? static_cast<int8_t>(std::nearbyint(to_float(from[d]) * factor)) : 0;
  return finite == 0.0f ? largest / 127.0f : NAN;
}

// The addresses of one token and head in the cache. The numbers of a key are block_size apart, those of a value are
// contiguous.
template <typename T>
struct Slot {
  T *keys, *values;
  int64_t index;  // in the scales of the cache

  Slot(const Layer& layer, int64_t slot, int64_t head) {
    const int64_t size = layer.shape.block_size, cell = slot / size * layer.shape.num_kv_heads + head;
    index = cell * size + slot % size;
    keys = static_cast<T*>(layer.keys) + cell * layer.shape.key_dim * size + slot % size;
    values = static_cast<T*>(layer.values) + index * layer.shape.value_dim;
  }
};

// Stores the key and the value of one token and head in the cache.
template <typename T, typename Q>
void store_one(const Layer& layer, const LayerStep& step, int64_t token, int64_t head) {
  const Shape& shape = layer.shape;
  const Slot<T> to(layer, step.slots[token], head);
  const Q* key = static_cast<const Q*>(step.keys.at) + head * step.keys.head_stride + token * step.keys.token_stride;
  const Q* value =
      static_cast<const Q*>(step.values.at) + head * step.values.head_stride + token * step.values.token_stride;
  if constexpr (std::is_same<T, int8_t>::value) {
    layer.key_scales[to.index] = quantise(key, shape.key_dim, to.keys, shape.block_size);
    layer.value_scales[to.index] = quantise(value, shape.value_dim, to.values, 1);
  } else {
    for (int64_t d = 0; d < shape.key_dim; ++d) to.keys[d * shape.block_size] = key[d];
    std::memcpy(to.values, value, shape.value_dim * sizeof(T));
  }
}

// Prefetches the memory that store_one will write to.
template <typename T>
NEREID_INLINE void prefetch_store(const Layer& layer, const LayerStep& step, int64_t token, int64_t head) {
  const Shape& shape = layer.shape;
  const Slot<T> to(layer, step.slots[token], head);
  const char *keys = reinterpret_cast<const char*>(to.keys), *values = reinterpret_cast<const char*>(to.values);
  const int64_t row = shape.block_size * sizeof(T), step_bytes = std::max<int64_t>(64, row);
  for (int64_t i = 0; i < shape.key_dim * row; i += step_bytes) __builtin_prefetch(keys + i, 1);
  for (int64_t i = 0; i < shape.value_dim * int64_t(sizeof(T)); i += 64) __builtin_prefetch(values + i, 1);
}

// Stores the keys and values of all tokens of a step.
template <typename T, typename Q>
void store_all(const Layer& layer, const LayerStep& step, int num_threads) {
  const int64_t heads = layer.shape.num_kv_heads, stores = step.num_tokens * heads;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && stores > 256)
  for (int64_t i = 0; i < stores; ++i) {
    if (i + 1 < stores) prefetch_store<T>(layer, step, (i + 1) / heads, (i + 1) % heads);
    store_one<T, Q>(layer, step, i / heads, i % heads);
  }
}

// Writes the queries of a task into the scratch memory.
template <typename T, typename Q>
void pack_queries(const Shape& shape, const Task& task, const Rows& queries, int64_t token, Scratch<T>& scratch) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  for (int64_t h = 0; h < task.num_heads; ++h)
    for (int64_t g = 0; g < group; g += kMaxGroup) {
      const Q* from = static_cast<const Q*>(queries.at) + token * queries.token_stride +
                      ((task.head + h) * group + g) * queries.head_stride;
      Arithmetic<T>::pack(from, queries.head_stride, std::min<int64_t>(kMaxGroup, group - g), shape.key_dim,
                          scratch.query.data() + (h * group + g) * Arithmetic<T>::query_size(shape.key_dim));
    }
}

// Stores the new keys and values of one layer, and computes the attention of the decodes, if there are any.
template <typename T, typename Q>
void run(const Layer& layer, const DecodeGroup& decodes, const LayerStep& step, int num_threads) {
  const Shape& shape = layer.shape;
  const int64_t group = shape.num_heads / shape.num_kv_heads, width = padded(shape.value_dim);
  const Plan plan = plan_tasks(shape, decodes, shape.block_size * shape.key_dim * sizeof(T), num_threads);
  const int64_t rows = plan.heads_per_task * group;
  // The results of the tasks that compute one of several segments: [partial][row] and [partial][row][value_dim].
  std::vector<Sums> sums(plan.num_partials * rows);
  std::vector<float> partials(plan.num_partials * rows * width);
  std::atomic<int64_t> next{0};
  // If the step contains only these decodes, each task stores its own keys and values, so that they are in the cache of
  // the core that reads them.
  const bool is_stored_first = step.num_tokens != decodes.num_seqs;
  if (is_stored_first) store_all<T, Q>(layer, step, num_threads);
  if (plan.tasks.empty()) return;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch<T> scratch(shape, rows);
    Reader<T> reader(layer, decodes, plan, next);
    while (const Task* task = reader.next_task()) {
      const int64_t token = decodes.tokens ? decodes.tokens[task->seq] : task->seq;
      if (!is_stored_first && task->last == decodes.lens[task->seq]) {
        for (int64_t h = 0; h < task->num_heads; ++h) prefetch_store<T>(layer, step, token, task->head + h);
        for (int64_t h = 0; h < task->num_heads; ++h) store_one<T, Q>(layer, step, token, task->head + h);
      }
      pack_queries<T, Q>(shape, *task, step.query, token, scratch);
      attend<T>(layer, *task, reader, scratch);
      if (task->partial >= 0) {
        std::copy(scratch.sums.begin(), scratch.sums.end(), sums.begin() + task->partial * rows);
        std::copy(scratch.out.begin(), scratch.out.end(), partials.begin() + task->partial * rows * width);
        continue;
      }
      for (int64_t row = 0; row < task->num_heads * group; ++row)
        write_output<Q>(shape, decodes, step, task->seq, task->head * group + row, &scratch.sums[row],
                        &scratch.out[row * width], rows, 1);
    }
  }
  for (const Merge& merge : plan.merges)
    for (int64_t row = 0; row < merge.num_heads * group; ++row) {
      const int64_t index = merge.partial * rows + row;
      write_output<Q>(shape, decodes, step, merge.seq, merge.head * group + row, &sums[index], &partials[index * width],
                      rows, merge.count);
    }
}

}  // namespace

extern "C" {

void nereid_attend(const Layer* layer, const DecodeGroup* decodes, const LayerStep* step, int num_threads) {
  with_types(*layer, [&](auto cache_number, auto query_number) {
    run<decltype(cache_number), decltype(query_number)>(*layer, *decodes, *step, num_threads);
  });
}

}  // extern "C"
