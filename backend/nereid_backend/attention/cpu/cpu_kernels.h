// SPDX-License-Identifier: Apache-2.0
// The C interface of the CPU kernels. Python (cpu_library.py) and compiled models (cpu_shim.cpp) call these functions.
//
// Layout of the KV cache for block b and key-value head h (block_size is a multiple of 16):
//
//     keys    [b][h][key_dim][block_size]    transposed: one vector contains one dimension of 16
//                                            tokens, so scores need no horizontal sums
//     values  [b][h][block_size][value_dim]  one vector contains 16 dimensions of one token
//
// A cache of 8-bit integers also has a scale for each key vector and each value vector, [b][h][block_size].

#pragma once

#include <cstdint>
#include <cstring>

// A bfloat16 number as it is stored in memory.
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

// The sizes and the parameters of the attention of one layer. layers.py describes them.
struct Shape {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window, chunk;     // in tokens; 0 means no limit
  int64_t is_bidirectional;  // whether a token also attends to later tokens; the window then limits both directions
  float scale, softcap;      // a softcap of 0 means none
};

// The properties of one layer and the addresses of its cache. The scales are null unless the cache stores integers.
// `keys` is null if the layer has no cache (see nereid_attend_prefills).
struct Layer {
  Shape shape;
  int64_t is_bfloat16;  // whether query, new keys, new values, out and a cache without scales are bfloat16
  void *keys, *values;
  float *key_scales, *value_scales;
};

// The query, the new keys or the new values. Strides are in elements, and the last dimension is contiguous.
struct Rows {
  const void* at;
  int64_t head_stride, token_stride;
};

// The inputs and the output of a step in one layer.
struct LayerStep {
  Rows query, keys, values;  // the keys and values of the new tokens
  const int64_t* slots;      // the slots of the new keys and values in the cache, [num_tokens]
  int64_t num_tokens;        // the number of tokens whose keys and values are to be stored
  const float* sinks;        // [num_heads]; null if the layer has no attention sinks
  void* out;                 // [tokens of the step][num_heads][value_dim]
};

// A group of decodes: num_seqs sequences that add one token each.
struct DecodeGroup {
  const int64_t* tokens;  // the rows of the tokens in the step; null if they are the first rows
  const int64_t* blocks;  // [num_seqs][blocks_stride]
  int64_t blocks_stride;
  const int64_t* lens;  // the lengths of the sequences, including the new token
  int64_t num_seqs;
};

// Several new tokens of one sequence.
struct Prefill {
  int64_t first;       // the row of the first new token in the step
  int64_t num_tokens;
  int64_t num_cached;  // the number of earlier tokens of the sequence
  const int64_t* blocks;  // the blocks of all tokens up to the last new one; not used without a cache
};

// The integer weights of a linear layer. cpu_integers.h describes their layout.
struct GroupedWeights {
  const uint8_t* values;
  const uint16_t* scales;    // float16
  const void* zeros;         // bytes or float16; null if each zero point is 2^(bits - 1)
  int64_t bits, group_size;  // 4, 6 or 8 bits; a multiple of 8 inputs (16 with 6 bits), at most 128
  int64_t dim, num_outputs;
  int64_t has_byte_zeros;    // 1 if each zero point is a byte
};

// A product that computes one linear layer, or several merged layers one after the other.
struct AdaptedProduct {
  const void* weight;   // the address of the weights in nereid_linear, or of the integers in nereid_grouped_linear
  int64_t num_outputs;  // the sum of the outputs of the layers
  int64_t first_layer, num_layers;
};

// The matrices of one LoRA adapter for one linear layer. The rank is a multiple of 4, and 0 if the adapter does not
// change the layer.
struct AdapterMatrices {
  const void* down;  // [rank][dim, rounded up to a multiple of 16]
  const void* up;    // [panels of 16 outputs][rank][16], multiplied by the adapter's scale
  int64_t rank;
};

// The adapters of the rows of one step.
struct AdapterStep {
  const AdaptedProduct* products;  // ordered by the address of the weights
  int64_t num_products;
  const int64_t* layer_outputs;              // the numbers of outputs of all linear layers
  const AdapterMatrices* const* adapters;    // for each adapter of the step, the matrices of all linear layers
  int64_t num_adapters, is_bfloat16;         // is_bfloat16: the type of the numbers in the matrices
  const int64_t *owners, *chunk_owners;      // the adapter of each token and of each chunk; -1 means none
  int64_t num_tokens, num_chunks;
  int64_t unfit_rows;  // set by nereid_adapt to a number of rows that cannot be divided over the chunks
};

extern "C" {

// Stores the new keys and values of a step, and then computes the attention of a group of decodes, which may be empty.
void nereid_attend(const Layer* layer, const DecodeGroup* decodes, const LayerStep* step, int num_threads);

// Computes the attention of `count` prefills. nereid_attend must have stored their keys and values. If the layer has no
// cache, the keys and values of the step are read instead, and num_cached must be 0. Only such a layer can be
// bidirectional.
void nereid_attend_prefills(const Layer* layer, const Prefill* prefills, int64_t count, const LayerStep* step,
                            int num_threads);

// Returns whether this build has the kernel nereid_linear.
int nereid_has_linear();

// Computes a linear layer: x [num_rows][dim] to out [num_rows][num_outputs], both contiguous. bias is [num_outputs] or
// null. For bfloat16, dim must be even. cpu_linear.cpp describes the layout of the weights.
void nereid_linear(int is_bfloat16, const void* weight, const void* bias, const void* x, void* out, int64_t num_rows,
                   int64_t dim, int64_t num_outputs, int num_threads);

// The next three functions read rows of logits, bfloat16 or float32, [num_rows][size]. Rows are `stride` numbers apart.

// Finds each row's first token with the largest logit, and the logarithm of the sum of the exponentials. This logarithm
// is NaN if a logit is NaN or plus infinity.
void nereid_read_logits(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                        int64_t* likeliest, float* logsumexp, int num_threads);

// Samples a token of each row with probabilities proportional to exp(scale * logit). `uniform` contains a number in
// [0, 1) for each row: the sampled token is the one at which the cumulated probabilities, in the order of the
// vocabulary, exceed this number. If a logit is NaN, any token may be returned.
void nereid_sample(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                   const float* scales, const double* uniform, int64_t* tokens, int num_threads);

// Finds the `width` most likely tokens of each row and their probabilities, most likely first, [num_rows][width]. If
// fewer tokens are possible, the rest is filled with token -1 and probability 0.
void nereid_likeliest(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                      const float* scales, int64_t width, int64_t* tokens, float* probs, int num_threads);

// Returns whether this build has the kernel nereid_grouped_linear.
int nereid_has_grouped_linear();

// Computes a linear layer with integer weights: x [num_rows][dim] to out [num_rows][num_outputs], both contiguous, both
// bfloat16 or both float32. bias is [num_outputs] of the same type, or null.
void nereid_grouped_linear(int is_bfloat16, const GroupedWeights* weights, const void* bias, const void* x, void* out,
                           int64_t num_rows, int num_threads);

// Sets the step whose adapters the linear layers use in this thread. Null ends the step.
void nereid_serve_adapters(AdapterStep* step);

// Adds the products of the step's adapters to the output of a linear layer, which has been computed. The arguments are
// those of nereid_linear, whose weights identify the layer. If the layer computes another number of rows than the step
// has tokens, each chunk has the same number of rows.
void nereid_adapt(int is_bfloat16, const void* weight, const void* x, void* out, int64_t num_rows, int64_t dim,
                  int64_t num_outputs, int num_threads);

}  // extern "C"
