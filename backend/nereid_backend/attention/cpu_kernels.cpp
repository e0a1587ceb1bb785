// SPDX-License-Identifier: Apache-2.0
// Paged attention on a CPU: a plain C interface over raw pointers, called from cpu.py.
//
// Layout of one layer's cache, for block b and key-value head h (block_size a multiple of 16):
//
//     keys    [b][h][key_dim][block_size]    transposed: one vector holds one dimension of 16 tokens,
//                                            so scores need no horizontal sums
//     values  [b][h][block_size][value_dim]  one vector holds 16 dimensions of one token
//
// A task is one sequence, one key-value head and one segment of its tokens. Query heads that share
// the key-value head are computed together, so each key and value is read from memory once.
// Scores and sums are float32 whatever the cache holds. A cache of 8-bit integers has a scale for each
// key and value vector, [b][h][block_size]; scores and weights are multiplied by it, not the vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kTile = 256;  // tokens between two rescalings of the sums
constexpr int kMaxSplits = 64;
constexpr int kMaxGroup = 8;  // query heads computed together: as many sums as there are registers

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int16_t Shorts __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, Bfloat16* out) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) {
    out->bits = 0x7fc0;  // NaN stays NaN: rounding could make it infinite
    return;
  }
  out->bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline Floats load(const Bfloat16* at) {
  const Halves halves = *reinterpret_cast<const Halves*>(at);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats result;
  std::memcpy(&result, &words, sizeof result);
  return result;
}

inline float to_float(int8_t value) { return static_cast<float>(value); }
inline Floats load(const int8_t* at) {
#ifdef __AVX512F__
  // The compiler takes 16 loads for this (GCC 12), the processor one.
  return reinterpret_cast<Floats>(
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))));
#else
  const Bytes bytes = *reinterpret_cast<const Bytes*>(at);
  // In two steps: GCC 12 makes vectors of each, and single numbers of one large one.
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints), Floats);
#endif
}

inline Floats fill(float value) { return Floats{} + value; }

// exp for arguments up to 88: 2^n * e^f with |f| <= ln(2) / 2, the latter by its Taylor series.
inline Floats exponential(Floats x) {
  const Floats low = fill(-87.0f);
  const Floats bounded = x > low ? x : low;
  const Floats scaled = bounded * 1.44269504088896341f;
  const Ints whole = __builtin_convertvector(scaled + (scaled > 0 ? fill(0.5f) : fill(-0.5f)), Ints);
  const Floats f = (scaled - __builtin_convertvector(whole, Floats)) * 0.69314718055994531f;
  Floats p = fill(1.0f / 5040);
  p = p * f + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const Ints power = (whole + 127) << 23;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  // What is not a number stays so: the sums must show it.
  return x > low ? p * factor : (x == x ? Floats{} : x);
}

struct Shape {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window, chunk;  // 0: no limit
  float scale, softcap;   // softcap 0: none
};

// One layer's cache; scales are null unless T is int8_t.
template <typename T>
struct Cache {
  const T *keys, *values;
  const float *key_scales, *value_scales;
};

struct Sums {  // of one query head over one segment
  float largest, total;
};

// Sums that do not depend on each other hide the latency of a multiply-add; about 8 are enough.
template <int G>
constexpr int chains() {
  return G == 1 ? 4 : G <= 4 ? 2 : 1;
}

