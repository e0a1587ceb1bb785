// SPDX-License-Identifier: Apache-2.0
// Rows of logits, read once: the likeliest token and what makes logits log-probabilities, a token drawn at random, the
// likeliest tokens with their probabilities.
//
// Exponentials are taken relative to the largest logit so far, block by block, so that one pass over memory is enough;
// a block's numbers are in the innermost cache when they are read again.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../attention/cpu/cpu_kernels.h"
#include "../attention/cpu/cpu_vectors.h"

namespace {

constexpr int64_t kBlock = 4096;
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <typename T>
float largest_in(const T* from, int64_t count) {  // numbers that are none do not count
  const int64_t whole = count / kLanes * kLanes;
  Floats most = fill(kNone);
  for (int64_t i = 0; i < whole; i += kLanes) most = larger(load(from + i), most);
  float largest = largest_of(most);
  for (int64_t i = whole; i < count; ++i) largest = std::max(largest, to_float(from[i]));
  return largest;
}

// exp(scale (x - top)); 0 where it would be below 2^-126: processors are slow with smaller numbers, and behind a guide
// most tokens are out of reach.
inline Floats weights_of(Floats x, float top, float scale) {
  const Floats least = fill(-126.0f), power = (x - top) * (scale * kLog2E);
  const Floats weights = power_of_two(larger(least, power));
  return power < least ? Floats{} : weights;
}
inline float weight_of(float x, float top, float scale) { return std::exp((x - top) * scale); }

template <typename T>
double sum_in(const T* from, int64_t count, float top, float scale) {
  const int64_t whole = count / kLanes * kLanes;
  Floats sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) sums += weights_of(load(from + i), top, scale);
  double sum = sum_of(sums);
  for (int64_t i = whole; i < count; ++i) sum += weight_of(to_float(from[i]), top, scale);
  return sum;
}

// A block of a row: the sum of its weights, relative to the largest logit up to its end.
struct Block {
  float top;
  double sum;
};

// Calls visit(start, count, block) for the blocks of a row in order; returns the row's as a whole.
template <typename T, typename Visit>
Block read_blocks(const T* row, int64_t size, float scale, Visit visit) {
  Block whole = {kNone, 0.0};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    const float largest = largest_in(row + start, count);
    if (largest > whole.top) {
      whole.sum *= std::exp((static_cast<double>(whole.top) - largest) * scale);
      whole.top = largest;
    }
    // Where all is out of reach so far, what is not a number must show in the sum still.
    const Block block = {whole.top, sum_in(row + start, count, whole.top == kNone ? 0.0f : whole.top, scale)};
    whole.sum += block.sum;
    visit(start, count, block);
  }
  return whole;
}

template <typename T>
void read_row(const T* row, int64_t size, int64_t* likeliest, float* logsumexp) {
  int64_t first = 0;
  float top = kNone;
  const Block whole = read_blocks(row, size, 1.0f, [&](int64_t start, int64_t, const Block& block) {
    if (block.top > top) first = start, top = block.top;
  });
  *logsumexp = static_cast<float>(whole.top + std::log(whole.sum));
  const int64_t end = std::min(first + kBlock, size);
  *likeliest = first;
  for (int64_t i = first; i < end; ++i) {
    if (to_float(row[i]) == whole.top) {
      *likeliest = i;
      break;
    }
  }
}

// The token at which `left` is used up by the weights in order; the last one that has any, if rounding leaves some.
template <typename T>
int64_t walk(const T* from, int64_t count, float top, float scale, double left) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - i);
    const Floats weights = weights_of(load_some(from + i, lanes), top, scale);
    if (lanes == kLanes) {
      const double sum = sum_of(weights);
      if (sum <= left) {
        left -= sum;
        if (sum > 0.0) last = i + kLanes - 1;
        continue;
      }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      if (weights[lane] > 0.0f) last = i + lane;
      if (left < weights[lane]) return last;
      left -= weights[lane];
    }
  }
  // Of a vector whose sum was passed over, the last token may have no weight.
  while (last > 0 && !(weight_of(to_float(from[last]), top, scale) > 0.0f)) --last;
  return last;
}

