// SPDX-License-Identifier: Apache-2.0
// Functions that read rows of logits: the likeliest token and the logsumexp of a row, a random token, and the likeliest
// tokens with their probabilities. native_logits.py calls them through a plain C interface.
//
// The weight of a token is exp(scale * (logit - top)), where `top` is the largest logit of the row. While a row is
// read, `top` is the largest logit so far. If a later block contains a larger logit, the sum of the earlier weights is
// rescaled. Each row is therefore read from memory only once. A block is read twice, first for its largest logit and
// then for its weights, but the second time the block is in the L1 cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../attention/cpu/cpu_kernels.h"
#include "../attention/cpu/cpu_vectors.h"

namespace {

constexpr int64_t kBlock = 4096;  // logits of a block: 16 KiB of float32 fit into the L1 cache
constexpr float kForbidden = -std::numeric_limits<float>::infinity();  // the logit of a token that is not allowed

// Returns the largest of `count` logits. NaN is ignored.
template <typename T>
float largest_in(const T* logits, int64_t count) {
  const int64_t end_of_vectors = count / kLanes * kLanes;
  Floats lane_largest = fill(kForbidden);
  for (int64_t i = 0; i < end_of_vectors; i += kLanes) lane_largest = larger(load(logits + i), lane_largest);
  float largest = largest_of(lane_largest);
  for (int64_t i = end_of_vectors; i < count; ++i) largest = std::max(largest, to_float(logits[i]));
  return largest;
}

// Returns the weights of 16 logits. Weights below 2^-126 are returned as 0, because processors compute slowly with
// smaller numbers, and a grammar can forbid most tokens of a row.
inline Floats weights_of(Floats x, float top, float scale) {
  const Floats least = fill(-126.0f), power = (x - top) * (scale * kLog2E);
  const Floats weights = power_of_two(larger(least, power));
  return power < least ? Floats{} : weights;
}
inline float weight_of(float x, float top, float scale) { return std::exp((x - top) * scale); }

// Returns the sum of the weights of `count` logits.
template <typename T>
double sum_weights(const T* logits, int64_t count, float top, float scale) {
  const int64_t end_of_vectors = count / kLanes * kLanes;
  Floats sums = {};
  for (int64_t i = 0; i < end_of_vectors; i += kLanes) sums += weights_of(load(logits + i), top, scale);
  double sum = sum_of(sums);
  for (int64_t i = end_of_vectors; i < count; ++i) sum += weight_of(to_float(logits[i]), top, scale);
  return sum;
}

// The sum of the weights of some consecutive logits. The weights are relative to `top`.
struct WeightSum {
  float top;  // the largest logit of the row up to the last of these logits
  double sum;
};

// Calls visit(start, count, block_sum) for each block of a row, in order. Returns the sum of the whole row.
template <typename T, typename Visit>
WeightSum read_blocks(const T* row, int64_t size, float scale, Visit visit) {
  WeightSum whole = {kForbidden, 0.0};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    const float largest = largest_in(row + start, count);
    if (largest > whole.top) {
      whole.sum *= std::exp((static_cast<double>(whole.top) - largest) * scale);
      whole.top = largest;
    }
    // If all tokens so far are forbidden, `top` is -inf, and the weights are computed relative to 0. They are then 0,
    // except that a NaN in the block still makes the sum NaN.
    const float base = whole.top == kForbidden ? 0.0f : whole.top;
    const WeightSum block = {whole.top, sum_weights(row + start, count, base, scale)};
    whole.sum += block.sum;
    visit(start, count, block);
  }
  return whole;
}

// Finds the first token with the largest logit of a row, and the row's logsumexp.
template <typename T>
void read_row(const T* row, int64_t size, int64_t* likeliest, float* logsumexp) {
  int64_t block_start = 0;  // the start of the first block that contains the largest logit
  float top = kForbidden;
  const WeightSum whole = read_blocks(row, size, 1.0f, [&](int64_t start, int64_t, const WeightSum& block) {
    if (block.top > top) {
      block_start = start;
      top = block.top;
    }
  });
  *logsumexp = static_cast<float>(whole.top + std::log(whole.sum));
  const int64_t end = std::min(block_start + kBlock, size);
  *likeliest = block_start;
  for (int64_t i = block_start; i < end; ++i) {
    if (to_float(row[i]) == whole.top) {
      *likeliest = i;
      break;
    }
  }
}

// Returns the first of `count` logits at which the cumulative weights exceed `target`. If rounding keeps the cumulative
// weights from exceeding `target`, returns the last logit whose weight is not 0. Example: with the weights 1, 0 and 2,
// the target 0.5 gives index 0 and the target 1.5 gives index 2.
template <typename T>
int64_t find_cumulative(const T* logits, int64_t count, float top, float scale, double target) {
  double remaining = target;  // the target minus the weights that were passed
  int64_t last = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - i);
    const Floats weights = weights_of(load_some(logits + i, lanes), top, scale);
    if (lanes == kLanes) {
      const double sum = sum_of(weights);
      if (sum <= remaining) {
        remaining -= sum;
        if (sum > 0.0) last = i + kLanes - 1;
        continue;
      }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      if (weights[lane] > 0.0f) last = i + lane;
      if (remaining < weights[lane]) return last;
      remaining -= weights[lane];
    }
  }
  // `last` may be the last lane of a vector that was passed as a whole. The weight of that lane may be 0.
  while (last > 0 && !(weight_of(to_float(logits[last]), top, scale) > 0.0f)) --last;
  return last;
}

