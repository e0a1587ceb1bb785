// SPDX-License-Identifier: Apache-2.0
// The functions that models compiled by AOTInductor call, without Python. They use torch's stable C interface to
// tensors (torch/csrc/inductor/aoti_torch/c/shim.h). AOTInductor derives their names and arguments from the schemas of
// the operators in torch_operator.py, native_linear.py and
// grouped_linear.py.

#include "cpu_kernels.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace {

typedef int32_t Error;  // 0 means success
struct Tensor;

// The metadata of one step, for the layers of one group.
struct GroupStep {
  const DecodeGroup* decodes;
  int64_t num_decodes;  // at least 1; the group of decodes may be empty
  const Prefill* prefills;
  int64_t num_prefills;
  const int64_t* slots;
};

// The metadata of one step, for all layers.
struct Forward {
  const Layer* layers;  // each call passes its scale, so their scale is not used
  int64_t num_layers;
  const GroupStep* steps;   // one for each group of layers
  const int64_t* group_of;  // for each layer, the index of its group
  int64_t num_tokens;
  int64_t num_threads;
  int64_t* times;  // two sums of nanoseconds, for linear layers and for attention; null if the time is not measured
};

thread_local const Forward* current = nullptr;

// Measures the time from its creation to its destruction, and adds this time to the sum of the linear layers (kind 0)
// or of attention (kind 1).
class Stopwatch {
 public:
  explicit Stopwatch(int kind) : to_(current->times ? current->times + kind : nullptr) {
    if (to_) started_ = std::chrono::steady_clock::now();
  }
  ~Stopwatch() {
    if (to_) *to_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - started_).count();
  }

 private:
  int64_t* to_;
  std::chrono::steady_clock::time_point started_;
};

}  // namespace

extern "C" {

Error aoti_torch_get_data_ptr(Tensor*, void**);
Error aoti_torch_get_dim(Tensor*, int64_t*);
Error aoti_torch_get_sizes(Tensor*, int64_t**);
Error aoti_torch_get_strides(Tensor*, int64_t**);
Error aoti_torch_get_dtype(Tensor*, int32_t*);
Error aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor**);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_device_type_cpu();

}  // extern "C"

namespace {

constexpr int64_t kMaxDims = 8;

// The properties of a tensor. `data` is null if the properties cannot be read, or if the tensor has too many
// dimensions.
struct View {
  const void* data = nullptr;
  int64_t dim = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;

  explicit View(Tensor* tensor) {
    int64_t *tensor_sizes, *tensor_strides;
    void* address;
    if (aoti_torch_get_dim(tensor, &dim) || aoti_torch_get_sizes(tensor, &tensor_sizes) ||
        aoti_torch_get_strides(tensor, &tensor_strides) || aoti_torch_get_dtype(tensor, &dtype) ||
        aoti_torch_get_data_ptr(tensor, &address) || dim < 1 || dim > kMaxDims)
      return;
    sizes = tensor_sizes;
    strides = tensor_strides;
    data = address;
  }

  // Returns the size of the last dimension.
  int64_t last() const { return sizes[dim - 1]; }
  // Returns the number of elements.
  int64_t count() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dim; ++i) count *= sizes[i];
    return count;
  }
  // Returns the size of one number in bytes.
  int64_t bytes() const { return dtype == aoti_torch_dtype_bfloat16() ? 2 : 4; }
};

// Returns a tensor's numbers contiguously: its own memory, or a copy in `storage`. Sets `strides` to the strides of the
// result.
const void* dense(const View& view, std::vector<char>& storage, int64_t* strides) {
  bool is_dense = true;
  int64_t expected = 1;
  for (int64_t i = view.dim - 1; i >= 0; --i) {
    is_dense &= view.sizes[i] == 1 || view.strides[i] == expected;
    strides[i] = expected;
    expected *= view.sizes[i];
  }
  if (is_dense) return view.data;
  const int64_t count = view.count(), bytes = view.bytes();
  storage.resize(count * bytes);
  int64_t index[kMaxDims] = {};
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = 0;
    for (int64_t d = 0; d < view.dim; ++d) offset += index[d] * view.strides[d];
    std::memcpy(storage.data() + i * bytes, static_cast<const char*>(view.data) + offset * bytes, bytes);
    for (int64_t d = view.dim - 1; d >= 0 && ++index[d] == view.sizes[d]; --d) index[d] = 0;
  }
  return storage.data();
}

// Creates a contiguous tensor on the CPU. Returns the address of its memory, or null if this fails.
void* make(const int64_t* sizes, int64_t dim, int32_t dtype, Tensor** made) {
  int64_t strides[kMaxDims], count = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = count;
    count *= sizes[i];
  }
  void* data;
  if (aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, made) ||
      aoti_torch_get_data_ptr(*made, &data))
    return nullptr;
  return data;
}

// Returns a tensor [1, heads, tokens, dim] in the form that the kernels read.
Rows rows_of(const View& view, std::vector<char>& storage) {
  if (view.strides[3] == 1) return {view.data, view.strides[1], view.strides[2]};
  int64_t strides[kMaxDims];
  const void* data = dense(view, storage, strides);
  return {data, strides[1], strides[2]};
}

// The arguments that all kinds of linear layers have.
struct LinearCall {
  bool is_bfloat16;
  const void *x, *bias;  // bias may be null
  void* out;
  int64_t num_rows, dim;
  int num_threads;
};