inline void fetch(const void* from, int64_t bytes) {
  const char* at = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// Scores of 16 tokens: G query heads against keys that lie dimension by dimension.
template <typename T, int G>
inline void score(const T* keys, int64_t stride, const float* query, int64_t dim, float* scores) {
  constexpr int U = chains<G>();
  Floats sums[U][G] = {};
  int64_t d = 0;
  for (; d + U <= dim; d += U)
    for (int u = 0; u < U; ++u) {
      const Floats key = load(keys + (d + u) * stride);
      for (int g = 0; g < G; ++g) sums[u][g] += key * query[g * dim + d + u];
    }
  for (; d < dim; ++d) {
    const Floats key = load(keys + d * stride);
    for (int g = 0; g < G; ++g) sums[0][g] += key * query[g * dim + d];
  }
  for (int g = 0; g < G; ++g) {
    for (int u = 1; u < U; ++u) sums[0][g] += sums[u][g];
    *reinterpret_cast<Floats*>(scores + g * kTile) = sums[0][g];
  }
}

// out += weights of some tokens times U * 16 dimensions of their values, from dimension c on.
template <typename T, int G, int U>
inline void weigh_lanes(const T* values, const float* weights, int64_t dim, int64_t c, int count, float* out) {
  Floats sums[U][G];
  for (int u = 0; u < U; ++u)
    for (int g = 0; g < G; ++g) sums[u][g] = load(out + g * dim + c + u * kLanes);
  for (int t = 0; t < count; ++t)
    for (int u = 0; u < U; ++u) {
      const Floats value = load(values + t * dim + c + u * kLanes);
      for (int g = 0; g < G; ++g) sums[u][g] += value * weights[g * kTile + t];
    }
  for (int u = 0; u < U; ++u)
    for (int g = 0; g < G; ++g) *reinterpret_cast<Floats*>(out + g * dim + c + u * kLanes) = sums[u][g];
}

// out += weights of at most 16 tokens times their values.
template <typename T, int G>
inline void weigh(const T* values, const float* weights, int64_t dim, int count, float* out) {
  constexpr int U = chains<G>();
  int64_t c = 0;
  for (; c + U * kLanes <= dim; c += U * kLanes) weigh_lanes<T, G, U>(values, weights, dim, c, count, out);
  for (; c + kLanes <= dim; c += kLanes) weigh_lanes<T, G, 1>(values, weights, dim, c, count, out);
  for (; c < dim; ++c)
    for (int t = 0; t < count; ++t)
      for (int g = 0; g < G; ++g) out[g * dim + c] += weights[g * kTile + t] * to_float(values[t * dim + c]);
}

// Attention of G query heads over tokens [first, last) of one sequence; out is not normalised.
template <typename T, int G>
void attend(const Shape& shape, const Cache<T>& cache, const int64_t* blocks, int64_t head, const float* query,
            int64_t first, int64_t last, Sums* state, float* out) {
  constexpr bool kScaled = std::is_same<T, int8_t>::value;
  const T *keys = cache.keys, *values = cache.values;
  alignas(64) float scores[G * kTile];
  const int64_t size = shape.block_size;
  for (int g = 0; g < G; ++g) state[g] = {-INFINITY, 0.0f};
  std::fill(out, out + G * shape.value_dim, 0.0f);
  for (int64_t start = first / kLanes * kLanes; start < last; start += kTile) {
    const int64_t end = std::min(last, start + kTile);
    const int64_t padded = (end - start + kLanes - 1) / kLanes * kLanes;
    for (int64_t t = 0; t < padded; t += kLanes) {
      const int64_t block = blocks[(start + t) / size];
      const T* from = keys + (block * shape.num_kv_heads + head) * shape.key_dim * size + (start + t) % size;
      if (t + kLanes < padded && size == kLanes) {
        // Blocks lie anywhere, so the processor cannot guess the next one.
        const int64_t next = blocks[(start + t + kLanes) / size];
        fetch(keys + (next * shape.num_kv_heads + head) * shape.key_dim * size, shape.key_dim * size * sizeof(T));
        if (kScaled) {
          fetch(cache.key_scales + (next * shape.num_kv_heads + head) * size, size * sizeof(float));
          fetch(cache.value_scales + (next * shape.num_kv_heads + head) * size, size * sizeof(float));
        }
      }
      score<T, G>(from, size, query, shape.key_dim, scores + t);
      if (kScaled) {
        const Floats scale = load(cache.key_scales + (block * shape.num_kv_heads + head) * size + (start + t) % size);
        for (int g = 0; g < G; ++g) *reinterpret_cast<Floats*>(scores + g * kTile + t) *= scale;
      }
    }
    for (int g = 0; g < G; ++g) {
      float* row = scores + g * kTile;
      for (int64_t t = 0; t < padded; t += kLanes) {
        Floats s = load(row + t) * shape.scale;
        if (shape.softcap > 0)
          for (int lane = 0; lane < kLanes; ++lane) s[lane] = shape.softcap * std::tanh(s[lane] / shape.softcap);
        *reinterpret_cast<Floats*>(row + t) = s;
      }
      for (int64_t t = start; t < first; ++t) row[t - start] = -INFINITY;
      for (int64_t t = end - start; t < padded; ++t) row[t] = -INFINITY;
      Floats top = fill(-INFINITY);
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats s = load(row + t);
        top = s > top ? s : top;
      }
      float largest = state[g].largest;
      for (int lane = 0; lane < kLanes; ++lane)
        largest = std::max(largest, top[lane]);
      if (largest == -INFINITY) largest = 0.0f;  // all hidden, or not numbers
      const float factor = state[g].largest == -INFINITY ? 0.0f : std::exp(state[g].largest - largest);
      Floats total = {};
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats weight = exponential(load(row + t) - largest);
        *reinterpret_cast<Floats*>(row + t) = weight;
        total += weight;
      }
      float sum = state[g].total * factor;
      for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
      state[g] = {largest, sum};
      if (factor != 1.0f)
        for (int64_t c = 0; c < shape.value_dim; ++c) out[g * shape.value_dim + c] *= factor;
    }
    for (int64_t t = 0; t < padded; t += kLanes) {
      const int64_t block = blocks[(start + t) / size];
      const T* from = values + ((block * shape.num_kv_heads + head) * size + (start + t) % size) * shape.value_dim;
      if (t + kLanes < padded && size == kLanes) {
        const int64_t next = blocks[(start + t + kLanes) / size];
        fetch(values + (next * shape.num_kv_heads + head) * size * shape.value_dim, shape.value_dim * size * sizeof(T));
      }
      const int count = static_cast<int>(std::min<int64_t>(kLanes, end - start - t));
      if (kScaled) {
        const Floats scale = load(cache.value_scales + (block * shape.num_kv_heads + head) * size + (start + t) % size);
        for (int g = 0; g < G; ++g) *reinterpret_cast<Floats*>(scores + g * kTile + t) *= scale;
      }
      weigh<T, G>(from, scores + t, shape.value_dim, count, out);
    }
  }
}

