#pragma once

#include <cstdint>
#include <vector>

#include "biomoe/ops/attention.h"
#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct Attention {
  Vector out;  // [T, H * K]
  Vector lse;  // [H, T]
};

struct AttentionGradients {
  Vector dq;
  Vector dk;
  Vector dv;
};

// One query of one head: which rows of q, k and v take part, as written in the definition.
class AttentionRow {
 public:
  AttentionRow(const AttentionShape& shape, int64_t first_token, int64_t token, int64_t head)
      : shape_(shape), token_(token), head_(head) {
    for (int64_t j = first_token; j <= token; ++j) {
      if (!shape.window || j > token - *shape.window) keys.push_back(j);
    }
  }
  size_t query(int64_t i) const {
    return static_cast<size_t>((token_ * shape_.num_heads + head_) * shape_.head_dim + i);
  }
  size_t key(int64_t token, int64_t i) const {
    const int64_t kv_head = head_ / (shape_.num_heads / shape_.num_key_value_heads);
    return static_cast<size_t>((token * shape_.num_key_value_heads + kv_head) * shape_.head_dim + i);
  }
  // softmax over `keys`, and its log sum exp.
  Vector probabilities(const Vector& q, const Vector& k, double& lse) const {
    Vector scores;
    double maximum = -INFINITY;
    for (int64_t j : keys) {
      double score = 0.0;
      for (int64_t i = 0; i < shape_.head_dim; ++i) score += q[query(i)] * k[key(j, i)];
      scores.push_back(score / std::sqrt(static_cast<double>(shape_.head_dim)));
      maximum = std::max(maximum, scores.back());
    }
    double sum = 0.0;
    for (double score : scores) sum += std::exp(score - maximum);
    lse = maximum + std::log(sum);
    for (double& score : scores) score = std::exp(score - lse);
    return scores;
  }

  std::vector<int64_t> keys;

 private:
  const AttentionShape& shape_;
  int64_t token_;
  int64_t head_;
};

template <typename Visit>
void for_each_attention_row(const AttentionShape& shape, const std::vector<int64_t>& cu_seqlens,
                            const Visit& visit) {
  for (size_t b = 0; b + 1 < cu_seqlens.size(); ++b) {
    for (int64_t token = cu_seqlens[b]; token < cu_seqlens[b + 1]; ++token) {
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        visit(AttentionRow(shape, cu_seqlens[b], token, head),
              static_cast<size_t>(head * cu_seqlens.back() + token));
      }
    }
  }
}

inline Attention attention(const AttentionShape& shape, const std::vector<int64_t>& cu_seqlens,
                           const Vector& q, const Vector& k, const Vector& v) {
  Attention result{Vector(q.size(), 0.0),
                   Vector(static_cast<size_t>(shape.num_heads * cu_seqlens.back()), 0.0)};
  for_each_attention_row(shape, cu_seqlens, [&](const AttentionRow& row, size_t of_lse) {
    const Vector p = row.probabilities(q, k, result.lse[of_lse]);
    for (size_t n = 0; n < p.size(); ++n) {
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        result.out[row.query(i)] += p[n] * v[row.key(row.keys[n], i)];
      }
    }
  });
  return result;
}

inline AttentionGradients attention_backward(const AttentionShape& shape,
                                             const std::vector<int64_t>& cu_seqlens, const Vector& q,
                                             const Vector& k, const Vector& v, const Vector& dout) {
  AttentionGradients result{Vector(q.size(), 0.0), Vector(k.size(), 0.0), Vector(v.size(), 0.0)};
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  for_each_attention_row(shape, cu_seqlens, [&](const AttentionRow& row, size_t) {
    double lse = 0.0;
    const Vector p = row.probabilities(q, k, lse);
    Vector dp(p.size(), 0.0);
    double mean = 0.0;
    for (size_t n = 0; n < p.size(); ++n) {
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        const double gradient = dout[row.query(i)];
        dp[n] += gradient * v[row.key(row.keys[n], i)];
        result.dv[row.key(row.keys[n], i)] += gradient * p[n];
      }
      mean += p[n] * dp[n];
    }
    for (size_t n = 0; n < p.size(); ++n) {
      const double dscore = p[n] * (dp[n] - mean) * scale;
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        result.dq[row.query(i)] += dscore * k[row.key(row.keys[n], i)];
        result.dk[row.key(row.keys[n], i)] += dscore * q[row.query(i)];
      }
    }
  });
  return result;
}

}  // namespace biomoe::ref
