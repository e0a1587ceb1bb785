// SPDX-License-Identifier: Apache-2.0
// The kernels for CPUs as they are called: from Python (cpu.py, native_linear.py, native_logits.py) and from compiled
// models (cpu_shim.cpp).
//
// Layout for block b and key-value head h (block_size a multiple of 16):
//
//     keys    [b][h][key_dim][block_size]    transposed: one vector holds one dimension of 16 tokens,
//                                            so scores need no horizontal sums
//     values  [b][h][block_size][value_dim]  one vector holds 16 dimensions of one token
//
// A cache of 8-bit integers has a scale for each key and value vector, [b][h][block_size].

#pragma once

#include <cstdint>
#include <cstring>

// Numbers as they lie in memory.
struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(int8_t value) { return static_cast<float>(value); }
inline float to_float(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

struct Shape {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window, chunk;  // 0: no limit
  float scale, softcap;   // softcap 0: none
};

// One layer: what it computes and where its cache is. Scales are null unless the cache holds integers.
struct Layer {
  Shape shape;
  int64_t is_bfloat16;  // query, new keys, new values and out, and the cache where there are no scales
  void *keys, *values;
  float *key_scales, *value_scales;
};

// One of query, new keys and new values; strides count elements, the last dimension has none.
struct Rows {
  const void* at;
  int64_t head_stride, token_stride;
};

// Sequences that add one token each, [num_seqs].
struct Decodes {
  const int64_t* tokens;  // their rows in the step; null: its first ones
  const int64_t* blocks;  // [num_seqs][blocks_stride]
  int64_t blocks_stride;
  const int64_t* lens;
  int64_t num_seqs;
};

// Tokens of one sequence.
struct Prefill {
  int64_t first;       // its first token's row in the step
  int64_t num_tokens;
  int64_t num_cached;  // tokens of the sequence that precede them
  const int64_t* blocks;
};

extern "C" {

// Stores the keys and values of num_tokens tokens, then attends for the decodes; null: there are none. Strides are
// those of head and token of query, new keys and new values.
void nereid_attend(const Layer* layer, const Decodes* decodes, const void* query, int64_t query_head_stride,
                   int64_t query_token_stride, const void* keys, int64_t key_head_stride, int64_t key_token_stride,
                   const void* values, int64_t value_head_stride, int64_t value_token_stride, const int64_t* slots,
                   int64_t num_tokens, const float* sinks, void* out, int num_threads);

// Attention of tokens whose keys and values are in the cache already; out is [tokens of the step][num_heads]
// [value_dim]. Strides are those of head and token of the query.
void nereid_attend_prefills(const Layer* layer, const Prefill* prefills, int64_t count, const void* query,
                            int64_t query_head_stride, int64_t query_token_stride, const float* sinks, void* out,
                            int num_threads);

// Whether nereid_linear can be called here with bfloat16 (else float32).
int nereid_has_linear();

// x [num_rows][dim] to out [num_rows][num_outputs], both packed tightly; bias [num_outputs] or null. dim is even
// for bfloat16. Layout of weights: cpu_linear.cpp.
void nereid_linear(int is_bfloat16, const void* weight, const void* bias, const void* x, void* out, int64_t num_rows,
                   int64_t dim, int64_t num_outputs, int num_threads);

// Rows of logits, bfloat16 or float32, [num_rows][size], stride numbers apart: cpu_logits.cpp.
//
// The first of each row's tokens with the largest logit, and the logarithm of the sum of exponentials, which is no
// number where a logit is none or plus infinity.
void nereid_read_logits(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                        int64_t* likeliest, float* logsumexp, int num_threads);

// A token of each row, drawn with probabilities proportional to exp(scale logit) by a number in [0, 1), which is a
// share of them cumulated in the order of the vocabulary. Any token, where logits are no numbers.
void nereid_draw(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                 const float* scales, const double* uniform, int64_t* tokens, int num_threads);

// The width likeliest tokens of each row with their probabilities, the likeliest first, [num_rows][width]; where fewer
// are within reach, token -1 with a probability of 0 stands for the others.
void nereid_likeliest(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                      const float* scales, int64_t width, int64_t* tokens, float* probs, int num_threads);

// A linear layer with weights [num_tiles][dim][16]: x [num_rows][dim] to out [num_rows][num_tiles * 16].
void nereid_linear_int8(const int8_t* weight, const float* scales, const float* x, float* out, int64_t num_rows,
                        int64_t dim, int64_t num_tiles, int num_threads);

}  // extern "C"