template <typename T>
void attend_group(const Shape& shape, int64_t group, const Cache<T>& cache, const int64_t* blocks, int64_t head,
                  const float* query, int64_t first, int64_t last, Sums* state, float* out) {
  int64_t g = 0;
  while (g < group) {
    const float* q = query + g * shape.key_dim;
    float* o = out + g * shape.value_dim;
    const int64_t left = std::min<int64_t>(kMaxGroup, group - g);
#define NEREID_HEADS(G)                                                             \
  case G:                                                                           \
    attend<T, G>(shape, cache, blocks, head, q, first, last, state + g, o);         \
    break
    switch (left) {
      NEREID_HEADS(1);
      NEREID_HEADS(2);
      NEREID_HEADS(3);
      NEREID_HEADS(4);
      NEREID_HEADS(5);
      NEREID_HEADS(6);
      NEREID_HEADS(7);
      NEREID_HEADS(8);
    }
    g += left;
#undef NEREID_HEADS
  }
}

int64_t first_seen(const Shape& shape, int64_t position) {
  int64_t first = 0;
  if (shape.window > 0) first = std::max<int64_t>(first, position - (shape.window - 1));
  if (shape.chunk > 0) first = std::max<int64_t>(first, position - position % shape.chunk);
  return first;
}

template <typename T, typename Q>
void decode(const Shape& shape, const Cache<T>& cache, const Q* query, int64_t query_head_stride, int64_t query_token_stride, const int64_t* tokens, const int64_t* blocks, int64_t blocks_stride,
            const int64_t* lens, int64_t num_seqs, const float* sinks, Q* out, int num_threads) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t tasks = num_seqs * shape.num_kv_heads;
  int64_t longest = 0;
  for (int64_t i = 0; i < num_seqs; ++i) longest = std::max(longest, lens[i] - first_seen(shape, lens[i] - 1));
  // Few long sequences are cut into segments, so that every thread has work.
  int64_t splits = 1;
  if (num_threads > 1 && tasks < 4 * num_threads)
    splits = std::clamp<int64_t>(longest / (2 * kTile), 1, std::min<int64_t>(kMaxSplits, (4 * num_threads + tasks - 1) / tasks));
  std::vector<float> partial(tasks * splits * group * shape.value_dim);
  std::vector<Sums> sums(tasks * splits * group);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
  for (int64_t task = 0; task < tasks * splits; ++task) {
    const int64_t split = task % splits, head = task / splits % shape.num_kv_heads;
    const int64_t seq = task / splits / shape.num_kv_heads;
    const int64_t token = tokens ? tokens[seq] : seq;
    const int64_t begin = first_seen(shape, lens[seq] - 1), length = lens[seq] - begin;
    const int64_t piece = ((length + splits - 1) / splits + kLanes - 1) / kLanes * kLanes;
    const int64_t first = begin + split * piece, last = std::min(lens[seq], first + piece);
    Sums* state = sums.data() + task * group;
    float* result = partial.data() + task * group * shape.value_dim;
    if (first >= last) {
      for (int64_t g = 0; g < group; ++g) state[g] = {-INFINITY, 0.0f};
      continue;
    }
    std::vector<float> rows(group * shape.key_dim);
    for (int64_t g = 0; g < group; ++g) {
      const Q* from = query + (head * group + g) * query_head_stride + token * query_token_stride;
      for (int64_t d = 0; d < shape.key_dim; ++d) rows[g * shape.key_dim + d] = to_float(from[d]);
    }
    attend_group<T>(shape, group, cache, blocks + seq * blocks_stride, head, rows.data(), first, last, state, result);
  }
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t head = task % shape.num_kv_heads, seq = task / shape.num_kv_heads;
    const int64_t token = tokens ? tokens[seq] : seq;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t query_head = head * group + g;
      float largest = sinks ? sinks[query_head] : -INFINITY;
      for (int64_t s = 0; s < splits; ++s) {
        largest = std::max(largest, sums[(task * splits + s) * group + g].largest);
      }
      float total = sinks ? std::exp(sinks[query_head] - largest) : 0.0f;
      float factors[kMaxSplits];
      for (int64_t s = 0; s < splits; ++s) {
        const Sums& state = sums[(task * splits + s) * group + g];
        factors[s] = state.largest == -INFINITY ? 0.0f : std::exp(state.largest - largest);
        total += factors[s] * state.total;
      }
      Q* to = out + (token * shape.num_heads + query_head) * shape.value_dim;
      for (int64_t c = 0; c < shape.value_dim; ++c) {
        float value = 0.0f;
        for (int64_t s = 0; s < splits; ++s)
          if (factors[s] != 0.0f)
            value += factors[s] * partial[((task * splits + s) * group + g) * shape.value_dim + c];
        from_float(value / total, to + c);
      }
    }
  }
}