template <typename T>
int64_t draw_from(const T* row, int64_t size, float scale, double uniform) {
  thread_local std::vector<Block> blocks;
  blocks.clear();
  const Block whole =
      read_blocks(row, size, scale, [&](int64_t, int64_t, const Block& block) { blocks.push_back(block); });
  double left = uniform * whole.sum;
  int64_t chosen = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const double sum = blocks[b].sum * std::exp((static_cast<double>(blocks[b].top) - whole.top) * scale);
    if (!(sum > 0.0)) continue;
    chosen = static_cast<int64_t>(b);
    if (left < sum) break;
    left -= sum;
  }
  const int64_t start = chosen * kBlock;
  return start + walk(row + start, std::min(kBlock, size - start), whole.top, scale, left);
}

struct Candidate {
  float logit;
  int64_t token;
  bool operator<(const Candidate& other) const {  // the likelier first
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

// The likeliest tokens of a row, of which more and more are known.
class Likeliest {
 public:
  explicit Likeliest(int64_t width) : width_(width) {}

  template <typename T>
  void look_at(const T* from, int64_t count, int64_t first_token) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, count - i);
      const Floats x = load_some(from + i, lanes);
      if (!(largest_of(larger(x, fill(kNone))) > least_) && lanes == kLanes) continue;
      for (int64_t lane = 0; lane < lanes; ++lane)
        if (x[lane] > least_) add({x[lane], first_token + i + lane});
    }
  }

  const std::vector<Candidate>& sorted() {
    cut();
    std::sort(found_.begin(), found_.end());
    return found_;
  }

 private:
  void add(const Candidate& candidate) {
    found_.push_back(candidate);
    if (static_cast<int64_t>(found_.size()) == 4 * width_) cut();
  }

  void cut() {
    if (static_cast<int64_t>(found_.size()) < width_) return;
    std::nth_element(found_.begin(), found_.begin() + (width_ - 1), found_.end());
    found_.resize(width_);
    least_ = found_.back().logit;
  }

  int64_t width_;
  float least_ = kNone;
  std::vector<Candidate> found_;
};

template <typename T>
void likeliest_in(const T* row, int64_t size, float scale, int64_t width, int64_t* tokens, float* probs) {
  Likeliest likeliest(width);
  const Block whole = read_blocks(row, size, scale, [&](int64_t start, int64_t count, const Block&) {
    likeliest.look_at(row + start, count, start);
  });
  const std::vector<Candidate>& found = likeliest.sorted();
  for (int64_t i = 0; i < width; ++i) {
    const bool is_there = i < static_cast<int64_t>(found.size());
    tokens[i] = is_there ? found[i].token : -1;
    probs[i] = is_there ? static_cast<float>(weight_of(found[i].logit, whole.top, scale) / whole.sum) : 0.0f;
  }
}

// Calls work(row, its number) for all rows.
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

void nereid_draw(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                 const float* scales, const double* uniform, int64_t* tokens, int num_threads) {
  for_rows(is_bfloat16, logits, num_rows, stride, num_threads,
           [=](auto* row, int64_t i) { tokens[i] = draw_from(row, size, scales[i], uniform[i]); });
}

void nereid_likeliest(int is_bfloat16, const void* logits, int64_t num_rows, int64_t stride, int64_t size,
                      const float* scales, int64_t width, int64_t* tokens, float* probs, int num_threads) {
  for_rows(is_bfloat16, logits, num_rows, stride, num_threads, [=](auto* row, int64_t i) {
    likeliest_in(row, size, scales[i], width, tokens + i * width, probs + i * width);
  });
}

}  // extern "C"