// Samples a token of a row with the random number `uniform`, which is in [0, 1).
template <typename T>
int64_t sample_row(const T* row, int64_t size, float scale, double uniform) {
  thread_local std::vector<WeightSum> blocks;
  blocks.clear();
  const WeightSum whole =
      read_blocks(row, size, scale, [&](int64_t, int64_t, const WeightSum& block) { blocks.push_back(block); });
  double remaining = uniform * whole.sum;
  int64_t sampled_block = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const double sum = blocks[b].sum * std::exp((static_cast<double>(blocks[b].top) - whole.top) * scale);
    if (!(sum > 0.0)) continue;  // the block has only forbidden tokens, or its sum is NaN
    sampled_block = static_cast<int64_t>(b);
    if (remaining < sum) break;
    remaining -= sum;
  }
  const int64_t start = sampled_block * kBlock;
  return start + find_cumulative(row + start, std::min(kBlock, size - start), whole.top, scale, remaining);
}

struct Candidate {
  float logit;
  int64_t token;
  // Orders candidates from the likeliest to the least likely. Among equal logits, the smaller token id comes first.
  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

// Finds the `width` likeliest tokens of a row, whose logits are added block by block. Up to 4 * width candidates are
// collected before all but the `width` likeliest are removed, because each removal takes time.
class LikeliestTokens {
 public:
  explicit LikeliestTokens(int64_t width) : width_(width) {}

  // Adds `count` logits, of which the first belongs to `first_token`.
  template <typename T>
  void add_block(const T* logits, int64_t count, int64_t first_token) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, count - i);
      const Floats x = load_some(logits + i, lanes);
      if (!(largest_of(larger(x, fill(kForbidden))) > min_logit_) && lanes == kLanes) continue;
      for (int64_t lane = 0; lane < lanes; ++lane)
        if (x[lane] > min_logit_) add_candidate({x[lane], first_token + i + lane});
    }
  }

  // Returns the likeliest tokens in order. There are fewer than `width` if the row has fewer allowed tokens.
  const std::vector<Candidate>& sorted() {
    remove_unlikely();
    std::sort(candidates_.begin(), candidates_.end());
    return candidates_;
  }

 private:
  void add_candidate(const Candidate& candidate) {
    candidates_.push_back(candidate);
    if (static_cast<int64_t>(candidates_.size()) == 4 * width_) remove_unlikely();
  }

  // Removes all candidates except the `width` likeliest.
  void remove_unlikely() {
    if (static_cast<int64_t>(candidates_.size()) < width_) return;
    std::nth_element(candidates_.begin(), candidates_.begin() + (width_ - 1), candidates_.end());
    candidates_.resize(width_);
    min_logit_ = candidates_.back().logit;
  }

  int64_t width_;
  float min_logit_ = kForbidden;  // only tokens with larger logits can still be among the likeliest
  std::vector<Candidate> candidates_;
};

// Finds the `width` likeliest tokens of a row and their probabilities. Missing tokens get the id -1.
template <typename T>
void find_likeliest(const T* row, int64_t size, float scale, int64_t width, int64_t* tokens, float* probs) {
  LikeliestTokens likeliest(width);
  const WeightSum whole = read_blocks(row, size, scale, [&](int64_t start, int64_t count, const WeightSum&) {
    likeliest.add_block(row + start, count, start);
  });
  const std::vector<Candidate>& candidates = likeliest.sorted();
  for (int64_t i = 0; i < width; ++i) {
    const bool exists = i < static_cast<int64_t>(candidates.size());
    tokens[i] = exists ? candidates[i].token : -1;
    probs[i] = exists ? static_cast<float>(weight_of(candidates[i].logit, whole.top, scale) / whole.sum) : 0.0f;
  }
}

// Calls work(row, index of the row) for each row of logits. The rows are divided among the threads.
template <typename Work>
void for_rows(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int num_threads, Work work) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_rows > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    if (is_bfloat16) {
      work(static_cast<const Bfloat16*>(logits) + row * stride, row);
    } else {
      work(static_cast<const float*>(logits) + row * stride, row);
    }
  }
}

}  // namespace

extern "C" {

void nereid_read_logits(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                        int64_t* likeliest, float* logsumexp, int num_threads) {
  for_rows(is_bfloat16, logits, num_rows, stride, num_threads,
           [=](auto* row, int64_t i) { read_row(row, size, likeliest + i, logsumexp + i); });
}

void nereid_sample(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                   const float* scales, const double* uniform, int64_t* tokens, int num_threads) {
  for_rows(is_bfloat16, logits, num_rows, stride, num_threads,
           [=](auto* row, int64_t i) { tokens[i] = sample_row(row, size, scales[i], uniform[i]); });
}

void nereid_likeliest(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                      const float* scales, int64_t width, int64_t* tokens, float* probs, int num_threads) {
  for_rows(is_bfloat16, logits, num_rows, stride, num_threads, [=](auto* row, int64_t i) {
    find_likeliest(row, size, scales[i], width, tokens + i * width, probs + i * width);
  });
}

}  // extern "C"