template <typename T>
void store(const Shape& shape, T* keys, T* values, const T* new_keys, const T* new_values, const int64_t* strides,
           const int64_t* slots, int64_t num_tokens, int num_threads) {
  const int64_t size = shape.block_size;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens > 64)
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t block = slots[i] / size, place = slots[i] % size;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const int64_t cell = block * shape.num_kv_heads + h;
      const T* key = new_keys + h * strides[0] + i * strides[1];
      T* to = keys + cell * shape.key_dim * size + place;
      for (int64_t d = 0; d < shape.key_dim; ++d) to[d * size] = key[d];
      std::memcpy(values + (cell * size + place) * shape.value_dim, new_values + h * strides[2] + i * strides[3],
                  shape.value_dim * sizeof(T));
    }
  }
}

// One vector as integers, `step` apart, and the factor that restores it; NaN if a number is not finite.
template <typename T>
float quantise(const T* from, int64_t dim, int8_t* to, int64_t step) {
  float largest = 0.0f, finite = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float value = to_float(from[d]);
    largest = std::max(largest, std::fabs(value));
    finite += value * 0.0f;  // NaN as soon as one is not finite
  }
  const bool usable = largest > 0.0f && finite == 0.0f;
  const float factor = usable ? 127.0f / largest : 0.0f;
  for (int64_t d = 0; d < dim; ++d)
    to[d * step] = usable ? static_cast<int8_t>(std::nearbyint(to_float(from[d]) * factor)) : 0;
  return finite == 0.0f ? largest / 127.0f : NAN;
}

template <typename T>
void store_int8(const Shape& shape, int8_t* keys, int8_t* values, float* key_scales, float* value_scales,
                const T* new_keys, const T* new_values, const int64_t* strides, const int64_t* slots,
                int64_t num_tokens, int num_threads) {
  const int64_t size = shape.block_size;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens > 64)
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t block = slots[i] / size, place = slots[i] % size;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const int64_t cell = block * shape.num_kv_heads + h;
      key_scales[cell * size + place] = quantise(new_keys + h * strides[0] + i * strides[1], shape.key_dim,
                                                 keys + cell * shape.key_dim * size + place, size);
      value_scales[cell * size + place] = quantise(new_values + h * strides[2] + i * strides[3], shape.value_dim,
                                                   values + (cell * size + place) * shape.value_dim, 1);
    }
  }
}