// Creates the output of a linear layer, and calls compute(LinearCall). Returns an error if a tensor cannot be read.
template <typename Compute>
Error linear_layer(Tensor* x, Tensor** bias, int64_t out_features, Tensor** out, Compute compute) {
  const View inputs(x);
  if (!current || !inputs.data) return 1;
  const Stopwatch stopwatch(0);
  int64_t sizes[kMaxDims], strides[kMaxDims];
  std::copy(inputs.sizes, inputs.sizes + inputs.dim, sizes);
  sizes[inputs.dim - 1] = out_features;
  void* to = make(sizes, inputs.dim, inputs.dtype, out);
  if (!to) return 1;
  thread_local std::vector<char> copy;
  const void* from = dense(inputs, copy, strides);
  void* added = nullptr;
  if (bias && aoti_torch_get_data_ptr(*bias, &added)) return 1;
  compute(LinearCall{inputs.bytes() == 2, from, added, to, inputs.count() / inputs.last(), inputs.last(),
                     static_cast<int>(current->num_threads)});
  return 0;
}

}  // namespace

extern "C" {

// Sets the step that the functions below use in this thread. Null ends the step.
void nereid_serve(const Forward* forward) { current = forward; }

// torch_operator.py: paged_attend(query, key, value, sinks?, layer, scale) -> [1, tokens, heads, value_dim].
Error aoti_torch_cpu_paged_attend(Tensor* query, Tensor* key, Tensor* value, Tensor** sinks, int64_t layer,
                                  double scale, Tensor** out) {
  const View queries(query), keys(key), values(value);
  if (!current || layer < 0 || layer >= current->num_layers || !queries.data || !keys.data || !values.data) return 1;
  const Stopwatch stopwatch(1);
  Layer own = current->layers[layer];
  own.shape.scale = static_cast<float>(scale);
  const Shape& shape = own.shape;
  const GroupStep& group = current->steps[current->group_of[layer]];
  const int64_t tokens = current->num_tokens, num_rows = queries.sizes[2];
  const int64_t width = shape.num_heads * shape.value_dim * queries.bytes();
  const int64_t sizes[] = {1, num_rows, shape.num_heads, shape.value_dim};
  char* to = static_cast<char*>(make(sizes, 4, queries.dtype, out));
  if (!to || num_rows < tokens) return 1;
  // The model may be called with more rows than the step has tokens. The outputs of these rows are zero.
  std::memset(to + tokens * width, 0, (num_rows - tokens) * width);
  std::vector<float> sink_scores;
  if (sinks) {
    const View view(*sinks);
    if (!view.data) return 1;
    for (int64_t i = 0; i < shape.num_heads; ++i)
      sink_scores.push_back(view.bytes() == 2 ? to_float(static_cast<const Bfloat16*>(view.data)[i * view.strides[0]])
                                              : static_cast<const float*>(view.data)[i * view.strides[0]]);
  }
  thread_local std::vector<char> copies[3];
  LayerStep step = {rows_of(queries, copies[0]), rows_of(keys, copies[1]), rows_of(values, copies[2]), group.slots,
                    tokens, sinks ? sink_scores.data() : nullptr, to};
  const int threads = static_cast<int>(current->num_threads);
  for (int64_t i = 0; i < group.num_decodes; ++i) {
    nereid_attend(&own, group.decodes + i, &step, threads);
    step.num_tokens = 0;  // the first call has stored the keys and values
  }
  if (group.num_prefills > 0) nereid_attend_prefills(&own, group.prefills, group.num_prefills, &step, threads);
  return 0;
}

// native_linear.py: packed_linear(x, packed, bias?, out_features) -> [..., out_features].
Error aoti_torch_cpu_packed_linear(Tensor* x, Tensor* packed, Tensor** bias, int64_t out_features, Tensor** out) {
  const View weights(packed);
  if (!weights.data) return 1;
  return linear_layer(x, bias, out_features, out, [&](const LinearCall& call) {
    nereid_linear(call.is_bfloat16, weights.data, call.bias, call.x, call.out, call.num_rows, call.dim, out_features,
                  call.num_threads);
  });
}

// grouped_linear.py: grouped_linear(x, values, scales, zeros?, bias?, bits, group_size, out_features)
// -> [..., out_features].
Error aoti_torch_cpu_grouped_linear(Tensor* x, Tensor* values, Tensor* scales, Tensor** zeros, Tensor** bias,
                                    int64_t bits, int64_t group_size, int64_t out_features, Tensor** out) {
  void *value_data, *scale_data, *zero_data = nullptr;
  if (aoti_torch_get_data_ptr(values, &value_data) || aoti_torch_get_data_ptr(scales, &scale_data) ||
      (zeros && aoti_torch_get_data_ptr(*zeros, &zero_data)))
    return 1;
  int32_t zero_type = 0;
  if (zeros && aoti_torch_get_dtype(*zeros, &zero_type)) return 1;
  const bool has_byte_zeros = zeros && zero_type == aoti_torch_dtype_uint8();
  return linear_layer(x, bias, out_features, out, [&](const LinearCall& call) {
    const GroupedWeights weights = {
        static_cast<uint8_t*>(value_data), static_cast<uint16_t*>(scale_data), zero_data, bits, group_size,
        call.dim, out_features, has_byte_zeros};
    nereid_grouped_linear(call.is_bfloat16, &weights, call.bias, call.x, call.out, call.num_rows, call.num_threads);
  });
}

}  // extern "C"