// out[row][o] = scales[o] * (weight of o . x[row]) for the 16 outputs of one tile, [dim][16] integers.
template <int G>
void linear_tile(const int8_t* tile, const float* scales, const float* x, int64_t dim, float* out, int64_t out_stride) {
  alignas(64) float sums[G * kTile];
  score<int8_t, G>(tile, kLanes, x, dim, sums);
  const Floats scale = load(scales);
  for (int g = 0; g < G; ++g) *reinterpret_cast<Floats*>(out + g * out_stride) = load(sums + g * kTile) * scale;
}

}  // namespace

extern "C" {

// A linear layer with weights [num_tiles][dim][16]: x [num_rows][dim] to out [num_rows][num_tiles * 16].
void nereid_linear_int8(const int8_t* weight, const float* scales, const float* x, float* out, int64_t num_rows,
                        int64_t dim, int64_t num_tiles, int num_threads) {
  const int64_t width = num_tiles * kLanes;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int8_t* from = weight + tile * dim * kLanes;
    for (int64_t row = 0; row < num_rows; row += kMaxGroup) {
      const float* rows = x + row * dim;
      float* to = out + row * width + tile * kLanes;
      switch (std::min<int64_t>(kMaxGroup, num_rows - row)) {
#define NEREID_ROWS(G) \
  case G:              \
    linear_tile<G>(from, scales + tile * kLanes, rows, dim, to, width); \
    break
        NEREID_ROWS(1);
        NEREID_ROWS(2);
        NEREID_ROWS(3);
        NEREID_ROWS(4);
        NEREID_ROWS(5);
        NEREID_ROWS(6);
        NEREID_ROWS(7);
        NEREID_ROWS(8);
#undef NEREID_ROWS
      }
    }
  }
}

// is_bfloat16: what query and out hold, and the cache where scales are null; otherwise float32. With scales
// [key, value] the cache holds 8-bit integers. Strides count elements.
void nereid_decode(const Shape* shape, int is_bfloat16, const void* keys, const void* values, const float* const* scales,
                   const void* query, int64_t query_head_stride, int64_t query_token_stride, const int64_t* tokens,
                   const int64_t* blocks, int64_t blocks_stride, const int64_t* lens, int64_t num_seqs,
                   const float* sinks, void* out, int num_threads) {
#define NEREID_DECODE(T, Q)                                                                                       \
  decode<T, Q>(*shape,                                                                                            \
               {static_cast<const T*>(keys), static_cast<const T*>(values), scales ? scales[0] : nullptr,         \
                scales ? scales[1] : nullptr},                                                                    \
               static_cast<const Q*>(query), query_head_stride, query_token_stride, tokens, blocks, blocks_stride, \
               lens, num_seqs, sinks, static_cast<Q*>(out), num_threads)
  if (scales && is_bfloat16) {
    NEREID_DECODE(int8_t, Bfloat16);
  } else if (scales) {
    NEREID_DECODE(int8_t, float);
  } else if (is_bfloat16) {
    NEREID_DECODE(Bfloat16, Bfloat16);
  } else {
    NEREID_DECODE(float, float);
  }
#undef NEREID_DECODE
}

// strides: of the new keys [head, token], then of the new values [head, token]. scales: as above.
void nereid_store(const Shape* shape, int is_bfloat16, void* keys, void* values, float* const* scales,
                  const void* new_keys, const void* new_values, const int64_t* strides, const int64_t* slots,
                  int64_t num_tokens, int num_threads) {
#define NEREID_STORE(FUNCTION, T, Q, ...)                                                                        \
  FUNCTION<Q>(*shape, static_cast<T*>(keys), static_cast<T*>(values), __VA_ARGS__ static_cast<const Q*>(new_keys), \
              static_cast<const Q*>(new_values), strides, slots, num_tokens, num_threads)
#define NEREID_SCALES scales[0], scales[1],
  if (scales && is_bfloat16) {
    NEREID_STORE(store_int8, int8_t, Bfloat16, NEREID_SCALES);
  } else if (scales) {
    NEREID_STORE(store_int8, int8_t, float, NEREID_SCALES);
  } else if (is_bfloat16) {
    NEREID_STORE(store, Bfloat16, Bfloat16, );
  } else {
    NEREID_STORE(store, float, float, );
  }
#undef NEREID_SCALES
#undef NEREID_STORE
}

}  // extern "C"
